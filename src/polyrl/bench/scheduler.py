"""How fast the scheduler is on this machine: events a second, a large fleet, growth with the fleet, bytes a sample.

A cheap world stands in for workers, rewards and trainer: lengths are drawn beforehand, speeds are constant, time is
virtual. It feeds the scheduler as a manager would: every five seconds each worker's progress (TokensArrived, all its
running leases at once), every second its heartbeat (WorkerReported); each answer ends in SampleFinished and
RewardFinished; the trainer takes micro-batches, trains steps and publishes versions, which every worker then installs;
workers are lost and come back.

Only the scheduler is on the clock: `handle` and the `wakeup_at` after it, each event by itself, less what reading the
clock costs. A reading of CPU time costs ten times as much, so it is taken once a virtual second, and the second's spans
are scaled by the share of the core that we had: neighbours on the machine do not count. The garbage collector is on,
set as the manager sets it.

Events are counted as calls. A TokensArrived of 500 leases is one event; `lease_updates_per_s` counts what is inside.
"""

import gc
import platform
import statistics
import tracemalloc
from typing import Any, NamedTuple

from polyrl.bench.machine import commit, cpu
from polyrl.bench.world import REPORT_EVERY_S, Clock, PlayedLoad, World, config_of, names_of, trust_all
from polyrl.errors import LawViolation
from polyrl.ids import Incarnation, Step, Version
from polyrl.scheduling.core import events as e
from polyrl.scheduling.scheduler import Scheduler

GC_THRESHOLDS = (50_000, 20, 100)
GOALS = {
    "events_per_s": 100_000,
    "us_per_event_of_large": 50.0,
    "cost_ratio_1000_to_10_workers": 2.0,
    "bytes_per_sample": 2048,
}


class Size(NamedTuple):
    events: PlayedLoad
    large: PlayedLoad
    """A fleet of a thousand workers, of which one is lost every second."""
    growth: tuple[PlayedLoad, ...]
    """Loads that are played by few workers, and by `more` times as many with as many slots in all."""
    more: int
    num_repeats: int
    num_held: int
    """Samples in flight whose memory is measured."""


def size(*, quick: bool) -> Size:
    if quick:
        steady = PlayedLoad(10, 100, 50, num_steps=2, max_staleness=2, factor=1.0, lose_every_s=0.0)
        calm = steady._replace(num_prompts=125, max_staleness=0, max_s=10.0)
        large = PlayedLoad(100, 8, 100, 1, factor=1.0, lose_every_s=1.0)
        return Size(PlayedLoad(8, 64, 100, 2), large, (steady, calm), more=10, num_repeats=1, num_held=2_000)
    plain = PlayedLoad(10, 10_000, 12_500, num_steps=2, factor=1.0, lose_every_s=0.0)
    # Up to nine rounds of 40,000 samples of similar lengths: 100,000 are in flight nearly always, and others wait.
    steady = plain._replace(num_prompts=5_000, median_tokens=1000, spread=0.1, max_staleness=8)
    # One round of 100,000: no sample waits, so every two seconds balancing looks for samples that should move.
    calm = plain._replace(max_s=20.0)
    # One round of 100,000, from the first sample to the last, its step and its version.
    large = PlayedLoad(1000, 100, 12_500, 1, factor=1.0, median_tokens=500, spread=0.5, lose_every_s=1.0)
    return Size(PlayedLoad(32, 256, 2048, 3), large, (steady, calm), more=100, num_repeats=3, num_held=100_000)


def measure(quick: bool = False) -> dict[str, Any]:
    """Everything, as one JSON object."""
    wanted = size(quick=quick)
    events = _measure_events(wanted.events, wanted.num_repeats)
    return {
        **events,
        "large": _measure_one(wanted.large),
        **_measure_growth(wanted),
        "bytes_per_sample": round(_measure_memory(wanted.num_held)),
        "bytes_per_sample_in_flight": wanted.num_held,
        "report_every_s": REPORT_EVERY_S,
        "goals": GOALS,
        "quick": quick,
        "gc": f"on, thresholds {GC_THRESHOLDS}; frozen after set-up" if gc.isenabled() else "off",
        "machine": {"cpu": cpu(), "python": platform.python_version(), "system": platform.platform()},
        "commit": commit(),
    }


def _measure_events(load: PlayedLoad, num_repeats: int) -> dict[str, Any]:
    """Return the median of several runs."""
    runs = sorted((_measure_one(load) for _ in range(num_repeats)), key=lambda one: one["events_per_s"])
    return {**runs[len(runs) // 2], "events_per_s_of_runs": [one["events_per_s"] for one in runs]}


def _measure_one(load: PlayedLoad) -> dict[str, Any]:
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
        "mean_us_per_event": round(1e6 * clock.total_s / clock.num_events, 2),
        "us_per_event": clock.us_per_event(),
        "longest_ms": clock.longest_ms(),
        "share_of_time": clock.shares(),
        "events_by_type": clock.counts(),
    }


def _measure_growth(wanted: Size) -> dict[str, Any]:
    """Measure the same samples on few and on many workers, second by second in turn, so that both see the same machine.

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
    load = PlayedLoad(32, -(-num_held // 32), num_held // 8, 1, factor=1.0)
    scheduler = Scheduler(config_of(load))
    scheduler.handle(e.VersionPublished(Version(0)), 0.0)
    for name in names_of(load):
        scheduler.handle(e.WorkerJoined(name, Incarnation(1), slots=load.slots, version=Version(0)), 0.0)
    trust_all(scheduler)
    gc.collect()
    before = tracemalloc.get_traced_memory()[0]
    scheduler.handle(e.RoundRequested(Step(0)), 0.0)
    scheduler.desk.commands = []
    for worker in scheduler.desk.seats.values():
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


def _settle_memory() -> None:
    """Freeze what set-up made and collect garbage more rarely, as the manager does at its start."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLDS)


def table(result: dict[str, Any]) -> list[str]:
    goals, growth, large = result["goals"], result["growth"], result["large"]
    few, many = growth["workers"]
    lines = [
        f"events a second             {result['events_per_s']:>12,}   goal: at least {goals['events_per_s']:,}",
        f"  of {result['workers']} workers, {result['peak_samples_in_flight']:,} samples in flight, "
        f"{result['events']:,} events, {result['lease_updates_per_s']:,} leases updated a second",
        f"us an event, {large['workers']:,} workers {large['mean_us_per_event']:>12.1f}   "
        f"goal: below {goals['us_per_event_of_large']:g}",
        f"  {large['peak_samples_in_flight']:,} samples in flight, {large['events']:,} events, "
        "a worker lost every second",
        f"cost, {many:,} to {few} workers    {result['cost_ratio_1000_to_10_workers']:>12.2f}   "
        f"goal: below {goals['cost_ratio_1000_to_10_workers']:g}",
        f"  {growth['us_per_event'][0]} and {growth['us_per_event'][1]} us an event, "
        f"{growth['mean_leases_in_flight']:,} leases in flight",
        f"bytes a sample              {result['bytes_per_sample']:>12,}   goal: below {goals['bytes_per_sample']:,}",
        f"  with {result['bytes_per_sample_in_flight']:,} in flight",
        "",
        f"{'event':<20}{'count':>10}{'us each':>12}{'of all time':>13}",
    ]
    for name, count in result["events_by_type"].items():
        share = result["share_of_time"][name]
        lines.append(f"{name:<20}{count:>10,}{result['us_per_event'][name]:>12,.1f}{share:>13.1%}")
    machine = result["machine"]
    where = f"{machine['cpu']}, Python {machine['python']}, gc {result['gc']}, commit {result['commit']}"
    return [*lines, "", where]
