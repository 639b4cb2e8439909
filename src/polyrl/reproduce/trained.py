"""The lengths that tail batching trains, the course of its step times, and training on more devices than was
published."""

import math

from polyrl.reproduce.comparing import Section, Table, times
from polyrl.reproduce.measures import (
    discarded_share,
    longest,
    mean,
    of_kind,
    rollout_s,
    step_s,
    tok_s,
    tokens,
    trained_length,
)
from polyrl.reproduce.playing import Player, Runs, Variant
from polyrl.reproduce.published import BREAKDOWN_S, CAP, EARLIER_BIAS
from polyrl.reproduce.tail import FREE_REWARDS, SYNCHRONOUS, TAIL

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
    cases = {mode: Variant(SYNCHRONOUS["16k"], (*overrides, f"rounds.tail_batching={mode}")) for mode in MODES}
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
    fixed = player.play({cap: Variant(TAIL[cap], length) for cap in CAP})
    adaptive = player.play({cap: Variant(TAIL[cap], (*length, "rounds.adaptive=true")) for cap in CAP})
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


# Training on more devices

DEVICES = {"8k": 16, "16k": 32}
MORE_DEVICES = (16, 32, 64, 128)


def more_devices(player: Player) -> Section:
    section = Section(
        "Training on more devices",
        "RollPacker gives four training times: of short and of long rounds, for 7B on 16 devices and for 14B on 32. "
        "How many tokens those rounds trained is not published; here it is simulated. Each setting then has one line: "
        "seconds that do not depend on tokens, and seconds a token. **Four figures for four unknowns, so nothing is "
        "left to test the fit with.** No figure of one model on several numbers of devices is at hand.",
    )
    whole = player.play({cap: Variant(TAIL[cap], ("run.steps=10", "run.warmup_steps=0")) for cap in CAP})
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
    def case(num: int) -> Variant:
        devices = (f"trainer.num_devices={num}", f"trainer.local_workers={num}")
        return Variant(TAIL["8k"], ("run.steps=10", "run.warmup_steps=0", *devices))

    runs = player.play({num: case(num) for num in MORE_DEVICES})
    base = mean(runs[MORE_DEVICES[0]], tok_s)
    rows = [
        [str(num), f"{mean(one, step_s):.0f}", f"{mean(one, rollout_s):.0f}", times(mean(one, tok_s) / base)]
        for num, one in runs.items()
    ]
    header = ("devices", "step, s", "rollout, s", "tokens/s")
    section.tables.append(Table("`tail-7b-8k` on more devices: nothing published to compare with", header, rows))
