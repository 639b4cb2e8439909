"""A plan as a person reads it in a terminal: the table of choices, and what to choose with the reason; hosts alike."""

import os
from collections.abc import Iterator

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

from polyrl.sim.host_planner import HostPlan, HostRow
from polyrl.sim.planner import Choice, Plan, PlanRow

_PIPE_WIDTH = 120


def print_plan(plan: Plan) -> None:
    console = _console()
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


def print_host_plan(plan: HostPlan) -> None:
    console = _console()
    title = f"{plan.scenario}, seed {plan.seed}: {plan.steps} steps each, {plan.slots} episodes a host process"
    table = Table(
        title=title, title_justify="left", title_style="bold", box=None, padding=(0, 1, 0, 0), header_style="cyan"
    )
    heads = ("host\nproc.", "step\ntime", "tokens/s", "hosts\n$/h", "all\n$/h", "$/Mtok", "waiting\nfor host")
    for head in (*heads, "places\ntaken", "calls\nat once", "engines\nbusy"):
        table.add_column(head, justify="right", no_wrap=True)
    for row in plan.rows:
        is_needed = row == plan.needed
        cells = ["failed"] if row.problem is not None else _host_figures(row)
        table.add_row(
            f"> {row.processes}" if is_needed else str(row.processes),
            *cells,
            *[""] * (9 - len(cells)),
            style="bold" if is_needed else "",
        )
    console.print(table)
    found = "[bold green]enough[/]" if plan.is_enough else "[bold yellow]at least[/]"
    console.print(f"\n{found}: {plan.why}.")


def _host_figures(row: HostRow) -> list[str]:
    return [
        f"{row.step_time_s:,.1f} s",
        f"{row.throughput_tok_s:,.0f}",
        f"{row.hosts_usd_per_hour:,.2f}",
        f"{row.usd_per_hour:,.2f}",
        "" if row.usd_per_mtok is None else f"{row.usd_per_mtok:.2f}",
        f"{row.waiting_for_host:,.1f}",
        "" if row.places_taken is None else f"{row.places_taken:.0%}",
        f"{row.generating:,.0f}",
        "" if row.engines_busy is None else f"{row.engines_busy:.0%}",
    ]


def _console() -> Console:
    console = Console(highlight=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = _PIPE_WIDTH  # a file has no width; 80 would cut the headings
    return console


def _tables(plan: Plan, console: Console) -> Iterator[Table]:
    """Yield one table, and further ones for prices that do not fit beside the figures."""
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


def _fits(plan: Plan, console: Console, prices: list[float], *, with_figures: bool) -> bool:
    table = _table(plan, prices, {}, with_figures=with_figures)
    return Measurement.get(console, console.options.update(max_width=1 << 20), table).maximum <= console.width


def _table(plan: Plan, prices: list[float], marks: dict[Choice, str], *, with_figures: bool) -> Table:
    """Return a table with a line for each choice and a column of dollars for each price."""
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
    by_choice: dict[Choice, list[PlanRow]] = {}
    for row in plan.rows:
        by_choice.setdefault(row.choice, []).append(row)
    last = None
    for choice, rows in by_choice.items():
        is_new, last = choice[:2] != last, choice[:2]
        if is_new and table.row_count:
            table.add_row()
        names = [str(choice.staleness) if is_new else "", f"{choice.factor:g}" if is_new else "", str(choice.workers)]
        mark = marks.get(choice, "")
        priced = [row for row in rows if row.worker_price_usd_per_hour in prices]
        cells = _figures(rows[0], priced) if with_figures else _dollars(priced)
        table.add_row(*names, *cells, mark, style="bold" if mark else "")
    return table


def _dollars(rows: list[PlanRow]) -> list[str]:
    return ["" if one.usd_per_mtok is None else f"{one.usd_per_mtok:.2f}" for one in rows]


def _figures(row: PlanRow, priced: list[PlanRow]) -> list[str]:
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


def _marks(plan: Plan) -> dict[Choice, str]:
    marks: dict[Choice, list[str]] = {}
    has_several = len({one.cheapest.row.choice for one in plan.by_price}) > 1
    for one in plan.by_price:
        at = f" at ${one.worker_price_usd_per_hour:g}" if has_several else ""
        for word, row in ((f"cheapest{at}", one.cheapest.row), ("fastest", one.fastest.row)):
            words = marks.setdefault(row.choice, [])
            if word not in words:
                words.append(word)
    return {choice: "< " + ", ".join(words) for choice, words in marks.items()}
