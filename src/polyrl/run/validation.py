"""Validating a version: the trainer's own engine answers prompts that no step trains on, and rewards score them."""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from msgspec import structs

from polyrl.client import Fleet
from polyrl.config.recipe import Recipe
from polyrl.errors import PolyrlError, one_line
from polyrl.run.reporting import Reporter
from polyrl.run.settings import sampling_of
from polyrl.run.task_contract import Tasks
from polyrl.run.validation_desk import ValidationDesk
from polyrl.run.validation_hosts import attempt_episodes
from polyrl.trainer.devices import Devices
from polyrl.trainer.local_engine import LocalAnswer, LocalEngine, LocalPrompt
from polyrl.trainer.state.saving import Saver
from polyrl.trainer.validation import report

log = logging.getLogger("polyrl.train")


def validator(
    recipe: Recipe,
    engine: LocalEngine | None,
    devices: Devices,
    tasks: Tasks,
    reporter: Reporter,
    fleet: Fleet,
    saver: Saver | None = None,
    desks: Mapping[str, ValidationDesk] | None = None,
) -> Callable[[int], Coroutine[Any, Any, None]] | None:
    """Return a function that validates a version once; None without an engine, or if the recipe does not validate.

    `desks` play the episodes of validation sets, by name.
    """
    wanted = recipe.validation
    if engine is None or not recipe.validates:
        return None

    async def validate(version: int) -> None:
        if reporter.knows(version):
            return
        await reporter.validates()
        told: dict[str, float] = {}
        all_rewards: list[list[float | None]] = []

        def add(place: str, rewards: list[list[float | None]]) -> None:
            means = report(rewards, wanted.pass_at, wanted.solved_above)
            told.update({f"{place}/{metric}": mean for metric, mean in means.items()})

        async with fleet.validation(), devices.for_validation():
            for name in tasks.validation_names:
                desk = None if desks is None else desks.get(name)
                if desk is None:
                    rewards = await _attempt(recipe, engine, tasks, name)
                else:
                    rewards = await attempt_episodes(recipe, desk, tasks.held_out(name))
                    _warn(name, desk.take_failures(), sum(map(len, rewards)))
                add(f"validation/{name}", rewards)
                all_rewards += rewards
        add("validation", all_rewards)
        if told:
            await reporter.validated(version, told)
            if saver is not None:
                saver.validated(version, told)

    return validate


async def _with_group_rewards(
    tasks: Tasks, name: str, prompt: int, answers: list[LocalAnswer], scored: list[float | str]
) -> list[float | str]:
    """Return the rewards of a prompt's attempts, with what they are worth as a group; a text: why there is none."""
    places = [at for at, one in enumerate(scored) if not isinstance(one, str)]
    if not places or not tasks.scores_groups:
        return scored
    given = [(answers[at].tokens, answers[at].finish) for at in places]
    try:
        found = await tasks.score_validation_group(name, prompt, given)
    except PolyrlError as error:
        return [one if isinstance(one, str) else f"no reward: {error}" for one in scored]
    final = list(scored)
    for at, added in zip(places, found, strict=True):
        own = scored[at]
        final[at] = "no reward: infrastructure_failed" if added is None or isinstance(own, str) else own + added.score
    return final


async def _attempt(recipe: Recipe, engine: LocalEngine, tasks: Tasks, name: str) -> list[list[float | None]]:
    """Return the rewards of every prompt's attempts; None where there is none."""
    wanted, rollout = recipe.validation, recipe.rollout
    prompts = tasks.validation_tokens(name)[: wanted.num_prompts]
    temperature = rollout.temperature if wanted.temperature is None else wanted.temperature
    sampling = structs.replace(sampling_of(recipe), temperature=temperature, imposed=None)
    num = wanted.samples_per_prompt
    questions = [
        LocalPrompt(prompt.tolist(), rollout.max_new_tokens, number * num + attempt, sampling)
        for number, prompt in enumerate(prompts)
        for attempt in range(num)
    ]
    answers = await engine.answer(questions)

    async def score(place: int) -> float | str:
        """Return the reward, or why there is none: an attempt without a reward is left out, not counted as wrong."""
        answer = answers[place]
        if not answer.is_whole:
            return f"no answer: {answer.finish}"
        try:
            return await tasks.score_validation(name, place // num, answer.tokens, answer.finish)
        except PolyrlError as error:
            return f"no reward: {error}"
        except Exception as error:  # noqa: BLE001  what is not ours may raise anything
            return f"no reward: {one_line(error)}"

    async def score_all(prompt: int) -> list[float | str]:
        first, end = prompt * num, (prompt + 1) * num
        own = await asyncio.gather(*(score(place) for place in range(first, end)))
        return await _with_group_rewards(tasks, name, prompt, answers[first:end], own)

    each = await asyncio.gather(*(score_all(prompt) for prompt in range(len(prompts))))
    scored = [one for attempts in each for one in attempts]
    _warn(name, Counter(one for one in scored if isinstance(one, str)), len(scored))
    return [[None if isinstance(one, str) else one for one in attempts] for attempts in each]


def _warn(name: str, reasons: Counter[str], num_attempts: int) -> None:
    for reason, times in reasons.most_common(1):
        log.warning(
            "validation of %s: %d of %d attempts are left out; %d of them: %s",
            name, reasons.total(), num_attempts, times, reason,
        )  # fmt: skip
