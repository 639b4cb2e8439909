"""The recipe's prompts, as the fleet, the trainer and the rewards want them."""

import asyncio
import contextlib
import logging
import math
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple, Protocol

from polyrl.config.recipe import DomainSection, Recipe
from polyrl.config.rewards import RewardsSection, WeightedReward
from polyrl.data.prompts import Task
from polyrl.data.sources import EnvironmentSource, Source, open_training, open_validation
from polyrl.data.tokens import ModelTokenizer, TokenIds
from polyrl.errors import ConfigError, UserError
from polyrl.rewards import weighing
from polyrl.rewards.line import Surroundings
from polyrl.rewards.lookup import check_functions
from polyrl.rewards.once import ScoredOnce
from polyrl.rewards.pool import RewardPool
from polyrl.rewards.reward import OURS, Reward, RewardFailed, RewardInput, RewardUnavailable
from polyrl.rewards.watching import RewardWatch
from polyrl.run.settings import MAX_ATTEMPTS, scheduler_config

log = logging.getLogger("polyrl.data")

_PROMPTS_AT_HAND = 1024
_HOPELESS = 32
"""A reward that has failed this often, and never succeeded, is given up."""


class Tasks(Protocol):
    """The prompts and rewards of a run. Domains, and prompts within them, have numbers; validation sets, names."""

    @property
    def num_prompts(self) -> list[int]: ...

    @property
    def names(self) -> list[str]: ...

    def tokens(self, domain: int, prompt: int) -> TokenIds: ...

    def row(self, domain: int, prompt: int) -> bytes:
        """Return the row of an episode's task, as JSON; empty for a prompt, and where the environment has its own."""
        ...

    @property
    def digests(self) -> tuple[str, ...]:
        """The digest of each domain's prompts in order; empty where the recipe alone determines them."""
        ...

    async def score(self, domain: int, prompt: int, answer: list[int], finish: str, limit_s: float = 0.0) -> Reward:
        """Return the reward. Raises if there is none: a missing reward is never a zero.

        `limit_s` is the CPU time that the answer's program may take; 0: no limit was learned.
        """
        ...

    @property
    def validation_names(self) -> list[str]:
        """The names of the validation sets."""
        ...

    def validation_tokens(self, name: str) -> list[TokenIds]: ...

    async def score_validation(self, name: str, prompt: int, answer: list[int], finish: str) -> float:
        """Raises as `score`."""
        ...

    def held_out(self, name: str) -> list[tuple[int, bytes]]:
        """Return the numbers and rows of a validation set's tasks, whose episodes are played."""
        ...

    async def failed(self) -> None:
        """Waits for as long as all is well; raises UserError when nothing can be trained."""
        ...

    def rewards_under_way(self) -> "UnderWay | None":
        """Return the present state of the reward functions; None if there is nothing to report."""
        ...

    def reward_metrics(self) -> dict[str, float]:
        """Return the metrics of the reward functions since the last call."""
        ...

    def why_none_scored(self) -> str:
        """Return why a reward has failed for all answers so far; empty if none has."""
        ...


class UnderWay(NamedTuple):
    running: int
    timeout_s: float
    longest: tuple[float, str]
    """The longest-running reward: its seconds, and its function."""
    failed: tuple[int, str]
    """The number of answers without a reward, and the reason of the last."""


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
    ) -> None:
        self._domains, self._tokenizer, self._pool, self._wanted = domains, tokenizer, pool, wanted
        self._solved_above = solved_above
        self._once, self._watch = ScoredOnce(), RewardWatch(wanted.row_failures)
        self._last_failure = ""
        self._asked = lru_cache(_PROMPTS_AT_HAND)(self._read)
        """Read once for all samples of a prompt: a chat template is a program."""
        self._num_failures = [0] * len(domains)
        """The number of failures of each domain's reward."""
        self._is_proven = [False] * len(domains)
        self._failures: dict[int, str] = {}
        """The reason of the last failure, by domain."""
        self._hopeless = asyncio.Event()
        self._why_hopeless = ""

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

    async def score_validation(self, name: str, prompt: int, answer: list[int], finish: str) -> float:
        """Raises RewardFailed and RewardUnavailable."""
        domain = self._domain_of(name)
        for _ in range(MAX_ATTEMPTS - 1):
            with contextlib.suppress(RewardUnavailable):
                return (await self._score(domain, name, prompt, answer, finish)).score
        return (await self._score(domain, name, prompt, answer, finish)).score

    def held_out(self, name: str) -> list[tuple[int, bytes]]:
        source = self._domains[self._domain_of(name)].validation[name]
        first = source.first if isinstance(source, EnvironmentSource) else 0
        rows = source.row if isinstance(source, EnvironmentSource) else lambda _: b""
        return [(first + number, rows(number)) for number in range(source.num_prompts)]

    def read(self, domain: int, prompt: int) -> tuple[Task, str]:
        """Return a task to train on, and its prompt as the model sees it."""
        return self._asked(domain, None, prompt)

    async def score_given(self, domain: int, given: RewardInput) -> Reward:
        """Score an answer from anywhere. Raises RewardFailed and RewardUnavailable."""
        return await weighing.score(self._pool, self._domains[domain].rewards, given, self._solved_above, self._once)

    def _domain_of(self, validation: str) -> int:
        return next(number for number, domain in enumerate(self._domains) if validation in domain.validation)

    async def score(self, domain: int, prompt: int, answer: list[int], finish: str, limit_s: float = 0.0) -> Reward:
        """Raises RewardFailed and RewardUnavailable."""
        return await self._score(domain, None, prompt, answer, finish, limit_s)

    async def _score(
        self, domain: int, validation: str | None, prompt: int, answer: list[int], finish: str, limit_s: float = 0.0
    ) -> Reward:
        task, written = self._asked(domain, validation, prompt)
        text = self._tokenizer.text(answer)
        given = RewardInput(written, text, task.expected, task.fields, finish, len(answer), limit_s)
        of, row = self._domains[domain], (domain, validation, prompt)
        if row in self._watch.quarantined:
            raise RewardFailed(f"{_row_name(of, validation, prompt)} is quarantined: {self._watch.quarantined[row]}")
        try:
            reward = await weighing.score(self._pool, of.rewards, given, self._solved_above, self._once)
        except (RewardFailed, RewardUnavailable) as error:
            self._count_failure(domain, str(error))
            self._watch.failed(domain, row, _row_name(of, validation, prompt), str(error))
            raise
        self._is_proven[domain] = True
        self._watch.scored(domain, row, given, reward)
        return reward

    def _read(self, domain: int, validation: str | None, prompt: int) -> tuple[Task, str]:
        """Return a task, and its prompt as the model sees it. `validation` names a set; None: training data."""
        of = self._domains[domain]
        source = of.training if validation is None else of.validation[validation]
        return source.task(prompt), source.written(prompt)

    async def failed(self) -> None:
        """Waits for as long as all is well; raises UserError for a reward that always fails: nothing is trained."""
        await self._hopeless.wait()
        raise UserError(self._why_hopeless)

    def rewards_under_way(self) -> UnderWay | None:
        state, num_failed = self._pool.state(), sum(self._num_failures)
        if not state.running and not num_failed:
            return None
        failed = (num_failed, self._last_failure)
        return UnderWay(state.running, self._wanted.wall_s, (state.longest_s, state.longest), failed)

    def reward_metrics(self) -> dict[str, float]:
        return {**self._watch.take_metrics(), "reward/scored_before": self._once.num_saved}

    def why_none_scored(self) -> str:
        unproven = [domain for domain in self._failures if not self._is_proven[domain]]
        return self._why(max(unproven, key=self._num_failures.__getitem__)) if unproven else ""

    def _count_failure(self, domain: int, reason: str) -> None:
        self._num_failures[domain] += 1
        self._failures[domain] = self._last_failure = reason
        if not self._is_proven[domain] and self._num_failures[domain] >= _HOPELESS and not self._hopeless.is_set():
            self._why_hopeless = self._why(domain)
            self._hopeless.set()

    def _why(self, domain: int) -> str:
        names = ", ".join(one.function for one in self._domains[domain].rewards)
        return f"the reward {names} failed for all of {self._num_failures[domain]} answers: {self._failures[domain]}"

    async def close(self) -> None:
        """End all reward processes."""
        await self._pool.close()


def _row_name(domain: Domain, validation: str | None, prompt: int) -> str:
    return f"prompt {prompt} of {f'the validation set {validation}' if validation else domain.name}"


def load_tasks(recipe: Recipe, reward_log: Path | None = None) -> RecipeTasks:
    """Find every reward, read all data. Raises UserError, with a dotted key or with file and line.

    `reward_log` is the file for the output of reward functions.
    """
    tokenizer, domains = _open_all(recipe)
    tasks = RecipeTasks(
        domains, tokenizer, _make_pool(recipe.rewards, reward_log), recipe.rewards, recipe.validation.solved_above
    )
    try:
        scheduler_config(recipe, tasks.num_prompts)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    for line in too_few(recipe, tasks.num_prompts):
        log.warning(line)
    return tasks


def _make_pool(wanted: RewardsSection, log: Path | None) -> RewardPool:
    memory_bytes = 0 if wanted.memory_gb is None else int(wanted.memory_gb * (1 << 30))
    return RewardPool(
        wanted.processes,
        wanted.wall_s,
        together=math.ceil(wanted.max_under_way / wanted.processes),
        surroundings=Surroundings(log, memory_bytes, wanted.environment),
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
    _, domains = _open_all(recipe, one_step=True)
    found: list[DomainOfStep] = []
    for domain, opened in zip(recipe.data.all_domains, domains, strict=True):
        first, source = opened.training.task(0), opened.training
        num = min(domain.prompts_per_step, source.num_prompts)
        found.append(DomainOfStep(domain.name, num, source.written(0), source.tokens(0).tolist(), first.expected))
    return found


def _open_all(recipe: Recipe, *, one_step: bool = False) -> tuple[ModelTokenizer, list[Domain]]:
    """`one_step`: read no more to train on than a step wants."""
    named = list(zip(recipe.data.all_domains, _keys(recipe), strict=True))
    check_functions(_reward_keys(recipe), recipe.rewards.environment)
    tokenizer = ModelTokenizer(recipe.model.path)
    room = prompt_room(recipe, tokenizer.max_context)
    return tokenizer, [_open(recipe, domain, tokenizer, room, key, one_step=one_step) for domain, key in named]


def too_few(recipe: Recipe, num_prompts: list[int]) -> list[str]:
    """A line for each domain that has fewer prompts than a step wants."""
    return [
        f"{key}.prompts_per_step: {domain.prompts_per_step}, and {domain.source} has only {num} prompts to train on: a "
        f"step has {num} of this domain"
        for domain, key, num in zip(recipe.data.all_domains, _keys(recipe), num_prompts, strict=True)
        if num < domain.prompts_per_step
    ]


def _keys(recipe: Recipe) -> list[str]:
    """Return the dotted key of each domain's settings."""
    domains = recipe.data.domains
    return [f"data.domains.{number}" for number in range(len(domains))] if domains else ["data"]


def _reward_keys(recipe: Recipe) -> dict[str, WeightedReward]:
    """Every function that scores something, by the setting that names it."""
    found: dict[str, WeightedReward] = {}
    for domain, key in zip(recipe.data.all_domains, _keys(recipe), strict=True):
        for number, one in enumerate(recipe.rewards_of(domain)):
            place = f"{key}.reward" if isinstance(domain.reward, str | None) else f"{key}.reward.{number}"
            if one in recipe.rewards.functions:
                place = f"rewards.functions.{recipe.rewards.functions.index(one)}.function"
            found[place] = one
    return found


def prompt_room(recipe: Recipe, model_context: int | None) -> int | None:
    """Tokens that a context leaves for a prompt beside the longest answer; none: any number."""
    limits = [one for one in (recipe.model.max_context, model_context) if one is not None]
    if not limits:
        return None
    room = min(limits) - recipe.rollout.max_new_tokens
    if room < 1:
        raise ConfigError(
            f"rollout.max_new_tokens: {recipe.rollout.max_new_tokens} leaves no room for a prompt, "
            f"expected less than the context of {min(limits)} tokens ({recipe.model.path})"
        )
    return room


def _open(
    recipe: Recipe, domain: DomainSection, tokenizer: ModelTokenizer, room: int | None, key: str, *, one_step: bool
) -> Domain:
    limits = [one for one in (domain.max_prompt_tokens, room) if one is not None]
    max_tokens = min(limits) if limits else None
    rewards = recipe.rewards_of(domain)
    needs_answer = any(one.function in OURS for one in rewards)
    seed = recipe.train.seed if recipe.data.shuffle_seed is None else recipe.data.shuffle_seed
    training = open_training(
        domain,
        tokenizer,
        seed=seed,
        max_tokens=max_tokens,
        needs_answer=needs_answer,
        key=key,
        enough=domain.prompts_per_step if one_step else None,
    )
    wanted = recipe.validation
    validation = {
        name: open_validation(
            place,
            domain,
            tokenizer,
            num_prompts=wanted.num_prompts,
            max_tokens=max_tokens,
            needs_answer=needs_answer,
            key=key,
        )
        for name, place in (domain.validation_sets.items() if recipe.validates else ())
    }
    return Domain(domain.name, rewards, training, validation)
