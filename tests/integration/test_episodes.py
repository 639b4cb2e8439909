"""Episodes over a live manager: real sockets, a real host agent, emulated workers; deaths between any two calls."""

import asyncio
import contextlib
import math
import re
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest
from tests.integration.live import MODEL, Live, honest_worker, manager, play_round, run, trainer, until

from polyrl.client import Group, Prompt
from polyrl.hosts.agent import HostAgent, HostOptions
from polyrl.hosts.episode import CallLimits, Episode, EpisodeEnd, EpisodeFailed, NoRoom
from polyrl.hosts.played import PlayedEpisode
from polyrl.ids import HostName
from polyrl.scheduling.core.parameters import (
    DomainData,
    EnvironmentRules,
    FleetRules,
    RoundsConfig,
    SchedulerConfig,
)
from polyrl.wire.dial import Dialer

CONFIG = SchedulerConfig(
    domains=(DomainData(name="d", prompts_per_step=2, num_prompts=50, environment="echo"),),
    max_new_tokens=256,
    rounds=RoundsConfig(samples_per_prompt=4),
    fleet_rules=FleetRules(heartbeat_timeout_s=3.0),
    environments=EnvironmentRules(host_timeout_s=1.0),
)
PATIENT = msgspec.structs.replace(CONFIG, environments=EnvironmentRules(host_timeout_s=30.0))
"""For tests of which a host that is lost is the failure: on a busy machine a second may pass without a heartbeat."""
TURNS = 3


def prompt_of(domain: int, prompt: int, epoch: int) -> Prompt:
    return Prompt([], task=msgspec.json.encode({"number": prompt}))


class EchoEnvironment:
    """Asks three times; each prompt is all that was said, and a mark. Deterministic."""

    name: str = "echo"
    num_tasks: int | None = None
    max_at_once: int | None = None
    worn_out: str = ""

    def __init__(self, after_call: Callable[[Episode, int], object] | None = None) -> None:
        self.after_call = after_call
        self.num_begun = 0

    async def start(self) -> None:
        pass

    async def close(self) -> None:
        pass

    async def play(self, episode: Episode) -> EpisodeEnd:
        self.num_begun += 1
        assert episode.task is not None
        said = [5, 6, 8 + episode.task["number"]]
        for turn in range(TURNS):
            answer = await episode.call(said, CallLimits(max_tokens=20))
            said = [*said, *answer.tokens, 9, 10 + turn]
            if self.after_call is not None:
                result = self.after_call(episode, turn)
                if asyncio.iscoroutine(result):
                    await result
        return EpisodeEnd(reward=float(sum(said) % 7), num_turns=TURNS)


@asynccontextmanager
async def host(live: Live, environment: EchoEnvironment, name: str = "h0", slots: int = 16) -> AsyncIterator[HostAgent]:
    agent = HostAgent(environment, Dialer(live.url, live.token("host")), HostOptions(name, slots=slots))
    life = asyncio.create_task(agent.run())
    try:
        await until(lambda: HostName(name) in live.service.lobby.hosts, f"{name} joined")
        yield agent
    finally:
        life.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await life


@asynccontextmanager
async def kept_host(live: Live, environment: EchoEnvironment, name: str) -> AsyncIterator[None]:
    """A host that is started again when it ends, as a run does."""

    async def keep() -> None:
        while True:
            await HostAgent(environment, Dialer(live.url, live.token("host")), HostOptions(name)).run()

    life = asyncio.create_task(keep())
    try:
        await until(lambda: HostName(name) in live.service.lobby.hosts, f"{name} joined")
        yield
    finally:
        life.cancel()
        await asyncio.wait([life])


def told(groups: list[Group]) -> dict[str, tuple[list[int], float, list[list[int]]]]:
    """What was drawn, paid and seen, by sample."""
    return {
        one.name: (one.tokens.tolist(), one.reward, [call.prompt.tolist() for call in one.calls])
        for group in groups
        for one in group.samples
    }


def check(groups: list[Group]) -> None:
    assert len(groups) == 2
    for group in groups:
        assert len(group.samples) == 4
        for sample in group.samples:
            assert len(sample.calls) == TURNS
            said = [5, 6, 8 + group.origin.prompt]
            at = 0
            for turn, call in enumerate(sample.calls):
                assert call.prompt.tolist() == said
                assert call.start == at < call.end
                said = [*said, *sample.tokens[call.start : call.end].tolist(), 9, 10 + turn]
                at = call.end
            assert at == len(sample.tokens)
            assert sample.reward == float(sum(said) % 7)
            assert sample.parts == {"turns": 3.0}


async def one_round(tmp_path: Path, environment: EchoEnvironment) -> list[Group]:
    async with (
        manager(tmp_path) as live,
        trainer(live, CONFIG, prompts=prompt_of, answers=MODEL) as fleet,
        honest_worker(live),
        host(live, environment),
    ):
        await fleet.publish(0)
        groups = await play_round(fleet, 0)
        ledger = live.service.lobby.need_run().scheduler.ledger
        assert ledger.num_calls == 8 * TURNS
        assert ledger.episodes_ended == {"scored": 8}
        assert ledger.hosts[HostName("h0")].episode_seconds > 0
        return groups


def test_an_episode_of_three_calls_is_played_and_delivered_with_all_that_the_policy_saw(tmp_path):
    groups = run(one_round(tmp_path, EchoEnvironment()))
    check(groups)


def test_a_host_claims_no_more_places_than_its_environment_has(tmp_path):
    """As a server has sessions: whoever waits for one within the environment spends its first turn's time there."""
    at_once = [0, 0]

    class Small(EchoEnvironment):
        max_at_once = 2

        async def play(self, episode: Episode) -> EpisodeEnd:
            at_once[0] += 1
            at_once[1] = max(at_once)
            try:
                return await super().play(episode)
            finally:
                at_once[0] -= 1

    check(run(one_round(tmp_path, Small())))
    assert at_once == [0, 2]


def test_calls_of_one_episode_draw_with_random_numbers_of_their_own(tmp_path):
    groups = run(one_round(tmp_path, EchoEnvironment()))
    for group in groups:
        for sample in group.samples:
            answers = [tuple(sample.tokens[call.start : call.end].tolist()) for call in sample.calls]
            assert len(set(answers)) == TURNS


def test_an_episode_whose_host_dies_between_two_calls_is_replayed_elsewhere_with_the_same_tokens(tmp_path):
    expected = told(run(one_round(tmp_path / "quiet", EchoEnvironment())))

    async def scenario() -> None:
        async with (
            manager(tmp_path / "run") as live,
            trainer(live, CONFIG, prompts=prompt_of, answers=MODEL) as fleet,
            honest_worker(live),
        ):
            await fleet.publish(0)
            hung = asyncio.Event()
            waiting = 0

            async def hang(episode: Episode, turn: int) -> None:
                nonlocal waiting
                if turn == 1:
                    waiting += 1
                    await hung.wait()

            round_ = asyncio.create_task(play_round(fleet, 0))
            async with host(live, EchoEnvironment(hang), "mortal"):
                await until(lambda: waiting == 8, "all episodes are in the middle")
            async with host(live, EchoEnvironment(), "second"):
                groups = await round_
            assert told(groups) == expected
            ledger = live.service.lobby.need_run().scheduler.ledger
            assert ledger.hosts[HostName("mortal")].num_losses == 1
            assert ledger.tokens_discarded == {}
            assert ledger.num_calls == 8 * TURNS  # the first two of each were not drawn again

    run(scenario(), 60.0)


def test_an_environment_that_takes_another_way_after_its_host_died_keeps_what_agrees(tmp_path):
    async def scenario() -> None:
        async with (
            manager(tmp_path) as live,
            trainer(live, CONFIG, prompts=prompt_of, answers=MODEL) as fleet,
            honest_worker(live),
        ):
            await fleet.publish(0)
            waiting = 0

            async def hang(episode: Episode, turn: int) -> None:
                nonlocal waiting
                if turn == 1:
                    waiting += 1
                    await asyncio.Event().wait()

            class Moody(EchoEnvironment):
                async def play(self, episode: Episode) -> EpisodeEnd:
                    assert episode.task is not None
                    first = await episode.call([5, 6, 8 + episode.task["number"]], CallLimits(max_tokens=20))
                    second = await episode.call([30, 31], CallLimits(max_tokens=20))
                    return EpisodeEnd(reward=float(len(first.tokens) + len(second.tokens)))

            round_ = asyncio.create_task(play_round(fleet, 0))
            async with host(live, EchoEnvironment(hang), "mortal"):
                await until(lambda: waiting == 8, "all episodes are in the middle")
            lost = sum(one.num_tokens for one in live.service.lobby.need_run().desk.samples.values())
            async with host(live, Moody(), "second"):
                groups = await round_
            ledger = live.service.lobby.need_run().scheduler.ledger
            kept = sum(sample.calls[0].end for group in groups for sample in group.samples)
            assert ledger.tokens_discarded == {"environment_lost": lost - kept}
            assert all(len(sample.calls) == 2 for group in groups for sample in group.samples)
            assert all(sample.reward == len(sample.tokens) for group in groups for sample in group.samples)

    run(scenario(), 60.0)


def test_a_failed_episode_is_begun_again_and_then_leaves_its_group_and_is_never_a_zero(tmp_path):
    class Broken(EchoEnvironment):
        async def play(self, episode: Episode) -> EpisodeEnd:
            assert isinstance(episode, PlayedEpisode)
            if episode.key.sample % 4 == 1:
                self.num_begun += 1
                raise EpisodeFailed("the sandbox is gone")
            return await super().play(episode)

    async def scenario() -> None:
        environment = Broken()
        async with (
            manager(tmp_path) as live,
            trainer(live, CONFIG, prompts=prompt_of, answers=MODEL) as fleet,
            honest_worker(live),
            host(live, environment),
        ):
            await fleet.publish(0)
            groups = await play_round(fleet, 0)
            assert [len(group.samples) for group in groups] == [3, 3]
            ledger = live.service.lobby.need_run().scheduler.ledger
            assert ledger.episodes_ended == {"scored": 6, "failed": 6}
            assert ledger.samples_discarded == {"failed": 2}

    run(scenario(), 60.0)


def test_calls_that_the_environment_does_not_pay_for_are_delivered_as_such(tmp_path):
    class WithUser(EchoEnvironment):
        async def play(self, episode: Episode) -> EpisodeEnd:
            return msgspec.structs.replace(await super().play(episode), untrained=(1, 7))

    async def scenario() -> None:
        async with (
            manager(tmp_path) as live,
            trainer(live, CONFIG, prompts=prompt_of, answers=MODEL) as fleet,
            honest_worker(live),
            host(live, WithUser()),
        ):
            await fleet.publish(0)
            for group in await play_round(fleet, 0):
                for sample in group.samples:
                    assert [call.is_trained for call in sample.calls] == [True, False, True]

    run(scenario(), 60.0)


def test_an_episode_whose_tokens_are_spent_hears_so_and_can_still_be_scored(tmp_path):
    class Endless(EchoEnvironment):
        async def play(self, episode: Episode) -> EpisodeEnd:
            said = [5, 6, 7]
            with contextlib.suppress(NoRoom):
                while True:
                    answer = await episode.call(said, CallLimits(max_tokens=50))
                    said += answer.tokens
            return EpisodeEnd(reward=1.0)

    async def scenario() -> None:
        async with (
            manager(tmp_path) as live,
            trainer(live, CONFIG, prompts=prompt_of, answers=MODEL) as fleet,
            honest_worker(live),
            host(live, Endless()),
        ):
            await fleet.publish(0)
            groups = await play_round(fleet, 0)
            assert all(len(sample.tokens) == 256 for group in groups for sample in group.samples)

    run(scenario(), 60.0)


def test_an_environment_that_never_answers_is_scored_when_its_time_is_up(tmp_path):
    rules = EnvironmentRules(turn_timeout_s=0.5, timeout_reward=-1.0, host_timeout_s=2.0)
    config = msgspec.structs.replace(CONFIG, environments=rules)

    async def hang(episode: Episode, turn: int) -> None:
        if turn == 1:
            await asyncio.Event().wait()

    async def scenario() -> None:
        async with (
            manager(tmp_path) as live,
            trainer(live, config, prompts=prompt_of, answers=MODEL) as fleet,
            honest_worker(live),
            kept_host(live, EchoEnvironment(hang), "h0"),
            kept_host(live, EchoEnvironment(hang), "h1"),
            kept_host(live, EchoEnvironment(hang), "h2"),
        ):
            await fleet.publish(0)
            groups = await play_round(fleet, 0)
            assert all(sample.reward == -1.0 and len(sample.calls) == 2 for one in groups for sample in one.samples)
            ledger = live.service.lobby.need_run().scheduler.ledger
            assert ledger.episodes_ended == {"timed_out": 8}
            assert ledger.hosts_hung >= 1, "they all stand still: at first the host is held guilty, and ends"
            assert ledger.hosts_hung <= 8, "each time an episode is noted that had not been, and is the cause next time"

    run(scenario(), 60.0)


def test_an_episode_that_hangs_among_others_that_move_ends_at_the_learned_limit_and_costs_them_nothing(
    tmp_path, caplog
):
    rules = EnvironmentRules(turn_timeout_s=8.0, least_turn_timeout_s=1.5, timeout_reward=-1.0, host_timeout_s=2.0)
    domain = msgspec.structs.replace(CONFIG.domains[0], prompts_per_step=6)
    config = msgspec.structs.replace(CONFIG, environments=rules, domains=(domain,))
    chosen: list[str] = []

    async def hang(episode: Episode, turn: int) -> None:
        if turn == 1 and len(chosen) < 1 and is_second:
            chosen.append(episode.name)
            await asyncio.Event().wait()
        elif chosen:
            await asyncio.sleep(0.5)  # the others go on meanwhile

    is_second = False

    async def scenario() -> None:
        nonlocal is_second
        async with (
            manager(tmp_path) as live,
            trainer(live, config, prompts=prompt_of, answers=MODEL) as fleet,
            honest_worker(live),
            host(live, EchoEnvironment(hang), slots=8),
        ):
            await fleet.publish(0)
            began = time.monotonic()
            await play_round(fleet, 0)  # 24 episodes of three turns: enough to learn from
            await fleet.publish(1)
            is_second = True
            await asyncio.sleep(max(0.0, began + 8.5 - time.monotonic()))  # then no slow turn can be missing
            groups = await play_round(fleet, 1)
            rewards = {sample.name: sample.reward for group in groups for sample in group.samples}
            assert sum(reward == -1.0 for reward in rewards.values()) == 1 and len(rewards) == 24
            said = re.search(r"took too long \(over ([\d.]+) s\)", caplog.text)
            assert said is not None and 1.5 <= float(said[1]) < 8.0, caplog.text
            ledger = live.service.lobby.need_run().scheduler.ledger
            assert ledger.episodes_ended == {"scored": 47, "timed_out": 1} and ledger.hosts_hung == 0

    run(scenario(), 60.0)


def test_calls_beyond_the_recipes_number_are_answered_so_and_the_environment_still_pays(tmp_path):
    config = msgspec.structs.replace(CONFIG, environments=EnvironmentRules(max_calls=2))

    class Patient(EchoEnvironment):
        async def play(self, episode: Episode) -> EpisodeEnd:
            try:
                await super().play(episode)
            except NoRoom as error:
                assert "all 2 calls of the episode are made (environments.max_calls)" in str(error)
                return EpisodeEnd(reward=0.25)
            raise AssertionError("a third call was answered")

    async def scenario() -> None:
        async with (
            manager(tmp_path) as live,
            trainer(live, config, prompts=prompt_of, answers=MODEL) as fleet,
            honest_worker(live),
            host(live, Patient()),
        ):
            await fleet.publish(0)
            groups = await play_round(fleet, 0)
            assert all(sample.reward == 0.25 and len(sample.calls) == 2 for one in groups for sample in one.samples)

    run(scenario(), 60.0)


def test_an_environment_that_asks_otherwise_after_its_host_died_in_a_call_without_a_token_is_answered(tmp_path):
    class Other(EchoEnvironment):
        async def play(self, episode: Episode) -> EpisodeEnd:
            answer = await episode.call([30, 31], CallLimits(max_tokens=20))
            return EpisodeEnd(reward=float(len(answer.tokens)))

    async def scenario() -> None:
        async with (
            manager(tmp_path) as live,
            trainer(live, CONFIG, prompts=prompt_of, answers=MODEL) as fleet,
        ):
            await fleet.publish(0)
            round_ = asyncio.create_task(play_round(fleet, 0))
            desk = live.service.lobby.need_run().desk

            def num_waiting(attempt: int) -> int:
                return sum(one.state == "waiting" and one.attempt == attempt for one in desk.samples.values())

            async with host(live, EchoEnvironment(), "mortal"):
                await until(lambda: num_waiting(1) == 8, "all have called")
            async with host(live, Other(), "second"):
                await until(lambda: num_waiting(2) == 8, "all have called again")
                async with honest_worker(live):
                    groups = await round_
            samples = [sample for group in groups for sample in group.samples]
            assert all([call.prompt.tolist() for call in one.calls] == [[30, 31]] for one in samples)
            assert all(one.reward == len(one.tokens) for one in samples)
            assert desk.ledger.episodes_ended == {"scored": 8}

    run(scenario(), 60.0)


BAD: dict[str, Callable[[Episode], object]] = {
    "a token beyond the vocabulary": lambda one: one.call([5, 10**6], CallLimits(max_tokens=5)),
    "a token below 0": lambda one: one.call([-1], CallLimits(max_tokens=5)),
    "too many stop strings": lambda one: one.call([5], CallLimits(5, (), ("x",) * 99)),
    "a stop string that is empty": lambda one: one.call([5], CallLimits(5, (), ("",))),
    "a stop string with half of a character": lambda one: one.call([5], CallLimits(5, (), ("\ud800",))),
    "a stop token below 0": lambda one: one.call([5], CallLimits(5, (-1,))),
    "a stop token beyond all": lambda one: one.call([5], CallLimits(5, (1 << 40,))),
    "no tokens wanted": lambda one: one.call([5], CallLimits(-4)),
    "half of a token wanted": lambda one: one.call([5], CallLimits(2.5)),  # type: ignore[arg-type]
    "a reward that is no number": lambda one: EpisodeEnd(reward=math.nan),
    "a reward that is infinite": lambda one: EpisodeEnd(reward=-math.inf),
    "a reward beyond all": lambda one: EpisodeEnd(reward=1e300),
    "a part beyond all": lambda one: EpisodeEnd(reward=1.0, parts={"x": 1e300}),
    "a part with a strange name": lambda one: EpisodeEnd(reward=1.0, parts={"a\nb": 1.0}),
    "more turns than a number may count": lambda one: EpisodeEnd(reward=1.0, num_turns=10**12),
    "a call beyond all that is not trained": lambda one: EpisodeEnd(reward=1.0, untrained=(1 << 40,)),
}


@pytest.mark.parametrize("way", BAD)
def test_what_an_environment_says_that_no_manager_takes_fails_its_own_episode_alone(tmp_path, way):
    class Mixed(EchoEnvironment):
        async def play(self, episode: Episode) -> EpisodeEnd:
            assert isinstance(episode, PlayedEpisode)
            if episode.key.sample % 4 != 1:
                return await super().play(episode)
            await episode.call([5, 6], CallLimits(max_tokens=5))
            made = BAD[way](episode)
            if isinstance(made, EpisodeEnd):
                return made
            await made  # type: ignore[misc]
            return EpisodeEnd(reward=1.0)

    async def scenario() -> None:
        async with (
            manager(tmp_path) as live,
            trainer(live, PATIENT, prompts=prompt_of, answers=MODEL) as fleet,
            honest_worker(live),
            host(live, Mixed()),
        ):
            await fleet.publish(0)
            groups = await play_round(fleet, 0)
            assert [len(group.samples) for group in groups] == [3, 3]
            assert live.service.lobby.need_run().scheduler.ledger.hosts[HostName("h0")].num_joins == 1
            assert not sum(live.service.lobby.refused.values())

    run(scenario(), 60.0)


def test_a_reason_that_cannot_be_written_is_escaped_and_the_episode_keeps_its_reward(tmp_path):
    class Damaged(EchoEnvironment):
        async def play(self, episode: Episode) -> EpisodeEnd:
            await super().play(episode)
            return EpisodeEnd(reward=1.0, why="no move: \ud800\n")

    async def scenario() -> None:
        async with (
            manager(tmp_path) as live,
            trainer(live, PATIENT, prompts=prompt_of, answers=MODEL) as fleet,
            honest_worker(live),
            host(live, Damaged()),
        ):
            await fleet.publish(0)
            groups = await play_round(fleet, 0)
            assert [one.reward for group in groups for one in group.samples] == [1.0] * 8
            assert live.service.lobby.need_run().scheduler.ledger.hosts[HostName("h0")].num_joins == 1

    run(scenario(), 60.0)


def test_a_harness_that_asks_in_a_loop_for_what_it_is_refused_costs_nobody_the_host(tmp_path):
    class Stubborn(EchoEnvironment):
        async def play(self, episode: Episode) -> EpisodeEnd:
            said = [5, 6, 7, *(await episode.call([5, 6, 7], CallLimits(max_tokens=256))).tokens]
            for _ in range(250):  # 2,000 in all; the manager takes 630, and 400 a second
                with contextlib.suppress(NoRoom):
                    said += (await episode.call(said, CallLimits(max_tokens=256))).tokens
            return EpisodeEnd(reward=1.0)

    async def scenario() -> None:
        async with (
            manager(tmp_path) as live,
            trainer(live, CONFIG, prompts=prompt_of, answers=MODEL) as fleet,
            honest_worker(live),
            host(live, Stubborn()),
        ):
            await fleet.publish(0)
            groups = await play_round(fleet, 0)
            assert [len(group.samples) for group in groups] == [4, 4]
            assert not live.service.lobby.refused["flood"]

    run(scenario(), 120.0)
