"""How many host processes does a fleet need? The scenario is played with each number, everything else as it says.

Rules kept here:
- Enough is the smallest number whose step time is within `ENOUGH` of the best that was played. Steps have noise: a
  number above may be faster or slower by a percent.
- A number that gets stuck or breaks a law is shown and never recommended.
"""

from collections.abc import Callable, Sequence

from msgspec import Struct
from msgspec.structs import replace

from polyrl.ids import Seconds
from polyrl.sim.planner import play_jobs, with_steps
from polyrl.sim.result import summarize
from polyrl.sim.scenario import Scenario
from polyrl.sim.simulation import Simulation, StuckError

ENOUGH = 0.02
_HOUR_S = 3600.0


class HostRow(Struct, frozen=True, kw_only=True):
    """A line of the table: the figures of a number of host processes."""

    processes: int
    """Of each environment."""
    step_time_s: Seconds = 0.0
    throughput_tok_s: float = 0.0
    usd_per_hour: float = 0.0
    """Of trainer, workers and hosts."""
    hosts_usd_per_hour: float = 0.0
    usd_per_mtok: float | None = None
    waiting_for_host: float = 0.0
    places_taken: float | None = None
    generating: float = 0.0
    """Calls that engines answered at once, on average: fuller batches make more tokens a second."""
    engines_busy: float | None = None
    engines_starved: float | None = None
    problem: str | None = None
    """Why it is out of the question: it got stuck, or a law did not hold."""


class HostPlan(Struct, frozen=True, kw_only=True):
    scenario: str
    seed: int
    steps: int
    slots: int
    """Episodes that a process plays at once."""
    rows: list[HostRow]
    needed: HostRow | None
    """The smallest number that is enough; None if no number can be recommended."""
    is_enough: bool
    """Whether a larger number was played, and saves next to nothing. False: more may be needed than were tried."""
    why: str


def play_hosts(scenario: Scenario, processes: int, seed: int) -> HostRow:
    """Simulate the scenario, which has so many host processes."""
    sim = Simulation(scenario, seed)
    try:
        sim.run()
    except StuckError as error:
        return HostRow(processes=processes, problem=f"stuck: {error}")
    result = summarize(sim, 0.0)
    episodes = result.episodes
    assert episodes is not None
    hours = result.step_time_s.mean * result.measured_steps / _HOUR_S
    return HostRow(
        processes=processes,
        step_time_s=result.step_time_s.mean,
        throughput_tok_s=result.throughput_tok_s,
        usd_per_hour=result.cost.usd_per_hour,
        hosts_usd_per_hour=result.cost.hosts_usd / hours if hours > 0 else 0.0,
        usd_per_mtok=result.cost.usd_per_mtok,
        waiting_for_host=episodes.waiting_for_host,
        places_taken=episodes.places_taken,
        generating=episodes.generating,
        engines_busy=episodes.engines_busy,
        engines_starved=episodes.engines_starved,
        problem=result.broken_laws[0] if result.broken_laws else None,
    )


def plan_hosts(
    scenario: Scenario,
    numbers: Sequence[int],
    steps: int,
    seed: int,
    *,
    num_processes: int | None = None,
    on_done: Callable[[int], None] | None = None,
) -> HostPlan:
    """Play every number of host processes, and say which is enough."""
    scenario = with_steps(scenario, steps)
    jobs = [(replace(scenario, hosts=replace(scenario.hosts, processes=n)), n, seed) for n in sorted(set(numbers))]
    rows = play_jobs(play_hosts, jobs, num_processes=num_processes, on_done=on_done)
    needed = enough(rows)
    return HostPlan(
        scenario=scenario.name,
        seed=seed,
        steps=steps,
        slots=scenario.hosts.slots,
        rows=rows,
        needed=needed,
        is_enough=needed is not None and not _is_largest(rows, needed),
        why="no number of hosts can be recommended" if needed is None else _why(rows, needed),
    )


def enough(rows: Sequence[HostRow]) -> HostRow | None:
    """Return the row with the fewest processes whose step time is within `ENOUGH` of the best."""
    sound = [row for row in rows if row.problem is None and row.step_time_s > 0]
    best = min((row.step_time_s for row in sound), default=0.0)
    able = [row for row in sound if row.step_time_s <= best * (1.0 + ENOUGH)]
    return min(able, key=lambda row: row.processes, default=None)


def _is_largest(rows: Sequence[HostRow], one: HostRow) -> bool:
    return one.processes == max(row.processes for row in rows if row.problem is None)


def _why(rows: Sequence[HostRow], needed: HostRow) -> str:
    sound = [row for row in rows if row.problem is None]
    fewer = max((row for row in sound if row.processes < needed.processes), key=lambda row: row.processes, default=None)
    price = f"${needed.hosts_usd_per_hour:,.2f} an hour of ${needed.usd_per_hour:,.2f}"
    parts = [f"{_several(needed.processes)}: {needed.step_time_s:,.1f} s a step, hosts for {price}"]
    if fewer is not None:
        longer = fewer.step_time_s / needed.step_time_s - 1.0
        parts.append(f"with {fewer.processes} a step takes {longer:.0%} longer")
    if _is_largest(rows, needed):
        parts.append("no larger number was tried, and more may be needed")
    else:
        parts.append(f"more save less than {ENOUGH:.0%} of a step")
    return "; ".join(parts)


def _several(number: int) -> str:
    return f"{number} host process{'' if number == 1 else 'es'}"
