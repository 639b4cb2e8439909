"""RLBoost's runs: a fleet that grows and shrinks, static fleets, what the seeding window brings, spot markets."""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from polyrl.reproduce.comparing import Check, Curve, Section, relative, times
from polyrl.reproduce.measures import mean, tok_per_usd, tok_s, window_s
from polyrl.reproduce.playing import COLOCATED, Played, Player, Runs, Variant
from polyrl.reproduce.published import (
    DOLLARS_OVER_SPOT_TRACES,
    GAIN_14B_ONE,
    GAIN_14B_SIX_MORE,
    GAIN_BY_CAP,
    THROUGHPUT_OVER_SPOT_TRACES,
    THROUGHPUT_TOLERANCE,
    TOK_S_8B,
    TRAINER_USD,
    WINDOW_S_8B,
    WINDOW_TOLERANCE,
    WITH_WINDOW_MEMORY,
    WITHOUT_SEEDING,
    WORKER_USD,
)
from polyrl.sim.result import Measured

TWO_STEPS = ("run.steps=2", "run.warmup_steps=0")
LEVELS = (0, 1, 2, 3, 4, 3, 2, 1, 0)
LEVEL_S = 3600.0
_SAME_FLEET = 0.05
_CALIBRATED_14B = (
    "14B: lengths and constants were fitted to the static runs and to the preemption ablation, `fleet.speed` left at "
    "1.0; no tolerance is set for these rows, and the static rows are not met exactly."
)


# The staircase


def staircase_case(levels: Sequence[int], level_s: float, num_steps: int) -> Variant:
    """Return a case in which the fleet is at every level for so long; machines are granted early enough, and taken
    without notice."""
    start_s = 120.0
    moments = [
        (max(0.0, number * level_s - (start_s if level > before else 0.0)), level)
        for number, (before, level) in enumerate(pairwise(levels), start=1)
    ]
    events = ", ".join(f"{{at_s={at_s:g}, workers={level}}}" for at_s, level in moments)
    overrides = (f"fleet.start_s={start_s:g}", f"fleet.workers={levels[0]}", f"supply.events=[{events}]")
    return Variant("elastic-8b", (*overrides, "supply.notice_s=0", f"run.steps={num_steps}", "run.warmup_steps=0"))


class _Level:
    """The steps of one stay at a level; its last half is measured, where the window has settled."""

    def __init__(self, workers: int, way: str, steps: list[Measured]) -> None:
        self.workers, self.way = workers, way
        self.steps = steps[len(steps) // 2 :]


def levels_of(steps: Sequence[Measured], levels: Sequence[int]) -> list[_Level]:
    """Divide a staircase's steps into its levels; a step in which the fleet changed belongs to none."""
    found: list[_Level] = []
    rest, top = list(steps), levels.index(max(levels))
    for number, level in enumerate(levels):
        while rest and abs(rest[0].line.mean_workers - level) > _SAME_FLEET:
            rest.pop(0)
        here: list[Measured] = []
        while rest and abs(rest[0].line.mean_workers - level) <= _SAME_FLEET:
            here.append(rest.pop(0))
        if here:
            found.append(_Level(level, "up" if number <= top else "down", here))
    return found


def staircase(
    player: Player,
    levels: Sequence[int] = LEVELS,
    level_s: float = LEVEL_S,
    num_steps: int = 96,
    baseline: tuple[str, ...] = ("run.steps=4",),
) -> Section:
    section = Section(
        f"An 8B run from {levels[0]} to {max(levels)} workers and back (RLBoost)",
        "The engine's constants were scaled until the baseline (`colocated-8b`) gave 10,000 tok/s; `fleet.speed` "
        "stays at 1.0 because that already gives the one-worker row. Rows 2 to 4 and all windows are predictions of "
        "these constants, with one reservation: the length distribution was chosen by an earlier fit that had the "
        f"published windows and throughputs in view. The fleet is at each level for {level_s:,.0f} s; the last half "
        "of the whole steps there is measured. Windows are learned from 60 s, with no constants, and remembered.",
    )
    runs = player.play(
        {"stairs": staircase_case(levels, level_s, num_steps), "baseline": Variant("colocated-8b", baseline)}
    )
    stairs = runs["stairs"][0]
    found = levels_of(stairs.steps, levels)
    _add_levels(section, found, runs["baseline"])
    section.curves += _staircase_curves(stairs)
    section.remarks.append(
        "The guide's own claim of 60% more tokens per dollar at four workers does not follow from its throughput and "
        "prices, which give the published column above."
    )
    return section


def _add_levels(section: Section, found: list[_Level], baseline: Runs) -> None:
    role = {0: "predicted", 1: "calibrated"}
    throughput = [relative("baseline", TOK_S_8B[0], mean(baseline, tok_s), THROUGHPUT_TOLERANCE, shape=",.0f")]
    throughput += [
        relative(
            f"{workers(one.workers)}, {one.way}",
            TOK_S_8B[one.workers],
            tok_s(one.steps),
            THROUGHPUT_TOLERANCE,
            shape=",.0f",
            more=(role.get(one.workers, "predicted"), str(len(one.steps))),
        )
        for one in found
    ]
    section.compare("8B tokens/s", throughput, ("", "steps"))
    base = mean(baseline, tok_per_usd)
    dollars = [
        relative(
            f"{workers(one.workers)}, {one.way}",
            TOK_S_8B[one.workers] / TOK_S_8B[0] * TRAINER_USD / (TRAINER_USD + one.workers * WORKER_USD),
            tok_per_usd(one.steps) / base,
        )
        for one in found
        if one.workers
    ]
    section.compare("8B tokens per dollar, against the baseline, published: from its tokens/s and prices", dollars)
    windows = [
        relative(
            f"{workers(one.workers)}, {one.way}",
            WINDOW_S_8B[one.workers],
            window_s(one.steps),
            WINDOW_TOLERANCE,
            shape=".0f",
        )
        for one in found
        if one.workers
    ]
    section.compare("8B seeding window, s, published: found by hand", windows)


def _staircase_curves(stairs: Played) -> list[Curve]:
    hours = [step.line.trained_at / 3600.0 for step in stairs.steps]
    speeds = [step.tok_s / 1000.0 for step in stairs.steps]
    counts = [step.line.mean_workers for step in stairs.steps]
    return [
        Curve("tokens/s of every step", "hours", "thousand tokens/s", {"": (hours, speeds)}),
        Curve("workers in every step", "hours", "workers", {"": (hours, counts)}),
    ]


def workers(num: int) -> str:
    return "1 worker" if num == 1 else f"{num} workers"


# Static fleets, and the seeding window


def static_14b(player: Player) -> Section:
    section = Section("Static 14B runs (RLBoost)", _CALIBRATED_14B)
    short = "run.max_new_tokens=5120"
    cases = {
        "baseline": Variant("elastic-14b", COLOCATED),
        "one": Variant("elastic-14b", ("fleet.workers=1",)),
        "six": Variant("elastic-14b"),
        "short baseline": Variant("elastic-14b", (*COLOCATED, short)),
        "short six": Variant("elastic-14b", (short,)),
    }
    speed = {name: mean(one, tok_s) for name, one in player.play(cases).items()}
    gains = {5120: speed["short six"] / speed["short baseline"], 14336: speed["six"] / speed["baseline"]}
    checks = [
        relative("1 worker / baseline", GAIN_14B_ONE, speed["one"] / speed["baseline"]),
        relative("6 workers / 1 worker", GAIN_14B_SIX_MORE, speed["six"] / speed["one"]),
        *(relative(f"6 workers / baseline, {cap} cap", GAIN_BY_CAP[cap], gain) for cap, gain in gains.items()),
    ]
    section.compare("14B tokens/s, ratios", checks)
    section.claim(
        f"longer answers raise the gain ({times(gains[5120])} at a 5k cap, {times(gains[14336])} at 14k)",
        holds=gains[14336] > gains[5120],
    )
    return section


def seeding_ablation(player: Player, num_steps: int = 24, warmup_steps: int = 12) -> Section:
    section = Section(
        "Without seeding (RLBoost, 14B)",
        f"Six workers; the trainer's own devices generate at the start of a step, or never. {_CALIBRATED_14B}",
    )
    length = (f"run.steps={num_steps}", f"run.warmup_steps={warmup_steps}")
    ways = {"seeded": "learned", "unseeded": "off"}
    cases = {way: Variant("elastic-14b", (*length, f"seeding.mode={mode}")) for way, mode in ways.items()}
    speed = {way: mean(one, tok_s) for way, one in player.play(cases).items()}
    ratio = speed["unseeded"] / speed["seeded"]
    section.compare("14B tokens/s", [relative("without seeding / with", WITHOUT_SEEDING, ratio)])
    section.claim(f"without seeding the run is slower ({ratio - 1:+.0%})", holds=ratio < 1)
    return section


def memory_ablation(
    player: Player, every_s: float = 2000.0, num_steps: int = 60, warmup_steps: int = 14, at_least: int = 2
) -> Section:
    section = Section(
        "Without memory of the seeding window (RLBoost, 14B)",
        f"The fleet goes from six workers to two and back every {every_s:,.0f} s, without notice: how it changed in "
        f"the published run is not known, so no tolerance is set. {_CALIBRATED_14B}",
    )
    events = ", ".join(f"{{at_s={every_s * number:g}, workers={2 if number % 2 else 6}}}" for number in range(1, 12))
    length = (f"run.steps={num_steps}", f"run.warmup_steps={warmup_steps}")
    world = (f"supply.events=[{events}]", "supply.notice_s=0", *length)
    cases = {flag: Variant("elastic-14b", (*world, f"seeding.remember={flag}")) for flag in ("true", "false")}
    speed = {flag: mean(one, tok_s) for flag, one in player.play(cases, at_least=at_least).items()}
    gain = speed["true"] / speed["false"]
    section.compare("14B tokens/s", [relative("with memory / without", WITH_WINDOW_MEMORY, gain, shape=".3f")])
    section.claim(f"memory does no harm ({times(gain)})", holds=gain > 0.995)
    return section


# Spot markets

_MARKET = (
    "fleet.workers=3",
    "supply.market_mean_s=900",
    "supply.market_max=6",
    "supply.notice_s=30",
    "faults.deaths_per_hour=0.3",
    "faults.restart_s=60",
)


class PlayedMarket(NamedTuple):
    """How long a market is played, and with which models."""

    models: Sequence[str] = ("8b", "14b")
    num_segments: int = 2
    segment_s: float = 7200.0
    left_out_s: float = 2400.0
    num_steps: int = 48
    """Enough for both times."""
    window: tuple[str, ...] = ()
    """Where the window starts, if it is not learned from nothing."""
    baseline: tuple[str, ...] = ("run.steps=4", "run.warmup_steps=1")

    def segment(self, played: Played) -> list[Measured]:
        first_s, last_s = self.left_out_s, self.left_out_s + self.segment_s
        return [step for step in played.steps if first_s < step.line.trained_at <= last_s]


WHOLE_MARKET = PlayedMarket()
AN_HOUR = PlayedMarket(("8b",), 1, 3600.0, 600.0, 18, ("seeding.initial_s=105",), TWO_STEPS)
"""For real processes: an hour, and a window that begins with the published one of three workers."""


def spot_trace(player: Player, market: PlayedMarket = WHOLE_MARKET) -> Section:
    section = Section(
        "Segments of a spot market (RLBoost)",
        f"A segment is {market.segment_s / 3600:g} h with none to six workers of two devices, 30 s of notice, and a "
        "death without any at times. RLBoost's traces are not published: the market is drawn "
        f"(`supply.market_mean_s`), a segment a seed, and the first {market.left_out_s / 60:.0f} minutes are left out "
        "for the window to be learned. Published: averages over three segments of two hours.",
    )
    for model in market.models:
        cases = {
            "baseline": Variant(f"elastic-{model}", (*COLOCATED, *market.baseline)),
            "market": Variant(
                f"elastic-{model}",
                (*_MARKET, *market.window, f"run.steps={market.num_steps}", "run.warmup_steps=0"),
            ),
        }
        runs = player.play(cases, at_least=market.num_segments)
        section.compare(f"{model.upper()}, against the baseline", _segment_checks(model, runs, market))
        for number, one in enumerate(runs["market"][: market.num_segments], start=1):
            steps = market.segment(one)
            hours = [step.line.trained_at / 3600.0 for step in one.steps]
            counts = [step.line.mean_workers for step in one.steps]
            section.remarks.append(
                f"{model.upper()}, segment {number}: {mean_workers(steps):.1f} workers on average, {len(steps)} steps."
            )
            if model == "8b":
                section.curves.append(Curve(f"workers of segment {number}", "hours", "workers", {"": (hours, counts)}))
    return section


def mean_workers(steps: list[Measured]) -> float:
    return sum(step.line.mean_workers * step.step_s for step in steps) / sum(step.step_s for step in steps)


def _segment_checks(model: str, runs: dict[str, Runs], market: PlayedMarket) -> list[Check]:
    checks: list[Check] = []
    for value, name, wanted in (
        (tok_s, "tokens/s", THROUGHPUT_OVER_SPOT_TRACES),
        (tok_per_usd, "tokens per dollar", DOLLARS_OVER_SPOT_TRACES),
    ):
        base = mean(runs["baseline"], value)
        gains = [value(market.segment(one)) / base for one in runs["market"][: market.num_segments]]
        checks += [
            relative(f"{name}, segment {number}", wanted[model], gain) for number, gain in enumerate(gains, start=1)
        ]
    return checks
