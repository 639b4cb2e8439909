"""Validating a version: what counts as an attempt, and what is told."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest

from polyrl.config import apply_overrides, build
from polyrl.config.recipe import Recipe
from polyrl.rewards.reward import Reward, RewardFailed
from polyrl.run.task_contract import Answered
from polyrl.run.validation import validator
from polyrl.trainer.devices import Devices
from polyrl.trainer.local_engine import LocalAnswer, LocalPrompt

SMALL: dict[str, Any] = {"name": "r", "model": {"path": "m"}, "data": {"source": "arithmetic"}}


class ToldFleet:
    """What the manager is told of validation."""

    def __init__(self) -> None:
        self.validates = False
        self.num_times = 0

    @asynccontextmanager
    async def validation(self) -> AsyncIterator[None]:
        self.validates = True
        self.num_times += 1
        yield
        self.validates = False


class Engine:
    """Answers with the prompt, if it is short enough."""

    def __init__(self, fleet: ToldFleet) -> None:
        self._fleet = fleet

    async def answer(self, questions: list[LocalPrompt]) -> list[LocalAnswer]:
        assert self._fleet.validates
        return [
            LocalAnswer(one.prompt, "stop") if len(one.prompt) < 3 else LocalAnswer([], "refused it leaves no room")
            for one in questions
        ]

    async def sleep(self) -> None: ...

    async def wake(self) -> None: ...


class Tasks:
    """The first prompt is answered well, the second badly, the third has no reward; the last two are too long."""

    validation_names = ("sums",)
    prompts = ([1], [0], [5], [1, 1, 1], [1, 1, 1])
    scores_groups = False

    def held_out(self, name: str) -> list[tuple[int, bytes]]:
        raise AssertionError("no episodes here")

    def validation_tokens(self, name: str) -> list[Any]:
        return [np.array(one, np.int32) for one in self.prompts]

    async def score_validation(self, name: str, prompt: int, given: Answered) -> float:
        answer = given.tokens
        assert answer, "what was never written has no reward"
        if answer[0] > 1:
            raise ValueError("no\nidea")
        return float(answer[0])


class Told:
    def __init__(self) -> None:
        self.rates: dict[int, dict[str, float]] = {}
        self.num_times = 0

    def knows(self, version: int) -> bool:
        return version in self.rates

    async def validates(self) -> None:
        self.num_times += 1

    async def validated(self, version: int, rates: dict[str, float]) -> None:
        self.rates[version] = rates


def validated(tasks: Tasks, told: Told) -> None:
    """Version 3, once; asked again, it is known by then."""
    recipe = build(apply_overrides(SMALL, ["validation.num_samples=2"]), Recipe)

    async def scenario() -> None:
        fleet = ToldFleet()
        engine = Engine(fleet)
        devices = Devices(engine)
        parts: list[Any] = [engine, devices, tasks, told, fleet]
        validate = validator(recipe, *parts)
        assert validate is not None
        await validate(3)
        await validate(3)
        devices.close()
        assert (fleet.num_times, fleet.validates) == (1, False)

    asyncio.run(scenario())


def test_what_an_engine_refuses_is_no_attempt_and_is_said_in_a_line(caplog: pytest.LogCaptureFixture):
    told = Told()
    with caplog.at_level(logging.WARNING):
        validated(Tasks(), told)
    assert told.num_times == 1
    places = ("validation/sums", "validation")
    assert told.rates == {3: {f"{place}/{metric}": 0.5 for place in places for metric in ("reward/mean", "pass@1")}}
    assert [record.getMessage() for record in caplog.records] == [
        "validation of sums: 6 of 10 attempts are left out; 4 of them: no answer: refused it leaves no room"
    ]


class NoRewards(Tasks):
    prompts = ([1], [5], [5])


def test_a_reward_that_fails_in_its_own_words_is_said_in_a_line(caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.WARNING):
        validated(NoRewards(), Told())
    assert [record.getMessage() for record in caplog.records] == [
        "validation of sums: 4 of 6 attempts are left out; 4 of them: no reward: ValueError: no idea"
    ]


class GroupTasks(Tasks):
    """Attempts are ranked as a group of two; the group of the last prompt has no reward, and half of the first's."""

    prompts = ([1], [0], [1, 1])
    scores_groups = True

    async def score_validation_group(self, name: str, prompt: int, answers: list[Answered]) -> list[Reward | None]:
        assert answers == [Answered(list(self.prompts[prompt]), "stop")] * 2
        if prompt == 2:
            raise RewardFailed("rank: returned 1 rewards, expected 2")
        return [Reward(4.0), None if prompt == 0 else Reward(6.0)]


def test_attempts_at_a_prompt_are_scored_as_a_group(caplog: pytest.LogCaptureFixture):
    told = Told()
    with caplog.at_level(logging.WARNING):
        validated(GroupTasks(), told)
    assert told.rates[3]["validation/reward/mean"] == ((1 + 4) + (4 + 6) / 2) / 2
    assert [record.getMessage() for record in caplog.records] == [
        "validation of sums: 3 of 6 attempts are left out; 2 of them: no reward: rank: returned 1 rewards, expected 2"
    ]
