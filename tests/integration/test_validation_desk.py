"""Validation of episodes: a real host agent over a real socket, and the trainer's engine as a function."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import aiohttp
import pytest
from tests.integration.test_episodes import EchoEnvironment

from polyrl.engines.engine import EngineError
from polyrl.hosts.agent import HostAgent, HostOptions
from polyrl.hosts.episode import CallLimits, Episode, EpisodeEnd, EpisodeFailed, NoRoom
from polyrl.run.task_contract import Answered
from polyrl.run.validation_desk import EpisodeLimits, HeldOutTask, ValidationDesk
from polyrl.scheduling.core.parameters import EnvironmentRules
from polyrl.trainer.local_engine import LocalAnswer
from polyrl.wire.control import AnswerRules
from polyrl.wire.dial import Dialer
from polyrl.wire.host_frames import MakeCall

TOKEN = "a-token-of-the-hosts"
TASKS = [HeldOutTask(100 + number, 7, number, b'{"number": 3}') for number in range(6)]
RULES = EnvironmentRules(turn_timeout_s=2.0, host_timeout_s=5.0, timeout_reward=-1.0)


async def answer(prompt: Sequence[int], max_tokens: int, call: MakeCall, seed: int) -> LocalAnswer:
    """Draws three tokens that follow from the prompt."""
    drawn = [(sum(prompt) + place) % 50 + 1 for place in range(min(3, max_tokens))]
    return LocalAnswer(drawn, "stop" if max_tokens >= 3 else "length", [-0.5] * len(drawn))


@asynccontextmanager
async def desk(
    rules: EnvironmentRules = RULES, max_new_tokens: int = 64, engine=answer
) -> AsyncIterator[ValidationDesk]:
    limits = EpisodeLimits(rules, AnswerRules(vocab=64, end_ids=(0,), max_context=200), max_new_tokens, slots=4)
    made = ValidationDesk("v", TOKEN, limits, engine)
    await made.start()
    try:
        yield made
    finally:
        await made.close()


@asynccontextmanager
async def host(at: ValidationDesk, environment: EchoEnvironment) -> AsyncIterator[None]:
    agent = HostAgent(environment, Dialer(at.url, TOKEN), HostOptions("v", slots=4))
    life = asyncio.create_task(agent.run())
    try:
        yield
    finally:
        life.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await life


def rewards_of(played: Sequence[Answered | None]) -> list[float | None]:
    return [None if one is None or one.own is None else one.own.value for one in played]


def validate(environment: EchoEnvironment, **settings) -> tuple[list[float | None], dict[str, int]]:
    async def scenario() -> tuple[list[float | None], dict[str, int]]:
        async with desk(**settings) as made, host(made, environment):
            played = await made.play(TASKS)
            return rewards_of(played), dict(made.take_failures())

    return asyncio.run(asyncio.wait_for(scenario(), 60.0))


def expected_reward() -> float:
    said = [5, 6, 11]
    for turn in range(3):
        said = [*said, *((sum(said) + place) % 50 + 1 for place in range(3)), 9, 10 + turn]
    return float(sum(said) % 7)


def test_episodes_of_tasks_that_are_not_trained_on_are_played_and_paid():
    seen: list[tuple[int, int]] = []

    def note(episode: Episode, turn: int) -> None:
        seen.append((episode.index, episode.seed))

    rewards, failures = validate(EchoEnvironment(note))
    assert rewards == [expected_reward()] * 6
    assert failures == {}
    assert sorted(set(seen)) == [(100 + number, 7) for number in range(6)]


def test_an_episode_that_fails_is_begun_again_and_then_left_out_and_is_never_a_zero():
    class Broken(EchoEnvironment):
        async def play(self, episode: Episode) -> EpisodeEnd:
            self.num_begun += episode.index == 103
            if episode.index == 103 or (episode.index == 104 and episode.attempt == 0):
                raise EpisodeFailed("the sandbox is gone")
            return await super().play(episode)

    environment = Broken()
    rewards, failures = validate(environment)
    assert rewards == [None if number == 3 else expected_reward() for number in range(6)]
    assert failures == {"the sandbox is gone": 1}
    assert environment.num_begun == RULES.max_attempts + 5


def test_an_environment_that_never_answers_is_scored_when_its_time_is_up():
    async def hang(episode: Episode, turn: int) -> None:
        if episode.index == 101:
            await asyncio.Event().wait()

    rewards, _ = validate(EchoEnvironment(hang))
    assert rewards == [-1.0 if number == 1 else expected_reward() for number in range(6)]


def test_an_episode_whose_tokens_are_spent_hears_so():
    class Endless(EchoEnvironment):
        async def play(self, episode: Episode) -> EpisodeEnd:
            said = [5]
            with contextlib.suppress(NoRoom):
                while True:
                    said += (await episode.call(said, CallLimits())).tokens
            return EpisodeEnd(reward=float(len(said)))

    rewards, _ = validate(Endless(), max_new_tokens=10)
    assert rewards == [11.0] * 6


def test_a_host_that_dies_is_replaced_and_its_episodes_begin_again():
    async def scenario() -> list[float | None]:
        async with desk() as made:
            waiting = asyncio.Event()

            async def hang(episode: Episode, turn: int) -> None:
                waiting.set()
                await asyncio.Event().wait()

            playing = asyncio.create_task(made.play(TASKS))
            async with host(made, EchoEnvironment(hang)):
                await waiting.wait()
            async with host(made, EchoEnvironment()):
                return rewards_of(await playing)

    assert asyncio.run(asyncio.wait_for(scenario(), 60.0)) == [expected_reward()] * 6


def test_a_failed_engine_ends_validation():
    async def fail(prompt: Sequence[int], max_tokens: int, call: MakeCall, seed: int) -> LocalAnswer:
        raise EngineError("out of memory")

    with pytest.raises(EngineError, match="out of memory"):
        validate(EchoEnvironment(), engine=fail)


def test_strangers_are_turned_away():
    async def scenario() -> list[int]:
        async with desk() as made, aiohttp.ClientSession() as client:
            found: list[int] = []
            async with client.post(f"{made.url}/v1/hosts/join", headers={"Authorization": "Bearer x"}) as reply:
                found.append(reply.status)
            async with client.get(f"{made.url}/v1/host", headers={"X-Polyrl-Session": "x"}) as reply:
                found.append(reply.status)
            return found

    assert asyncio.run(scenario()) == [401, 410]
