"""Reward workers that come, go, break off and come back in any order: every answer has its own score, once, or none
through no fault of its own; and no honest worker is accused."""

import asyncio
import random

import pytest

from polyrl.rewards.messages import RewardScored
from polyrl.rewards.pool import RewardPool
from polyrl.rewards.remote import travel
from polyrl.rewards.reward import Reward, RewardInput, RewardUnavailable
from polyrl.run.event_loop import run_loop
from polyrl.wire import reward_frames as r

NUM_ANSWERS = 60
NUM_MOVES = 400


class HonestWorker:
    """What a reward worker does, without its processes."""

    def __init__(self, name: str) -> None:
        self.name, self.life = name, f"life of {name}"
        self.connection = 0
        self.is_listed = True
        self.jobs: dict[int, bytes] = {}
        self.results: dict[int, bytes] = {}

    def seat(self) -> r.RewardSeat:
        return r.RewardSeat(self.name, self.life, 4, self.connection, False)

    def finish(self, number: int) -> None:
        call = travel.read_call(self.jobs.pop(number))
        assert isinstance(call.given, RewardInput)
        self.results[number] = travel.pack_reply(RewardScored(b"", float(call.given.answer), {}))


class World:
    def __init__(self, pool: RewardPool, seed: int) -> None:
        self.remote, self.draw = pool.remote, random.Random(seed)
        self.workers: dict[str, HonestWorker] = {}
        self.num_born = self.num_connections = 0
        self.inbox: list[r.FromDispatcher] = []
        self.accused: list[r.Accuse] = []
        self.remote.connected(self.inbox.append)

    def tell(self) -> None:
        self.remote.hear_fleet(tuple(one.seat() for one in self.workers.values() if one.is_listed))

    def deliver(self) -> None:
        """Pass on what the trainer has said. What is for a worker that is not connected is lost."""
        said, self.inbox[:] = list(self.inbox), []
        for frame in said:
            if isinstance(frame, r.Accuse):
                self.accused.append(frame)
            elif isinstance(frame, r.SendJob) and frame.worker in self.workers:
                worker = self.workers[frame.worker]
                if worker.connection and worker.is_listed and frame.job in worker.results:
                    self.say(worker, frame.job)
                elif worker.connection and worker.is_listed:
                    worker.jobs[frame.job] = frame.body

    def say(self, worker: HonestWorker, number: int) -> None:
        if worker.connection and worker.is_listed:
            self.remote.hear(worker.name, worker.life, r.JobDone(number, worker.results[number]))

    def connect(self, worker: HonestWorker) -> None:
        self.num_connections += 1
        worker.connection, worker.is_listed = self.num_connections, True

    def move(self) -> None:
        some = self.draw.choice(list(self.workers.values())) if self.workers else None
        what = self.draw.choice(
            ["join", "finish", "finish", "finish", "again", "break", "back", "die", "drain", "miss"]
        )
        if what == "join" and len(self.workers) < 4:
            self.num_born += 1
            born = self.workers[f"w{self.num_born}"] = HonestWorker(f"w{self.num_born}")
            self.connect(born)
        elif some is None:
            return
        elif what == "finish" and some.jobs:
            number = self.draw.choice(list(some.jobs))
            some.finish(number)
            self.say(some, number)
        elif what == "again" and some.results:
            self.say(some, self.draw.choice(list(some.results)))
        elif what == "break":
            some.connection = 0
        elif what == "back" and not some.connection:
            self.connect(some)
        elif what == "die" and self.draw.random() < 0.2:
            del self.workers[some.name]
        elif what == "drain" and some.connection and some.is_listed and self.draw.random() < 0.3:
            self.remote.hear(some.name, some.life, r.JobsReturned(tuple(some.jobs)))
            del self.workers[some.name]
        elif what == "miss" and self.draw.random() < 0.2:  # given up although it lives: it joins again later
            some.connection, some.is_listed = 0, False
        if self.draw.random() < 0.02:
            self.restart_manager()
        self.tell()

    def restart_manager(self) -> None:
        self.inbox.clear()
        self.remote.disconnected()
        for one in self.workers.values():
            one.connection = 0
            one.is_listed = self.draw.random() < 0.5
        self.num_connections = 0
        self.remote.connected(self.inbox.append)

    def settle_down(self) -> None:
        """A worker that stays, and finishes all that it has; the others are gone."""
        if "last" not in self.workers:
            self.workers = {"last": HonestWorker("last")}
            self.connect(self.workers["last"])
        last = self.workers["last"]
        for number in list(last.jobs):
            last.finish(number)
            self.say(last, number)
        self.tell()
        self.remote.look(asyncio.get_running_loop().time() + 30.0)


async def breathe() -> None:
    for _ in range(8):
        await asyncio.sleep(0)


async def play(seed: int) -> None:
    pool = RewardPool(0, 20.0)
    world = World(pool, seed)
    given = [RewardInput("", str(n), "", {}, "stop", 1) for n in range(NUM_ANSWERS)]
    tasks = [asyncio.create_task(pool.score("mine:graded", one)) for one in given]
    for _ in range(NUM_MOVES):
        world.move()
        await breathe()
        world.deliver()
        await breathe()
    while not all(one.done() for one in tasks):
        world.settle_down()
        await breathe()
        world.deliver()
        await breathe()
    found = await asyncio.gather(*tasks, return_exceptions=True)
    assert world.accused == []
    wrong = [
        (n, one) for n, one in enumerate(found) if not isinstance(one, RewardUnavailable) and one != Reward(float(n))
    ]
    assert wrong == []
    assert sum(isinstance(one, Reward) for one in found) > NUM_ANSWERS // 2
    await pool.close()


@pytest.mark.parametrize("seed", range(25))
def test_every_answer_has_its_own_score_whatever_becomes_of_those_who_score(seed: int):
    async def bounded() -> None:
        async with asyncio.timeout(60):
            await play(seed)

    run_loop(bounded())
