"""The training loop against a real manager, with workers that emulate an engine and steps that only count."""

import asyncio
import contextlib
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from tests.integration import live

from polyrl.client import RewardOf, Sample
from polyrl.config import apply_overrides, build
from polyrl.config.recipe import Recipe
from polyrl.engines.emulated import EmulatedConfig
from polyrl.errors import UserError
from polyrl.scheduling.core.parameters import DomainData
from polyrl.trainer.batch import TrainGroup
from polyrl.trainer.devices import Devices
from polyrl.trainer.guard import MismatchGuard
from polyrl.trainer.loop import Loop, NothingCameError
from polyrl.trainer.replicas import Replicas
from polyrl.trainer.reports import StepReport
from polyrl.trainer.state import redo
from polyrl.trainer.state.checkpoint import Keep, TrainerState
from polyrl.trainer.state.saving import Rules, Saver
from polyrl.trainer.step_stats import Added, StepStats
from polyrl.weights.server import Offer
from polyrl.wire import frames
from polyrl.wire.control import JoinReply
from polyrl.wire.dial import Dialer

NUM_PROMPTS = 6


class CountingSteps:
    device_type = "cpu"

    def __init__(self) -> None:
        self.groups: list[TrainGroup] = []
        self._step = 0

    def begin(self, step: int, num_steps: int | None = None) -> None:
        self._step = step

    def add(self, groups: Sequence[TrainGroup], first: int | None = None) -> Added:
        self.groups += groups
        return Added(len(groups))

    def finish(self, *, may_be_void: bool = False) -> StepStats:
        return StepStats(self._step, Added(len(self.groups)), metrics={})


class Publisher:
    async def publish(self, version: int) -> Offer:
        return Offer(version, "", 0, ())


class Listener:
    def __init__(self) -> None:
        self.num_trained = 0
        self.reports: list[StepReport] = []

    async def step_begins(self, step: int) -> None: ...

    async def groups_trained(self, step: int, num: int) -> None:
        self.num_trained += num

    async def step_ended(self, report: StepReport) -> None:
        self.reports.append(report)

    async def saves(self) -> None: ...


def make_recipe(*overrides: str) -> Recipe:
    tree = {"name": "r", "model": {"path": "m"}, "data": {"source": "arithmetic"}}
    longest = live.CONFIG.max_new_tokens
    return build(apply_overrides(tree, [f"rollout.max_new_tokens={longest}", *overrides]), Recipe)


def prompt_tokens(domain: int, prompt: int) -> Any:
    return np.array(live.prompt_of(domain, prompt, 0).tokens, np.int32)


def play(
    run_dir: Path, mode: str, reward_of: RewardOf, *overrides: str, engine: EmulatedConfig = live.ENGINE
) -> tuple[list[TrainGroup], StepReport]:
    """One step: what it trained on, and what was told of it."""
    recipe = make_recipe(f"train.mode={mode}", "train.steps=1", *overrides)
    domain = DomainData(name="d", prompts_per_step=NUM_PROMPTS, num_prompts=50)
    streaming = mode == "streaming"
    rewards = replace(live.CONFIG.rewards, as_finished=streaming)
    config = replace(live.CONFIG, domains=(domain,), streaming=streaming, rewards=rewards)
    steps, listener = CountingSteps(), Listener()

    async def scenario() -> None:
        async with (
            live.manager(run_dir) as manager,
            live.honest_worker(manager, engine),
            live.trainer(manager, config, reward=reward_of) as fleet,
        ):
            devices = Devices()
            await Loop(recipe, fleet, Replicas(steps, devices), Publisher(), prompt_tokens, listener).run()
            devices.close()

    live.run(scenario())
    (report,) = listener.reports
    return steps.groups, report


@pytest.mark.parametrize("mode", ["streaming", "synchronous"])
def test_a_group_that_teaches_nothing_is_replaced_before_its_step_is_trained(mode: str, tmp_path: Path):
    seen: dict[int, int] = {}

    async def reward_of(sample: Sample) -> float:
        """Of every second prompt all answers are equally right."""
        place = seen.setdefault(sample.origin.prompt, len(seen))
        return 1.0 if place % 2 else float(sample.id % 2)

    groups, report = play(tmp_path, mode, reward_of)
    assert report.line is not None and len(groups) == report.line.num_groups == NUM_PROMPTS
    assert report.num_filtered > 0
    assert len(report.rewards) == live.CONFIG.rounds.samples_per_prompt * (NUM_PROMPTS + report.num_filtered)
    numbers = [group[0].group for group in groups]
    assert mode == "streaming" or numbers == sorted(numbers)


@pytest.mark.parametrize(
    "overrides",
    [
        ["algorithm.overlong=penalty", f"algorithm.overlong_buffer_tokens={live.CONFIG.max_new_tokens}"],
        ["algorithm.advantage=reinforce_plus_plus"],
    ],
)
def test_a_group_with_equal_rewards_is_trained_where_it_teaches(overrides: list[str], tmp_path: Path):
    async def always_right(sample: Sample) -> float:
        return 1.0

    groups, report = play(tmp_path, "streaming", always_right, *overrides)
    assert (len(groups), report.num_filtered) == (NUM_PROMPTS, 0)


def test_a_round_of_which_nothing_can_be_generated_ends_the_run_with_a_line(tmp_path: Path):
    async def always_right(sample: Sample) -> float:
        return 1.0

    with pytest.raises(UserError, match="step 0: nothing of its round could be generated and scored"):
        play(tmp_path, "streaming", always_right, engine=replace(live.ENGINE, fail_every=1))


@pytest.mark.parametrize(("every", "asked"), [(2, [0, 2]), (3, [0])])
def test_a_run_that_goes_on_asks_for_the_validation_that_is_due_where_it_starts(
    every: int, asked: list[int], tmp_path: Path
):
    validated: list[int] = []

    async def validate(version: int) -> None:
        validated.append(version)

    async def any_reward(sample: Sample) -> float:
        return float(sample.id % 2)

    async def scenario() -> None:
        devices = Devices()
        async with live.manager(tmp_path) as manager, live.honest_worker(manager):
            for num_steps, first in ((2, 0), (3, 2)):
                recipe = make_recipe(f"train.steps={num_steps}", f"validation.every_steps={every}")
                async with live.trainer(manager, reward=any_reward) as fleet:
                    steps, listener = CountingSteps(), Listener()
                    loop = Loop(recipe, fleet, Replicas(steps, devices), Publisher(), prompt_tokens, listener, validate)
                    await loop.run(first)
                if not first:
                    assert validated == asked
                    validated.clear()
        devices.close()

    live.run(scenario())
    assert validated == ([2] if every == 2 else [3])


class Killed(Exception):
    pass


class DiesInStep(Publisher):
    """A safe place and a publisher: all ends as the one has the step, or as the other is to have its version."""

    def __init__(self, *, when_safe: bool) -> None:
        self.report, self._when_safe = b"", when_safe

    async def offered(self, version: int, digest: str) -> bool:
        return False

    async def trained(
        self,
        step: int,
        batches: Sequence[Sequence[TrainGroup]],
        report: bytes = b"",
        rejected: Sequence[TrainGroup] = (),
    ) -> None:
        self.report = report
        if self._when_safe:
            raise Killed

    async def rejected(self, step: int, group: int, rewards: list[float]) -> None: ...

    async def rejected_before(self, step: int) -> dict[int, list[float]]:
        return {}

    async def data_ended(self, step: int) -> None: ...

    async def finish(self) -> None: ...

    async def publish(self, version: int) -> Offer:
        if version == 1:
            raise Killed
        return await super().publish(version)


@pytest.mark.parametrize("when_safe", [True, False], ids=["before it is done for the manager", "after"])
def test_a_step_that_is_safe_and_untold_is_told_by_the_process_that_goes_on(tmp_path: Path, *, when_safe: bool):
    rewards: dict[int, float] = {}

    async def reward_of(sample: Sample) -> float:
        return rewards.setdefault(sample.id, float(sample.id % 2))

    recipe, safety, listener = make_recipe("train.steps=2"), DiesInStep(when_safe=when_safe), Listener()

    async def live_once(manager: live.Live, publisher: Publisher, *past: Any, **more: Any) -> None:
        devices = Devices()
        try:
            async with live.trainer(manager, reward=reward_of) as fleet:
                loop = Loop(
                    recipe, fleet, Replicas(CountingSteps(), devices), publisher, prompt_tokens, listener, **more
                )
                await loop.run(*past)
        finally:
            devices.close()

    async def scenario() -> None:
        async with live.manager(tmp_path) as manager, live.honest_worker(manager):
            with pytest.raises(Killed):
                await live_once(manager, safety, safety=safety)
            assert not listener.reports
            await live_once(manager, Publisher(), 1, StepReport.decode(safety.report))

    live.run(scenario())
    first, second = listener.reports
    assert (first.step, second.step) == (0, 1)
    assert first.line is not None and (first.line.step, first.line.num_samples) == (0, len(first.lengths))
    assert first.rewards and set(first.rewards) <= {0.0, 1.0} and "save" not in first.seconds


@pytest.mark.parametrize("is_told", [True, False])
def test_a_run_that_had_reached_its_reward_when_it_was_killed_trains_no_further(tmp_path: Path, *, is_told: bool):
    """Killed while the version after the step is validated, say."""
    listener, validated = Listener(), list[int]()

    async def validate(version: int) -> None:
        validated.append(version)

    async def half_are_right(sample: Sample) -> float:
        return float(sample.id % 2)

    async def live_once(manager: live.Live, *settings: str, past: tuple[Any, ...] = ()) -> str:
        recipe, devices = make_recipe("validation.every_steps=1", *settings), Devices()
        async with live.trainer(manager, reward=half_are_right) as fleet:
            loop = Loop(
                recipe, fleet, Replicas(CountingSteps(), devices), Publisher(), prompt_tokens, listener, validate
            )
            why = await loop.run(*past, is_told=is_told)
        devices.close()
        return why

    async def scenario() -> None:
        async with live.manager(tmp_path) as manager, live.honest_worker(manager):
            await live_once(manager, "train.steps=1")
            past = (1, listener.reports.pop())
            validated.clear()
            why = await live_once(manager, "train.steps=2", "train.stop_at_reward=0.5", past=past)
            assert why == "step 0: the mean reward has reached 0.5"
            assert validated == [1] and [one.step for one in listener.reports] == ([] if is_told else [0])
            why = await live_once(manager, "train.steps=2", "train.stop_at_reward=0.9", past=past)
            assert why == "all 2 steps are trained" and listener.reports[-1].step == 1

    live.run(scenario())


class DiesAfterRejections(Saver):
    """Of one step, when so many groups were rejected."""

    def __init__(self, run_dir: Path, num: int) -> None:
        super().__init__(run_dir, TrainerState(next_step=0), Rules(10, Keep()), lambda: (), newest=0, num_steps=1)
        self._num_left = num

    async def rejected(self, step: int, group: int, rewards: list[float]) -> None:
        await super().rejected(step, group, rewards)
        self._num_left -= 1
        if not self._num_left:
            raise Killed


def test_what_is_told_of_a_step_counts_the_groups_that_a_killed_process_rejected(tmp_path: Path):
    """Each once: also the one that the manager had not heard of, which comes again."""
    scored: dict[int, float] = {}
    dropped: dict[str, int] = {}
    recipe, listener = make_recipe("train.steps=1"), Listener()

    async def reward_of(sample: Sample) -> float:
        """Of two prompts in three all answers are equally right."""
        return scored.setdefault(sample.id, 1.0 if sample.origin.prompt % 3 else float(sample.id % 2))

    async def live_once(manager: live.Live, num_rejections: int) -> None:
        devices, safety = Devices(), DiesAfterRejections(tmp_path, num_rejections)
        try:
            if num_rejections:
                await safety.begin()
            async with live.trainer(manager, reward=reward_of) as fleet:
                steps = CountingSteps()
                loop = Loop(
                    recipe, fleet, Replicas(steps, devices), Publisher(), prompt_tokens, listener, safety=safety
                )
                await loop.run()
        finally:
            devices.close()
            await safety.stop()

    async def scenario() -> None:
        async with live.manager(tmp_path / "run") as manager, live.honest_worker(manager):
            with pytest.raises(Killed):
                await live_once(manager, 2)
            assert len(redo.read_rejections(tmp_path, 0)) == 2
            await live_once(manager, 0)
            scheduler = manager.service.lobby.need_run().scheduler
            dropped.update(scheduler.desk.ledger.prompts_dropped)

    live.run(scenario())
    (report,) = listener.reports
    assert report.line is not None
    num_groups = report.line.num_groups + report.num_filtered
    assert report.num_filtered == dropped["filtered"] >= 2
    assert len(report.rewards) == live.CONFIG.rounds.samples_per_prompt * num_groups
    assert redo.read_rejections(tmp_path, 0) == [], "the step's entry has them"


class GuardedSteps(CountingSteps):
    """Of whose model every token's log-probability is -1."""

    def __init__(self) -> None:
        super().__init__()
        self.trained: list[set[str]] = []
        """The writers of each step, those included whose samples were left out."""

    def begin(self, step: int, num_steps: int | None = None) -> None:
        super().begin(step, num_steps)
        self.groups = []

    def finish(self, *, may_be_void: bool = False) -> StepStats:
        guard = MismatchGuard(3.0, self._step, few_tokens=1)
        samples = [one for group in self.groups for one in group]
        theirs = torch.from_numpy(np.concatenate([one.logprobs for one in samples]))
        guard.look(torch.full_like(theirs, -1.0), theirs, samples, range(len(samples)))
        left_out, too_far = guard.found()
        is_void = may_be_void and 2 * len(left_out) > len(samples)
        if not is_void:
            self.trained.append({turn.worker for one in samples for turn in one.written_by})
        self.groups = []
        return super().finish()._replace(too_far=tuple(too_far.items()), is_void=is_void)


async def forge(peer: live.Peer) -> None:
    """Answer every order at once, with tokens and log-probabilities that nobody's weights gave."""
    version = 0
    with contextlib.suppress(TypeError, ConnectionError, TimeoutError):  # the connection was closed
        while True:
            message = frames.decode_to_worker(await peer.socket.receive_bytes())
            if isinstance(message, frames.PullOrder):
                version = message.version
                await peer.say(frames.Installed(version))
            if isinstance(message, frames.ChangeDuty):  # it is the trainer's own
                version = max(version, peer.live.service.lobby.need_run().desk.state.published)
                await peer.say(frames.OnDuty(message.duty))
            if isinstance(message, frames.Orders):
                for order in message.orders:
                    done = len(order.so_far) // 4
                    ended = (frames.Ended(order.lease, done + 2, "stop"),)
                    its = live.tokens(order.lease, offset=done, version=version, ids=[7, 2], logprobs=[-60.0] * 2)
                    await peer.say(replace(its, ended=ended))


def test_a_worker_that_forges_log_probabilities_is_named_its_next_groups_are_rejected_and_it_is_given_up(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    recipe = make_recipe("train.mode=streaming", "train.steps=3", "algorithm.zero_variance=keep")
    domain = DomainData(name="d", prompts_per_step=NUM_PROMPTS, num_prompts=500)
    config = replace(
        live.CONFIG, domains=(domain,), fleet_rules=replace(live.CONFIG.fleet_rules, heartbeat_timeout_s=60.0)
    )
    steps, listener = GuardedSteps(), Listener()

    async def scenario() -> None:
        async with (
            live.manager(tmp_path) as manager,
            live.honest_worker(manager),
            live.trainer(manager, config) as fleet,
            live.Peer(manager, slots=64) as peer,
        ):
            await peer.enter()
            forging = asyncio.create_task(forge(peer))
            devices = Devices()
            await Loop(recipe, fleet, Replicas(steps, devices), Publisher(), prompt_tokens, listener).run()
            devices.close()
            await forging
            assert steps.trained[1:] == [{"honest"}, {"honest"}]
            assert live.is_connected(manager, "honest") and not live.is_connected(manager, "mallory")

    live.run(scenario(), timeout_s=60.0)
    assert "step 0: samples of worker mallory are not trained on: log-probabilities 59.0 nats a token" in caplog.text
    (given_up,) = (one.getMessage() for one in caplog.records if "mallory is given up" in one.getMessage())
    assert "3 groups were rejected for what it wrote" in given_up


def test_a_round_that_a_forger_wrote_alone_is_written_again_by_whoever_comes(tmp_path: Path):
    """No prompt and no step is spent on it, and the run does not end: it waits for a worker that can be believed."""
    recipe = make_recipe("train.mode=streaming", "train.steps=3", "algorithm.zero_variance=keep")
    domain = DomainData(name="d", prompts_per_step=2, num_prompts=4)
    config = replace(live.CONFIG, domains=(domain,), num_epochs=1)
    steps, listener = GuardedSteps(), Listener()

    async def scenario() -> None:
        async with (
            live.manager(tmp_path) as manager,
            live.trainer(manager, config) as fleet,
            live.Peer(manager, slots=64) as peer,
        ):
            await peer.enter()
            forging = asyncio.create_task(forge(peer))
            devices = Devices()
            loop = Loop(recipe, fleet, Replicas(steps, devices), Publisher(), prompt_tokens, listener)
            training = asyncio.create_task(loop.run())
            await live.until(lambda: not live.is_connected(manager, "mallory"), "it is given up")
            async with live.honest_worker(manager):
                assert await training == "the data has ended, after 2 steps"
            assert manager.service.lobby.need_run().scheduler.ledger.prompts_dropped == {}
            devices.close()
            await forging

    live.run(scenario(), timeout_s=60.0)
    assert steps.trained == [{"honest"}, {"honest"}]
    assert listener.num_trained == 4, "each place is counted once"


def test_a_round_that_only_forgers_write_under_ever_new_names_ends_the_run_and_names_them(tmp_path: Path):
    """It was written again for ever: nobody is there in the first step of which answers were trained."""
    recipe = make_recipe("train.mode=streaming", "train.steps=3", "algorithm.zero_variance=keep")

    async def under_new_names(manager: live.Live) -> None:
        for number in count():
            async with live.Peer(manager, f"mallory-{number}", slots=64) as peer:
                await peer.enter()
                await forge(peer)  # until it is given up

    async def scenario() -> None:
        async with live.manager(tmp_path) as manager, live.trainer(manager) as fleet:
            forging = asyncio.create_task(under_new_names(manager))
            devices = Devices()
            try:
                await Loop(
                    recipe, fleet, Replicas(GuardedSteps(), devices), Publisher(), prompt_tokens, Listener()
                ).run()
            finally:
                devices.close()
                forging.cancel()
                await asyncio.gather(forging, return_exceptions=True)

    said = r"^step 0: all groups of its round were rejected, .*: worker mallory-0 \([34] groups\), worker mallory-1 "
    with pytest.raises(NothingCameError, match=said):
        live.run(scenario(), timeout_s=40.0)


def test_where_the_trainers_own_worker_is_too_far_off_the_run_ends_and_says_so(tmp_path: Path):
    """It is never given up, and would write the same again."""
    recipe = make_recipe("train.mode=streaming", "train.steps=3", "algorithm.zero_variance=keep")

    async def scenario() -> None:
        async with (
            live.manager(tmp_path) as manager,
            live.trainer(manager) as fleet,
            live.Peer(manager, "trainer", slots=64) as peer,
        ):
            async with Dialer(manager.url, manager.token("admin")) as dialer:
                peer.session = (await dialer.post("/v1/join", replace(peer.facts, local=True), JoinReply)).session
            await peer.dial()
            await peer.say(frames.Hello(0, b""))
            forging = asyncio.create_task(forge(peer))
            devices = Devices()
            await Loop(recipe, fleet, Replicas(GuardedSteps(), devices), Publisher(), prompt_tokens, Listener()).run()
            devices.close()
            await forging

    said = r"^step 0: all groups of its round were rejected, .*max_mismatch=3\): worker trainer \([24] groups\)\. "
    with pytest.raises(NothingCameError, match=said):
        live.run(scenario(), timeout_s=60.0)
