"""The figures of a simulated run: one typed struct, made from a finished simulation, and its JSON.

Two windows, and every field says which one it has. *Measured* is the steps after `run.warmup_steps`, cut at the end to
whole periods of short and long rounds: times, throughput, dollars, shares. *Whole run* is what
the ledger counted: tokens, rounds, migrations, joins and losses.

Rules kept here: everything but `events_per_s`, the speed of this machine, depends on the scenario and the seed alone.
A figure that does not exist (the mean long step of a run without one) is None, never zero.
"""

from collections.abc import Callable, Sequence
from statistics import fmean

import msgspec
from msgspec import Struct

from polyrl.ids import Seconds
from polyrl.scheduling.core.ledger import StepLine
from polyrl.scheduling.rules.lengths import interpolate
from polyrl.scheduling.rules.scaling import useful_workers
from polyrl.scheduling.rules.seeding import StepTimes
from polyrl.sim.scenario import Scenario
from polyrl.sim.simulation import Simulation
from polyrl.telemetry.timeline import seconds_by_activity

_HOUR_S = 3600.0
_MILLION = 1e6
_SHOWN_VIOLATIONS = 20


class Spread(Struct, frozen=True):
    """Seconds of the measured steps, or of their rollouts."""

    mean: float
    p50: float
    p95: float
    short_mean: float | None
    long_mean: float | None


class TokenTotals(Struct, frozen=True):
    generated: int
    trained: int
    open: int
    """Tokens of samples that were still running when the run ended."""
    discarded: dict[str, int]
    reprefilled: int
    """Computed a second time because a sample moved; not part of `generated`."""


class Length(Struct, frozen=True):
    trained_mean: float
    generated_mean: float
    """Mean of all samples started; prompts that were deferred, the long ones, are in it twice."""
    natural_mean: float
    """Mean of every prompt once an epoch: what `tail_batching = "off"` would train."""
    bias: float
    """trained_mean / natural_mean: below 1, long answers are trained too rarely."""
    longest: int
    """The longest answer trained."""


class Cost(Struct, frozen=True):
    usd: float
    trainer_usd: float
    workers_usd: float
    hosts_usd: float
    usd_per_hour: float
    usd_per_mtok: float
    tok_per_usd: float | None
    """None when the run costs nothing."""


class Workers(Struct, frozen=True):
    mean: float
    joins: int
    losses: int
    paid_hours: float
    useful: float
    """Workers that would generate a step's samples in the time that it trains (scheduling/rules/scaling.py)."""


class Idle(Struct, frozen=True):
    trainer_waiting: float
    """Share of the time in which the trainer was ready to train and had no micro-batch."""
    fleet_idle: float | None
    """Share of the remote workers' time in which they had no sample, their pulling of weights not counted."""


class EpisodeFigures(Struct, frozen=True, kw_only=True):
    """The environments' work, and the waits for them. Numbers at once are means over the measured time."""

    begun: int
    ended: dict[str, int]
    """By outcome, of the whole run."""
    calls: int
    hosts: float
    host_losses: int
    """Hosts that went while they played, in the whole run."""
    host_hours: float
    """Hours of all host processes together, measured."""
    usd: float
    """Of the host processes, measured."""
    places_taken: float | None
    """Share of the hosts' places that had an episode."""
    waiting_for_host: float
    """Episodes that waited for a place at a host: the back-pressure of environments."""
    most_waiting_for_host: int
    most_hosted: int
    playing: float
    """Episodes whose environment had the move: a tool ran, or it thought."""
    waiting_for_worker: float
    generating: float
    engines_busy: float | None
    """Share of the time of engines that could generate in which they had at least one call."""
    engines_starved: float | None
    """Share in which they had none while episodes were with an environment or waited for a host."""
    prefix_reuse: float | None
    """Of the context of an episode that comes back for another call: the share that its engine still had."""


class Result(Struct, frozen=True, kw_only=True):
    scenario: str
    seed: int
    steps: int
    warmup_steps: int
    """Steps left out of the measured figures: `run.warmup_steps`, or half of the steps if that would leave none."""
    measured_steps: int
    """The number of steps that the measured figures cover. Where long rounds come regularly, a whole number of their
    periods."""
    virtual_s: Seconds
    step_time_s: Spread
    rollout_s: Spread
    throughput_tok_s: float
    tokens: TokenTotals
    length: Length
    cost: Cost
    workers: Workers
    idle: Idle
    gb_between_regions: float | None
    """The bytes of all pulls over regions' links, in the whole run; None without `fleet.regions`."""
    episodes: EpisodeFigures | None
    """None when no domain has an environment."""
    rounds: dict[str, int]
    migrations: int
    migrations_by_cause: dict[str, int]
    seed_window_s: float
    seed_memory_s: dict[str, float]
    """The window learned for each number of workers."""
    prompts_deferred: int
    prompts_dropped: dict[str, int]
    journal_digest: str
    events: int
    events_per_s: float
    law_violations: int
    broken_laws: list[str]
    assumed: list[str]
    """Keys of the scenario that the figures depend on and that were never published: the user has to measure them."""


class Measured(Struct, frozen=True):
    """A step, in the figures that a person reads."""

    line: StepLine
    step_s: Seconds
    rollout_s: Seconds
    tokens: int
    """Trained in it, prompts included."""
    usd: float

    @property
    def tok_s(self) -> float:
        return self.tokens / self.step_s if self.step_s > 0 else 0.0


def measure_steps(sim: Simulation) -> list[Measured]:
    """Return every step of the run, the warm-up included."""
    steps: list[Measured] = []
    ended_at, tokens, usd = 0.0, 0, 0.0
    for line, tokens_now in zip(sim.lines, sim.tokens_at_step, strict=True):
        rollout_s = line.closed_at - line.opened_at
        steps.append(Measured(line, line.trained_at - ended_at, rollout_s, tokens_now - tokens, line.usd - usd))
        ended_at, tokens, usd = line.trained_at, tokens_now, line.usd
    return steps


def num_warmup_steps(sim: Simulation) -> int:
    """Return the number of steps that the measured figures leave out."""
    wanted, num_steps = sim.scenario.run.warmup_steps, len(sim.lines)
    return wanted if wanted < num_steps else num_steps // 2


def whole_periods(steps: list[Measured]) -> list[Measured]:
    """Return the steps without the last ones that make no whole period: from one long round to the next."""
    longs = [index for index, step in enumerate(steps) if step.line.kind == "long"]
    if len(longs) < 2:
        return steps
    period = longs[-1] - longs[-2]
    return steps[: len(steps) // period * period]


def summarize(sim: Simulation, wall_s: float) -> Result:
    """Return the result of a finished simulation that took `wall_s` seconds of this machine. Needs at least one
    step."""
    warmup = num_warmup_steps(sim)
    ledger = sim.scheduler.desk.ledger
    steps = whole_periods(measure_steps(sim)[warmup:])
    total_s = sum(step.step_s for step in steps)
    tokens = sum(step.tokens for step in steps)
    return Result(
        scenario=sim.scenario.name,
        seed=sim.seed,
        steps=len(sim.lines),
        warmup_steps=warmup,
        measured_steps=len(steps),
        virtual_s=sim.now,
        step_time_s=_spread(steps, lambda step: step.step_s),
        rollout_s=_spread(steps, lambda step: step.rollout_s),
        throughput_tok_s=tokens / total_s if total_s > 0 else 0.0,
        tokens=TokenTotals(
            generated=ledger.tokens_arrived,
            trained=ledger.tokens_kept,
            open=ledger.tokens_arrived - ledger.tokens_kept - sum(ledger.tokens_discarded.values()),
            discarded=_largest_first(ledger.tokens_discarded),
            reprefilled=ledger.tokens_reprefilled,
        ),
        length=_length(sim),
        cost=_cost(sim, steps, total_s, tokens),
        workers=_workers(sim, steps, total_s),
        idle=_idle(sim, steps, total_s),
        gb_between_regions=sim.gb_between_regions if sim.scenario.fleet.regions else None,
        episodes=_episodes(sim, warmup, len(steps), total_s),
        rounds={kind: ledger.rounds.get(kind, 0) for kind in ("short", "long")},
        migrations=sum(ledger.moves.values()),
        migrations_by_cause=_largest_first(ledger.moves),
        seed_window_s=fmean(step.line.seed_window_s for step in steps),
        seed_memory_s={
            str(n): seconds for n, seconds in sorted(sim.scheduler.desk.state.seeding["short"].memory.items())
        },
        prompts_deferred=ledger.num_deferrals,
        prompts_dropped=_largest_first(ledger.prompts_dropped),
        journal_digest=sim.digest.hex(),
        events=sim.num_events,
        events_per_s=round(sim.num_events / wall_s, 1) if wall_s > 0 else 0.0,
        law_violations=len(sim.law_violations),
        broken_laws=sim.law_violations[:_SHOWN_VIOLATIONS],
        assumed=_assumed(sim.scenario),
    )


def to_json(result: Struct, *, indent: int = 2) -> str:
    """Write any struct of figures as JSON text. A number that JSON cannot say is null."""
    return msgspec.json.format(msgspec.json.encode(result), indent=indent).decode()


def percentile(values: Sequence[float], share: float) -> float:
    """Return the value below which `share` of them lie, linear between two."""
    return interpolate(list(enumerate(sorted(values))), share * (len(values) - 1))


def is_local(worker: str) -> bool:
    """Return whether a row of the timeline is an engine on the trainer's own devices."""
    return worker.startswith("local")


def _spread(steps: list[Measured], value: Callable[[Measured], Seconds]) -> Spread:
    values = [value(step) for step in steps]
    by_kind = {kind: [value(step) for step in steps if step.line.kind == kind] for kind in ("short", "long")}
    means = [fmean(ones) if ones else None for ones in by_kind.values()]
    return Spread(fmean(values), percentile(values, 0.5), percentile(values, 0.95), *means)


def _largest_first(counts: dict[str, int]) -> dict[str, int]:
    return {cause: num for cause, num in sorted(counts.items(), key=lambda item: (-item[1], item[0])) if num}


def _length(sim: Simulation) -> Length:
    ledger = sim.scheduler.desk.ledger
    trained = ledger.tokens_kept / ledger.samples_trained if ledger.samples_trained else 0.0
    natural = sim.natural_tokens / sim.num_natural if sim.num_natural else 0.0
    return Length(
        trained_mean=trained,
        generated_mean=sim.started_tokens / sim.num_started if sim.num_started else 0.0,
        natural_mean=natural,
        bias=trained / natural if natural else 0.0,
        longest=max(line.longest for line in sim.lines),
    )


def _cost(sim: Simulation, steps: list[Measured], total_s: Seconds, tokens: int) -> Cost:
    usd = sum(step.usd for step in steps)
    trainer_usd = total_s * sim.scenario.trainer.price_usd_per_hour / _HOUR_S
    times = sim.episode_times
    hosts_usd = 0.0 if times is None else times.within(num_warmup_steps(sim), len(steps)).usd
    return Cost(
        usd=usd,
        trainer_usd=trainer_usd,
        workers_usd=max(0.0, usd - trainer_usd - hosts_usd),
        hosts_usd=hosts_usd,
        usd_per_hour=usd / total_s * _HOUR_S if total_s > 0 else 0.0,
        usd_per_mtok=usd / tokens * _MILLION if tokens else 0.0,
        tok_per_usd=tokens / usd if usd else None,
    )


def _workers(sim: Simulation, steps: list[Measured], total_s: Seconds) -> Workers:
    remote = [line for name, line in sim.scheduler.desk.ledger.workers.items() if not is_local(name)]
    weighted = sum(step.line.mean_workers * step.step_s for step in steps)
    return Workers(
        mean=weighted / total_s if total_s > 0 else 0.0,
        joins=sum(line.num_joins for line in remote),
        losses=sum(line.num_losses for line in remote),
        paid_hours=sum(line.paid_s for line in remote) / _HOUR_S,
        useful=_useful(sim, steps),
    )


def _useful(sim: Simulation, steps: list[Measured]) -> float:
    """Apply the scheduler's own rule over all measured steps: what all engines generated, against what was trained."""
    window = steps[0].line.trained_at - steps[0].step_s, steps[-1].line.trained_at
    generating = [seconds_by_activity(spans, *window).get("generating", 0.0) for spans in sim.timeline.rows.values()]
    times = StepTimes(
        wait_train_s=0.0,
        wait_remote_s=0.0,
        remote_s=sum(generating),
        train_s=sum(step.line.train_s for step in steps),
        mean_workers=1.0,
        workers_now=0,
        num_reserved=0,
    )
    return useful_workers(times, 0.0)


def _idle(sim: Simulation, steps: list[Measured], total_s: Seconds) -> Idle:
    window = steps[0].line.trained_at - steps[0].step_s, steps[-1].line.trained_at
    remote = [seconds_by_activity(spans, *window) for name, spans in sim.timeline.rows.items() if not is_local(name)]
    paid_s = sum(sum(seconds.values()) for seconds in remote)
    waited_s = sum(step.line.wait_train_s for step in steps)
    return Idle(
        trainer_waiting=waited_s / total_s if total_s > 0 else 0.0,
        fleet_idle=sum(seconds.get("idle", 0.0) for seconds in remote) / paid_s if paid_s > 0 else None,
    )


def _episodes(sim: Simulation, first: int, num_steps: int, total_s: Seconds) -> EpisodeFigures | None:
    times, ledger = sim.episode_times, sim.scheduler.desk.ledger
    if times is None:
        return None
    sums = times.within(first, num_steps)
    return EpisodeFigures(
        begun=ledger.episodes_begun,
        ended=_largest_first(ledger.episodes_ended),
        calls=ledger.num_calls,
        hosts=_part(sums.host_s, total_s) or 0.0,
        host_losses=sum(line.num_losses for line in ledger.hosts.values()),
        host_hours=sums.host_s / _HOUR_S,
        usd=sums.usd,
        places_taken=_part(sums.taken_s, sums.place_s),
        waiting_for_host=_part(sums.waiting_for_host_s, total_s) or 0.0,
        most_waiting_for_host=times.most_waiting_for_host,
        most_hosted=times.most_hosted,
        playing=_part(sums.playing_s, total_s) or 0.0,
        waiting_for_worker=_part(sums.waiting_for_worker_s, total_s) or 0.0,
        generating=_part(sums.generating_s, total_s) or 0.0,
        engines_busy=_part(sums.busy_s, sums.engine_s),
        engines_starved=_part(sums.starved_s, sums.engine_s),
        prefix_reuse=_part(sim.reused_tokens, sim.returned_tokens),
    )


def _part(part: float, whole: float) -> float | None:
    return part / whole if whole > 0 else None


def _assumed(scenario: Scenario) -> list[str]:
    trainer = scenario.trainer
    if trainer.timed_devices is None or trainer.timed_devices == trainer.num_devices:
        return []
    return [
        f"{trainer.num_devices} devices train a token {scenario.training_speed:.2f} times as fast as the "
        f"{trainer.timed_devices} that were timed, and the optimizer takes as long: trainer.scaling = "
        f"{trainer.scaling:g} is yours to measure"
    ]
