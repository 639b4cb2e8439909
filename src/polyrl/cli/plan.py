"""`polyrl plan`: play a scenario with other fleets, factors and staleness, price it, and say what to choose."""

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from polyrl.cli.simulate import add_run_options, load, make_folder, new_folder, progress, show_written, writing_to
from polyrl.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import Console
    from rich.table import Table

    from polyrl.sim.planner import Plan, PlanRow

EXIT_OK = 0
EXIT_WRONG = 1
MAX_WORKERS = 1000
MAX_STALENESS = 16
MAX_FACTOR = 8.0

EXAMPLE = """\
examples:
  polyrl plan elastic-8b                                  42 short simulations, some minutes on two cores
  polyrl plan elastic-8b --workers 0-8 --factors 1 --staleness 0
  polyrl plan my-scenario.toml --worker-price 2.66,5.32 --out out/plan

Fastest means most tokens trained a second; cheapest the fewest dollars a token. A factor of 1 is no over-provisioning,
above 1 a race over prompts and samples. Files of --out: plan.json and, with matplotlib, plan.png."""

_PIPE_WIDTH = 120


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EXAMPLE
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "scenario", metavar="SCENARIO", help="a name of `polyrl simulate --list`, or a file ending in .toml"
    )
    parser.add_argument("overrides", metavar="section.key=value", nargs="*", help="changes to the scenario")
    parser.add_argument("--workers", default="0-6", metavar="LIST", help="remote workers to try (default: 0-6)")
    parser.add_argument(
        "--factors", default="1,1.25,1.5", metavar="LIST", help="over-provisioning (default: 1,1.25,1.5)"
    )
    parser.add_argument("--staleness", default="0,1", metavar="LIST", help="max_staleness to try (default: 0,1)")
    parser.add_argument("--worker-price", metavar="LIST", help="dollars an hour (default: the scenario's)")
    add_run_options(parser)
    parser.add_argument("--out", metavar="DIR", help="write plan.json and plan.png to a new folder")


def run(args: argparse.Namespace) -> int:
    from polyrl.sim import planner

    steps = planner.DEFAULT_STEPS if args.steps is None else args.steps
    args.steps = steps
    scenario = load(args)
    own_price = scenario.fleet.price_usd_per_hour
    prices = [own_price] if args.worker_price is None else _numbers("--worker-price", args.worker_price, 0.0, 1e6)
    wanted = planner.choices(
        _integers("--workers", args.workers, MAX_WORKERS),
        _numbers("--factors", args.factors, 1.0, MAX_FACTOR),
        _integers("--staleness", args.staleness, MAX_STALENESS),
    )
    out = None if args.out is None else new_folder(args.out)
    if not args.no_progress:
        num = min(len(wanted), planner.num_cores())
        words = f"{len(wanted)} simulations of {steps} steps, {num} at a time; narrow --workers, --factors, --staleness"
        print(f"polyrl: planning: {words} for fewer", file=sys.stderr)
    with progress("planning", len(wanted), shown=not args.no_progress) as on_done:
        outcomes = planner.play_all(scenario, wanted, steps, args.seed, on_done=on_done)
    plan = planner.make_plan(scenario, outcomes, prices, args.seed, steps)
    return _report(plan, out, as_json=args.json)


def _integers(option: str, text: str, most: int) -> list[int]:
    """`0-3,6` as [0, 1, 2, 3, 6]."""
    numbers: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise UserError(f"{option}: got {part.strip()!r}, expected integers >= 0 like 0-6 or 0,2,4")
        low, high = int(first), int(last if dash else first)
        if high < low or high > most:
            raise UserError(f"{option}: got {part.strip()!r}, expected a rising range up to {most}")
        numbers.update(range(low, high + 1))
    return sorted(numbers)


def _numbers(option: str, text: str, least: float, most: float) -> list[float]:
    """`1,1.25` as [1.0, 1.25]."""
    numbers: set[float] = set()
    for part in text.split(","):
        try:
            number = float(part)
        except ValueError as error:
            raise UserError(f"{option}: got {part.strip()!r}, expected numbers like {least:g},1.25") from error
        if not least <= number <= most:
            raise UserError(f"{option}: got {number:g}, expected a number from {least:g} to {most:g}")
        numbers.add(number)
    return sorted(numbers)


def _report(plan: "Plan", out: Path | None, *, as_json: bool) -> int:
    from polyrl.sim.result import to_json

    if as_json:
        print(to_json(plan))
    else:
        _print_plan(plan)
    if out is not None:
        make_folder(out)
        with writing_to(out):
            _write_files(plan, out)
        if not as_json:
            show_written(out)
    problems = sorted(
        {
            f"{row.workers} workers, factor {row.factor:g}, staleness {row.staleness}: {row.problem}"
            for row in plan.rows
            if row.problem
        }
    )
    for problem in problems:
        print(f"polyrl: {problem}", file=sys.stderr)
    return EXIT_WRONG if problems else EXIT_OK


def _print_plan(plan: "Plan") -> None:
    from rich.console import Console

    console = Console(highlight=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = _PIPE_WIDTH  # a file has no width; 80 would cut the headings
    for table in _tables(plan, console):
        console.print(table)
    for choice in plan.by_price:
        price = f" at ${choice.worker_price_usd_per_hour:g} a worker and hour" if len(plan.by_price) > 1 else ""
        console.print(f"\n[bold green]cheapest[/]{price}: {choice.cheapest.why}.")
        console.print(f"[bold blue]fastest[/]{price}: {choice.fastest.why}.")
    if plan.useful_workers is not None:
        useful = (
            f"at most about {plan.useful_workers:.1f}: so many generate a step's samples in the time that it trains"
        )
        console.print(f"\n[bold]useful workers[/]: {useful}, more only wait.")


def _tables(plan: "Plan", console: "Console") -> "Iterator[Table]":
    """One table; with more prices than fit beside the figures, those that do not in tables of their own."""
    rest = sorted({row.worker_price_usd_per_hour for row in plan.rows})
    with_figures = True
    while rest or with_figures:
        least = 0 if with_figures else 1
        num = next(
            n
            for n in range(len(rest), -1, -1)
            if n == least or _fits(plan, console, rest[:n], with_figures=with_figures)
        )
        yield _table(plan, rest[:num], _marks(plan), with_figures=with_figures)
        rest, with_figures = rest[num:], False


def _fits(plan: "Plan", console: "Console", prices: list[float], *, with_figures: bool) -> bool:
    from rich.measure import Measurement

    table = _table(plan, prices, {}, with_figures=with_figures)
    return Measurement.get(console, console.options.update(max_width=1 << 20), table).maximum <= console.width


def _table(
    plan: "Plan", prices: list[float], marks: dict[tuple[int, float, int], str], *, with_figures: bool
) -> "Table":
    """One line a choice; a column of dollars for each of the prices."""
    from rich.table import Table

    title = (
        f"{plan.scenario}, seed {plan.seed}: {plan.steps} steps each, trainer ${plan.trainer_price_usd_per_hour:g}/h"
    )
    table = Table(
        title=title if with_figures else "Dollars, by the price of a worker",
        title_justify="left",
        title_style="bold",
        box=None,
        padding=(0, 1, 0, 0),
        header_style="cyan",
    )
    figures = ("tokens/s", "step\ntime") if with_figures else ()
    more = ("trained\nlength", "dis-\ncarded", "trainer\nwaits", "fleet\nidle") if with_figures else ()
    dollars = [f"$/Mtok\nat ${price:g}" for price in prices]
    for head in ["stale-\nness", "factor", "workers", *figures, *dollars, *more]:
        table.add_column(head, justify="right", no_wrap=True)
    table.add_column("", min_width=10)
    by_choice: dict[tuple[int, float, int], list[PlanRow]] = {}
    for row in plan.rows:
        by_choice.setdefault((row.staleness, row.factor, row.workers), []).append(row)
    last = None
    for (staleness, factor, workers), rows in by_choice.items():
        is_new, last = (staleness, factor) != last, (staleness, factor)
        if is_new and table.row_count:
            table.add_row()
        names = [str(staleness) if is_new else "", f"{factor:g}" if is_new else "", str(workers)]
        mark = marks.get((staleness, factor, workers), "")
        priced = [row for row in rows if row.worker_price_usd_per_hour in prices]
        cells = _figures(rows[0], priced) if with_figures else _dollars(priced)
        table.add_row(*names, *cells, mark, style="bold" if mark else "")
    return table


def _dollars(rows: "list[PlanRow]") -> list[str]:
    return ["" if one.usd_per_mtok is None else f"{one.usd_per_mtok:.2f}" for one in rows]


def _figures(row: "PlanRow", priced: "list[PlanRow]") -> list[str]:
    if row.problem is not None:
        return ["failed", "", *("" for _ in priced), "", "", "", ""]
    return [
        f"{row.throughput_tok_s:,.0f}",
        f"{row.step_time_s:,.0f} s",
        *_dollars(priced),
        f"{row.bias:.1%}",
        f"{row.discarded_share:.0%}",
        f"{row.trainer_waiting:.0%}",
        "" if row.fleet_idle is None else f"{row.fleet_idle:.0%}",
    ]


def _marks(plan: "Plan") -> dict[tuple[int, float, int], str]:
    marks: dict[tuple[int, float, int], list[str]] = {}
    cheapest = {
        (one.cheapest.row.staleness, one.cheapest.row.factor, one.cheapest.row.workers) for one in plan.by_price
    }
    for one in plan.by_price:
        at = f" at ${one.worker_price_usd_per_hour:g}" if len(cheapest) > 1 else ""
        for word, row in ((f"cheapest{at}", one.cheapest.row), ("fastest", one.fastest.row)):
            words = marks.setdefault((row.staleness, row.factor, row.workers), [])
            if word not in words:
                words.append(word)
    return {choice: "< " + ", ".join(words) for choice, words in marks.items()}


def _write_files(plan: "Plan", out: Path) -> None:
    from polyrl.sim.pictures import plan_figure
    from polyrl.sim.result import to_json
    from polyrl.telemetry.canvas import NoPlottingError, save

    (out / "plan.json").write_text(to_json(plan) + "\n", encoding="utf-8")
    try:
        save(plan_figure(plan), out / "plan.png")
    except NoPlottingError as error:
        print(f"polyrl: {error}", file=sys.stderr)
