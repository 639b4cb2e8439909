"""One trainer after the other: what was taken is not delivered again, and who is followed by another ends."""

import asyncio
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
from tests.integration.live import CONFIG, PATIENCE_S, Live, honest_worker, manager, play_round, prompt_of, run, trainer
from tests.telemetry.test_metrics import a_line

from polyrl.client import Fleet
from polyrl.errors import UserError
from polyrl.scheduling.core.ledger import StepLine
from polyrl.wire import frames
from polyrl.wire.dial import Dialer

PROMPTS_A_STEP = CONFIG.domains[0].prompts_per_step


async def take_one(run_dir: Path) -> None:
    async with manager(run_dir) as live, honest_worker(live):
        async with trainer(live) as first:
            await first.publish(0)
            taken = await anext(aiter(first.round(0)))
            await first.take(taken)
            await first.settled()
        async with trainer(live) as second:
            assert second.opened is not None
            assert (second.opened.fresh, second.opened.open_steps) == (False, (0,))
            groups = await play_round(second, 0)
    assert taken.id not in {group.id for group in groups}
    assert len(groups) == PROMPTS_A_STEP - 1


def test_a_round_of_which_a_group_was_taken_ends_for_the_next_trainer_without_it(tmp_path):
    run(take_one(tmp_path))


async def take_all(run_dir: Path) -> None:
    async with manager(run_dir) as live, honest_worker(live):
        async with trainer(live) as first:
            await first.publish(0)
            async for group in first.round(0):
                await first.take(group)
            await first.settled()
        async with trainer(live) as second:
            assert await play_round(second, 0) == []


def test_a_round_that_was_taken_as_a_whole_is_over_at_once_for_the_next_trainer(tmp_path):
    run(take_all(tmp_path))


async def reject_one(run_dir: Path) -> None:
    async with manager(run_dir) as live, honest_worker(live), trainer(live) as fleet:
        await fleet.publish(0)
        seen: list[int] = []
        async for group in fleet.round(0):
            seen.append(group.id)
            if len(seen) == PROMPTS_A_STEP:  # the last one: all that was said of the round's end is void
                await fleet.reject(group, "not this one")
            else:
                await fleet.take(group)
    assert len(seen) == PROMPTS_A_STEP + 1
    assert len(set(seen)) == len(seen)


def test_a_rejected_group_is_replaced_before_the_round_ends(tmp_path):
    run(reject_one(tmp_path))


async def be_followed(run_dir: Path) -> None:
    async with manager(run_dir) as live, trainer(live) as first, trainer(live) as second:
        with pytest.raises(UserError, match="another trainer has opened the run"):
            async for _ in first.round(0):
                pass
        await second.publish(0)
        await second.settled()
        assert "session" in live.refused


def test_a_trainer_whose_run_another_one_opens_ends_with_one_line_and_leaves_it_alone(tmp_path):
    run(be_followed(tmp_path))


async def line_told_to(live: Live, session: str) -> StepLine:
    """What a trainer that dials again hears of the step that was trained last."""
    async with Dialer(live.url, live.token("admin")) as dialer, asyncio.timeout(PATIENCE_S):
        socket = await dialer.stream("/v1/trainer", session, frames.MAX_TRAINER_FRAME_BYTES)
        await socket.send_bytes(frames.encode(frames.TrainerHello()))
        while not isinstance(frame := frames.decode_to_trainer(await socket.receive_bytes()), frames.StepReported):
            pass
        await socket.close()
        return frame.line


async def miss_a_line(run_dir: Path) -> None:
    async with manager(run_dir) as live, honest_worker(live):
        async with trainer(live) as fleet:
            assert fleet.opened is not None
            session = fleet.opened.session
            for step in (0, 1):
                await fleet.publish(step)
                await play_round(fleet, step)
            line = await fleet.line(1)
            assert [one.step for one in fleet.lines] == [0, 1]
        assert await line_told_to(live, session) == line
    async with manager(run_dir) as live:
        assert await line_told_to(live, session) == line


def test_a_step_s_line_that_a_break_or_a_restart_swallowed_is_told_again(tmp_path):
    run(miss_a_line(tmp_path))


async def hear_of_a_step_that_is_done(run_dir: Path) -> None:
    async with manager(run_dir) as live, honest_worker(live), trainer(live) as fleet:
        await fleet.publish(0)
        (group, *_) = await play_round(fleet, 0)
        await fleet._hear(frames.Delivered(0, group.id, group.origin, ()))
        await fleet._hear(frames.Closed(0, (group.id,), ()))
        assert fleet._rounds == {}


def test_nothing_is_kept_of_a_step_that_is_told_again_after_it_is_done(tmp_path):
    run(hear_of_a_step_that_is_done(tmp_path))


async def speak_on(run_dir: Path) -> None:
    async def keep_speaking(fleet: Fleet) -> None:
        while True:
            await fleet.micro_batch_done(0)
            await asyncio.sleep(0)

    async with manager(run_dir) as live, trainer(live) as fleet:
        early = asyncio.create_task(fleet.until_published())
        speaking = asyncio.create_task(keep_speaking(fleet))
        await asyncio.sleep(0.05)
        assert not early.done()
        await fleet.publish(0)
        async with asyncio.timeout(PATIENCE_S):
            await fleet.settled()
            await early
        assert live.service.lobby.need_run().desk.state.published == 0
        speaking.cancel()


def test_what_was_said_is_on_file_although_others_go_on_speaking(tmp_path):
    run(speak_on(tmp_path))


class Heard:
    """A connection that takes all, and during which more is said."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        self.seqs: list[int] = []

    async def send_bytes(self, data: bytes) -> None:
        frame = frames.decode_from_trainer(data)
        assert isinstance(frame, frames.MicroBatchDone)
        self.seqs.append(frame.seq)
        if len(self.seqs) in (1, NUM_SAID):
            await self.fleet.micro_batch_done(0)


class CountedLooks(deque[tuple[int, frames.Statement]]):
    num = 0

    def __iter__(self) -> Iterator[tuple[int, frames.Statement]]:
        for one in super().__iter__():
            self.num += 1
            yield one


NUM_SAID = 500


def test_what_was_said_is_said_again_in_order_and_looked_at_a_few_times_only():
    async def scenario() -> None:
        fleet = Fleet(Dialer("http://127.0.0.1:1", "token"), CONFIG, prompt_of, None, 1.0)
        looks = fleet._line._unacknowledged = CountedLooks()
        for _ in range(NUM_SAID):
            await fleet.micro_batch_done(0)
        heard = Heard(fleet)
        await fleet._line._send_backlog(cast(Any, heard))
        assert heard.seqs == list(range(1, NUM_SAID + 3))
        assert looks.num < 5 * NUM_SAID

    run(scenario())


def test_a_trainer_remembers_the_last_steps_and_versions_and_no_others():
    async def scenario() -> None:
        fleet = Fleet(Dialer("http://127.0.0.1:1", "token"), CONFIG, prompt_of, None, 1.0)
        for step in range(500):
            await fleet.publish(step, f"{step:064x}")
            await fleet._hear(frames.StepReported(a_line(step)))
        assert (await fleet.line(499)).step == 499
        assert len(fleet.lines) == len(fleet.digests) == 64
        assert (fleet.lines[-1].step, max(fleet.digests)) == (499, 499)

    run(scenario())
