"""The market and the faults of remote machines: a list of events in order of time, made before the run starts.

Rules it keeps:
- The same sections and seed give the same list; what happens to one machine does not depend on the others' draws.
- Machines are named w1, w2, ... in the order of their grants. A fall of the supply takes the newest first; a taken
  machine never comes back, a machine that died does, under its name.
- The supply is a level: how many remote machines there are in all. It starts at `fleet.workers`; a schedule, a trace or
  a random market sets it; each moment of `fleet.join_at_s` adds one to it.
- The level falls when the machine goes, so its notice comes `notice_s` earlier, but never before its grant.
- Nothing happens to a machine after it was taken: no restart, no end of a partition.

It leaves out `faults.kill_at_s`, which counts from a step's start and is the simulation's, late and repeated news, and
the release of machines that are not needed: events of a machine that the simulation gave back are to be ignored.
"""

from math import inf
from typing import Literal

from msgspec import Struct

from polyrl.config.supply_trace import SupplyEvent
from polyrl.errors import ConfigError
from polyrl.ids import Seconds, WorkerName
from polyrl.sim.draws import exponential, key_of, unit
from polyrl.sim.scenario import FaultsSection, SimFleetSection, SupplySection

_GAP_STREAM = 0x30
_LEVEL_STREAM = 0x31
_DEATH_STREAM = 0x32
_PARTITION_STREAM = 0x33
_SLOW_STREAM = 0x34
_HOUR_S = 3600.0
NOBODY = WorkerName("")
"""A change of prices happens to no machine in particular."""

WorldKind = Literal["price", "grant", "notice", "take", "die", "restart", "cut", "heal"]
_ORDER_AT_ONE_MOMENT = ("price", "grant", "restart", "heal", "cut", "notice", "die", "take")


class WorldEvent(Struct, frozen=True):
    """Something that happens to a machine; it is paid from its grant on."""

    at_s: Seconds
    kind: WorldKind
    worker: WorkerName
    joins_at_s: Seconds | None = None
    """The moment at which a granted machine joins."""
    goes_at_s: Seconds | None = None
    """The moment at which a machine goes that was given notice."""
    usd_per_hour: float | None = None
    """The price of machines that are started from now on."""


class _Machine(Struct):
    number: int
    granted_at: Seconds
    joins_at: Seconds
    taken_at: Seconds = inf

    @property
    def name(self) -> WorkerName:
        return WorkerName(f"w{self.number}")


def plan_supply(
    fleet: SimFleetSection,
    supply: SupplySection,
    faults: FaultsSection,
    seed: int,
    horizon_s: Seconds,
    *,
    trace: list[SupplyEvent] | None = None,
) -> list[WorldEvent]:
    """Everything that happens to remote machines up to the horizon. `trace` is the content of `supply.trace`."""
    levels = _levels(fleet, supply, seed, horizon_s, trace)
    machines = _machines(fleet, levels, horizon_s)
    events: list[tuple[int, WorldEvent]] = [
        (0, WorldEvent(level.at_s, "price", NOBODY, usd_per_hour=level.usd_per_hour))
        for level in levels
        if level.usd_per_hour is not None and level.at_s <= horizon_s
    ]
    for machine in machines:
        happens = [*_life(machine, supply.notice_s), *_deaths(machine, faults, seed, horizon_s)]
        happens += _partitions(machine, faults, seed, horizon_s)
        events += [(machine.number, event) for event in happens]
    events.sort(key=lambda item: (item[1].at_s, _ORDER_AT_ONE_MOMENT.index(item[1].kind), item[0]))
    return [event for _, event in events]


def speed_of(worker: WorkerName, faults: FaultsSection, seed: int) -> float:
    """Return a worker's speed against its like: 1, or `slow_speed` for the share that is slow."""
    if unit(seed, _SLOW_STREAM, key_of(worker)) < faults.slow_share:
        return faults.slow_speed
    return 1.0


def _levels(
    fleet: SimFleetSection, supply: SupplySection, seed: int, horizon_s: Seconds, trace: list[SupplyEvent] | None
) -> list[SupplyEvent]:
    """Return the levels of the supply by its one source: the schedule, the trace or the market."""
    named = {
        "events": bool(supply.events),
        "trace": supply.trace is not None,
        "market_mean_s": supply.market_mean_s is not None,
    }
    sources = [name for name, is_set in named.items() if is_set]
    if len(sources) > 1:
        raise ConfigError(f"supply.{sources[1]}: supply.{sources[0]} is set too; expected one source of supply")
    if supply.trace is not None and trace is None:
        raise ValueError("supply.trace is set, but its content was not passed to plan_supply")
    if supply.market_mean_s is not None:
        return _market(fleet.workers, supply, supply.market_mean_s, seed, horizon_s)
    return supply.events if trace is None else trace


def _market(level: int, supply: SupplySection, mean_s: Seconds, seed: int, horizon_s: Seconds) -> list[SupplyEvent]:
    """Draw a new level after exponential times, each other level within the bounds as likely as the next."""
    levels: list[SupplyEvent] = []
    at_s = exponential(mean_s, seed, _GAP_STREAM, 0)
    while at_s <= horizon_s:
        change = len(levels) + 1
        others = [other for other in range(supply.market_min, supply.market_max + 1) if other != level]
        if not others:
            break
        level = others[int(unit(seed, _LEVEL_STREAM, change) * len(others))]
        levels.append(SupplyEvent(at_s=at_s, workers=level))
        at_s += exponential(mean_s, seed, _GAP_STREAM, change)
    return levels


def _machines(fleet: SimFleetSection, levels: list[SupplyEvent], horizon_s: Seconds) -> list[_Machine]:
    """Return every machine that is ever granted, with its moments."""
    machines = [_Machine(number, 0.0, 0.0) for number in range(1, fleet.workers + 1)]
    held = list(machines)

    def grant(at_s: Seconds, joins_at: Seconds) -> None:
        machine = _Machine(len(machines) + 1, at_s, joins_at)
        machines.append(machine)
        held.append(machine)

    # A machine of the ramp joins at its moment, so it was granted earlier.
    ramp = [(max(0.0, joins_at - fleet.start_s), joins_at) for joins_at in sorted(fleet.join_at_s)]
    changes = [(level.at_s, level.workers, 0.0) for level in levels]
    changes += [(at_s, None, joins_at) for at_s, joins_at in ramp]
    for at_s, level, joins_at in sorted(changes, key=lambda change: change[0]):
        if at_s > horizon_s:
            break
        if level is None:
            grant(at_s, joins_at)
            continue
        while len(held) < level:
            grant(at_s, at_s + fleet.start_s)
        while len(held) > level:
            held.pop().taken_at = at_s
    return machines


def _life(machine: _Machine, notice_s: Seconds) -> list[WorldEvent]:
    life = [WorldEvent(machine.granted_at, "grant", machine.name, machine.joins_at)]
    if machine.taken_at == inf:
        return life
    if notice_s > 0:
        said_at = max(machine.granted_at, machine.taken_at - notice_s)
        life.append(WorldEvent(said_at, "notice", machine.name, goes_at_s=machine.taken_at))
    life.append(WorldEvent(machine.taken_at, "take", machine.name))
    return life


def _deaths(machine: _Machine, faults: FaultsSection, seed: int, horizon_s: Seconds) -> list[WorldEvent]:
    spans = _spans(machine, faults.deaths_per_hour, faults.restart_s, (seed, _DEATH_STREAM), horizon_s)
    return _as_events(machine, spans, "die", "restart", horizon_s)


def _partitions(machine: _Machine, faults: FaultsSection, seed: int, horizon_s: Seconds) -> list[WorldEvent]:
    spans = _spans(machine, faults.partitions_per_hour, faults.partition_s, (seed, _PARTITION_STREAM), horizon_s)
    return _as_events(machine, spans, "cut", "heal", horizon_s)


def _spans(
    machine: _Machine, per_hour: float, span_s: Seconds, stream: tuple[int, int], horizon_s: Seconds
) -> list[tuple[Seconds, Seconds]]:
    """Begin and end of what goes wrong with a machine from its joining on: exponential gaps, fixed spans."""
    if per_hour == 0:
        return []
    key = key_of(machine.name)
    spans: list[tuple[Seconds, Seconds]] = []
    free_from = machine.joins_at
    while True:
        begins = free_from + exponential(_HOUR_S / per_hour, *stream, key, len(spans))
        if begins >= machine.taken_at or begins > horizon_s:
            return spans
        free_from = begins + span_s
        spans.append((begins, free_from))


def _as_events(
    machine: _Machine, spans: list[tuple[Seconds, Seconds]], first: WorldKind, then: WorldKind, horizon_s: Seconds
) -> list[WorldEvent]:
    events: list[WorldEvent] = []
    for begins, ends in spans:
        events.append(WorldEvent(begins, first, machine.name))
        if ends < machine.taken_at and ends <= horizon_s:
            events.append(WorldEvent(ends, then, machine.name))
    return events
