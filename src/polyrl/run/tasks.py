"""The recipe's prompts, as the fleet, the trainer and the rewards want them."""

import asyncio
import contextlib
import logging
import math
from collections.abc import Awaitable, Callable, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import NamedTuple

from polyrl.config.recipe import DomainSection, Recipe
from polyrl.config.rewards import ENVIRONMENT, RewardsSection, WeightedReward
from polyrl.data.prompts import Task
from polyrl.data.sources import EnvironmentSource, Source, open_validation
from polyrl.data.tokens import ModelTokenizer, TokenIds
from polyrl.errors import ConfigError
from polyrl.rewards import weighing
from polyrl.rewards.facts import RunFacts
from polyrl.rewards.failures import FailureKey, RewardFailures
from polyrl.rewards.groups import AnswerFacts, RewardGroup, make_group, make_input
from polyrl.rewards.judging.account import JudgeMeter
from polyrl.rewards.line import Surroundings
from polyrl.rewards.lookup import check_functions, check_sent
from polyrl.rewards.once import ScoredOnce
from polyrl.rewards.pool import RewardPool
from polyrl.rewards.reward import (
    Reward,
    RewardFailed,
    RewardInput,
    RewardStops,
    RewardUnavailable,
    ToolUse,
    needs_answer,
)
from polyrl.rewards.sandbox.walls import look_for_walls
from polyrl.rewards.watching import RewardWatch
from polyrl.run.conversations import Conversations
from polyrl.run.encryption import encryption
from polyrl.run.settings import MAX_ATTEMPTS, scheduler_config
from polyrl.run.task_contract import Answered, UnderWay
from polyrl.run.training_rows import domain_keys, longest_prompt, open_rows_of, prompt_room

log = logging.getLogger("polyrl.data")

_PROMPTS_AT_HAND = 1024


class Domain(NamedTuple):
    name: str
    rewards: tuple[WeightedReward, ...]
    training: Source
    validation: dict[str, Source]


class RecipeTasks:
    """Made by `load_tasks`."""

    def __init__(
        self,
        domains: list[Domain],
        tokenizer: ModelTokenizer,
        pool: RewardPool,
        wanted: RewardsSection,
        solved_above: float = 0.5,
        run_dir: Path | None = None,
    ) -> None:
        self._judges = JudgeMeter(run_dir)
        self._domains, self._tokenizer, self._pool, self._wanted = domains, tokenizer, pool, wanted
        self._conversations = Conversations(tokenizer)
        self._solved_above = solved_above
        self._once, self._watch = ScoredOnce(), RewardWatch(wanted.row_failures)
        self._failures = RewardFailures(
            {
                (number, whole): ", ".join(one.function for one in domain.rewards if one.whole_group is whole)
                for number, domain in enumerate(domains)
                for whole in (False, True)
            }
        )
        self._asked = lru_cache(_PROMPTS_AT_HAND)(self._read)
        """Read once for all samples of a prompt: a chat template is a program."""

    @property
    def pool(self) -> RewardPool:
        return self._pool

    @property
    def tokenizer(self) -> ModelTokenizer:
        return self._tokenizer

    @property
    def num_prompts(self) -> list[int]:
        return [domain.training.num_prompts for domain in self._domains]

    @property
    def names(self) -> list[str]:
        return [domain.name for domain in self._domains]

    @property
    def digests(self) -> tuple[str, ...]:
        return tuple(domain.training.digest() for domain in self._domains)

    def tokens(self, domain: int, prompt: int) -> TokenIds:
        return self._domains[domain].training.tokens(prompt)

    def row(self, domain: int, prompt: int) -> bytes:
        source = self._domains[domain].training
        return source.row(prompt) if isinstance(source, EnvironmentSource) else b""

    @property
    def validation_names(self) -> list[str]:
        return [name for domain in self._domains for name in domain.validation]

    def validation_tokens(self, name: str) -> list[TokenIds]:
        source = self._domains[self._domain_of(name)].validation[name]
        return [source.tokens(prompt) for prompt in range(source.num_prompts)]

    async def score_validation(self, name: str, prompt: int, answer: Answered) -> float:
        """Score an attempt of a validation set. Raises RewardFailed, and RewardUnavailable after the last try."""
        domain = self._domain_of(name)
        for _ in range(MAX_ATTEMPTS - 1):
            with contextlib.suppress(RewardUnavailable):
                return (await self._score(domain, name, prompt, answer)).score
        return (await self._score(domain, name, prompt, answer)).score

    async def score_validation_group(self, name: str, prompt: int, answers: Sequence[Answered]) -> list[Reward | None]:
        """Return what the functions of whole groups add to each attempt at a prompt. Raises as `score_validation`."""
        domain = self._domain_of(name)
        for _ in range(MAX_ATTEMPTS - 1):
            with contextlib.suppress(RewardUnavailable):
                found = await self._score_group(domain, name, prompt, answers)
                if all(one is not None for one in found):
                    return found
        return await self._score_group(domain, name, prompt, answers)

    def held_out(self, name: str) -> list[tuple[int, bytes]]:
        source = self._domains[self._domain_of(name)].validation[name]
        first = source.first if isinstance(source, EnvironmentSource) else 0
        rows = source.row if isinstance(source, EnvironmentSource) else lambda _: b""
        return [(first + number, rows(number)) for number in range(source.num_prompts)]

    def read(self, domain: int, prompt: int) -> tuple[Task, str]:
        """Return a task to train on, and its prompt as the model sees it."""
        return self._asked(domain, None, prompt)

    def tool_calls(self, drawn: str) -> list[ToolUse]:
        """Return the tool calls in what the policy drew."""
        return self._conversations.tool_calls(drawn)

    async def score_given(self, domain: int, given: RewardInput) -> Reward:
        """Score an answer from anywhere. Raises RewardFailed and RewardUnavailable."""
        if given.episode is not None and not self._domains[domain].rewards:
            return Reward(given.episode.reward, given.episode.parts)
        return await weighing.score(self._pool, self._domains[domain].rewards, given, self._solved_above, self._once)

    async def score_given_group(
        self, domain: int, shared: RewardInput, answers: list[RewardInput]
    ) -> list[Reward | None]:
        """Return what the functions of whole groups add to answers from anywhere. Raises as `score_given`."""
        group = RewardGroup(shared.prompt, shared.expected, shared.row, answers)
        return await weighing.score_group(self._pool, self._domains[domain].rewards, group, self._once)

    def _domain_of(self, validation: str) -> int:
        return next(number for number, domain in enumerate(self._domains) if validation in domain.validation)

    async def score(self, domain: int, prompt: int, answer: Answered, limit_s: float = 0.0) -> Reward:
        """Score one answer, or one episode. Raises RewardFailed and RewardUnavailable."""
        return await self._score(domain, None, prompt, answer, limit_s)

    async def _score(
        self, domain: int, validation: str | None, prompt: int, answer: Answered, limit_s: float = 0.0
    ) -> Reward:
        rewards = self._domains[domain].rewards
        if answer.own is not None and not rewards:
            return Reward(answer.own.value, answer.own.parts)
        if all(one.whole_group for one in rewards):
            return Reward()
        (facts,) = await self._written([answer])
        given = make_input(self._shared(domain, validation, prompt), facts, limit_s)
        make = partial(weighing.score, self._pool, rewards, given, self._solved_above, self._once)
        (found,) = await self._watched((domain, False), validation, prompt, [given], make)
        assert found is not None
        return found

    @property
    def scores_groups(self) -> bool:
        return any(one.whole_group for domain in self._domains for one in domain.rewards)

    async def score_group(self, domain: int, prompt: int, answers: Sequence[Answered]) -> list[Reward | None]:
        """Return what the functions of whole groups add to each answer. Raises RewardFailed and RewardUnavailable."""
        return await self._score_group(domain, None, prompt, answers)

    async def _score_group(
        self, domain: int, validation: str | None, prompt: int, answers: Sequence[Answered]
    ) -> list[Reward | None]:
        rewards = self._domains[domain].rewards
        if not any(one.whole_group for one in rewards):
            return [Reward()] * len(answers)
        group = make_group(self._shared(domain, validation, prompt), await self._written(answers))
        make = partial(weighing.score_group, self._pool, rewards, group, self._once)
        return await self._watched((domain, True), validation, prompt, group.answers, make)

    async def _written(self, answers: Sequence[Answered]) -> list[AnswerFacts]:
        """Write answers out as text. Episodes may have a thousand calls: they are written in a thread."""
        if all(one.own is None for one in answers):
            return [self._conversations.write(one) for one in answers]
        return await asyncio.to_thread(lambda: [self._conversations.write(one) for one in answers])

    def _shared(self, domain: int, validation: str | None, prompt: int) -> RewardInput:
        """Return what all answers to a prompt share."""
        task, written = self._asked(domain, validation, prompt)
        return RewardInput(written, "", task.expected, task.fields, "", 0)

    async def _watched(
        self,
        kind: FailureKey,
        validation: str | None,
        prompt: int,
        given: Sequence[RewardInput],
        make: Callable[[], Awaitable[Reward | list[Reward | None]]],
    ) -> list[Reward | None]:
        """Return the rewards of these answers to one prompt. Failures are counted, for the functions of this kind."""
        row = (kind, validation, prompt)
        if row in self._watch.quarantined:
            name = _row_name(self._domains[kind[0]], validation, prompt)
            raise RewardFailed(f"{name} is quarantined: {self._watch.quarantined[row]}")
        try:
            found = await make()
        except (RewardFailed, RewardUnavailable) as error:
            self._failures.failed(kind, str(error), len(given))
            self._watch.failed(kind, row, _row_name(self._domains[kind[0]], validation, prompt), str(error))
            raise
        except RewardStops as error:
            self._failures.stop(str(error))
            raise RewardUnavailable(str(error)) from error
        self._failures.scored(kind)
        rewards: list[Reward | None] = [found] if isinstance(found, Reward) else found
        for one, reward in zip(given, rewards, strict=True):
            if reward is not None:
                self._watch.scored(kind, row, one, reward)
        return rewards

    def _read(self, domain: int, validation: str | None, prompt: int) -> tuple[Task, str]:
        """Return a task, and its prompt as the model sees it. `validation` names a set; None: training data."""
        of = self._domains[domain]
        source = of.training if validation is None else of.validation[validation]
        return source.task(prompt), source.written(prompt)

    async def failed(self) -> None:
        """Wait for as long as all is well. Raises UserError for a reward that always fails."""
        await self._failures.until_hopeless()

    def rewards_under_way(self) -> UnderWay | None:
        state, failures = self._pool.state(), self._failures
        if not state.running and not failures.total:
            return None
        failed = (failures.total, failures.last_reason)
        return UnderWay(state.running, self._wanted.wall_s, (state.longest_s, state.longest), failed)

    def reward_metrics(self) -> dict[str, float]:
        others = {**self._judges.take_metrics(), **self._pool.remote.take_metrics()}
        return {**self._watch.take_metrics(), **others, "reward/scored_before": self._once.num_saved}

    def why_none_scored(self) -> str:
        return self._failures.why_none_scored()

    async def close(self) -> None:
        """End all reward processes."""
        await self._pool.close()


def _row_name(domain: Domain, validation: str | None, prompt: int) -> str:
    return f"prompt {prompt} of {f'the validation set {validation}' if validation else domain.name}"


def load_tasks(recipe: Recipe, run_dir: Path | None = None) -> RecipeTasks:
    """Find every reward, read all data. Raises UserError, with a dotted key or with file and line.

    `run_dir` is the run's directory, for the output of reward functions; None: there is no run.
    """
    surroundings = _surroundings(recipe, run_dir)
    tokenizer, domains = _open_all(recipe, surroundings)
    pool, solved_above = _make_pool(recipe.rewards, surroundings), recipe.validation.solved_above
    tasks = RecipeTasks(domains, tokenizer, pool, recipe.rewards, solved_above, run_dir)
    try:
        scheduler_config(recipe, tasks.num_prompts)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    for line in too_few(recipe, tasks.num_prompts):
        log.warning(line)
    return tasks


def _surroundings(recipe: Recipe, run_dir: Path | None = None) -> Surroundings:
    """Return how processes are started. Raises ConfigError without the sandbox that is wanted."""
    wanted, walls = recipe.rewards, None
    log = None if run_dir is None else run_dir / "logs" / "rewards.log"
    if wanted.sandbox and wanted.processes:
        functions = [one.function for one in reward_keys(recipe).values()]
        walls = look_for_walls(functions, run_dir)
    return Surroundings(
        log,
        wanted.memory_bytes,
        wanted.environment,
        walls=walls,
        facts=_facts(recipe, run_dir),
        start_s=wanted.start_timeout_s,
    )


def _facts(recipe: Recipe, run_dir: Path | None) -> RunFacts:
    wanted, tls = recipe.rewards, None if run_dir is None else encryption(recipe.manager)
    return RunFacts(
        run_dir="" if run_dir is None else str(run_dir.absolute()),
        timeout_s=wanted.wall_s,
        processes=max(1, wanted.processes),
        max_usd=wanted.max_usd,
        max_tokens=wanted.max_tokens,
        manager_host="" if tls is None else tls.host,
        manager_ca=recipe.manager.ca,
    )


def _make_pool(wanted: RewardsSection, surroundings: Surroundings) -> RewardPool:
    return RewardPool(
        wanted.processes,
        wanted.wall_s,
        together=math.ceil(wanted.max_under_way / max(1, wanted.processes)),
        surroundings=surroundings,
    )


class DomainOfStep(NamedTuple):
    """A domain's part of a step, and its first prompt."""

    name: str
    num_prompts: int
    """The number of prompts that a step uses: `prompts_per_step`, or all if there are fewer."""
    written: str
    """The first prompt as the model sees it; `tokens` and `expected` are its own too."""
    tokens: list[int]
    expected: str


def look_at_a_step(recipe: Recipe) -> list[DomainOfStep]:
    """Return each domain's part of one step, reading no more rows than that takes.

    Raises UserError for the same mistakes as `load_tasks`, in the rows that it reads.
    """
    _, domains = _open_all(recipe, _surroundings(recipe), one_step=True)
    found: list[DomainOfStep] = []
    for domain, opened in zip(recipe.data.all_domains, domains, strict=True):
        first, source = opened.training.task(0), opened.training
        num = min(domain.prompts_per_step, source.num_prompts)
        found.append(DomainOfStep(domain.name, num, source.written(0), source.tokens(0).tolist(), first.expected))
    return found


def _open_all(
    recipe: Recipe, surroundings: Surroundings, *, one_step: bool = False
) -> tuple[ModelTokenizer, list[Domain]]:
    """Open all domains. `one_step`: read no more to train on than a step wants."""
    named = list(zip(recipe.data.all_domains, domain_keys(recipe), strict=True))
    if recipe.rewards.processes:
        check_functions(reward_keys(recipe), surroundings)
    else:
        check_sent(reward_keys(recipe))
    tokenizer = ModelTokenizer(recipe.model.path)
    room = prompt_room(recipe, tokenizer.max_context)
    return tokenizer, [_open(recipe, domain, tokenizer, room, key, one_step=one_step) for domain, key in named]


def too_few(recipe: Recipe, num_prompts: list[int]) -> list[str]:
    """Return a line for each domain that has fewer prompts than a step wants."""
    return [
        f"{key}.prompts_per_step: {domain.prompts_per_step}, and {domain.source} has only {num} prompts to train on: a "
        f"step has {num} of this domain"
        for domain, key, num in zip(recipe.data.all_domains, domain_keys(recipe), num_prompts, strict=True)
        if num < domain.prompts_per_step
    ]


def reward_keys(recipe: Recipe) -> dict[str, WeightedReward]:
    """Return every function that scores something, by the setting that names it."""
    found: dict[str, WeightedReward] = {}
    for domain, key in zip(recipe.data.all_domains, domain_keys(recipe), strict=True):
        for number, one in enumerate(recipe.rewards_of(domain)):
            place = f"{key}.reward" if isinstance(domain.reward, str | None) else f"{key}.reward.{number}"
            if one.function == ENVIRONMENT:
                continue
            if one in recipe.rewards.functions:
                place = f"rewards.functions.{recipe.rewards.functions.index(one)}.function"
            found[place] = one
    return found


def _open(
    recipe: Recipe, domain: DomainSection, tokenizer: ModelTokenizer, room: int | None, key: str, *, one_step: bool
) -> Domain:
    max_tokens, rewards = longest_prompt(domain, room), recipe.rewards_of(domain)
    training = open_rows_of(recipe, domain, tokenizer, room, key, one_step=one_step)
    wanted = recipe.validation
    validation = {
        name: open_validation(
            place,
            domain,
            tokenizer,
            num_prompts=wanted.num_prompts,
            max_tokens=max_tokens,
            needs_answer=needs_answer(rewards),
            key=key,
        )
        for name, place in (domain.validation_sets.items() if recipe.validates else ())
    }
    return Domain(domain.name, rewards, training, validation)
