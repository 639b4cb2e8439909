"""`polyrl simulate`: play a scenario on a virtual clock; table and pictures for a person, JSON for a machine.

A scenario that cannot be played is refused before anything is written. Exit code 1 means a bug of ours: an
invariant does not hold, or the run got stuck.
"""

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from polyrl.errors import UserError

if TYPE_CHECKING:
    from polyrl.sim.out_folder import OutFolder
    from polyrl.sim.scenario import Scenario
    from polyrl.sim.simulation import Simulation

EXIT_OK = 0
EXIT_WRONG = 1
_SILENCE_S = 10.0

EXAMPLE = """\
examples:
  polyrl simulate --list
  polyrl simulate elastic-8b fleet.workers=2
  polyrl simulate spot-trace --seed 7 --out out/spot
  polyrl simulate my-scenario.toml --steps 5 --json

Files of --out: result.json, steps.jsonl, scenario.toml (as played), journal.bin (for replay and story), and with
matplotlib timeline.png, steps.png, workers.png. Exit code 1: a law was violated or the run got stuck; 2: bad input."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("scenario", metavar="SCENARIO", nargs="?", help="a name of --list, or a file ending in .toml")
    parser.add_argument("overrides", metavar="section.key=value", nargs="*", help="changes to the scenario")
    parser.add_argument("--list", action="store_true", help="list the scenarios that ship with PolyRL")
    add_run_options(parser)
    parser.add_argument("--out", metavar="DIR", help="write result, steps, journal and pictures to a new folder")


def add_run_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that `simulate` and `plan` share."""
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of everything random (default: 0)")
    parser.add_argument("--steps", type=int, metavar="N", help="the same as run.steps=N")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    parser.add_argument(
        "--no-progress", action="store_true", help="no progress on stderr (a bar, or a line now and then in a log)"
    )


def run(args: argparse.Namespace) -> int:
    if args.list:
        return _list(as_json=args.json)
    from polyrl.sim.out_folder import OutFolder
    from polyrl.sim.simulation import Simulation, StuckError

    scenario = load(args)
    out = None if args.out is None else OutFolder(args.out)
    sim = Simulation(scenario, args.seed)
    started = time.perf_counter()
    try:
        with progress("simulating", scenario.run.steps, shown=not args.no_progress) as on_step:
            sim.run(on_step) if out is None else out.play(sim, on_step)
    except StuckError as error:
        print(f"polyrl: stuck: {error}", file=sys.stderr)
        return EXIT_WRONG
    return _report(sim, time.perf_counter() - started, out, as_json=args.json)


def load(args: argparse.Namespace) -> "Scenario":
    """Load the scenario that the arguments name."""
    from polyrl.sim.library import load_scenario

    if args.scenario is None:
        raise UserError("expected a SCENARIO; `polyrl simulate --list` shows those that ship with PolyRL")
    if args.seed < 0:
        raise UserError(f"--seed: got {args.seed}, expected an integer >= 0")
    steps = [] if args.steps is None else [f"run.steps={args.steps}"]
    return load_scenario(args.scenario, [*args.overrides, *steps])


@contextmanager
def progress(words: str, total: int, *, shown: bool) -> Iterator[Callable[[int], None] | None]:
    """Show progress on stderr, a bar or a line now and then. Yields a function that takes the number done."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    if not shown:
        yield None
        return
    if not console.is_terminal:
        yield LogProgress(words, total).show
        return
    columns = TextColumn("{task.description}"), BarColumn(None), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(words, total=total)
        yield lambda done: bar.update(task, completed=done)


class LogProgress:
    """Progress for a log: a line after some seconds of silence, none for what is quickly done."""

    def __init__(self, words: str, total: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._words, self._total, self._clock = words, total, clock
        self._began_at = self._said_at = clock()

    def show(self, done: int) -> None:
        now = self._clock()
        if now - self._said_at >= _SILENCE_S and done < self._total:
            self._said_at = now
            print(f"polyrl: {self._words}: {done} of {self._total}, {now - self._began_at:.0f} s", file=sys.stderr)


def _list(*, as_json: bool) -> int:
    from polyrl.config.load import show_shipped
    from polyrl.sim.library import list_scenarios

    found = list_scenarios()
    if as_json:
        import json

        print(json.dumps([{"name": name, "about": about} for name, about in found], indent=2))
        return EXIT_OK
    print(show_shipped(found))
    return EXIT_OK


def _report(sim: "Simulation", wall_s: float, out: "OutFolder | None", *, as_json: bool) -> int:
    from rich.console import Console

    from polyrl.sim.report import whole_report
    from polyrl.sim.result import summarize, to_json

    result = summarize(sim, wall_s)
    if as_json:
        print(to_json(result))
    else:
        console = Console(highlight=False)
        console.print(whole_report(sim, result, console.width))
    if out is not None:
        with without_pictures():
            out.write_result(sim, result)
        if not as_json:
            print(f"\nwritten to {out}")
    for broken in result.broken_laws:
        print(f"polyrl: law violated: {broken}", file=sys.stderr)
    return EXIT_WRONG if result.law_violations else EXIT_OK


@contextmanager
def without_pictures() -> Iterator[None]:
    """Say in one line that there are no pictures, and go on."""
    from polyrl.telemetry.canvas import NoPlottingError

    try:
        yield
    except NoPlottingError as error:
        print(f"polyrl: {error}", file=sys.stderr)
