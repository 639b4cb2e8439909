"""Every mechanism at once: against each alone, against the published ones, and in tokens per dollar."""

from collections.abc import Sequence
from typing import NamedTuple

from polyrl.reproduce.comparing import Section, Table, relative, times
from polyrl.reproduce.measures import discarded_share, mean, step_s, tok_per_usd, tok_s, trained_length
from polyrl.reproduce.playing import COLOCATED, Player, Variant
from polyrl.reproduce.published import DOLLARS_OVER_SPOT_TRACES, SPEEDUPS
from polyrl.reproduce.tail import CAPS, SYNCHRONOUS, TAIL

TOGETHER = "all, `prompts`"
WITHOUT_TAIL = "all but tail batching"
ALONE = ("elastic", "tail batching, `race`", "tail batching, `prompts`", "hand-over", "rewards")


def together_cases() -> dict[str, Variant]:
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
    return {name: Variant("all-together", change) for name, change in overrides.items()}


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


# Against the published ones

WAYS = {
    "all": (),
    "all, adaptive": ("routing.balance=true", "rounds.adaptive=true"),
    "all, lag 1": ("run.max_staleness=1",),
}
"""The overrides of the `tail-*` scenarios, whose planner finds nothing to do and stays off."""
SPOT = ("fleet.workers=4",)
_SPOT_WAYS = ("all", "all, lag 1")


class RunLengths(NamedTuple):
    """Of `spot` even numbers: with a lag of one, steps come in pairs of a long and a short one."""

    baseline: tuple[str, ...]
    tail: tuple[str, ...]
    spot: tuple[str, ...]


SIMULATED = RunLengths(
    ("run.steps=6", "run.warmup_steps=1"),
    ("run.steps=16", "run.warmup_steps=1"),
    ("run.steps=20", "run.warmup_steps=10"),
)
EMULATED = RunLengths(
    ("run.steps=2", "run.warmup_steps=0"),
    ("run.steps=5", "run.warmup_steps=0"),
    ("run.steps=4", "run.warmup_steps=2"),
)


def everything_cases(length: RunLengths, caps: Sequence[str] = CAPS) -> dict[str, Variant]:
    cases = {f"{cap} baseline": Variant(SYNCHRONOUS[cap], length.baseline) for cap in caps}
    for cap in caps:
        for way, added in WAYS.items():
            cases[f"{cap} {way}"] = Variant(TAIL[cap], (*length.tail, "parallelism.enabled=false", *added))
    cases["spot baseline"] = Variant("elastic-14b", (*COLOCATED, *length.baseline))
    for way in _SPOT_WAYS:
        cases[f"spot {way}"] = Variant("elastic-14b", (*SPOT, *length.spot, *WAYS[way]))
    return cases


def everything(
    player: Player,
    length: RunLengths = SIMULATED,
    caps: Sequence[str] = CAPS,
    goals: tuple[float, ...] = (2.03, 2.22, 1.49),
) -> Section:
    section = Section(
        "Every mechanism at once, against the published gains",
        "7B and 14B on the trainer's own devices alone, against the synchronous baseline, in steps/s: the `tail-*` "
        "scenarios; `adaptive`: engines exchange samples too, and factors adapt. 14B with four spot workers, against "
        "the colocated baseline, in tokens per dollar: seeding, streaming, no tail batching, which discards tokens. "
        "`lag 1`: a round may be written by the version before (`run.max_staleness = 1`), which is no longer "
        "on-policy; RollPacker and RLBoost are. Step times of tail batching are of rounds that train shorter "
        "answers, here as there.",
    )
    runs = player.play(everything_cases(length, caps))
    gains = {
        f"{cap}, {way}": mean(runs[f"{cap} baseline"], step_s) / mean(runs[f"{cap} {way}"], step_s)
        for cap in caps
        for way in WAYS
    }
    base = mean(runs["spot baseline"], tok_per_usd)
    dollars = {way: mean(runs[f"spot {way}"], tok_per_usd) / base for way in _SPOT_WAYS}
    speeds = [relative(name, SPEEDUPS[name.partition(",")[0]]["stream"], gain) for name, gain in gains.items()]
    section.compare("Steps/s against the synchronous baseline", speeds)
    wanted = DOLLARS_OVER_SPOT_TRACES["14b"]
    section.compare("14B tokens per dollar", [relative(way, wanted, gain) for way, gain in dollars.items()])
    for cap, goal in zip(caps, goals, strict=False):
        best = max(gains[f"{cap}, {way}"] for way in WAYS)
        section.claim(f"all together beats {times(goal)} at {cap} ({times(best)})", holds=best > goal)
    best = max(dollars.values())
    section.claim(
        f"14B with spot workers beats {goals[-1] - 1:+.0%} tokens per dollar ({best - 1:+.0%})", holds=best > goals[-1]
    )
    return section


def everything_emulated(player: Player) -> Section:
    return everything(player, EMULATED, ("8k",), (1.8, 1.4))
