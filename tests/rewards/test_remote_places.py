"""The places of reward workers: who gets which answer, what is believed of a result, and what becomes of one whose
worker is lost. The test says what the manager would say."""

import asyncio
import math
import time
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import pytest

from polyrl.rewards.line import RewardCall
from polyrl.rewards.messages import RewardScored
from polyrl.rewards.pool import MAX_LOSSES, RewardPool
from polyrl.rewards.remote import places, travel
from polyrl.rewards.reward import Reward, RewardFailed, RewardInput, RewardStops, RewardTimedOut, RewardUnavailable
from polyrl.run.event_loop import run_loop
from polyrl.wire import reward_frames as r

GIVEN = RewardInput("1+2=", "3", "3", {"n": 1}, "stop", 2)


class Manager:
    """A pool whose dispatcher is this test."""

    def __init__(self, pool: RewardPool) -> None:
        self.pool, self.remote = pool, pool.remote
        self.sent: list[r.FromDispatcher] = []
        self.remote.connected(self.sent.append)
        self._seats: dict[str, r.RewardSeat] = {}

    def seat(self, name: str, places: int = 4, connection: int = 1, *, draining: bool = False) -> None:
        self._seats[name] = r.RewardSeat(name, f"life of {name}", places, connection, draining)
        self.remote.hear_fleet(tuple(self._seats.values()))

    def remove(self, name: str) -> None:
        del self._seats[name]
        self.remote.hear_fleet(tuple(self._seats.values()))

    def jobs(self, name: str) -> list[r.SendJob]:
        return [one for one in self.sent if isinstance(one, r.SendJob) and one.worker == name]

    def accused(self) -> list[tuple[str, str]]:
        return [(one.worker, one.why) for one in self.sent if isinstance(one, r.Accuse)]

    def answer(self, name: str, job: int, result: bytes) -> None:
        self.remote.hear(name, f"life of {name}", r.JobDone(job, result))

    def score(self, name: str, job: r.SendJob, value: float = 1.0) -> None:
        self.answer(name, job.job, travel.pack_reply(RewardScored(b"", value, {})))


def with_manager(body: Callable[[Manager], Awaitable[Any]], processes: int = 0) -> Any:
    async def run() -> Any:
        pool = RewardPool(processes, 20.0)
        try:
            async with asyncio.timeout(30):
                return await body(Manager(pool))
        finally:
            await pool.close()

    return run_loop(run())


def ask(manager: Manager, given: RewardInput = GIVEN) -> "asyncio.Task[Reward]":
    return asyncio.create_task(manager.pool.score("mine:graded", given, {"k": 1}))


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


def test_an_answer_waits_for_a_place_goes_out_whole_and_its_reward_comes_back():
    async def body(manager: Manager) -> None:
        given = GIVEN._replace(limit_s=2.5, row={**GIVEN.row, "value": [1 << 80]})
        task = ask(manager, given)
        await settle()
        assert not manager.sent and manager.pool.state().waiting == 1 and manager.pool.is_without_places
        manager.seat("a")
        await settle()
        (job,) = manager.jobs("a")
        call = travel.read_call(job.body)
        assert call == RewardCall("mine:graded", {"k": 1}, given, 20.0) and call.cpu_s == 2.5
        manager.answer(
            "a", job.job, travel.pack_reply(RewardScored(b"", 0.5, {"x": 0.25}, "timed_out", 1.5, correct=True))
        )
        assert await task == Reward(0.5, {"x": 0.25}, "timed_out", 1.5, True)
        assert manager.pool.state() == (0, 0, 0.0, "")

    with_manager(body)


@pytest.mark.parametrize(
    "error",
    [RewardFailed("no"), RewardTimedOut("late", 3.0), RewardTimedOut("late"), RewardUnavailable("away")],
    ids=repr,
)
def test_a_failure_on_a_reward_worker_is_the_same_failure_here(error: RewardFailed | RewardUnavailable):
    async def body(manager: Manager) -> None:
        manager.seat("a")
        task = ask(manager)
        await settle()
        manager.answer("a", manager.jobs("a")[0].job, travel.pack_failure(error))
        with pytest.raises(type(error), match=str(error)) as raised:
            await task
        assert getattr(raised.value, "cpu_s", 0.0) == getattr(error, "cpu_s", 0.0)

    with_manager(body)


def test_answers_go_where_most_places_are_free_and_a_claim_is_believed_as_far_as_results_bear_it_out():
    async def body(manager: Manager) -> None:
        manager.seat("small", places=2)
        manager.seat("boaster", places=200_000)
        tasks = [ask(manager) for _ in range(20)]
        await settle()
        assert (len(manager.jobs("small")), len(manager.jobs("boaster"))) == (2, 4)
        manager.score("boaster", manager.jobs("boaster")[0])
        await settle()
        assert len(manager.jobs("boaster")) == 4 + 1 + 4
        for task in tasks:
            task.cancel()

    with_manager(body)


def test_a_worker_that_drains_or_is_away_gets_nothing_new_and_keeps_what_it_has():
    async def body(manager: Manager) -> None:
        manager.seat("a")
        first = ask(manager)
        await settle()
        manager.seat("a", draining=True)
        second = ask(manager)
        await settle()
        assert len(manager.jobs("a")) == 1 and manager.pool.is_without_places
        manager.seat("a", connection=0)
        await settle()
        assert len(manager.jobs("a")) == 1
        manager.score("a", manager.jobs("a")[0], 7.0)
        assert (await first).score == 7.0
        second.cancel()

    with_manager(body)


def test_a_worker_that_connects_again_is_sent_its_jobs_again_and_one_result_counts():
    async def body(manager: Manager) -> None:
        manager.seat("a")
        task = ask(manager)
        await settle()
        manager.seat("a", connection=0)
        manager.seat("a", connection=2)
        first, again = manager.jobs("a")
        assert again == first
        manager.score("a", first, 1.0)
        manager.score("a", again, 2.0)
        assert (await task).score == 1.0
        assert not manager.accused()

    with_manager(body)


def test_a_job_that_is_handed_back_goes_elsewhere_and_is_no_suspect():
    async def body(manager: Manager) -> None:
        manager.seat("a")
        tasks = [ask(manager) for _ in range(2)]
        await settle()
        manager.seat("b")
        manager.seat("a", draining=True)
        numbers = tuple(one.job for one in manager.jobs("a"))
        manager.remote.hear("a", "life of a", r.JobsReturned(numbers))
        await settle()
        assert len(manager.jobs("b")) == 2, "suspect ones would go one by one"
        for job in manager.jobs("b"):
            manager.score("b", job)
        await asyncio.gather(*tasks)

    with_manager(body)


def test_a_job_that_crossed_its_workers_goodbye_is_no_suspect():
    async def body(manager: Manager) -> None:
        manager.seat("a")
        tasks = [ask(manager) for _ in range(2)]
        await settle()
        manager.seat("b")
        manager.seat("a", draining=True)
        manager.remove("a")
        await settle()
        assert len(manager.jobs("b")) == 2
        for job in manager.jobs("b"):
            manager.score("b", job)
        await asyncio.gather(*tasks)

    with_manager(body)


def test_a_lost_workers_answers_are_scored_elsewhere_each_apart_from_the_others_and_late_results_are_nobodys():
    async def body(manager: Manager) -> None:
        manager.seat("a")
        tasks = [ask(manager) for _ in range(2)]
        await settle()
        manager.seat("b")
        manager.remove("a")
        await settle()
        assert len(manager.jobs("b")) == 1, "one of them may be what killed a"
        manager.score("a", manager.jobs("a")[0], 666.0)
        for _ in range(2):
            manager.score("b", manager.jobs("b")[-1], 3.0)
            await settle()
        assert [one.score for one in await asyncio.gather(*tasks)] == [3.0, 3.0]
        assert manager.remote.take_metrics()["reward/remote_lost"] == 2

    with_manager(body)


def test_a_worker_that_was_given_up_and_comes_back_may_still_say_what_it_has_scored_and_it_does_not_count():
    async def body(manager: Manager) -> None:
        manager.seat("a")
        task = ask(manager)
        await settle()
        manager.remove("a")
        manager.seat("a", connection=2)
        await settle()
        former, present = manager.jobs("a")
        assert former.job != present.job
        manager.score("a", former, 666.0)
        assert not manager.accused() and not task.done()
        manager.score("a", present, 1.0)
        assert (await task).score == 1.0

    with_manager(body)


def test_an_answer_that_takes_its_workers_down_has_no_reward_for_now_and_its_neighbours_are_scored():
    async def body(manager: Manager) -> None:
        deadly = ask(manager, GIVEN._replace(answer="deadly"))
        harmless = [ask(manager) for _ in range(3)]
        await settle()
        num_killed = num_workers = 0
        while not all(one.done() for one in (deadly, *harmless)):
            num_workers += 1
            name = f"w{num_workers}"
            manager.seat(name)
            await settle()
            if any(b"deadly" in job.body for job in manager.jobs(name)):
                num_killed += 1
            else:
                for job in manager.jobs(name):
                    manager.score(name, job)
            manager.remove(name)
            await settle()
        with pytest.raises(RewardUnavailable, match=f"{MAX_LOSSES} reward workers were lost over it"):
            deadly.result()
        assert num_killed == MAX_LOSSES
        assert [one.result().score for one in harmless] == [1.0] * 3

    with_manager(body)


SCORED = RewardScored(b"", 1.0, {})
LIES: dict[str, bytes] = {
    "NaN": msgspec.msgpack.encode(msgspec.structs.replace(SCORED, score=math.nan)),
    "infinity": msgspec.msgpack.encode(msgspec.structs.replace(SCORED, score=math.inf)),
    "a part that is NaN": msgspec.msgpack.encode(msgspec.structs.replace(SCORED, parts={"x": math.nan})),
    "a part with a newline": msgspec.msgpack.encode(msgspec.structs.replace(SCORED, parts={"x\ny": 1.0})),
    "a thousand parts": msgspec.msgpack.encode(
        msgspec.structs.replace(SCORED, parts={f"p{n}": 1.0 for n in range(1000)})
    ),
    "CPU time below zero": msgspec.msgpack.encode(["RewardScored", b"", 1.0, {}, "scored", -1.0]),
    "an outcome that there is not": msgspec.msgpack.encode(["RewardScored", b"", 1.0, {}, "infrastructure_failed"]),
    "a text for a score": msgspec.msgpack.encode(["RewardScored", b"", "1", {}]),
    "a reason without an end": msgspec.msgpack.encode(["_TravellingFailure", "x" * 100_000, "failed"]),
    "no message at all": b"\xc1",
    "nothing": b"",
    "arrays in arrays": b"\x91" * 100_000,
}


@pytest.mark.parametrize("lie", LIES)
def test_a_worker_that_sends_what_is_no_result_is_accused_and_its_answers_are_scored_elsewhere(lie: str):
    async def body(manager: Manager) -> None:
        manager.seat("liar")
        task = ask(manager)
        await settle()
        manager.seat("honest")
        manager.answer("liar", manager.jobs("liar")[0].job, LIES[lie])
        await settle()
        ((name, why),) = manager.accused()
        assert name == "liar" and why.isprintable() and len(why) <= 300
        manager.seat("liar")  # the manager had said so before it heard the accusation
        manager.score("honest", manager.jobs("honest")[0], 5.0)
        assert (await task).score == 5.0
        await settle()
        assert len(manager.jobs("liar")) == 1, "nothing is given to a worker that was accused"

    with_manager(body)


def test_a_worker_that_answers_the_job_of_another_is_accused_and_the_answer_does_not_count():
    async def body(manager: Manager) -> None:
        manager.seat("honest")
        task = ask(manager)
        await settle()
        manager.seat("thief")
        job = manager.jobs("honest")[0]
        manager.answer("thief", job.job, travel.pack_reply(RewardScored(b"", 666.0, {})))
        assert [name for name, _ in manager.accused()] == ["thief"]
        manager.score("honest", job, 1.0)
        assert (await task).score == 1.0

    with_manager(body)


def test_results_of_a_former_trainers_jobs_are_ignored():
    async def body(manager: Manager) -> None:
        manager.seat("a")
        former = ((manager.remote.era + 1) << 31) + 5
        manager.answer("a", former, travel.pack_reply(RewardScored(b"", 1.0, {})))
        assert not manager.accused()

    with_manager(body)


def test_a_worker_that_keeps_a_job_for_too_long_is_accused():
    async def body(manager: Manager) -> None:
        manager.seat("hangs")
        task = ask(manager)
        await settle()
        now = asyncio.get_running_loop().time()
        manager.remote.look(now + 2 * (60 + 20))
        assert not manager.accused()
        manager.remote.look(now + 2 * (60 + 20) + 31)
        ((name, why),) = manager.accused()
        assert name == "hangs" and "no result of mine:graded" in why
        task.cancel()

    with_manager(body)


def test_after_a_break_of_our_own_workers_that_are_missing_are_waited_for_and_keep_their_jobs():
    async def body(manager: Manager) -> None:
        manager.seat("a")
        task = ask(manager)
        await settle()
        manager.remote.disconnected()
        assert manager.pool.is_without_places
        manager.remote.connected(manager.sent.append)
        manager.remote.hear_fleet(())  # the manager was started again, and nobody has joined yet
        manager.remote.look(asyncio.get_running_loop().time() + places.REJOIN_S - 1)
        await settle()
        assert not task.done() and manager.remote.take_metrics()["reward/remote_lost"] == 0
        manager.seat("a", connection=1)
        assert len(manager.jobs("a")) == 2
        manager.score("a", manager.jobs("a")[0], 4.0)
        assert (await task).score == 4.0

    with_manager(body)


def test_an_answer_that_is_too_large_to_travel_has_no_reward_without_processes():
    async def body(manager: Manager) -> None:
        manager.seat("a")
        large = GIVEN._replace(answer="x" * (places.MAX_JOB_BYTES + 1))
        with pytest.raises(RewardFailed, match=r"the answer and its row are 33,.* bytes; expected at most 33,554,432"):
            await manager.pool.score("mine:graded", large)
        assert not manager.jobs("a")

    with_manager(body)


def test_a_row_that_is_no_plain_data_fails_and_its_place_is_free_again():
    async def body(manager: Manager) -> None:
        manager.seat("a", places=1)
        with pytest.raises(RewardFailed, match="the row is no plain data"):
            await manager.pool.score("mine:graded", GIVEN._replace(row={"n": "\ud800"}))
        task = ask(manager)
        await settle()
        manager.score("a", manager.jobs("a")[0])
        assert (await task).score == 1.0

    with_manager(body)


@pytest.mark.parametrize("lie", ["repeated", "too many"])
def test_a_worker_that_hands_back_more_than_it_had_is_accused_and_many_numbers_take_no_time(lie: str):
    async def body(manager: Manager) -> None:
        manager.seat("a")
        for _ in range(1100):
            task = ask(manager)
            await settle()
            manager.score("a", manager.jobs("a")[-1])
            await task
        last = manager.jobs("a")[-1].job
        began = time.process_time()
        manager.remote.hear("a", "life of a", r.JobsReturned(tuple(range(last - 1000, last + 1))))
        assert time.process_time() - began < 0.1 and not manager.accused()
        wrong = (last,) * 4096 if lie == "repeated" else tuple(range(last - 4095, last + 1))
        manager.remote.hear("a", "life of a", r.JobsReturned(wrong))
        assert time.process_time() - began < 0.1
        assert manager.accused() == [("a", "it handed back more jobs than it was given")]

    with_manager(body)


def test_a_worker_that_cannot_score_is_sent_away_and_the_run_goes_on_with_others():
    async def body(manager: Manager) -> None:
        manager.seat("a")
        task = ask(manager)
        await settle()
        manager.answer("a", manager.jobs("a")[0].job, travel.pack_failure(RewardStops("no key here")))
        await settle()
        assert manager.accused() == [("a", "it cannot score: no key here")] and not task.done()
        manager.seat("b")
        await settle()
        manager.score("b", manager.jobs("b")[0], 0.5)
        assert (await task).score == 0.5

    with_manager(body)
