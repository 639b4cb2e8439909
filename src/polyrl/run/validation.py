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
from polyrl.run.task_contract import Answered, Tasks
from polyrl.run.validation_desk import ValidationDesk
from polyrl.run.validation_hosts import attempt_episodes
from polyrl.trainer.devices import Devices
from polyrl.trainer.local_engine import LocalEngine, LocalPrompt
from polyrl.trainer.state.saving import Saver
from polyrl.trainer.validation import report

log = logging.getLogger("polyrl.train")

Attempted = Answered | str
"""An attempt at a prompt, or why there is none."""
_NO_EPISODE = "no episode was played to its end"


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
                    rewards = await _scored(tasks, name, await _attempt(recipe, engine, tasks, name))
                else:
                    played = await attempt_episodes(recipe, desk, tasks.held_out(name))
                    whys = iter(desk.take_failures().elements())
                    attempts = [[one or next(whys, _NO_EPISODE) for one in each] for each in played]
                    rewards = await _scored(tasks, name, attempts)
                add(f"validation/{name}", rewards)
                all_rewards += rewards
        add("validation", all_rewards)
        if told:
            await reporter.validated(version, told)
            if saver is not None:
                saver.validated(version, told)

    return validate


async def _attempt(recipe: Recipe, engine: LocalEngine, tasks: Tasks, name: str) -> list[list[Attempted]]:
    """Return every prompt's attempts."""
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
    answers = [
        Answered(one.tokens, one.finish) if one.is_whole else f"no answer: {one.finish}"
        for one in await engine.answer(questions)
    ]
    return [answers[at : at + num] for at in range(0, len(answers), num)]


async def _scored(tasks: Tasks, name: str, attempts: list[list[Attempted]]) -> list[list[float | None]]:
    """Return the rewards of every prompt's attempts; None where there is none: it is left out, not counted as wrong."""

    async def score(prompt: int, attempt: Attempted) -> float | str:
        """Return the reward, or why there is none."""
        if isinstance(attempt, str):
            return attempt
        try:
            return await tasks.score_validation(name, prompt, attempt)
        except PolyrlError as error:
            return f"no reward: {error}"
        except Exception as error:  # noqa: BLE001  what is not ours may raise anything
            return f"no reward: {one_line(error)}"

    async def score_all(prompt: int, each: list[Attempted]) -> list[float | str]:
        own = await asyncio.gather(*(score(prompt, one) for one in each))
        return await _with_group_rewards(tasks, name, prompt, each, own)

    found = await asyncio.gather(*(score_all(prompt, each) for prompt, each in enumerate(attempts)))
    whys = Counter(one for each in found for one in each if isinstance(one, str))
    _warn(name, whys, sum(map(len, found)))
    return [[None if isinstance(one, str) else one for one in each] for each in found]


async def _with_group_rewards(
    tasks: Tasks, name: str, prompt: int, attempts: list[Attempted], scored: list[float | str]
) -> list[float | str]:
    """Return the rewards of a prompt's attempts, with what they are worth as a group; a text: why there is none."""
    places = [at for at, one in enumerate(scored) if not isinstance(one, str)]
    if not places or not tasks.scores_groups:
        return scored
    given = [one for at in places if not isinstance(one := attempts[at], str)]
    try:
        found = await tasks.score_validation_group(name, prompt, given)
    except PolyrlError as error:
        return [one if isinstance(one, str) else f"no reward: {error}" for one in scored]
    final = list(scored)
    for at, added in zip(places, found, strict=True):
        own = scored[at]
        final[at] = "no reward: infrastructure_failed" if added is None or isinstance(own, str) else own + added.score
    return final


def _warn(name: str, reasons: Counter[str], num_attempts: int) -> None:
    for reason, times in reasons.most_common(1):
        log.warning(
            "validation of %s: %d of %d attempts are left out; %d of them: %s",
            name, reasons.total(), num_attempts, times, reason,
        )  # fmt: skip
