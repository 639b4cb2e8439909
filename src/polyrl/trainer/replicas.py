"""Replicas as rank zero sees them: each trains on groups of its own on its own devices, and all meet to end a step.

    replica = await replicas.free()             one whose devices train, with nothing to do
    replicas.start(replica, work)               beside the others; a failure is raised by whatever waits here next
    stats = await replicas.finish()             all of them; each then holds still until `release`
    await replicas.name_version(7)              their engines may run what they hold as version 7

The first replica is in this process. Another one is led by a process that hosts a worker of its own, and tells what
its devices do (run/replica.py). Rank zero hands out the work: a replica gets one command at a time, and answers it.
"""

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol, TypeVar

import msgspec
from msgspec import Struct

from polyrl.errors import RankLost, UserError
from polyrl.trainer.batch import TrainGroup, encode_groups, first_sequences
from polyrl.trainer.devices import Devices, TrainingClock
from polyrl.trainer.leading import Add, Begin, Finish, StopRanks
from polyrl.trainer.publishing import VersionFacts
from polyrl.trainer.ranks import RankLines
from polyrl.trainer.step_stats import Added, Steps, StepStats

T = TypeVar("T")


# What rank zero tells a replica, besides the commands of a step, and what it hears


class JoinRun(Struct, frozen=True, tag=True):
    """Start an engine, and join the manager's fleet with it once the weights have a version's number."""

    url: str
    token: str


class NameVersion(Struct, frozen=True, tag=True):
    """The weights that all replicas hold are this version."""

    version: int


class ServeShares(Struct, frozen=True, tag=True):
    """The weights that all replicas hold are this version: the nodes serve their shares of it."""

    facts: VersionFacts


class ReleaseDevices(Struct, frozen=True, tag=True):
    """The version is published: the devices may generate again."""


ReplicaCommand = Begin | Add | Finish | JoinRun | ServeShares | NameVersion | ReleaseDevices | StopRanks


class CommandDone(Struct, frozen=True, tag=True):
    trained_s: float = 0.0


class TrainingChanged(Struct, frozen=True, tag=True):
    is_training: bool


ReplicaNews = CommandDone | TrainingChanged


class Replica(Protocol):
    worker: str
    """The name of its local worker."""

    @property
    def training(self) -> TrainingClock: ...

    @property
    def trained_s(self) -> float: ...

    async def add(self, groups: Sequence[TrainGroup], first: int | None) -> None: ...


class OwnReplica:
    """The replica in this process."""

    def __init__(self, steps: Steps, devices: Devices, worker: str = "") -> None:
        self.steps, self.devices, self.worker = steps, devices, worker

    @property
    def training(self) -> TrainingClock:
        return self.devices.training

    @property
    def trained_s(self) -> float:
        return self.devices.trained_s

    async def add(self, groups: Sequence[TrainGroup], first: int | None) -> None:
        await self.devices.train(lambda: self.steps.add(groups, first))


class FarReplica:
    """A replica in other processes. `lost` returns which rank is gone, or None if no rank is. `serves`: one of its
    ranks is the first of a node."""

    def __init__(
        self, lines: RankLines, worker: str, lost: Callable[[RuntimeError], RankLost | None], *, serves: bool = False
    ) -> None:
        self.worker, self.serves = worker, serves
        self.training = TrainingClock()
        self.training.begin()  # until an engine is there, nothing else uses its devices
        self.trained_s = 0.0
        self._lines, self._lost = lines, lost
        self._loop: asyncio.AbstractEventLoop | None = None
        self._sender = ThreadPoolExecutor(1, thread_name_prefix=f"to {worker}")
        self._pending: Future[None] | None = None
        self._is_stopped = False
        threading.Thread(target=self._hear, name=f"from {worker}", daemon=True).start()

    def send(self, command: ReplicaCommand) -> Future[None]:
        """Give it a command. The result is there when it is carried out, with an exception if the replica is gone."""
        assert self._pending is None or self._pending.done(), "one command at a time"
        self._pending = answer = Future[None]()

        def send() -> None:
            try:
                self._lines.down.send(msgspec.msgpack.encode(command))
            except RuntimeError as error:
                self._fail(answer, error)

        self._sender.submit(send)
        return answer

    async def tell(self, command: ReplicaCommand) -> None:
        self._loop = asyncio.get_running_loop()
        await asyncio.wrap_future(self.send(command))

    async def add(self, groups: Sequence[TrainGroup], first: int | None) -> None:
        await self.tell(Add(encode_groups(groups), first))

    def stop(self, timeout_s: float) -> None:
        """Tell it to end, once. A replica that is gone, or does not hear within this time, is no error."""
        is_at_work = self._pending is not None and not self._pending.done()  # then it waits for others within a step
        if is_at_work or self._is_stopped:
            return
        self._is_stopped = True
        answer = self.send(StopRanks())
        with contextlib.suppress(UserError, RuntimeError, TimeoutError):
            answer.result(timeout_s)
        self._sender.shutdown(wait=False)

    def _hear(self) -> None:
        while True:
            try:
                news = msgspec.msgpack.decode(self._lines.up.receive(), type=ReplicaNews)
            except RuntimeError as error:
                if self._pending is not None:
                    self._fail(self._pending, error)
                return
            match news:
                case TrainingChanged(is_training):
                    assert self._loop is not None, "it was told to join"
                    self._loop.call_soon_threadsafe(self.training.begin if is_training else self.training.end)
                case CommandDone(trained_s):
                    assert self._pending is not None
                    self.trained_s += trained_s
                    self._pending.set_result(None)

    def _fail(self, answer: Future[None], error: RuntimeError) -> None:
        if answer.done():
            return
        lost = self._lost(error)
        answer.set_exception(error if lost is None else lost)


class Replicas:
    """All replicas of a run, and the work that is under way at each."""

    def __init__(self, steps: Steps, devices: Devices, others: Sequence[FarReplica] = (), worker: str = "") -> None:
        self.own, self.others = OwnReplica(steps, devices, worker), tuple(others)
        self._all: list[Replica] = [self.own, *self.others]
        self._running: dict[str, asyncio.Task[None]] = {}
        self._num_episodes = 0

    @property
    def device_type(self) -> str:
        return self.own.steps.device_type

    @property
    def training_duty_s(self) -> float:
        """The seconds for which training has been the duty, averaged over replicas."""
        return sum(one.training.seconds for one in self._all) / len(self._all)

    @property
    def trained_s(self) -> float:
        return sum(one.trained_s for one in self._all) / len(self._all)

    async def begin(self, step: int) -> None:
        self._num_episodes = 0
        self.own.steps.begin(step)
        await self._tell(Begin(step, None))

    # Work

    async def free(self, number: int | None = None) -> Replica:
        """Wait for a replica whose devices train and have nothing to do; with `number`, for that one, modulo how many
        there are. The duty may have changed again before the caller uses it."""
        wanted = self._all if number is None else [self._all[number % len(self._all)]]
        while True:
            self._reap()
            for one in wanted:
                if one.worker not in self._running and one.training.is_on:
                    return one
            waits = [asyncio.ensure_future(one.training.wait()) for one in wanted if one.worker not in self._running]
            try:
                await asyncio.wait([*waits, *self._running.values()], return_when=asyncio.FIRST_COMPLETED)
            finally:
                for one in waits:
                    one.cancel()

    def start(self, replica: Replica, work: Coroutine[Any, Any, None]) -> None:
        self._running[replica.worker] = asyncio.create_task(work)

    async def add(self, replica: Replica, groups: Sequence[TrainGroup]) -> None:
        first = self._num_episodes
        self._num_episodes += len(first_sequences(groups))
        await replica.add(groups, first if self.others else None)

    async def beside(self, source: AsyncIterator[T]) -> AsyncIterator[T]:
        """Yield what `source` yields. Raises what work under way fails of, as soon as it does."""
        while True:
            coming = asyncio.ensure_future(_next(source))
            try:
                while not coming.done():
                    await asyncio.wait([coming, *self._running.values()], return_when=asyncio.FIRST_COMPLETED)
                    self._reap()
            finally:
                coming.cancel()
            found = coming.result()
            if not found:
                return
            yield found[0]

    async def done(self) -> None:
        """Wait until nothing is under way."""
        while self._running:
            await asyncio.wait(self._running.values(), return_when=asyncio.FIRST_COMPLETED)
            self._reap()

    def _reap(self) -> None:
        for name, task in list(self._running.items()):
            if task.done():
                del self._running[name]
                task.result()

    # A step's end

    async def finish(self, *, may_be_void: bool = False) -> StepStats:
        """End the step at all replicas, each as soon as its devices train. The caller holds this process's devices; the
        others hold theirs until `release`."""
        ours = self.own.devices.run(lambda: self.own.steps.finish(may_be_void=may_be_void))
        stats, *_ = await asyncio.gather(ours, self._tell(Finish(may_be_void)))
        return stats

    async def serve_shares(self, facts: VersionFacts) -> None:
        """Have the replicas on other nodes serve those nodes' shares of a version. Returns when they do."""
        await asyncio.gather(*(one.tell(ServeShares(facts)) for one in self.others if one.serves))

    async def name_version(self, version: int) -> None:
        await self._tell(NameVersion(version))

    async def release(self) -> None:
        await self._tell(ReleaseDevices())

    async def join_run(self, url: str, token: str) -> None:
        await self._tell(JoinRun(url, token))

    async def _tell(self, command: ReplicaCommand) -> None:
        await asyncio.gather(*(one.tell(command) for one in self.others))

    async def stop(self, timeout_s: float) -> None:
        """Have the others leave the fleet and end."""
        await asyncio.gather(*(asyncio.to_thread(one.stop, timeout_s) for one in self.others))

    async def give_up(self) -> None:
        """Stop waiting for the work that is under way."""
        for task in self._running.values():
            task.cancel()
        await asyncio.gather(*self._running.values(), return_exceptions=True)


async def _next(source: AsyncIterator[T]) -> tuple[T, ...]:
    """Return the next one, or nothing at the end."""
    async for one in source:
        return (one,)
    return ()


class EveryReplica:
    """Implements `Steps` over replicas, for one thread and outside a run: steps are trained again from the log. Groups
    go to the replicas in turn."""

    def __init__(self, steps: Steps, others: Sequence[FarReplica]) -> None:
        self._own, self._others = steps, others
        self._num_calls = self._num_episodes = 0

    @property
    def device_type(self) -> str:
        return self._own.device_type

    def begin(self, step: int, num_steps: int | None = None) -> None:
        self._num_calls = self._num_episodes = 0
        asked = [one.send(Begin(step, num_steps)) for one in self._others]
        self._own.begin(step, num_steps)
        for one in asked:
            one.result()

    def add(self, groups: Sequence[TrainGroup], first: int | None = None) -> Added:
        first = self._num_episodes if first is None else first
        number = self._num_calls % (1 + len(self._others))
        self._num_calls += 1
        self._num_episodes = first + len(first_sequences(groups))
        if number == 0:
            return self._own.add(groups, first)
        self._others[number - 1].send(Add(encode_groups(groups), first)).result()
        return Added(len(groups))

    def finish(self, *, may_be_void: bool = False) -> StepStats:
        asked = [one.send(Finish(may_be_void)) for one in self._others]
        stats = self._own.finish(may_be_void=may_be_void)
        for one in asked:
            one.result()
        return stats
