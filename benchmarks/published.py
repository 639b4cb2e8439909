"""The published figures of RollPacker and RLBoost beside what the simulator gives, and the page that shows both.

    make bench NAME=published ARGS='[--only SECTION] [--seeds N] [--json] [--out FILE.md]'

Rules kept here: what is published stands in the constants below, with its source; every simulated figure comes from
a run of a shipped scenario with overrides. A row with a tolerance passes or fails, and the command exits with 1 if one
fails. Periods of tail batching are measured whole: part of one would hold too few long rounds.

What is left out, and why, the page says at its end (NOT_COMPARED).
"""

import argparse
import json
import math
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from multiprocessing import get_context
from multiprocessing.pool import Pool
from pathlib import Path
from statistics import fmean
from typing import NamedTuple, TypeVar

from polyrl.sim.library import load_scenario
from polyrl.sim.result import Measured, measure_steps
from polyrl.sim.simulation import Simulation

COMMAND = ".venv/bin/python -m benchmarks published"
NUM_PROCESSES = 2
TIME_LIMIT_S = 1800.0
"""Wall seconds for the runs of one section."""

# RollPacker (P0 = 128, R0 = 8, both factors 1.25): its factor table, ablation, step times and breakdown.
ROLLOUT_S = {
    "8k": {
        "none": 82,
        "samples": {1.125: 77, 1.25: 71, 1.5: 54},
        "prompts": {1.125: 77, 1.25: 72, 1.5: 60},
        "both": 47,
    },
    "16k": {
        "none": 277,
        "samples": {1.125: 260, 1.25: 232, 1.5: 115},
        "prompts": {1.125: 244, 1.25: 169, 1.5: 143},
        "both": 88,
    },
}
SPEEDUPS = {
    "8k": {"rewards alone": 1.48, "tail": 1.30, "rewards": 2.01, "planner": 2.01, "stream": 2.03},
    "16k": {"rewards alone": 1.35, "tail": 1.48, "rewards": 1.99, "planner": 2.02, "stream": 2.22},
}
STEP_S = {"8k": {"baseline": 233, "all": 115}, "16k": {"baseline": 383, "all": 172}}
STEP_RANGES_S = {
    "8k": {"short": (102, 115), "long": (125, 137)},
    "16k": {"short": (133, 144), "long": (294, 317)},
}
BREAKDOWN_S = {  # sync, rollout, reward, train
    "8k": {"short": (4.9, 74.5, 2.7, 24.5), "long": (5.1, 87.4, 3.9, 32.5)},
    "16k": {"short": (14.8, 68, 1.5, 49.7), "long": (15.2, 225, 2.2, 59.5)},
}
STREAM_LONG_STEP = 115.2 / 124.2
"""7B/8k, long rounds: adaptive stream trainer against none."""
CAP = {"8k": 8192, "16k": 16384}

# RLBoost: the guide of its 8B run, the static 14B runs, its ablations (14B). Prices: its instances.
TOK_S_8B = {0: 10_000, 1: 12_000, 2: 14_000, 3: 16_000, 4: 18_000}
WINDOW_S_8B = {1: 190, 2: 160, 3: 105, 4: 70}
TRAINER_USD, WORKER_USD = 83.79, 5.32
GAIN_14B_ONE, GAIN_14B_SIX_MORE = 1.37, 1.64
GAIN_BY_CAP = {5120: 1.47, 14336: 2.22}
WITHOUT_SEEDING = 0.81
MIGRATION_SAVES = {100: 0.33, 200: 0.76}

# Mean trained length, factors 1.25: a first simulation of ours with RollPacker's lengths, not its authors' figure.
EARLIER_BIAS = {"race": 0.68, "prompts": 0.85}

# Tolerances set before the first run. Three of six had none in numbers, only direction and size: 15 points are ours.
RATIO_TOLERANCE, THROUGHPUT_TOLERANCE, WINDOW_TOLERANCE, SAVING_TOLERANCE = 0.15, 0.10, 0.25, 0.15

SYNCHRONOUS = {"8k": "synchronous-7b-8k", "16k": "synchronous-14b-16k"}
TAIL = {"8k": "tail-7b-8k", "16k": "tail-14b-16k"}
COLOCATED = ("run.mode=synchronous", "rewards.as_finished=false", "routing.balance=false", "fleet.workers=0")
FREE_REWARDS = (
    "trainer.reward_slots_per_device=10000",
    "domains.code.reward.endless_share=0",
    "domains.code.reward.duration_quantiles=[[0.0, 0.01], [1.0, 0.01]]",
    "domains.judge.reward.duration_quantiles=[[0.0, 0.01], [1.0, 0.01]]",
)
"""Generation alone: what the factor table and the bias are about."""


# Playing


class Case(NamedTuple):
    """A shipped scenario and what is changed in it."""

    scenario: str
    overrides: tuple[str, ...] = ()


class Played(NamedTuple):
    steps: list[Measured]
    """Every step, the warm-up included."""
    warmup_steps: int
    digest: str

    @property
    def measured(self) -> list[Measured]:
        """The steps after the warm-up, cut to whole periods if there are long rounds."""
        ends = [index + 1 for index, step in enumerate(self.steps) if step.line.kind == "long"]
        starts = [start for start in (0, *ends) if start >= self.warmup_steps]
        return self.steps[starts[0] : ends[-1]] if ends and starts[0] < ends[-1] else self.steps[self.warmup_steps :]


Runs = list[Played]
"""One case, by seed."""
Value = Callable[[list[Measured]], float]
Key = TypeVar("Key", bound=Hashable)


def play(case: Case, seed: int) -> Played:
    """One run; a broken law is an error."""
    scenario = load_scenario(case.scenario, list(case.overrides))
    sim = Simulation(scenario, seed)
    sim.run()
    if sim.law_violations:
        raise SystemExit(f"{case} with seed {seed} breaks a law: {sim.law_violations[0]}")
    return Played(measure_steps(sim), scenario.run.warmup_steps, sim.digest.hex())


class Player:
    """Plays cases on a pool of processes, each case and seed once."""

    def __init__(self, pool: Pool, num_seeds: int) -> None:
        self._pool = pool
        self._num_seeds = num_seeds
        self._played: dict[tuple[Case, int], Played] = {}

    def play(self, cases: Mapping[Key, Case], at_least: int = 1) -> dict[Key, Runs]:
        """The runs of every case, with `at_least` as many seeds where few would show only noise."""
        seeds = range(max(self._num_seeds, at_least))
        wanted = [(case, seed) for case in dict.fromkeys(cases.values()) for seed in seeds]
        missing = [job for job in wanted if job not in self._played]
        played = self._pool.starmap_async(play, missing, chunksize=1).get(TIME_LIMIT_S)
        self._played.update(zip(missing, played, strict=True))
        return {key: [self._played[case, seed] for seed in seeds] for key, case in cases.items()}


# Figures of a run's measured steps


def step_s(steps: list[Measured]) -> float:
    return fmean(step.step_s for step in steps)


def rollout_s(steps: list[Measured]) -> float:
    return fmean(step.rollout_s for step in steps)


def after_rollout_s(steps: list[Measured]) -> float:
    return step_s(steps) - rollout_s(steps)


def tok_s(steps: list[Measured]) -> float:
    return sum(step.tokens for step in steps) / sum(step.step_s for step in steps)


def tok_per_usd(steps: list[Measured]) -> float:
    return sum(step.tokens for step in steps) / sum(step.usd for step in steps)


def window_s(steps: list[Measured]) -> float:
    return fmean(step.line.seed_window_s for step in steps)


def longest(steps: list[Measured]) -> float:
    return fmean(step.line.longest for step in steps)


def trained_length(steps: list[Measured]) -> float:
    return sum(step.line.tokens_trained for step in steps) / sum(step.line.num_samples for step in steps)


def discarded_share(steps: list[Measured]) -> float:
    discarded = sum(sum(step.line.tokens_discarded.values()) for step in steps)
    return discarded / (discarded + sum(step.line.tokens_trained for step in steps))


def of_kind(kind: str, value: Value) -> Value:
    """The same figure, of short or of long rounds only."""
    return lambda steps: value([step for step in steps if step.line.kind == kind])


def mean(runs: Runs, value: Value) -> float:
    return fmean(value(played.measured) for played in runs)


def span(runs: Runs, value: Value, shape: str = ",.0f", scale: float = 1.0) -> str:
    """The lowest and the highest of the seeds."""
    values = [value(played.measured) * scale for played in runs]
    return f"{min(values):{shape}} to {max(values):{shape}}"


# Comparing


@dataclass(frozen=True)
class Check:
    """One published figure beside the simulated one. Without a tolerance nothing passes or fails."""

    name: str
    published: float
    simulated: float
    error: float
    tolerance: float | None
    shape: str
    more: tuple[str, ...] = ()
    points: bool = False
    """The error is a difference of shares."""
    table: str = ""
    """Where it stands."""

    @property
    def error_shown(self) -> str:
        return f"{100 * self.error:+.1f}{' points' if self.points else '%'}"

    @property
    def holds(self) -> bool | None:
        return None if self.tolerance is None else abs(self.error) <= self.tolerance


@dataclass(frozen=True)
class Claim:
    """A direction instead of a figure."""

    text: str
    holds: bool


@dataclass(frozen=True)
class Table:
    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass
class Section:
    title: str
    about: str
    """What was calibrated on what, and how it is measured."""
    tables: list[Table] = field(default_factory=list)
    checks: list[Check] = field(default_factory=list)
    claims: list[Claim] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    misfits: list[str] = field(default_factory=list)

    def compare(self, title: str, checks: list[Check], more: Sequence[str] = ()) -> None:
        header = ("", "published", "simulated", "error", "within", *more)
        self.tables.append(Table(title, header, [check_row(check) for check in checks]))
        self.checks += [replace(check, table=title.partition(",")[0]) for check in checks]

    def claim(self, text: str, *, holds: bool) -> None:
        self.claims.append(Claim(text, holds))


def relative(
    name: str,
    published: float,
    simulated: float,
    tolerance: float | None = None,
    *,
    shape: str = ".2f",
    more: tuple = (),
) -> Check:
    return Check(name, published, simulated, simulated / published - 1, tolerance, shape, more)


def in_points(name: str, published: float, simulated: float, tolerance: float | None, more: tuple = ()) -> Check:
    """Shares: their error is a difference."""
    return Check(name, published, simulated, simulated - published, tolerance, ".0%", more, points=True)


def check_row(check: Check) -> list[str]:
    verdict = "-" if check.tolerance is None else f"{check.tolerance:.0%}: {'yes' if check.holds else '**no**'}"
    figures = f"{check.published:{check.shape}}", f"{check.simulated:{check.shape}}"
    return [check.name, *figures, check.error_shown, verdict, *check.more]


def times(ratio: float) -> str:
    return f"{ratio:.2f}x"


# (a) The factor table

FACTOR_SEEDS = 8


def factor_cases(cap: str) -> dict[tuple[str, str, float], Case]:
    """Enough steps for whole periods: 9 rounds at 1.125, 5 at 1.25, 3 at 1.5."""
    num_steps = {1.0: 25, 1.125: 27, 1.25: 25, 1.5: 27}

    def case(mode: str, samples: float, prompts: float) -> Case:
        steps = num_steps[prompts]
        rounds = (f"rounds.tail_batching={mode}", f"rounds.sample_factor={samples}", f"rounds.prompt_factor={prompts}")
        return Case(SYNCHRONOUS[cap], (f"run.steps={steps}", *FREE_REWARDS, *rounds))

    factors = (1.125, 1.25, 1.5)
    return {
        (cap, "none", 1.0): case("off", 1.0, 1.0),
        **{(cap, "samples", factor): case("race", factor, 1.0) for factor in factors},
        **{(cap, "prompts", factor): case("prompts", 1.0, factor) for factor in factors},
        (cap, "both", 1.25): case("race", 1.25, 1.25),
    }


def published_rollout_s(cap: str, kind: str, factor: float) -> float:
    figures = ROLLOUT_S[cap][kind]
    return figures[factor] if isinstance(figures, dict) else figures


def factors(player: Player) -> Section:
    section = Section(
        "Rollout time by over-provisioning factor (RollPacker)",
        "Seconds from a round's opening to its closing, rewards at no cost, averaged over whole periods; the ratio to "
        "factor 1.0 is compared. **Calibration, not prediction:** the lengths above the published p95, the "
        "within-prompt correlation and the decode constants of these two scenarios were fitted to this very table. "
        f"Rollout time depends on a few answers, so there are at least {FACTOR_SEEDS} seeds here, and the last column "
        "shows the lowest and the highest ratio of a single one: the mean is compared, single seeds may lie outside.",
    )
    for cap in CAP:
        runs = player.play(factor_cases(cap), at_least=FACTOR_SEEDS)
        simulated = {key: mean(one, rollout_s) for key, one in runs.items()}
        base = simulated[cap, "none", 1.0]
        checks: list[Check] = []
        for (_, kind, factor), seconds in simulated.items():
            wanted = published_rollout_s(cap, kind, factor)
            ratio = wanted / published_rollout_s(cap, "none", 1.0)
            tolerance = None if kind == "none" else RATIO_TOLERANCE
            spread = span(runs[cap, kind, factor], rollout_s, ".2f", scale=1 / base)
            more = (f"{wanted:.0f}", f"{seconds:.1f}", spread)
            name = "factor 1.0" if kind == "none" else f"{kind} {factor}"
            checks.append(relative(name, ratio, seconds / base, tolerance, shape=".3f", more=more))
        section.compare(f"{cap} cap, ratio to factor 1.0", checks, ("published, s", "simulated, s", "single seeds"))
        alone = min(simulated[cap, "samples", 1.25], simulated[cap, "prompts", 1.25])
        both = simulated[cap, "both", 1.25]
        text = f"{cap}: both factors at 1.25 beat either alone ({both:.0f} s against {alone:.0f} s)"
        section.claim(text, holds=both < alone)
        section.misfits += absolute_misfit(cap, base)
    return section


def absolute_misfit(cap: str, base_s: float) -> list[str]:
    wanted = published_rollout_s(cap, "none", 1.0)
    if abs(base_s / wanted - 1) <= RATIO_TOLERANCE:
        return []
    return [
        f"Factor table at {cap}: the ratios are compared, the seconds are not. Factor 1.0 takes {base_s:.0f} s here "
        f"and {wanted:.0f} s in the table, because so long a rollout leaves no room for the rest of the "
        f"{STEP_S[cap]['baseline']} s step that the same paper gives: its two sets of figures do not fit one set of "
        "constants, and the step time was preferred."
    ]


# (b) RollPacker's cumulative speedups


def speedup_cases(cap: str) -> dict[str, Case]:
    length = ("run.steps=30", "run.warmup_steps=1")
    beside = "rewards.as_finished=true"
    tail = ("rounds.tail_batching=race",)
    rewards = (*tail, beside, "rewards.adaptive=true")
    planner = "parallelism.enabled=true"
    added = {"baseline": (), "rewards alone": (beside,), "tail": tail, "rewards": rewards}
    synchronous = {name: Case(SYNCHRONOUS[cap], (*length, *overrides)) for name, overrides in added.items()}
    return {
        **synchronous,
        "planner": Case(SYNCHRONOUS[cap], (*length, *rewards, planner)),
        "stream": Case(TAIL[cap], (*length, planner)),
    }


def speedups(player: Player) -> Section:
    section = Section(
        "RollPacker's cumulative speedups",
        "Each row adds a mechanism to the row above it, but for the first, which stands alone. `stream` is the shipped "
        "`tail-*` scenario, the others the `synchronous-*` one with overrides. Engines do not exchange samples "
        "there (`routing.balance = false`), as in RollPacker. **Calibration, not prediction:** training time, reward "
        "pool and decode constants were fitted to the baseline's step time and to these speedups; one set of "
        "constants serves all rows of a cap. In the breakdown our rollout lasts until the round's last reward, with "
        "training beside it, and what follows is only what was left to do; where the authors draw these lines is "
        "not published.",
    )
    runs = {cap: player.play(speedup_cases(cap)) for cap in CAP}
    for cap in CAP:
        add_speedups(section, cap, runs[cap])
    for cap in CAP:
        add_step_times(section, cap, runs[cap])
    gains = {cap: mean(one["tail"], step_s) / mean(one["rewards"], step_s) for cap, one in runs.items()}
    text = f"the reward scheduler matters most at short caps ({times(gains['8k'])} at 8k, {times(gains['16k'])} at 16k)"
    section.claim(text, holds=gains["8k"] > gains["16k"])
    planned = {cap: mean(one["rewards"], step_s) / mean(one["planner"], step_s) for cap, one in runs.items()}
    text = f"the parallelism planner does no harm ({planned['8k']:.3f}x at 8k, {planned['16k']:.3f}x at 16k)"
    section.claim(text, holds=min(planned.values()) > 0.995)
    section.misfits.append(
        "Scoring runs a device (`trainer.reward_slots_per_device`), one seed, ten steps: at 16k three instead of the "
        "shipped two take the rollout of short rounds from 92 s to 74 s (published 69.5 s) and the mean step from "
        "183 s to 169 s (published 172 s); rewards alone then bring 1.24x (published 1.35x) and tail batching 1.61x "
        "(published 1.48x). At 8k six instead of four, with training after short rounds as in RollPacker, give its "
        "breakdown of them (76 s and 30 s, published 77 s and 29 s) but a baseline of 200 s (published 233 s)."
    )
    if planned["16k"] < 1.005:
        wanted = SPEEDUPS["16k"]["planner"] / SPEEDUPS["16k"]["rewards"]
        section.misfits.append(
            f"The parallelism planner brings {planned['16k']:.3f}x at 16k, published {wanted:.3f}x: with these "
            "constants it finds no engine width worth the change."
        )
    return section


def add_speedups(section: Section, cap: str, runs: dict[str, Runs]) -> None:
    seconds = {name: mean(one, step_s) for name, one in runs.items()}
    checks = [relative("baseline, s a step", STEP_S[cap]["baseline"], seconds["baseline"], shape=".0f")]
    checks += [
        relative(
            name if name == "rewards alone" else f"+ {name}",
            wanted,
            seconds["baseline"] / seconds[name],
            RATIO_TOLERANCE,
            more=(f"{seconds[name]:.0f} s",),
        )
        for name, wanted in SPEEDUPS[cap].items()
    ]
    section.compare(f"{cap} cap, speedup over the synchronous baseline", checks, ("simulated step",))


def add_step_times(section: Section, cap: str, runs: dict[str, Runs]) -> None:
    full = runs["stream"]
    checks = [relative("mean step", STEP_S[cap]["all"], mean(full, step_s), shape=".0f")]
    for kind, (low, high) in STEP_RANGES_S[cap].items():
        sync, rollout, reward, train = BREAKDOWN_S[cap][kind]
        seconds = [mean(full, of_kind(kind, value)) for value in (step_s, rollout_s, after_rollout_s)]
        checks += [
            relative(f"{kind} step", (low + high) / 2, seconds[0], shape=".1f", more=(f"published: {low} to {high}",)),
            relative(f"{kind}: rollout and reward", rollout + reward, seconds[1], shape=".1f"),
            relative(f"{kind}: sync and training after it", sync + train, seconds[2], shape=".1f"),
        ]
    if cap == "8k":
        ratio = mean(full, of_kind("long", step_s)) / mean(runs["rewards"], of_kind("long", step_s))
        checks.append(relative("long step, stream trainer on / off", STREAM_LONG_STEP, ratio))
    section.compare(f"{cap} cap, everything on, seconds", checks, ("",))


# (c) RLBoost's elastic runs


def elastic(player: Player) -> Section:
    section = Section(
        "RLBoost's elastic runs",
        "8B: the engine's constants were scaled until the baseline (`colocated-8b`) gave 10,000 tok/s; `fleet.speed` "
        "stays at 1.0 because that already gives the one-worker row. Rows 2 to 4 and all windows are predictions of "
        "these constants, with one reservation: the length distribution was chosen by an earlier fit that had the "
        "published windows and throughputs in view. Windows are learned from 60 s, with no constants; the first 12 "
        "steps are left out. 14B: lengths and constants were fitted to the static runs and to the preemption ablation, "
        "`fleet.speed` left at 1.0; no tolerance is set for these rows, and the static rows are not met exactly.",
    )
    add_8b(section, player)
    add_14b(section, player)
    section.remarks.append(
        "The guide's own claim of 60% more tokens per dollar at four workers does not follow from its throughput and "
        "prices, which give the published column above."
    )
    return section


def workers(num: int) -> str:
    return {0: "baseline", 1: "1 worker"}.get(num, f"{num} workers")


def add_8b(section: Section, player: Player) -> None:
    cases = {num: Case("elastic-8b", (f"fleet.workers={num}",)) for num in WINDOW_S_8B}
    runs = player.play({0: Case("colocated-8b"), **cases})
    base = mean(runs[0], tok_per_usd)
    role = {0: "calibrated", 1: "calibrated"}
    throughput = [
        relative(
            workers(num),
            wanted,
            mean(runs[num], tok_s),
            THROUGHPUT_TOLERANCE,
            shape=",.0f",
            more=(span(runs[num], tok_s), role.get(num, "predicted")),
        )
        for num, wanted in TOK_S_8B.items()
    ]
    section.compare("8B tokens/s", throughput, ("seeds", ""))
    steps = [later.simulated - earlier.simulated for earlier, later in pairwise(throughput)]
    section.misfits.append(
        "8B: every worker brings 2,000 tok/s in the guide's round figures; here the third and the fourth bring less "
        f"than the first two ({', '.join(f'{step:+,.0f}' for step in steps)})."
    )
    dollars = [
        relative(
            workers(num),
            wanted / TOK_S_8B[0] * TRAINER_USD / (TRAINER_USD + num * WORKER_USD),
            mean(runs[num], tok_per_usd) / base,
            more=(f"{mean(runs[num], tok_per_usd):,.0f}",),
        )
        for num, wanted in TOK_S_8B.items()
        if num
    ]
    section.compare(
        "8B tokens per dollar, against the baseline (published: from its tokens/s and prices)", dollars, ("tok/$",)
    )
    windows = [
        relative(
            workers(num),
            wanted,
            mean(runs[num], window_s),
            WINDOW_TOLERANCE,
            shape=".0f",
            more=(span(runs[num], window_s),),
        )
        for num, wanted in WINDOW_S_8B.items()
    ]
    section.compare("8B seeding window, s, learned from scratch (published: found by hand)", windows, ("seeds",))


def add_14b(section: Section, player: Player) -> None:
    cases = {
        "baseline": Case("elastic-14b", COLOCATED),
        "one": Case("elastic-14b", ("fleet.workers=1",)),
        "six": Case("elastic-14b"),
        "unseeded": Case("elastic-14b", ("seeding.mode=off",)),
        "short baseline": Case("elastic-14b", (*COLOCATED, "run.max_new_tokens=5120")),
        "short six": Case("elastic-14b", ("run.max_new_tokens=5120",)),
    }
    runs = player.play(cases)
    speed = {name: mean(one, tok_s) for name, one in runs.items()}
    gains = {
        5120: speed["short six"] / speed["short baseline"],
        14336: speed["six"] / speed["baseline"],
    }
    checks = [
        relative("1 worker / baseline", GAIN_14B_ONE, speed["one"] / speed["baseline"]),
        relative("6 workers / 1 worker", GAIN_14B_SIX_MORE, speed["six"] / speed["one"]),
        *(relative(f"6 workers / baseline, {cap} cap", GAIN_BY_CAP[cap], gain) for cap, gain in gains.items()),
        relative("6 workers, without seeding / with", WITHOUT_SEEDING, speed["unseeded"] / speed["six"]),
    ]
    section.compare("14B tokens/s, ratios", checks)
    section.misfits.append(
        "14B does not fit exactly: "
        + "; ".join(f"{check.name} {check.simulated:.2f} instead of {check.published:.2f}" for check in checks)
        + "."
    )
    section.claim(
        f"longer answers raise the gain ({times(gains[5120])} at a 5k cap, {times(gains[14336])} at 14k)",
        holds=gains[14336] > gains[5120],
    )
    section.claim(
        f"without seeding the run is slower ({speed['unseeded'] / speed['six'] - 1:+.0%})",
        holds=speed["unseeded"] < speed["six"],
    )


# (d) Three of six workers preempted

KILL_STEP = 16


def preemption(player: Player) -> Section:
    section = Section(
        "Three of six workers preempted (RLBoost, 14B)",
        f"Scenario `three-of-six`: the overhead is what step {KILL_STEP} takes longer than the same step of the same "
        "seed without a loss. There is no notice, and nobody comes back within the step. At least three seeds. The 14B "
        "constants were chosen with these two figures in view; the tolerance of 15 points is ours.",
    )
    cases = {"undisturbed": Case("three-of-six", ("faults.kill_workers=0",))}
    for at in MIGRATION_SAVES:
        for migrate in ("true", "false"):
            cases[f"{at} {migrate}"] = Case(
                "three-of-six", (f"faults.kill_at_s=[{at}]", f"fleet_rules.migrate={migrate}")
            )
    runs = player.play(cases, at_least=3)
    took = {name: fmean(played.steps[KILL_STEP].step_s for played in one) for name, one in runs.items()}
    checks: list[Check] = []
    for at, wanted in MIGRATION_SAVES.items():
        migrated, regenerated = (took[f"{at} {migrate}"] - took["undisturbed"] for migrate in ("true", "false"))
        more = (f"+{migrated:.0f} s", f"+{regenerated:.0f} s", f"{took['undisturbed']:.0f} s")
        checks.append(in_points(f"lost at {at} s", wanted, 1 - migrated / regenerated, SAVING_TOLERANCE, more))
    header = ("migrating", "regenerating", "undisturbed step")
    section.compare("Overhead saved, by migrating instead of regenerating", checks, header)
    early, late = (check.simulated for check in checks)
    section.claim(
        f"migrating saves overhead, and more the later the loss ({early:.0%}, {late:.0%})", holds=0 < early < late
    )
    return section


# (e) All together

TOGETHER = "all, `prompts`"
WITHOUT_TAIL = "all but tail batching"
ALONE = ("elastic", "tail batching, `race`", "tail batching, `prompts`", "hand-over", "rewards")


def together_cases() -> dict[str, Case]:
    slow_rewards = ("rewards.as_finished=false", "rewards.adaptive=false")
    no_tail = "rounds.tail_batching=off"
    off = (*COLOCATED, "rewards.adaptive=false", "hand_back.enabled=false")
    overrides = {
        "baseline": (*off, no_tail),
        "elastic": (no_tail, *slow_rewards, "hand_back.enabled=false"),
        "tail batching, `race`": (*off, "rounds.tail_batching=race"),
        "tail batching, `prompts`": (*off, "rounds.tail_batching=prompts"),
        "hand-over": (*off, no_tail, "run.mode=streaming", "hand_back.enabled=true"),
        "rewards": (*off, no_tail, "rewards.as_finished=true", "rewards.adaptive=true"),
        "elastic and rewards": (no_tail, "hand_back.enabled=false"),
        WITHOUT_TAIL: (no_tail,),
        TOGETHER: (),
        "all, `race`": ("rounds.tail_batching=race",),
    }
    return {name: Case("all-together", change) for name, change in overrides.items()}


def together(player: Player) -> Section:
    section = Section(
        "All together",
        "Nothing is published to compare with: the machines and prices of `elastic-8b` with four workers, the answers "
        "and the slow code rewards of the 16k scenario. Each mechanism alone is added to the synchronous baseline; "
        "`all` is the shipped scenario `all-together`. Trained length is the mean trained answer against that of the "
        "baseline, which trains every answer.",
    )
    runs = player.play(together_cases())
    figures = {
        name: {
            "tokens/s": mean(one, tok_s),
            "tokens/$": mean(one, tok_per_usd),
            "step": mean(one, step_s),
            "length": mean(one, trained_length),
            "discarded": mean(one, discarded_share),
        }
        for name, one in runs.items()
    }
    base = figures["baseline"]
    rows = [
        [
            name,
            f"{one['tokens/s']:,.0f}",
            times(one["tokens/s"] / base["tokens/s"]),
            f"{one['tokens/$']:,.0f}",
            times(one["tokens/$"] / base["tokens/$"]),
            f"{one['step']:.0f}",
            times(base["step"] / one["step"]),
            f"{one['length'] / base['length']:.0%}",
            f"{one['discarded']:.0%}",
        ]
        for name, one in figures.items()
    ]
    header = ("", "tokens/s", "gain", "tokens/$", "gain", "step, s", "steps/s gain", "trained length", "discarded")
    section.tables.append(Table("Every mechanism alone, and together", header, rows))
    for unit in ("tokens/s", "tokens/$"):
        best_alone = max(ALONE, key=lambda name: figures[name][unit])
        gain = figures[TOGETHER][unit] / figures[best_alone][unit]
        section.claim(
            f"all together beats each mechanism alone in {unit}: {times(gain)} the best ({best_alone})", holds=gain > 1
        )
    section.remarks += together_remarks(figures)
    handed = figures[WITHOUT_TAIL]["tokens/s"] / figures["elastic and rewards"]["tokens/s"]
    if handed < 1.01:
        section.misfits.append(
            f"Hand-over adds nothing to the elastic run ({handed:.3f}x in tokens/s): with a fleet, the seeding window "
            "already decides when the trainer's devices train."
        )
    return section


def together_remarks(figures: dict[str, dict[str, float]]) -> list[str]:
    best = {unit: max(figures, key=lambda name: figures[name][unit]) for unit in ("tokens/s", "tokens/$")}
    fastest = min(figures, key=lambda name: figures[name]["step"])
    tail, plain = figures[TOGETHER], figures[WITHOUT_TAIL]
    tokens = tail["tokens/s"] / plain["tokens/s"] - 1
    return [
        f"Most tokens/s: {best['tokens/s']}. Most tokens per dollar: {best['tokens/$']}. Most steps/s: {fastest}.",
        f"Tail batching on top of the others takes a step from {plain['step']:.0f} s to {tail['step']:.0f} s, but what "
        f"it trains is {1 - tail['length'] / plain['length']:.0%} shorter, and {tail['discarded']:.0%} of what is "
        f"generated is thrown away: in tokens/s it is {abs(tokens):.0%} {'ahead of' if tokens > 0 else 'behind'} the "
        "run without it. Steps/s is the figure that it improves; whether a "
        "step of shorter answers teaches as much, no simulator says.",
    ]


# (f) Bias, and the trends of tail batching

MODES = ("off", "race", "prompts", "designated", "predicted")


def bias(player: Player) -> Section:
    section = Section(
        "What tail batching trains: bias and trends",
        "Lengths of the 16k scenario, rewards at no cost, factors 1.25, a small data set (ten steps an epoch) so that "
        "`predicted` has a history; the first two epochs are left out. Trained length is against `off`, which trains "
        "every answer; `length.bias` of `polyrl simulate` is the same ratio, against the prompts of its own run. The "
        "earlier figures are a first "
        "simulation of ours, not RollPacker's authors'.",
    )
    add_modes(section, player)
    add_trends(section, player)
    return section


def add_modes(section: Section, player: Player) -> None:
    small = tuple(f"domains.{index}.num_prompts={10 * quota}" for index, quota in enumerate((64, 51, 13)))
    length = ("run.steps=50", "run.warmup_steps=20")
    overrides = (*length, *small, *FREE_REWARDS)
    cases = {mode: Case(SYNCHRONOUS["16k"], (*overrides, f"rounds.tail_batching={mode}")) for mode in MODES}
    runs = player.play(cases)
    lengths = {mode: mean(one, trained_length) / mean(runs["off"], trained_length) for mode, one in runs.items()}
    seconds = {mode: mean(one, rollout_s) for mode, one in runs.items()}
    rows = [
        [
            mode,
            f"{lengths[mode]:.0%}",
            f"{EARLIER_BIAS[mode]:.0%}" if mode in EARLIER_BIAS else "-",
            f"{mean(runs[mode], discarded_share):.0%}",
            f"{seconds[mode]:.0f}",
            times(seconds["off"] / seconds[mode]),
            f"{mean(runs[mode], of_kind('short', longest)) / CAP['16k']:.0%}",
        ]
        for mode in MODES
    ]
    header = (
        "mode",
        "trained length",
        "earlier simulation",
        "discarded",
        "rollout, s",
        "rollouts/s gain",
        "longest, short round",
    )
    section.tables.append(Table("The modes of tail batching, 16k", header, rows))
    section.claim(
        f"`race` shortens the trained answers most ({lengths['race']:.0%}), then `prompts` ({lengths['prompts']:.0%})",
        holds=lengths["race"] < lengths["prompts"] < min(lengths["designated"], lengths["predicted"]),
    )
    slow = [mode for mode in MODES[1:] if seconds["off"] / seconds[mode] < 1.05]
    if slow:
        section.misfits.append(
            f"Tail batching by {' and '.join(f'`{mode}`' for mode in slow)} gains less than 5% in rollout time on "
            "these lengths, though its bias is small: its short rounds still hold answers at or near the cap."
        )
    section.claim(
        f"`predicted` trains without bias ({lengths['predicted']:.0%})", holds=abs(lengths["predicted"] - 1) < 0.05
    )


def add_trends(section: Section, player: Player) -> None:
    length = ("run.steps=40", "run.warmup_steps=9")
    fixed = player.play({cap: Case(TAIL[cap], length) for cap in CAP})
    adaptive = player.play({cap: Case(TAIL[cap], (*length, "rounds.adaptive=true")) for cap in CAP})
    rounds = fixed["16k"][0].steps
    kinds = "".join(step.line.kind[0] for step in rounds)
    section.claim(f"a saw-tooth of four short rounds and a long one: `{kinds}`", holds="ssssl" * 4 in kinds)
    filled = {cap: mean(one, of_kind("short", longest)) / CAP[cap] for cap, one in fixed.items()}
    section.claim(
        "the longest answer of a short round is far under the cap, and the gap grows with it: "
        f"{filled['8k']:.0%} of 8k, {filled['16k']:.0%} of 16k",
        holds=filled["16k"] < filled["8k"] < 1,
    )
    section.tables.append(adaptive_table(fixed, adaptive))
    gains = {cap: mean(fixed[cap], step_s) / mean(adaptive[cap], step_s) for cap in CAP}
    section.claim(
        f"adaptive factors shorten the step against 1.25 ({gains['8k']:.3f}x at 8k, {gains['16k']:.3f}x at 16k)",
        holds=min(gains.values()) > 1,
    )


def adaptive_table(fixed: dict[str, Runs], adaptive: dict[str, Runs]) -> Table:
    rows = [
        [
            f"{cap}, {name}",
            f"{mean(one, step_s):.1f}",
            f"{mean(one, rollout_s):.1f}",
            f"{mean(one, trained_length):,.0f}",
            f"{mean(one, discarded_share):.0%}",
        ]
        for cap in CAP
        for name, one in (("fixed 1.25", fixed[cap]), ("adaptive", adaptive[cap]))
    ]
    header = ("", "step, s", "rollout, s", "trained length, tokens", "discarded")
    return Table("Adaptive factors (`rounds.adaptive=true`) against 1.25, shipped scenarios", header, rows)


# (g) Training on more devices

DEVICES = {"8k": 16, "16k": 32}
MORE_DEVICES = (16, 32, 64, 128)


def tokens(steps: list[Measured]) -> float:
    return fmean(step.tokens for step in steps)


def more_devices(player: Player) -> Section:
    section = Section(
        "Training on more devices",
        "RollPacker gives four training times: of short and of long rounds, for 7B on 16 devices and for 14B on 32. "
        "How many tokens those rounds trained is not published; here it is simulated. Each setting then has one line: "
        "seconds that do not depend on tokens, and seconds a token. **Four figures for four unknowns, so nothing is "
        "left to test the fit with.** No figure of one model on several numbers of devices is at hand.",
    )
    whole = player.play({cap: Case(TAIL[cap], ("run.steps=10", "run.warmup_steps=0")) for cap in CAP})
    fixed: dict[str, float] = {}
    per_token: dict[str, float] = {}
    rows: list[list[str]] = []
    for cap, runs in whole.items():
        short, long = (mean(runs, of_kind(kind, tokens)) for kind in ("short", "long"))
        short_s, long_s = (BREAKDOWN_S[cap][kind][3] for kind in ("short", "long"))
        per_token[cap] = (long_s - short_s) / (long - short)
        fixed[cap] = short_s - per_token[cap] * short
        sizes = [f"{short / 1e6:.2f} M", f"{long / 1e6:.2f} M"]
        parts = [f"{fixed[cap]:.1f}", f"{per_token[cap] * 1e6:.2f}"]
        rows.append([f"{cap} cap, {DEVICES[cap]} devices", *sizes, f"{short_s:.1f}", f"{long_s:.1f}", *parts])
    header = ("", "tokens, short", "tokens, long", "published, short, s", "long, s", "fixed, s", "us a token")
    section.tables.append(Table("Four training times as two lines", header, rows))
    powers = [math.log2(2.0 * part["8k"] / part["16k"]) for part in (per_token, fixed)]
    section.remarks.append(
        "Twice the parameters on twice the devices. If both parts go with parameters, seconds a token go with devices "
        f"to the power of -{powers[0]:.2f} and fixed seconds to the power of {-powers[1]:+.2f}: tokens are shared out "
        "in full, and the rest of a step (optimizer, moving weights and states) is not shared at all. So "
        "`trainer.scaling` is 1 in these scenarios and acts on tokens alone; `optimizer_s` stays. On your devices it "
        "is yours to measure, and `polyrl simulate` says so wherever it acts."
    )
    add_more_devices(section, player)
    return section


def add_more_devices(section: Section, player: Player) -> None:
    def case(num: int) -> Case:
        devices = (f"trainer.num_devices={num}", f"trainer.local_workers={num}")
        return Case(TAIL["8k"], ("run.steps=10", "run.warmup_steps=0", *devices))

    runs = player.play({num: case(num) for num in MORE_DEVICES})
    base = mean(runs[MORE_DEVICES[0]], tok_s)
    rows = [
        [str(num), f"{mean(one, step_s):.0f}", f"{mean(one, rollout_s):.0f}", times(mean(one, tok_s) / base)]
        for num, one in runs.items()
    ]
    header = ("devices", "step, s", "rollout, s", "tokens/s")
    section.tables.append(Table("`tail-7b-8k` on more devices: nothing published to compare with", header, rows))


# Showing

SECTIONS: dict[str, Callable[[Player], Section]] = {
    "factors": factors,
    "speedups": speedups,
    "elastic": elastic,
    "preemption": preemption,
    "together": together,
    "bias": bias,
    "devices": more_devices,
}
NOT_COMPARED = (
    "RLBoost's averages over three spot-trace segments (1.66x and 1.97x, +34% and +49% tokens per dollar): the traces "
    "are not published. `spot-trace` plays a market of our own.",
    "The +6% from remembering the seeding window: it depends on how the fleet changes, which is not published.",
    "RollPacker's adaptive time limits on code only (60.8 s to 41.9 s): it needs one test a sample where the step "
    "times need eight, and the calibration found no reward constants that give both.",
    "RollPacker's fixed hand-back at 20, 30 and 40%: the rule here is the adaptive one.",
    "RollPacker's runs on more devices than 16 (7B) and 32 (14B): no figure of them is at hand.",
)


def markdown_table(table: Table) -> str:
    lines = [list(table.header), *map(list, table.rows)]
    lines = [line + [""] * (len(table.header) - len(line)) for line in lines]
    widths = [max(3, *(len(line[column]) for line in lines)) for column in range(len(table.header))]
    shown = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |" for line in lines
    ]
    rule = "|" + "|".join("-" * (width + 2) for width in widths) + "|"
    return "\n".join([f"**{table.title}**", "", shown[0], rule, *shown[1:]])


def bullets(texts: Sequence[str]) -> str:
    return "\n".join(f"- {text}" for text in texts)


def markdown_section(name: str, section: Section) -> str:
    parts = [f"## {section.title}", f"`{COMMAND} --only {name}`", section.about, *map(markdown_table, section.tables)]
    verdict = {True: "holds", False: "**does not hold**"}
    if section.claims:
        parts.append(bullets([f"{verdict[claim.holds]}: {claim.text}" for claim in section.claims]))
    return "\n\n".join([*parts, *section.remarks])


def nearness(check: Check) -> float:
    return abs(check.error) / check.tolerance if check.tolerance else 0.0


def summary_table(sections: dict[str, Section]) -> Table:
    rows = []
    for section in sections.values():
        judged = [check for check in section.checks if check.holds is not None]
        held = sum(check.holds is True for check in judged)
        worst = max(judged, key=nearness, default=None)
        claims = f"{sum(claim.holds for claim in section.claims)} of {len(section.claims)}"
        row = (
            ("-", "-")
            if worst is None
            else (f"{held} of {len(judged)}", f"{worst.error_shown} ({worst.table}: {worst.name})")
        )
        rows.append([section.title, *row, claims])
    return Table("In short", ("", "figures within tolerance", "nearest to its tolerance", "directions that hold"), rows)


def misfits(sections: dict[str, Section]) -> list[str]:
    """What fails, what is off by more than 15% without failing, and what a section says of itself."""
    found: list[str] = []
    for section in sections.values():
        for check in section.checks:
            if check.holds is False or (check.holds is None and abs(check.error) > RATIO_TOLERANCE):
                figures = f"published {check.published:{check.shape}}, simulated {check.simulated:{check.shape}}"
                found.append(f"{section.title}, {check.table}: {check.name}: {figures} ({check.error_shown}).")
        found += [f"{section.title}: does not hold: {claim.text}." for claim in section.claims if not claim.holds]
        found += section.misfits
    return found


def said_by(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=10).stdout.strip()


def source_state() -> str:
    """The commit that is about to be played."""
    here = str(Path(__file__).parent)
    commit = said_by("git", "-C", here, "rev-parse", "--short", "HEAD") or "unknown"
    return commit + (
        " with changes" if said_by("git", "-C", here, "status", "--porcelain", "--", "../src", ".") else ""
    )


def provenance(arguments: Sequence[str], num_seeds: int, commit: str, wall_s: float) -> str:
    models = [line.split(":", 1)[1].strip() for line in cpu_lines() if line.startswith("model name")]
    model = models[0] if models else platform.machine()
    return bullets(
        [
            f"command: `{' '.join([COMMAND, *arguments])}`, {wall_s:.0f} s",
            f"seeds: {num_seeds}, where a section does not say more",
            f"commit: {commit}",
            f"machine: {model}, {os.cpu_count()} cores, Python {platform.python_version()}",
            f"date: {time.strftime('%Y-%m-%d')}",
        ]
    )


def cpu_lines() -> list[str]:
    path = Path("/proc/cpuinfo")
    return path.read_text().splitlines() if path.is_file() else []


def page(sections: dict[str, Section], origin: str) -> str:
    wrong = misfits(sections)
    parts = [
        "# Published figures, simulated",
        "What RollPacker and RLBoost published, beside what PolyRL's scheduler does in its simulator. Nothing here is "
        "a measurement of real devices. The page is written by the command below; simulated figures depend on scenario "
        "and seed alone, not on the machine. Errors are relative to the published figure, for shares in points.",
        origin,
        markdown_table(summary_table(sections)),
        *(markdown_section(name, section) for name, section in sections.items()),
        "## What does not fit",
        bullets(wrong) if wrong else "Nothing.",
        "## Not compared",
        bullets(NOT_COMPARED),
    ]
    return "\n\n".join(parts) + "\n"


def as_json(sections: dict[str, Section]) -> str:
    trees = {
        name: {**asdict(section), "checks": [{**asdict(check), "holds": check.holds} for check in section.checks]}
        for name, section in sections.items()
    }
    return json.dumps({"sections": trees, "misfits": misfits(sections)}, indent=2)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", choices=SECTIONS, help="one section instead of all")
    parser.add_argument("--seeds", type=int, choices=range(1, 65), metavar="N", default=2, help="runs of each case (2)")
    parser.add_argument("--json", action="store_true", help="print one object instead of the page")
    parser.add_argument("--out", type=Path, metavar="FILE.md", help="write the page there as well")
    options = parser.parse_args(arguments)
    wanted = {options.only: SECTIONS[options.only]} if options.only else SECTIONS
    started, commit = time.monotonic(), source_state()
    with get_context("spawn").Pool(NUM_PROCESSES) as pool:
        player = Player(pool, options.seeds)
        sections = {}
        for name, section in wanted.items():
            sections[name] = section(player)
            print(f"{name}: {time.monotonic() - started:.0f} s", file=sys.stderr)
    written = page(sections, provenance(arguments, options.seeds, commit, time.monotonic() - started))
    print(as_json(sections) if options.json else written)
    if options.out is not None:
        options.out.write_text(written)
    return int(any(check.holds is False for section in sections.values() for check in section.checks))
