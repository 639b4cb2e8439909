"""How fast the scheduler is on this machine: events a second, growth with the fleet, bytes a sample.

A cheap world stands in for workers, rewards and trainer: lengths are drawn beforehand, speeds are constant, time is
virtual. It feeds the scheduler as a manager would: every two seconds each worker's progress (TokensArrived, all its
running leases at once), every second its heartbeat (WorkerReported); each answer ends in SampleFinished and
RewardFinished; the trainer takes micro-batches, trains steps and publishes versions, which every worker then installs;
workers are lost and come back.

Only the scheduler is on the clock: `handle` and the `wakeup_at` after it, each event by itself, less what reading the
clock costs. A reading of CPU time costs ten times as much, so it is taken once a virtual second, and the second's spans
are scaled by the share of the core that we had: neighbours on the machine do not count. The garbage collector is on, as
it is live; what exists after set-up is frozen, as a service would do.

Events are counted as calls. A TokensArrived of 500 leases is one event; `lease_updates_per_s` counts what is inside.
"""

import gc
import heapq
import itertools
import platform
import random
import statistics
import subprocess
import tracemalloc
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter, thread_time
from typing import Any, NamedTuple

from polyrl.errors import LawViolation
from polyrl.ids import GroupId, Incarnation, LeaseId, SampleId, Step, Version, WorkerName
from polyrl.scheduling import commands as c
from polyrl.scheduling import events as e
from polyrl.scheduling.order import mix64
from polyrl.scheduling.parameters import (
    DomainData,
    RewardConfig,
    RoundsConfig,
    RoutingConfig,
    SchedulerConfig,
    SeedingConfig,
)
from polyrl.scheduling.scheduler import Scheduler

GOALS = {"events_per_s": 100_000, "cost_ratio_1000_to_10_workers": 2.0, "bytes_per_sample": 2048}

_REPORT_EVERY_S = 2
_TOKENS_PER_S = 50.0
_MAX_NEW_TOKENS = 8192
_REWARD_S = 0.5
_MICRO_BATCH_GROUPS = 16
_MICRO_BATCH_S = 0.02
_OPTIMIZER_S = 2.0
_INSTALL_S = 2.0
_AWAY_S = 20.0
_NUM_DRAWS = 65_536
_LEASES_AN_EVENT = 100


class Load(NamedTuple):
    """What the world is made of."""

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


class Size(NamedTuple):
    events: Load
    growth: tuple[Load, ...]
    """What is played by few workers, and by `more` times as many with as many slots in all."""
    more: int
    num_repeats: int
    num_held: int
    """Samples in flight whose memory is measured."""


def size(*, quick: bool) -> Size:
    if quick:
        steady = Load(10, 100, 50, num_steps=2, max_staleness=2, factor=1.0, lose_every_s=0.0)
        calm = steady._replace(num_prompts=125, max_staleness=0, max_s=10.0)
        return Size(Load(8, 64, 100, 2), (steady, calm), more=10, num_repeats=1, num_held=2_000)
    plain = Load(10, 10_000, 12_500, num_steps=2, factor=1.0, lose_every_s=0.0)
    # Up to nine rounds of 40,000 samples of similar lengths: 100,000 are in flight nearly always, and others wait.
    steady = plain._replace(num_prompts=5_000, median_tokens=1000, spread=0.1, max_staleness=8)
    # One round of 100,000: nobody waits, so every two seconds the fleet is looked over for samples that should move.
    calm = plain._replace(max_s=20.0)
    return Size(Load(32, 256, 2048, 3), (steady, calm), more=100, num_repeats=3, num_held=100_000)


def measure(*, quick: bool = False) -> dict[str, Any]:
    """Everything, as one JSON object."""
    wanted = size(quick=quick)
    events = _measure_events(wanted.events, wanted.num_repeats)
    return {
        **events,
        **_measure_growth(wanted),
        "bytes_per_sample": round(_measure_memory(wanted.num_held)),
        "bytes_per_sample_in_flight": wanted.num_held,
        "goals": GOALS,
        "quick": quick,
        "gc": "on; frozen after set-up" if gc.isenabled() else "off",
        "machine": {"cpu": _cpu(), "python": platform.python_version(), "system": platform.platform()},
        "commit": _commit(),
    }


def _measure_events(load: Load, num_repeats: int) -> dict[str, Any]:
    """The middle one of some runs."""
    runs = sorted((_measure_one(load) for _ in range(num_repeats)), key=lambda one: one["events_per_s"])
    return {**runs[len(runs) // 2], "events_per_s_of_runs": [one["events_per_s"] for one in runs]}


def _measure_one(load: Load) -> dict[str, Any]:
    world = World(load)
    _settle_memory()
    while not world.is_over:
        world.play_second()
    gc.unfreeze()
    clock = world.clock
    return {
        "events_per_s": round(clock.num_events / clock.total_s),
        "lease_updates_per_s": round(clock.num_lease_updates / clock.total_s),
        "events": clock.num_events,
        "lease_updates": clock.num_lease_updates,
        "scheduler_s": round(clock.total_s, 3),
        "share_of_the_core": round(clock.cpu_s / clock.wall_s, 3),
        "virtual_s": round(world.now, 1),
        "workers": load.num_workers,
        "steps": world.num_steps_trained,
        "samples": world.scheduler.ledger.samples_started,
        "peak_samples_in_flight": world.peak_open,
        "us_per_event": clock.us_per_event(),
        "share_of_time": clock.shares(),
        "events_by_type": clock.counts(),
    }


def _measure_growth(wanted: Size) -> dict[str, Any]:
    """The same samples on few and on many workers, second by second in turn, so that both see the same machine.

    Many workers send more heartbeats and reports of fewer leases: cheap events, which would flatter the large fleet. So
    the cost per event leaves heartbeats out and counts a report as an event per 100 leases in it. `total_cost_ratio`
    compares all the time, for the same answers.
    """
    runs = [_measure_growth_once(wanted) for _ in range(wanted.num_repeats)]
    runs.sort(key=lambda run: run["ratio"])
    middle = runs[len(runs) // 2]
    return {
        "cost_ratio_1000_to_10_workers": middle["ratio"],
        "cost_ratios_of_runs": [run["ratio"] for run in runs],
        "total_cost_ratio": middle["total_ratio"],
        "growth": middle,
    }


def _measure_growth_once(wanted: Size) -> dict[str, Any]:
    clocks = (Clock(), Clock())
    in_flight: list[int] = []
    parts: list[float] = []
    for load in wanted.growth:
        more = load._replace(num_workers=load.num_workers * wanted.more, slots=load.slots // wanted.more)
        worlds = (World(load), World(more))
        _settle_memory()
        while not all(world.is_over for world in worlds):
            for world in worlds:
                if not world.is_over:
                    world.play_second()
                    in_flight.append(len(world.scheduler.desk.leases))
        gc.unfreeze()
        parts.append(round(worlds[1].clock.cost() / worlds[0].clock.cost(), 3))
        for clock, world in zip(clocks, worlds, strict=True):
            clock.add(world.clock)
    costs = [clock.cost() for clock in clocks]
    few, many = (clock.us_per_event() for clock in clocks)
    return {
        "ratio": round(costs[1] / costs[0], 3),
        "ratio_with_waiting": parts[0],
        "ratio_without_waiting": parts[1],
        "total_ratio": round(clocks[1].total_s / clocks[0].total_s, 3),
        "workers": [wanted.growth[0].num_workers, wanted.growth[0].num_workers * wanted.more],
        "us_per_event": [round(1e6 * cost, 2) for cost in costs],
        "mean_leases_in_flight": round(statistics.mean(in_flight)),
        "us_per_event_by_type": {name: [few[name], many[name]] for name in few if name in many},
        "share_of_time_of_many": clocks[1].shares(),
        "events_by_type": [clock.counts() for clock in clocks],
    }


def _measure_memory(num_held: int) -> float:
    """Bytes that the scheduler holds for each sample: leased, with tokens, one report of each worker behind it."""
    gc.collect()
    tracemalloc.start()
    load = Load(32, -(-num_held // 32), num_held // 8, 1, factor=1.0)
    scheduler = Scheduler(config_of(load))
    scheduler.handle(e.VersionPublished(Version(0)), 0.0)
    for name in _names(load):
        scheduler.handle(e.WorkerJoined(name, Incarnation(1), slots=load.slots, version=Version(0)), 0.0)
    gc.collect()
    before = tracemalloc.get_traced_memory()[0]
    scheduler.handle(e.RoundRequested(Step(0)), 0.0)
    scheduler.desk.commands = []
    for worker in scheduler.desk.state.fleet.seats.values():
        leases = tuple(worker.leases)
        counts = tuple(range(1000, 1000 + len(leases)))
        scheduler.handle(e.TokensArrived(worker.name, worker.incarnation, leases, counts), 1.0)
        del leases, counts
    gc.collect()
    after = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    num_samples = len(scheduler.desk.leases)
    if num_samples != num_held // 8 * 8:
        raise LawViolation(f"{num_held} samples were to be in flight; {num_samples} are")
    return (after - before) / num_samples


# The clock


class Clock:
    """Seconds and calls by type of event."""

    def __init__(self) -> None:
        self.seconds: dict[type[Any], float] = {}
        self.calls: dict[type[Any], int] = {}
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
        """Seconds an event, comparable between fleets: no heartbeats, and a report is an event per 100 leases in it."""
        seconds = self.total_s - self.seconds[e.WorkerReported]
        num_events = self.num_events - self.calls[e.WorkerReported] - self.calls[e.TokensArrived]
        return seconds / (num_events + self.num_lease_updates / _LEASES_AN_EVENT)

    def _by_cost(self) -> list[type[Any]]:
        return sorted(self.seconds, key=lambda kind: -self.seconds[kind])

    def us_per_event(self) -> dict[str, float]:
        return {kind.__name__: round(1e6 * self.seconds[kind] / self.calls[kind], 2) for kind in self._by_cost()}

    def shares(self) -> dict[str, float]:
        return {kind.__name__: round(self.seconds[kind] / self.total_s, 4) for kind in self._by_cost()}

    def counts(self) -> dict[str, int]:
        return {kind.__name__: self.calls[kind] for kind in self._by_cost()}


def _clock_overhead_s() -> float:
    """What two readings of the clock add to a span."""
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


class Machine:
    __slots__ = ("incarnation", "name", "running")

    def __init__(self, name: WorkerName) -> None:
        self.name = name
        self.incarnation = 1
        self.running: dict[LeaseId, Running] = {}


class World:
    """Answers commands with events at virtual times. It is driven a virtual second at a time."""

    def __init__(self, load: Load, seed: int = 0) -> None:
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
        self._machines = {name: Machine(name) for name in _names(load)}
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
        self.clock = Clock()
        with self.clock.second():
            for step in range(self.load.max_staleness + 1):
                self._tell(e.RoundRequested(Step(step)))

    @property
    def is_over(self) -> bool:
        return self.num_steps_trained >= self.load.num_steps or self.now >= self.load.max_s

    def play_second(self) -> None:
        """What happens within a second, at its moments; then every worker reports."""
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
        self.peak_open = max(self.peak_open, len(self.scheduler.desk.state.samples))

    def _report(self) -> None:
        now = self.now
        for machine in list(self._machines.values()):
            life, running = Incarnation(machine.incarnation), machine.running
            if running and int(now) % _REPORT_EVERY_S == 0:
                counts = tuple(int(one.from_token + (now - one.began_at) * _TOKENS_PER_S) for one in running.values())
                self.clock.num_lease_updates += len(counts)
                self._tell(e.TokensArrived(machine.name, life, tuple(running), counts))
            self._tell(e.WorkerReported(machine.name, life))

    def _lose(self, machine: Machine) -> None:
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
                machine = Machine(event.worker)
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
        self._train()

    def _end_lease(self, lease: LeaseId) -> bool:
        """Whether the lease still ran: it may have been aborted, or have died with its worker."""
        sample = self.scheduler.desk.leases.get(lease)
        if sample is None:
            return False
        name = self.scheduler.desk.state.fleet.seats[sample.worker].name
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


def config_of(load: Load) -> SchedulerConfig:
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


def _names(load: Load) -> list[WorkerName]:
    return [WorkerName(f"w{number}") for number in range(load.num_workers)]


def _settle_memory() -> None:
    gc.collect()
    gc.freeze()


# Where it ran


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def _commit() -> str | None:
    """The commit this file is of, with a `+` if the tree has changes; None without git or outside a repository."""
    git = ["git", "-C", str(Path(__file__).parent)]
    try:
        head = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, timeout=10, check=True)
        changes = subprocess.run(
            [*git, "status", "--porcelain"], capture_output=True, text=True, timeout=10, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return head.stdout.strip() + ("+" if changes.stdout.strip() else "")
