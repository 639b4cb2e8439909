"""Workers that are lost: a fleet that is preempted all the time, three of six at once, and none left."""

from statistics import fmean

from polyrl.reproduce.comparing import Check, Section, Table, in_points, relative
from polyrl.reproduce.measures import discarded_share, mean, tok_s
from polyrl.reproduce.playing import Player, Variant
from polyrl.reproduce.published import (
    LOST_TO_TRUNCATION,
    MIGRATION_SAVES,
    SAVING_TOLERANCE,
    THROUGHPUT_TOLERANCE,
    TOK_S_8B,
)

KILL_STEP = 16
SETTLED_WINDOW_S = 60.0
AWAY_FOR_A_WHILE = (
    "run.steps=4",
    "run.warmup_steps=0",
    "fleet.workers=2",
    "supply.events=[{at_s=200, workers=0}, {at_s=900, workers=2}]",
)
"""A few steps of `zero-workers`: two workers are gone for less than a quarter of an hour."""


def churn(every_s: float, last_s: float, notice_s: float) -> tuple[str, ...]:
    """Return overrides by which two of four machines are taken every so often, and two others granted a second
    later."""
    moments = [every_s * number for number in range(1, int(last_s / every_s))]
    levels = (f"{{at_s={at:g}, workers=2}}, {{at_s={at + 1:g}, workers=4}}" for at in moments)
    return f"supply.events=[{', '.join(levels)}]", f"supply.notice_s={notice_s:g}"


def preemption(player: Player, num_steps: int = 20, warmup_steps: int = 10, every_s: float = 450.0) -> Section:
    section = Section(
        "A fleet that is preempted all the time (RLBoost, 8B)",
        f"`elastic-8b` with four workers: every {every_s:,.0f} s two of them are taken and two others granted. "
        "Published is what RLBoost loses where a failure cuts off a whole group: 6 to 35% of its tokens; compared is "
        "the lower bound. Here samples are independent, and a moved one goes on after its last token that arrived.",
    )
    length = (f"run.steps={num_steps}", f"run.warmup_steps={warmup_steps}")
    ways = {"none": (), "30 s of notice": churn(every_s, 9000, 30), "no notice": churn(every_s, 9000, 0)}
    runs = player.play({way: Variant("elastic-8b", (*length, *world)) for way, world in ways.items()})
    speed = {way: mean(one, tok_s) for way, one in runs.items()}
    lost = {way: mean(one, discarded_share) for way, one in runs.items()}
    rows = [[way, f"{speed[way]:,.0f}", f"{speed[way] / speed['none']:.3f}", f"{lost[way]:.2%}"] for way in ways]
    section.tables.append(Table("Preemptions", ("", "tokens/s", "against none", "tokens discarded"), rows))
    least = LOST_TO_TRUNCATION[0]
    checks = [in_points(way, least, lost[way], None) for way in ways if way != "none"]
    section.compare("Share of tokens that is lost", checks)
    section.claim(
        f"less is lost than by cutting groups off ({max(lost.values()):.2%} against {least:.0%} or more)",
        holds=max(lost.values()) < least,
    )
    return section


def three_of_six(player: Player, at_least: int = 3, step: int = KILL_STEP, more: tuple[str, ...] = ()) -> Section:
    section = Section(
        "Three of six workers preempted (RLBoost, 14B)",
        f"Scenario `three-of-six`: the overhead is what step {step} takes longer than the same step of the same "
        f"seed without a loss. There is no notice, and no worker comes back within the step. {at_least} seeds at "
        "least. The 14B constants were chosen with these two figures in view; the tolerance of 15 points is ours.",
    )
    length = (f"faults.kill_step={step}", f"run.steps={step + 1}", *more)
    cases = {"undisturbed": Variant("three-of-six", (*length, "faults.kill_workers=0"))}
    for at in MIGRATION_SAVES:
        for migrate in ("true", "false"):
            overrides = (*length, f"faults.kill_at_s=[{at}]", f"fleet_rules.migrate={migrate}")
            cases[f"{at} {migrate}"] = Variant("three-of-six", overrides)
    runs = player.play(cases, at_least=at_least)
    took = {name: fmean(played.steps[step].step_s for played in one) for name, one in runs.items()}
    checks: list[Check] = []
    for at, wanted in MIGRATION_SAVES.items():
        migrated, regenerated = (took[f"{at} {migrate}"] - took["undisturbed"] for migrate in ("true", "false"))
        shown = (f"+{migrated:.0f} s", f"+{regenerated:.0f} s", f"{took['undisturbed']:.0f} s")
        checks.append(in_points(f"lost at {at} s", wanted, 1 - migrated / regenerated, SAVING_TOLERANCE, shown))
    header = ("migrating", "regenerating", "undisturbed step")
    section.compare("Overhead saved, by migrating instead of regenerating", checks, header)
    early, late = (check.ours for check in checks)
    section.claim(
        f"migrating saves overhead, and more the later the loss ({early:.0%}, {late:.0%})", holds=0 < early < late
    )
    return section


def three_of_six_emulated(player: Player) -> Section:
    """Play the loss in the second step, with a window that is set to what the simulator learns."""
    return three_of_six(player, 1, 1, ("run.warmup_steps=0", f"seeding.initial_s={SETTLED_WINDOW_S:g}"))


def minimum(
    player: Player, length: tuple[str, ...] = ("run.steps=6", "run.warmup_steps=1"), away: tuple[str, ...] = ()
) -> Section:
    section = Section(
        "The least fleet: no worker (RLBoost, 8B)",
        "RLBoost stands still for ever when its last worker is gone. Here: no worker at all, against the published "
        "synchronous baseline; and `zero-workers`, whose four workers go away for an hour and come back.",
    )
    cases = {
        "alone": Variant("elastic-8b", ("fleet.workers=0", *length)),
        "baseline": Variant("colocated-8b", length),
        "away": Variant("zero-workers", away),
    }
    runs = player.play(cases)
    speed = {name: mean(one, tok_s) for name, one in runs.items()}
    checks = [
        relative("synchronous baseline", TOK_S_8B[0], speed["baseline"], THROUGHPUT_TOLERANCE, shape=",.0f"),
        relative("streaming, no worker", TOK_S_8B[0], speed["alone"], shape=",.0f"),
    ]
    section.compare("8B tokens/s without a worker", checks)
    section.claim(
        "a run without a worker is no slower than the baseline", holds=speed["alone"] >= 0.99 * speed["baseline"]
    )
    steps = runs["away"][0].steps
    alone = sum(step.line.mean_workers < 0.05 for step in steps)
    section.claim(
        f"a run whose workers all go away trains on: {alone} of its {len(steps)} steps without any, and the "
        f"last one with {steps[-1].line.mean_workers:.1f}",
        holds=alone > 0 and steps[-1].line.mean_workers > 0,
    )
    return section
