"""A run as a person reads it in a terminal: the table, the timeline of every worker, the saw-tooth of step times.

Rules kept here: everything is text that keeps its meaning without colour; nothing is wider than the width given; what
is left out for want of room is said. The first half are plain functions of numbers; only the second knows rich.
"""

from collections.abc import Iterable, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from polyrl.ids import Seconds
from polyrl.sim.result import Measured, Result, is_local, measure_steps, num_warmup_steps
from polyrl.sim.simulation import Simulation
from polyrl.telemetry.looks import (
    ACTIVITIES,
    CAUSES,
    GONE,
    KINDS,
    LEFT,
    MOVES,
    nice_ticks,
    show_seconds,
    show_tokens,
    unit_for,
)
from polyrl.telemetry.timeline import Span, moments_of_going, seconds_by_activity

_MAX_ROWS = 40
_BAR_ROWS = 6
_MAX_BAR_WIDTH = 4
_EIGHTHS = " ▁▂▃▄▅▆▇█"
_MIN_WIDTH = 40


# Plain functions of numbers


def cells(spans: Sequence[Span], total_s: Seconds, width: int) -> list[str | None]:
    """Return a worker's main activity in each of `width` equal stretches of time; None: it was not there.

    The stretch in which it went away is `LEFT`, however short that was against the rest.
    """
    goes_at = moments_of_going(spans, total_s)
    result: list[str | None] = []
    first = 0
    for column in range(width):
        start, end = total_s * column / width, total_s * (column + 1) / width
        while first < len(spans) and spans[first].end_s <= start:
            first += 1
        within: list[Span] = []
        for span in spans[first:]:
            if span.start_s >= end:
                break
            within.append(span)
        seconds = seconds_by_activity(within, start, end)
        absent = end - start - sum(seconds.values())
        best = max(seconds, key=lambda activity: seconds[activity], default=None)
        if any(start < moment <= end for moment in goes_at):
            result.append(LEFT)
        else:
            result.append(None if best is None or absent > seconds[best] else best)
    return result


def merge_rows(rows: dict[str, list[str | None]]) -> list[tuple[str, list[str | None]]]:
    """Rows in order, neighbours that look the same as one: `local1..16`."""
    merged: list[tuple[str, str, list[str | None]]] = []
    for name, row in rows.items():
        if merged and merged[-1][2] == row and is_local(name):
            merged[-1] = (merged[-1][0], name, row)
        else:
            merged.append((name, name, row))
    return [(first if first == last else f"{first}..{last.removeprefix('local')}", row) for first, last, row in merged]


def time_axis(total_s: Seconds, width: int) -> tuple[str, str]:
    """Return a ruler of `width` characters, and the numbers under it."""
    unit = unit_for(total_s)
    ruler, labels = ["─"] * width, [" "] * width
    taken = 0
    for tick in nice_ticks(total_s / unit.seconds, max(1, width // 12)):
        column = min(width - 1, round(tick * unit.seconds / total_s * width)) if total_s > 0 else 0
        label = f"{tick:g}" if tick else f"0 {unit.name}"
        ruler[column] = "┬"
        if taken <= column <= width - len(label):
            labels[column : column + len(label)] = label
            taken = column + len(label) + 1
    return "".join(ruler), "".join(labels).rstrip()


def columns_of(values: Sequence[float], width: int) -> tuple[list[float], int, int]:
    """Return (means, values a mean stands for, characters a column): as many columns as fit into the width."""
    each = max(1, -(-len(values) // max(1, width)))
    means = [sum(values[i : i + each]) / len(values[i : i + each]) for i in range(0, len(values), each)]
    return means, each, max(1, min(_MAX_BAR_WIDTH, width // max(1, len(means))))


def bar_rows(values: Sequence[float], highest: float, num_rows: int) -> list[list[str]]:
    """Bars from zero, one character wide, as rows from the top; heights in eighths of a row."""
    rows: list[list[str]] = []
    for row in range(num_rows - 1, -1, -1):
        eighths = [round(value / highest * num_rows * 8) - row * 8 if highest > 0 else 0 for value in values]
        rows.append([_EIGHTHS[max(0, min(8, number))] for number in eighths])
    return rows


# Rich


def timeline(sim: Simulation, width: int) -> Group:
    """Return a row for each worker, with its main activity in each column."""
    rows = sim.timeline.rows
    by_name = {name: rows[name] for name in sorted(rows, key=row_order)}
    num_local = sum(is_local(name) for name in by_name)
    label = max((len(name) for name in [*by_name, f"local1..{num_local}"]), default=0) + 1
    room = max(_MIN_WIDTH, width) - label
    merged = merge_rows({name: cells(spans, sim.now, room) for name, spans in by_name.items()})
    lines: list[Text] = [Text("What every worker did", style="bold")]
    lines += [Text(name.rjust(label - 1) + " ").append_text(_row_text(row)) for name, row in merged[:_MAX_ROWS]]
    if len(merged) > _MAX_ROWS:
        lines.append(Text(f"... and {len(merged) - _MAX_ROWS} more rows; --out DIR draws all", style="dim"))
    ruler, numbers = time_axis(sim.now, room)
    lines += [Text(" " * label + ruler, style="dim"), Text(" " * label + numbers, style="dim")]
    lines.append(_legend(row for _, row in merged[:_MAX_ROWS]))
    return Group(*lines)


def saw_tooth(steps: Sequence[Measured], num_warmup: int, width: int) -> Group:
    """Draw a bar a step, its height the step's time; long rounds are marked."""
    highest = max(step.step_s for step in steps)
    unit = unit_for(highest)
    marks = [
        f"{highest / unit.seconds:.0f} {unit.name}",
        f"{highest / 2 / unit.seconds:.0f} {unit.name}",
        f"0 {unit.name}",
    ]
    label = max(len(mark) for mark in marks) + 1
    means, each, columns = columns_of([step.step_s for step in steps], max(_MIN_WIDTH, width) - label - 1)
    kinds = [
        "long" if any(s.line.kind == "long" for s in steps[i : i + each]) else "short"
        for i in range(0, len(steps), each)
    ]
    title = "Seconds of each step" if each == 1 else f"Seconds of each step, means of {each}"
    lines = [Text(title, style="bold")]
    at_row = {0: marks[0], _BAR_ROWS // 2: marks[1]}
    for number, row in enumerate(bar_rows(means, highest, _BAR_ROWS)):
        line = Text(at_row.get(number, "").rjust(label - 1) + "│", style="dim")
        for glyph, kind in zip(row, kinds, strict=True):
            bar = glyph * (columns - 1 or 1) + (" " if columns > 1 else "")
            line.append(bar, style=f"not dim {KINDS[kind]}")
        lines.append(line)
    lines.append(Text(marks[2].rjust(label - 1) + "└" + "─" * (len(means) * columns), style="dim"))
    if "long" in kinds:
        under = "".join(("L" if kind == "long" else " ").ljust(columns) for kind in kinds)
        lines.append(Text(" " * label + under, style=KINDS["long"]))
    words = ["one bar a step" if each == 1 else f"one bar {each} steps"]
    words += ["L: a long round"] if "long" in kinds else []
    words += [f"warm-up, left out of the figures: {num_warmup}"] if num_warmup else []
    lines.append(Text(" " * label + "; ".join(words), style="dim"))
    return Group(*lines)


def speed_by_workers(steps: Sequence[Measured], width: int) -> Group | None:
    """Return the tokens a second by the number of workers; None if it never changed."""
    by_number: dict[int, list[Measured]] = {}
    for step in steps:
        by_number.setdefault(round(step.line.mean_workers), []).append(step)
    if len(by_number) < 2:
        return None
    speeds = {n: sum(s.tokens for s in ones) / sum(s.step_s for s in ones) for n, ones in sorted(by_number.items())}
    highest = max(speeds.values())
    room = max(10, min(60, width - 46))
    lines = [Text("Tokens a second by the number of workers (rounded mean of a step)", style="bold")]
    for number, speed in speeds.items():
        bar = "█" * max(1, round(speed / highest * room))
        count = len(by_number[number])
        line = Text(f"{number:>3} ").append(bar, style=KINDS["short"])
        lines.append(line.append(f" {speed:,.0f} tok/s ({count} step{'s' if count > 1 else ''})"))
    return Group(*lines)


def summary(result: Result) -> Table:
    """Return the table: what was measured, in plain words."""
    title = f"{result.scenario}, seed {result.seed}: {result.steps} steps in {show_seconds(result.virtual_s)}"
    if result.warmup_steps:
        title += f"; times, speed and dollars without the first {_steps(result.warmup_steps)}"
    table = Table(
        title=title, title_justify="left", title_style="bold", box=None, padding=(0, 2, 0, 0), show_header=False
    )
    table.add_column(style="cyan", no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(style="dim")
    for label, value, note in _rows(result):
        table.add_row(label, value, note)
    return table


def whole_report(sim: Simulation, result: Result, width: int) -> Group:
    """Table and pictures, ready to print."""
    steps, num_warmup = measure_steps(sim), num_warmup_steps(sim)
    parts: list[RenderableType] = [summary(result), "", timeline(sim, width), "", saw_tooth(steps, num_warmup, width)]
    by_workers = speed_by_workers(steps, width)
    if by_workers is not None:
        parts += ["", by_workers]
    return Group(*parts)


def row_order(name: str) -> tuple[bool, int, str]:
    """Return the key of an order: the trainer's own first, then in the order of the grants: w2 before w10."""
    digits = "".join(char for char in name if char.isdigit())
    return not is_local(name), int(digits) if digits else 0, name


def _steps(number: int) -> str:
    return "step" if number == 1 else f"{number} steps"


def _row_text(row: Iterable[str | None]) -> Text:
    text = Text()
    for activity in row:
        look = None if activity is None else ACTIVITIES[activity]
        text.append(GONE if look is None else look.glyph, style="" if look is None else look.colour)
    return text


def _legend(rows: Iterable[Iterable[str | None]]) -> Text:
    """Explain the characters that are there to be seen."""
    seen = {activity for row in rows for activity in row}
    text = Text()
    for activity, look in ACTIVITIES.items():
        if activity in seen:
            text.append(f"{look.glyph} ", style=look.colour).append(f"{look.words}   ")
    if None in seen:
        text.append("blank: not there", style="dim")
    text.rstrip()
    return text


def _rows(result: Result) -> Iterable[tuple[str, str, str]]:
    yield from _speed_rows(result)
    yield from _money_rows(result)
    yield from _fleet_rows(result)
    yield from _episode_rows(result)
    yield from _token_rows(result)
    yield from _run_rows(result)


def _speed_rows(result: Result) -> Iterable[tuple[str, str, str]]:
    time, rollout = result.step_time_s, result.rollout_s
    yield (
        "step time",
        show_seconds(time.mean),
        f"half under {show_seconds(time.p50)}, 95% under {show_seconds(time.p95)}",
    )
    if time.short_mean is not None and time.long_mean is not None:
        yield "  short and long", f"{show_seconds(time.short_mean)} / {show_seconds(time.long_mean)}", "means"
    yield "rollout time", show_seconds(rollout.mean), "from a round's opening to its last reward"
    yield "tokens a second", f"{result.throughput_tok_s:,.0f}", "trained, with their prompts"


def _money_rows(result: Result) -> Iterable[tuple[str, str, str]]:
    cost = result.cost
    if cost.tok_per_usd is None:
        yield "dollars", "$0", "all prices are 0"
        return
    yield "tokens a dollar", f"{cost.tok_per_usd:,.0f}", f"${cost.usd_per_mtok:.2f} a million tokens"
    hosts = f", hosts ${cost.hosts_usd:,.2f}" if result.episodes is not None else ""
    split = f"trainer ${cost.trainer_usd:,.2f}, workers ${cost.workers_usd:,.2f}{hosts}"
    yield "dollars", f"${cost.usd:,.2f}", f"{split}; ${cost.usd_per_hour:,.2f} an hour"


def _fleet_rows(result: Result) -> Iterable[tuple[str, str, str]]:
    workers, idle = result.workers, result.idle
    yield "remote workers", f"{workers.mean:.1f}", f"mean; {workers.joins} joined, {workers.losses} lost"
    yield "  worth holding", f"{workers.useful:.1f}", "as many generate a step's samples in the time that it trains"
    yield "trainer waiting", f"{idle.trainer_waiting:.1%}", "of the time: ready to train, no samples there"
    if result.gb_between_regions is not None:
        yield "between regions", f"{result.gb_between_regions:,.1f} GB", "of weights, in the whole run"
    if idle.fleet_idle is not None:
        yield "fleet idle", f"{idle.fleet_idle:.1%}", "of the remote workers' time: nothing to generate"
    memory = ", ".join(f"{n}: {seconds:.0f} s" for n, seconds in result.seed_memory_s.items())
    note = f"learned by number of workers: {memory}" if memory else "a step, on the trainer's own devices"
    yield "seeding window", show_seconds(result.seed_window_s), note
    moves = ", ".join(f"{MOVES.get(cause, cause)} {num:,}" for cause, num in result.migrations_by_cause.items())
    again = f"{show_tokens(result.tokens.reprefilled)} tokens prefilled again"
    yield "migrations", f"{result.migrations:,}", f"{moves}; {again}" if moves else "samples that went on elsewhere"


def _episode_rows(result: Result) -> Iterable[tuple[str, str, str]]:
    episodes = result.episodes
    if episodes is None:
        return
    ended = ", ".join(f"{outcome.replace('_', ' ')} {num:,}" for outcome, num in episodes.ended.items())
    calls = f"{episodes.calls:,} calls; at most {episodes.most_hosted:,} episodes at once"
    yield "episodes", f"{episodes.begun:,}", f"begun; {ended}; {calls}"
    lost = f"; {episodes.host_losses:,} lost while they played" if episodes.host_losses else ""
    yield "hosts", f"{episodes.hosts:.1f}", f"mean; {episodes.host_hours:,.2f} hours, ${episodes.usd:,.2f}{lost}"
    if episodes.places_taken is not None:
        yield "  places taken", f"{episodes.places_taken:.1%}", "of the hosts' places had an episode"
    waited = f"episodes, mean; at most {episodes.most_waiting_for_host:,}"
    yield "  waiting for a host", f"{episodes.waiting_for_host:.1f}", waited
    others = f"{episodes.generating:.1f} generating, {episodes.waiting_for_worker:.1f} waiting for a worker"
    yield "  with their tools", f"{episodes.playing:.1f}", f"episodes, mean; beside them {others}"
    if episodes.engines_busy is not None and episodes.engines_starved is not None:
        yield "engines busy", f"{episodes.engines_busy:.1%}", "of the time in which they could generate"
        words = "idle while episodes were with their tools or waited for a host"
        yield "  lost to waiting", f"{episodes.engines_starved:.1%}", words
    if episodes.prefix_reuse is not None:
        words = "of the context of a next call was still in its engine's cache"
        yield "prefix reuse", f"{episodes.prefix_reuse:.1%}", words


def _token_rows(result: Result) -> Iterable[tuple[str, str, str]]:
    tokens, length = result.tokens, result.length
    yield "tokens generated", show_tokens(tokens.generated), f"of them trained: {show_tokens(tokens.trained)}"
    discarded = sum(tokens.discarded.values())
    share = discarded / tokens.generated if tokens.generated else 0.0
    yield "tokens discarded", show_tokens(discarded), f"{share:.1%} of all generated"
    for cause, num in tokens.discarded.items():
        yield f"  {cause}", show_tokens(num), CAUSES.get(cause, "")
    yield (
        "answer length",
        f"{length.trained_mean:,.0f}",
        f"tokens, mean of what was trained; the longest {length.longest:,}",
    )
    yield (
        "  against `off`",
        f"{length.bias:.1%}",
        f"that would train {length.natural_mean:,.0f}: every prompt's answers, once an epoch",
    )


def _run_rows(result: Result) -> Iterable[tuple[str, str, str]]:
    rounds = ", ".join(f"{num} {kind}" for kind, num in result.rounds.items())
    notes = [f"{result.prompts_deferred:,} prompts put off"] if result.prompts_deferred else []
    notes += [f"{num:,} dropped: {reason}" for reason, num in result.prompts_dropped.items()]
    yield "rounds", rounds, "; ".join(notes)
    for words in result.assumed:
        yield "assumed", "", words
    yield "events", f"{result.events:,}", f"{result.events_per_s:,.0f} a second on this machine"
    yield "law violations", str(result.law_violations), "conservation laws, checked all along"
