"""The cheap world that the scheduler is timed in, and the clock that times it.

Lengths are drawn beforehand, speeds are constant, time is virtual: whatever is not the scheduler costs next to nothing.
"""

import heapq
import itertools
import random
import statistics
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter, thread_time
from typing import Any, NamedTuple

from polyrl.ids import GroupId, Incarnation, LeaseId, SampleId, Step, Version, WorkerName
from polyrl.scheduling.core import commands as c
from polyrl.scheduling.core import events as e
from polyrl.scheduling.core.fleet import UNBOUNDED
from polyrl.scheduling.core.parameters import (
    DomainData,
    RewardConfig,
    RoundsConfig,
    RoutingConfig,
    SchedulerConfig,
    SeedingConfig,
)
from polyrl.scheduling.rules.order import mix64
from polyrl.scheduling.scheduler import Scheduler

REPORT_EVERY_S = 5
_TOKENS_PER_S = 50.0
_MAX_NEW_TOKENS = 8192
_REWARD_S = 0.5
_MICRO_BATCH_GROUPS = 16
_MICRO_BATCH_S = 0.02
_OPTIMIZER_S = 2.0
_INSTALL_S = 2.0
_AWAY_S = 20.0
_NUM_DRAWS = 65_536
LEASES_AN_EVENT = 100


class PlayedLoad(NamedTuple):
    """The size of a world."""

    num_workers: int
    slots: int
    """Of each worker."""
    num_prompts: int
    num_steps: int
    samples_per_prompt: int = 8
    median_tokens: int = 1500
    spread: float = 0.8
    """Standard deviation of the logarithm of an answer's length."""
    factor: float = 1.25
    """Over-provisioning of prompts and of samples; 1 is none."""
    max_s: float = float("inf")
    """Virtual seconds after which it ends, if the steps have not been trained before."""
    max_staleness: int = 0
    lose_every_s: float = 30.0
    """A worker dies this often, and comes back a while later; 0 is never."""


class Clock:
    """Seconds and calls by type of event."""

    def __init__(self) -> None:
        self.seconds: dict[type[Any], float] = {}
        self.calls: dict[type[Any], int] = {}
        self.longest_s: dict[type[Any], float] = {}
        """The longest call of each type, in wall time: a busy neighbour makes it longer."""
        self.num_lease_updates = 0
        self.wall_s = 0.0
        self.cpu_s = 0.0
        self._spans: dict[type[Any], float] = {}
        self._overhead_s = _clock_overhead_s()

    def handle(self, scheduler: Scheduler, event: e.Event, now: float) -> list[c.Command]:
        began = perf_counter()
        commands = scheduler.handle(event, now)
        scheduler.wakeup_at  # noqa: B018  a driver asks after every event
        took = perf_counter() - began
        kind = type(event)
        self._spans[kind] = self._spans.get(kind, 0.0) + took - self._overhead_s
        if took > self.longest_s.get(kind, 0.0):
            self.longest_s[kind] = took
        self.calls[kind] = self.calls.get(kind, 0) + 1
        return commands

    @contextmanager
    def second(self) -> Iterator[None]:
        """Count the events handled within in CPU time."""
        wall, cpu = perf_counter(), thread_time()
        yield
        wall_s, cpu_s = perf_counter() - wall, thread_time() - cpu
        share = min(1.0, cpu_s / wall_s)
        for kind, span in self._spans.items():
            self.seconds[kind] = self.seconds.get(kind, 0.0) + span * share
        self._spans = {}
        self.wall_s += wall_s
        self.cpu_s += cpu_s

    def add(self, other: "Clock") -> None:
        for kind, seconds in other.seconds.items():
            self.seconds[kind] = self.seconds.get(kind, 0.0) + seconds
            self.calls[kind] = self.calls.get(kind, 0) + other.calls[kind]
        self.num_lease_updates += other.num_lease_updates

    @property
    def total_s(self) -> float:
        return sum(self.seconds.values())

    @property
    def num_events(self) -> int:
        return sum(self.calls.values())

    def cost(self) -> float:
        """Return the seconds of an event, comparable between fleets: no heartbeats, and a report counts as an event per
        100 leases."""
        seconds = self.total_s - self.seconds[e.WorkerReported]
        num_events = self.num_events - self.calls[e.WorkerReported] - self.calls[e.TokensArrived]
        return seconds / (num_events + self.num_lease_updates / LEASES_AN_EVENT)

    def _by_cost(self) -> list[type[Any]]:
        return sorted(self.seconds, key=lambda kind: -self.seconds[kind])

    def us_per_event(self) -> dict[str, float]:
        return {kind.__name__: round(1e6 * self.seconds[kind] / self.calls[kind], 2) for kind in self._by_cost()}

    def longest_ms(self) -> dict[str, float]:
        return {kind.__name__: round(1e3 * self.longest_s[kind], 2) for kind in self._by_cost()}

    def shares(self) -> dict[str, float]:
        return {kind.__name__: round(self.seconds[kind] / self.total_s, 4) for kind in self._by_cost()}

    def counts(self) -> dict[str, int]:
        return {kind.__name__: self.calls[kind] for kind in self._by_cost()}


def _clock_overhead_s() -> float:
    """Return the time that two readings of the clock add to a span."""
    spans: list[float] = []
    for _ in range(2000):
        began = perf_counter()
        spans.append(perf_counter() - began)
    return statistics.median(spans)


# The world


class Running(NamedTuple):
    began_at: float
    from_token: int
    sample: SampleId


class PlayedMachine:
    __slots__ = ("incarnation", "name", "running")

    def __init__(self, name: WorkerName) -> None:
        self.name = name
        self.incarnation = 1
        self.running: dict[LeaseId, Running] = {}


class World:
    """Answers commands with events at virtual times. It is driven a virtual second at a time."""

    def __init__(self, load: PlayedLoad, seed: int = 0) -> None:
        self.load = load
        self.scheduler = Scheduler(config_of(load))
        self.clock = Clock()
        self.now = 0.0
        self.num_steps_trained = 0
        self.peak_open = 0
        rng = random.Random(seed)
        cap = _MAX_NEW_TOKENS
        draws = [load.median_tokens * rng.lognormvariate(0.0, load.spread) for _ in range(_NUM_DRAWS)]
        self._lengths = [max(1, min(cap, int(draw))) for draw in draws]
        self._rewards_s = [rng.expovariate(1 / _REWARD_S) for _ in range(_NUM_DRAWS)]
        self._rng = rng
        self._machines = {name: PlayedMachine(name) for name in names_of(load)}
        self._future: list[tuple[float, int, e.Event]] = []
        self._numbers = itertools.count()
        self._ready: dict[Step, deque[GroupId]] = {}
        self._closed: dict[Step, bool] = {}
        self._step = Step(0)
        self._training = False
        self._next_loss = load.lose_every_s if load.lose_every_s else float("inf")
        self._start()

    def _start(self) -> None:
        self._tell(e.VersionPublished(Version(0)))
        for machine in self._machines.values():
            self._tell(e.WorkerJoined(machine.name, Incarnation(1), slots=self.load.slots, version=Version(0)))
        trust_all(self.scheduler)
        self.clock = Clock()
        with self.clock.second():
            for step in range(self.load.max_staleness + 1):
                self._tell(e.RoundRequested(Step(step)))

    @property
    def is_over(self) -> bool:
        return self.num_steps_trained >= self.load.num_steps or self.now >= self.load.max_s

    def play_second(self) -> None:
        """Play the events of a second at their moments; then every worker reports."""
        with self.clock.second():
            self._play_second()

    def _play_second(self) -> None:
        end = self.now + 1.0
        future = self._future
        while True:
            wakeup = self.scheduler.wakeup_at
            at = future[0][0] if future else float("inf")
            if wakeup is not None and wakeup <= end and wakeup <= at:
                self.now = max(self.now, wakeup)
                self._tell(e.TimePassed())
            elif at <= end:
                self.now = at
                self._happen(heapq.heappop(future)[2])
            else:
                break
        self.now = end
        self._report()
        if end >= self._next_loss:
            self._next_loss += self.load.lose_every_s
            self._lose(self._rng.choice(list(self._machines.values())))
        self.peak_open = max(self.peak_open, len(self.scheduler.desk.samples))

    def _report(self) -> None:
        now = self.now
        for machine in list(self._machines.values()):
            life, running = Incarnation(machine.incarnation), machine.running
            if running and int(now) % REPORT_EVERY_S == 0:
                counts = tuple(int(one.from_token + (now - one.began_at) * _TOKENS_PER_S) for one in running.values())
                self.clock.num_lease_updates += len(counts)
                self._tell(e.TokensArrived(machine.name, life, tuple(running), counts))
            self._tell(e.WorkerReported(machine.name, life))

    def _lose(self, machine: PlayedMachine) -> None:
        del self._machines[machine.name]
        machine.running = {}
        self._tell(e.WorkerLeft(machine.name, Incarnation(machine.incarnation), "preempted"))
        machine.incarnation += 1
        joined = e.WorkerJoined(machine.name, Incarnation(machine.incarnation), slots=self.load.slots)
        self._later(_AWAY_S, joined)

    # News

    def _later(self, seconds: float, event: e.Event) -> None:
        heapq.heappush(self._future, (self.now + seconds, next(self._numbers), event))

    def _happen(self, event: e.Event) -> None:
        match event:
            case e.SampleFinished():
                if not self._end_lease(event.lease):
                    return
            case e.WorkerJoined():
                machine = PlayedMachine(event.worker)
                machine.incarnation = event.incarnation
                self._machines[event.worker] = machine
            case e.MicroBatchTrained():
                self._training = False
            case e.StepTrained():
                self._trained(event)
                return
            case _:
                pass
        self._tell(event)
        if isinstance(event, e.WorkerJoined):
            trust_all(self.scheduler)
        self._train()

    def _end_lease(self, lease: LeaseId) -> bool:
        """Return whether the lease still ran: it may have been aborted, or have died with its worker."""
        sample = self.scheduler.desk.leases.get(lease)
        if sample is None:
            return False
        name = self.scheduler.desk.seats[sample.worker].name
        return self._machines[name].running.pop(lease, None) is not None

    def _tell(self, event: e.Event) -> None:
        for command in self.clock.handle(self.scheduler, event, self.now):
            self._carry_out(command)

    def _carry_out(self, command: c.Command) -> None:
        match command:
            case c.Generate():
                self._generate(command)
            case c.Abort():
                self._machines[command.worker].running.pop(command.lease, None)
            case c.HandOver():
                self._hand_over(command)
            case c.Score():
                event = e.RewardFinished(command.sample, command.attempt, "scored", command.sample % 3 == 0, 0.5)
                self._later(self._rewards_s[command.sample % _NUM_DRAWS], event)
            case c.DeliverGroup():
                self._ready.setdefault(command.step, deque()).append(command.group)
            case c.CloseRound():
                self._closed[command.step] = True
            case c.PullWeights():
                life = Incarnation(self._machines[command.worker].incarnation)
                self._later(_INSTALL_S, e.WeightsInstalled(command.worker, life, command.version))
            case _:
                pass

    def _generate(self, command: c.Generate) -> None:
        length = max(self._lengths[mix64(0, command.sample) % _NUM_DRAWS], command.from_token + 1)
        self._machines[command.worker].running[command.lease] = Running(self.now, command.from_token, command.sample)
        self._later((length - command.from_token) / _TOKENS_PER_S, e.SampleFinished(command.lease, length))

    def _hand_over(self, command: c.HandOver) -> None:
        one = self._machines[command.worker].running.pop(command.lease)
        num_tokens = int(one.from_token + (self.now - one.began_at) * _TOKENS_PER_S)
        self._later(0.1, e.LeaseEnded(command.lease, num_tokens, "handed_over"))

    # The trainer

    def _train(self) -> None:
        """Take a full micro-batch, or what is left when the round is closed; when nothing is, end the step."""
        if self._training:
            return
        ready = self._ready.get(self._step, ())
        closed = self._closed.get(self._step, False)
        if closed and not ready:
            self._training = True
            self._later(_OPTIMIZER_S, e.StepTrained(self._step))
        elif ready and (closed or len(ready) >= _MICRO_BATCH_GROUPS):
            self._training = True
            batch = tuple(ready.popleft() for _ in range(min(_MICRO_BATCH_GROUPS, len(ready))))
            self._later(_MICRO_BATCH_S, e.MicroBatchTrained(self._step))
            self._tell(e.GroupsTaken(self._step, batch))

    def _trained(self, event: e.StepTrained) -> None:
        self._training = False
        self.num_steps_trained += 1
        self._step = Step(event.step + 1)
        self._tell(event)
        self._tell(e.VersionPublished(Version(event.step + 1)))
        self._tell(e.RoundRequested(Step(event.step + 1 + self.load.max_staleness)))


def config_of(load: PlayedLoad) -> SchedulerConfig:
    return SchedulerConfig(
        domains=(DomainData(name="all", prompts_per_step=load.num_prompts, num_prompts=10 * load.num_prompts),),
        max_new_tokens=_MAX_NEW_TOKENS,
        max_staleness=load.max_staleness,
        rounds=RoundsConfig(
            tail_batching="race" if load.factor > 1 else "off",
            samples_per_prompt=load.samples_per_prompt,
            prompt_factor=load.factor,
            sample_factor=load.factor,
        ),
        routing=RoutingConfig(),
        seeding=SeedingConfig(mode="off"),
        rewards=RewardConfig(slots=load.num_workers * load.slots // 8),
    )


def trust_all(scheduler: Scheduler) -> None:
    """Give all workers full credit, as after their first answers: a fleet that still earns it has little to do."""
    for worker in scheduler.desk.seats.values():
        worker.earned = UNBOUNDED
        scheduler.desk.router.update(worker)


def names_of(load: PlayedLoad) -> list[WorkerName]:
    return [WorkerName(f"w{number}") for number in range(load.num_workers)]
