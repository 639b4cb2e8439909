"""A simulated run as pictures in files, those of any run (telemetry/pictures.py), and the picture of a plan."""

from pathlib import Path
from typing import TYPE_CHECKING

from polyrl.sim.report import row_order
from polyrl.sim.result import measure_steps, num_warmup_steps
from polyrl.sim.simulation import Simulation
from polyrl.telemetry.canvas import GRID, SEVERAL, legend_below, new_figure, save, set_titles
from polyrl.telemetry.pictures import steps_figure, timeline_figure, workers_figure
from polyrl.telemetry.runs import DrawnFleet, DrawnRun, DrawnStep
from polyrl.telemetry.timeline import moments_of_going

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from polyrl.sim.host_planner import HostPlan
    from polyrl.sim.planner import Plan


def draw_all(sim: Simulation, folder: Path) -> list[Path]:
    """Draw the three pictures into the folder. Raises NoPlottingError if matplotlib is missing."""
    run = run_of(sim)
    figures = {
        "timeline.png": timeline_figure(run),
        "steps.png": steps_figure(run),
        "workers.png": workers_figure([run]),
    }
    drawn = {folder / name: figure for name, figure in figures.items() if figure is not None}
    for path, figure in drawn.items():
        save(figure, path)
    return list(drawn)


def run_of(sim: Simulation) -> DrawnRun:
    """Return what the pictures show of a finished simulation."""
    warmup = num_warmup_steps(sim)
    steps = [
        DrawnStep(
            step=one.line.step,
            kind=one.line.kind,
            ended_s=one.line.trained_at,
            step_s=one.step_s,
            train_s=one.line.train_s,
            longest=one.line.longest,
            tok_s=one.tok_s,
            workers=one.line.mean_workers,
            usd=one.line.usd,
            rollout_s=one.rollout_s,
            is_warmup=one.line.step < warmup,
        )
        for one in measure_steps(sim)
    ]
    rows = {name: sim.timeline.rows[name] for name in sorted(sim.timeline.rows, key=row_order)}
    ends = [("gone", name, at) for name, spans in rows.items() for at in moments_of_going(spans, sim.now)]
    fleet = DrawnFleet(rows, ends, sim.now) if rows else None
    name = f"{sim.scenario.name}, seed {sim.seed}"
    return DrawnRun(name, steps, fleet, has_prompts_in_tok_s=True, max_new_tokens=sim.config.max_new_tokens)


def draw_plan(plan: "Plan", folder: Path) -> None:
    """Draw plan.png. Raises NoPlottingError if matplotlib is missing."""
    save(plan_figure(plan), folder / "plan.png")


def plan_figure(plan: "Plan") -> "Figure":
    """Dollars a million tokens against tokens a second: a line a way to run, a point a number of workers."""
    figure, axes = new_figure(8.5, 5.4)
    prices = sorted({row.worker_price_usd_per_hour for row in plan.rows})
    rows = [row for row in plan.rows if row.worker_price_usd_per_hour == prices[0] and row.usd_per_mtok is not None]
    ways = sorted({(row.staleness, row.factor) for row in rows})
    factors = sorted({factor for _, factor in ways})
    for staleness, factor in ways:
        ones = sorted(
            (row for row in rows if (row.staleness, row.factor) == (staleness, factor)), key=lambda row: row.workers
        )
        x, y = (
            [row.throughput_tok_s for row in ones],
            [row.usd_per_mtok for row in ones if row.usd_per_mtok is not None],
        )
        label = f"factor {factor:g}, " + ("on-policy" if staleness == 0 else f"staleness {staleness}")
        colour = SEVERAL[factors.index(factor) % len(SEVERAL)]
        axes.plot(x, y, "-o" if staleness == 0 else "--s", color=colour, label=label, markersize=5, linewidth=1.4)
        for row, at_x, at_y in zip(ones, x, y, strict=True):
            axes.annotate(str(row.workers), (at_x, at_y), (4, 4), textcoords="offset points", fontsize=8, color=colour)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.yaxis.set_major_formatter(lambda value, _: f"${value:.2f}")
    axes.grid(color=GRID)
    about = f"numbers: remote workers, at ${prices[0]:g} an hour each; right is faster, down is cheaper"
    title = f"Ways to run {plan.scenario}, seed {plan.seed}"
    set_titles(axes, title, about, "tokens trained a second", "dollars a million tokens")
    legend_below(axes, 3)
    return figure


def draw_host_plan(plan: "HostPlan", folder: Path) -> None:
    """Draw plan.png. Raises NoPlottingError if matplotlib is missing."""
    save(host_plan_figure(plan), folder / "plan.png")


def host_plan_figure(plan: "HostPlan") -> "Figure":
    """Draw the seconds of a step against the number of host processes, with the number that is enough."""
    figure, axes = new_figure(8.5, 5.4)
    rows = [row for row in plan.rows if row.problem is None]
    x, y = [row.processes for row in rows], [row.step_time_s for row in rows]
    axes.plot(x, y, "-o", color=SEVERAL[0], label="step time", markersize=5, linewidth=1.4)
    if plan.needed is not None:
        label = f"{'enough' if plan.is_enough else 'at least'}: {plan.needed.processes}"
        axes.axvline(plan.needed.processes, color=SEVERAL[1], linestyle="--", label=label)
    axes.set_ylim(bottom=0.0)
    axes.grid(color=GRID)
    about = f"{plan.slots} episodes a process at once; {plan.steps} steps each"
    title = f"Hosts of environments for {plan.scenario}, seed {plan.seed}"
    set_titles(axes, title, about, "host processes", "seconds a step")
    legend_below(axes, 2)
    return figure
