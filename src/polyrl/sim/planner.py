"""The planner: what would a scenario cost, and how fast would it be, with other fleets, factors, staleness and prices?

It plays every choice in the simulator, each in a process of its own, and recommends the cheapest and the fastest with
the reason. Prices decide nothing in a run, so they are not played: dollars are worker-hours and trainer-hours times
prices.

Rules kept here:
- `workers` is the most that are held. Where the scenario has a supply of its own, it is cut at that number.
- A factor of 1 means no tail batching; above 1 it is a race over prompts and samples with that factor for both.
- Over-provisioning makes short and long rounds alternate, so what is measured is whole periods: 5 steps for a factor
  of 1.25, 3 for 1.5. Otherwise one long round more or less decides.
- Fastest is most tokens trained a second, not the shortest step: a race shortens steps by training shorter answers.
- A choice that gets stuck or breaks a law is shown and never recommended.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from typing import NamedTuple, TypeVar

from msgspec import Struct
from msgspec.structs import replace

from polyrl.config.supply_trace import SupplyEvent, read_supply_trace
from polyrl.cores import num_cores
from polyrl.errors import UserError
from polyrl.ids import Seconds
from polyrl.scheduling.core.ledger import StepLine
from polyrl.sim.result import summarize
from polyrl.sim.scenario import Scenario
from polyrl.sim.simulation import Simulation, StuckError

DEFAULT_STEPS = 14
_MIN_WARMUP = 4
"""Steps for the seeding window to settle; a window for a fleet size not seen before takes about as many."""
_MILLION = 1e6
_HOUR_S = 3600.0
_WORTH_NAMING = 0.01

_T = TypeVar("_T")
_Tried = TypeVar("_Tried")


class Choice(NamedTuple):
    """A way to run the scenario."""

    staleness: int
    factor: float
    workers: int


class PlanRow(Struct, frozen=True, kw_only=True):
    """A line of the table: the figures of a choice at one price of a worker.

    As played, a worker costs a dollar an hour, trainer and hosts nothing: `usd_per_hour` is the workers paid for.
    """

    workers: int
    factor: float
    staleness: int
    worker_price_usd_per_hour: float = 1.0
    throughput_tok_s: float = 0.0
    step_time_s: Seconds = 0.0
    usd_per_hour: float = 0.0
    hosts_usd_per_hour: float = 0.0
    usd_per_mtok: float | None = None
    bias: float = 0.0
    """Mean length trained, over whole periods, against what is trained without over-provisioning."""
    discarded_share: float = 0.0
    mean_workers: float = 0.0
    trainer_waiting: float = 0.0
    fleet_idle: float | None = None
    useful_workers: float = 0.0
    problem: str | None = None
    """Why it is out of the question: it got stuck, or a law did not hold."""

    @property
    def choice(self) -> Choice:
        return Choice(self.staleness, self.factor, self.workers)


class Recommendation(Struct, frozen=True, kw_only=True):
    row: PlanRow
    why: str


class AtPrice(Struct, frozen=True, kw_only=True):
    """Recommendations at one price of a worker. The fastest is the same at every price, its reason is not."""

    worker_price_usd_per_hour: float
    cheapest: Recommendation
    fastest: Recommendation


class Plan(Struct, frozen=True, kw_only=True):
    scenario: str
    seed: int
    steps: int
    trainer_price_usd_per_hour: float
    rows: list[PlanRow]
    cheapest: Recommendation | None
    """At the lowest price of a worker; None if no choice can be recommended."""
    fastest: Recommendation | None
    by_price: list[AtPrice]
    useful_workers: float | None
    """Workers that generate a step's samples in the time that it trains, by the plainest choice that was played."""


def choices(workers: Sequence[int], factors: Sequence[float], staleness: Sequence[int]) -> list[Choice]:
    """Return every combination, once each, in the order of the table."""
    return sorted({Choice(k, factor, n) for n in workers for factor in factors for k in staleness})


def steps_in_period(factor: float) -> int:
    """Return after how many steps short and long rounds repeat: each short round defers a share of `factor - 1`."""
    return 1 if factor <= 1.0 else 1 + round(1.0 / (factor - 1.0)) if factor < 2.0 else 2


def num_warmup(steps: int, factor: float) -> int:
    """Return the number of steps to leave out, so that whole periods are measured."""
    period = steps_in_period(factor)
    most = steps - min(_MIN_WARMUP, steps // 2)
    return steps - (most // period * period or most)


def with_steps(scenario: Scenario, steps: int) -> Scenario:
    """Return the scenario with so many steps, the first ones left out of what is measured."""
    rounds = scenario.rounds
    factor = 1.0 if rounds.tail_batching == "off" else rounds.prompt_factor
    return replace(scenario, run=replace(scenario.run, steps=steps, warmup_steps=num_warmup(steps, factor)))


def apply_choice(scenario: Scenario, choice: Choice, steps: int, supply: list[SupplyEvent] | None = None) -> Scenario:
    """Return the scenario with a choice made. `supply` is the content of `supply.trace`, if it has one."""
    rounds = replace(scenario.rounds, tail_batching="off")
    if choice.factor > 1.0:
        rounds = replace(
            rounds, tail_batching="race", prompt_factor=choice.factor, sample_factor=choice.factor, adaptive=False
        )
    warmup = num_warmup(steps, choice.factor)
    run = replace(scenario.run, steps=steps, warmup_steps=warmup, max_staleness=choice.staleness)
    priced = replace(scenario, fleet=replace(scenario.fleet, price_usd_per_hour=1.0))  # a dollar is a worker-hour
    return replace(_hold_at_most(priced, choice.workers, supply), run=run, rounds=rounds)


def play(scenario: Scenario, choice: Choice, seed: int) -> PlanRow:
    """Simulate a choice that was applied to its scenario, with workers at a dollar an hour."""
    sim = Simulation(scenario, seed)
    try:
        sim.run()
    except StuckError as error:
        return PlanRow(**choice._asdict(), problem=f"stuck: {error}")
    result = summarize(sim, 0.0)
    hours = result.step_time_s.mean * result.measured_steps / _HOUR_S
    return PlanRow(
        **choice._asdict(),
        throughput_tok_s=result.throughput_tok_s,
        step_time_s=result.step_time_s.mean,
        usd_per_hour=_share(result.cost.workers_usd, hours),
        hosts_usd_per_hour=_share(result.cost.hosts_usd, hours),
        bias=_share(trained_mean(sim.lines, choice.factor), result.length.natural_mean),
        discarded_share=_share(sum(result.tokens.discarded.values()), result.tokens.generated),
        mean_workers=result.workers.mean,
        trainer_waiting=result.idle.trainer_waiting,
        fleet_idle=result.idle.fleet_idle,
        useful_workers=result.workers.useful,
        problem=result.broken_laws[0] if result.broken_laws else None,
    )


def trained_mean(lines: Sequence[StepLine], factor: float) -> float:
    """Mean length of what was trained, in whole periods, so that what was put off is in it. Lengths need no warm-up."""
    period = steps_in_period(factor)
    steps = lines[: len(lines) // period * period or len(lines)]
    return _share(sum(line.tokens_trained for line in steps), sum(line.num_samples for line in steps))


def play_all(
    scenario: Scenario,
    wanted: Sequence[Choice],
    steps: int,
    seed: int,
    *,
    num_processes: int | None = None,
    on_done: Callable[[int], None] | None = None,
) -> list[PlanRow]:
    """Play every choice, in as many processes as there are cores; the rows come in the order of the choices.

    Raises UserError for a choice that the scenario cannot be run with.
    """
    supply = None if scenario.supply.trace is None else read_supply_trace(scenario.supply.trace)
    jobs: list[tuple[Scenario, Choice, int]] = []
    for choice in wanted:
        try:
            jobs.append((apply_choice(scenario, choice, steps, supply), choice, seed))
        except ValueError as error:
            raise UserError(f"{scenario.name} with {show_choice(choice)}: {error}") from error
    return play_jobs(play, jobs, num_processes=num_processes, on_done=on_done)


def play_jobs(
    play_one: Callable[[Scenario, _Tried, int], _T],
    jobs: Sequence[tuple[Scenario, _Tried, int]],
    *,
    num_processes: int | None,
    on_done: Callable[[int], None] | None,
) -> list[_T]:
    """Play every job: a scenario, what is tried in it, and the seed. The rows come in the order of the jobs."""
    processes = min(len(jobs), num_cores() if num_processes is None else num_processes)
    if processes <= 1:
        return list(_counted((play_one(*job) for job in jobs), on_done))
    # Spawned, not forked: a fork copies whatever threads and locks this process has at the moment.
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        futures = {pool.submit(play_one, *job): index for index, job in enumerate(jobs)}
        done = {futures[future]: future.result() for future in _counted(as_completed(futures), on_done)}
    return [done[index] for index in range(len(jobs))]


def make_plan(scenario: Scenario, played: Sequence[PlanRow], prices: Sequence[float], seed: int, steps: int) -> Plan:
    """Put prices on what was played, and choose."""
    trainer_price = scenario.trainer.price_usd_per_hour
    rows = [price(row, worker_price, trainer_price) for worker_price in sorted(set(prices)) for row in played]
    by_price: list[AtPrice] = []
    for worker_price in sorted(set(prices)):
        sound = [row for row in rows if row.worker_price_usd_per_hour == worker_price and _is_sound(row)]
        if sound:
            cheapest, fastest = recommend_cheapest(sound), recommend_fastest(sound)
            by_price.append(AtPrice(worker_price_usd_per_hour=worker_price, cheapest=cheapest, fastest=fastest))
    # On-policy first, no over-provisioning, then the largest fleet.
    plainest = min(
        (row for row in played if row.problem is None),
        key=lambda row: (row.staleness, row.factor, -row.workers),
        default=None,
    )
    return Plan(
        scenario=scenario.name,
        seed=seed,
        steps=steps,
        trainer_price_usd_per_hour=trainer_price,
        rows=rows,
        cheapest=by_price[0].cheapest if by_price else None,
        fastest=by_price[0].fastest if by_price else None,
        by_price=by_price,
        useful_workers=None if plainest is None else plainest.useful_workers,
    )


def price(played: PlanRow, worker_price: float, trainer_price: float) -> PlanRow:
    """Return a row of what was played, with dollars."""
    usd_per_hour = trainer_price + played.usd_per_hour * worker_price + played.hosts_usd_per_hour
    mtok_per_hour = played.throughput_tok_s * _HOUR_S / _MILLION
    return replace(
        played,
        worker_price_usd_per_hour=worker_price,
        usd_per_hour=usd_per_hour,
        usd_per_mtok=usd_per_hour / mtok_per_hour if mtok_per_hour > 0 else None,
    )


def marginal_usd_per_mtok(fewer: PlanRow, more: PlanRow) -> float | None:
    """Return the price of a million tokens that the larger fleet makes beyond the smaller; None if it makes none."""
    extra_tok_s = more.throughput_tok_s - fewer.throughput_tok_s
    if extra_tok_s <= 0:
        return None
    return (more.usd_per_hour - fewer.usd_per_hour) / (extra_tok_s * _HOUR_S / _MILLION)


def show_choice(row: PlanRow | Choice) -> str:
    """Return a choice in words: `4 workers, factor 1.25, staleness 1`."""
    return f"{_fleet_and_factor(row)}, {'on-policy' if row.staleness == 0 else f'staleness {row.staleness}'}"


def _fleet_and_factor(row: PlanRow | Choice) -> str:
    factor = "no over-provisioning" if row.factor <= 1.0 else f"factor {row.factor:g}"
    return f"{row.workers} worker{'' if row.workers == 1 else 's'}, {factor}"


def recommend_cheapest(rows: Sequence[PlanRow]) -> Recommendation:
    """Recommend the lowest price of a token among sound rows at one price; of equals the faster."""
    best = min(rows, key=_by_price)
    fewest = min(_same_but_workers(rows, best), key=lambda row: row.workers)
    parts = [f"{show_choice(best)}: ${_usd(best):.2f} a million tokens"]
    if fewest.workers < best.workers and _usd(fewest) > 0:
        parts[0] += f", {1.0 - _usd(best) / _usd(fewest):.0%} less than with {fewest.workers}"
    return Recommendation(row=best, why="; ".join([*parts, _next_worker(rows, best), *_reservations(rows, best)]))


def recommend_fastest(rows: Sequence[PlanRow]) -> Recommendation:
    """Recommend the most tokens a second among sound rows at one price; of equals the cheaper."""
    best = max(rows, key=lambda row: (row.throughput_tok_s, -_usd(row)))
    cheapest = min(rows, key=_by_price)
    words = f"{show_choice(best)}: {best.throughput_tok_s:,.0f} tokens/s, {best.step_time_s:,.0f} s a step"
    if best == cheapest:
        return Recommendation(row=best, why=f"{words}; the cheapest is the fastest, too")
    words += f", {best.throughput_tok_s / cheapest.throughput_tok_s - 1.0:.0%} more than the cheapest"
    dearer = marginal_usd_per_mtok(cheapest, best)
    words += "" if dearer is None else f", each extra million tokens for ${dearer:.2f}"
    return Recommendation(row=best, why="; ".join([words, _next_worker(rows, best), *_reservations(rows, best)]))


def _is_sound(row: PlanRow) -> bool:
    return row.problem is None and row.throughput_tok_s > 0


def _usd(row: PlanRow) -> float:
    """Dollars a million tokens, of a sound row."""
    return float("inf") if row.usd_per_mtok is None else row.usd_per_mtok


def _by_price(row: PlanRow) -> tuple[float, float]:
    return _usd(row), -row.throughput_tok_s


def _same_but_workers(rows: Iterable[PlanRow], like: PlanRow) -> list[PlanRow]:
    return [row for row in rows if (row.factor, row.staleness) == (like.factor, like.staleness)]


def _next_worker(rows: Iterable[PlanRow], best: PlanRow) -> str:
    """Say what the next larger fleet would bring."""
    larger = [row for row in _same_but_workers(rows, best) if row.workers > best.workers]
    if not larger:
        return "no larger fleet was tried"
    more = min(larger, key=lambda row: row.workers)
    cost = marginal_usd_per_mtok(best, more)
    if cost is None:
        return f"a fleet of {more.workers} brings nothing more"
    return f"the tokens that a fleet of {more.workers} would add cost ${cost:.2f} a million"


def _reservations(rows: Iterable[PlanRow], best: PlanRow) -> list[str]:
    """Say what the figures of a choice do not show."""
    notes: list[str] = []
    if best.factor > 1.0 and best.bias < 1.0 - _WORTH_NAMING:
        notes.append(f"racing trains answers {1.0 - best.bias:.0%} shorter than without it")
    if best.staleness > 0:
        notes.append(f"its samples are up to {best.staleness} version{'' if best.staleness == 1 else 's'} old")
        strict = min((row for row in rows if row.staleness == 0), key=_by_price, default=None)
        if strict is not None:
            notes.append(f"strictly on-policy, {_fleet_and_factor(strict)} is the cheapest: ${_usd(strict):.2f}")
    return notes


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def _counted(items: Iterable[_T], on_done: Callable[[int], None] | None) -> Iterator[_T]:
    for number, item in enumerate(items, start=1):
        if on_done is not None:
            on_done(number)
        yield item


def _hold_at_most(scenario: Scenario, most: int, trace: list[SupplyEvent] | None) -> Scenario:
    """Return the scenario with never more than `most` remote workers; without a supply, exactly so many all the
    time."""
    fleet, supply = scenario.fleet, scenario.supply
    if not (supply.events or trace is not None or supply.market_mean_s is not None or fleet.join_at_s):
        return replace(scenario, fleet=replace(fleet, workers=most))
    workers = min(fleet.workers, most)
    levels = supply.events if trace is None else trace
    return replace(
        scenario,
        fleet=replace(fleet, workers=workers, join_at_s=fleet.join_at_s[: most - workers]),
        supply=replace(
            supply,
            events=[replace(level, workers=min(level.workers, most)) for level in levels],
            trace=None,
            market_min=min(supply.market_min, most),
            market_max=min(supply.market_max, most),
        ),
    )
