"""`polyrl simulate`: play a scenario on a virtual clock; table and pictures for a person, JSON for a machine.

Rules: a scenario that cannot be played is refused before anything is written; a folder that holds something is never
written into; where a file cannot be written, none is left. Exit code 1 means that we are wrong: a law does not hold, or
the run got stuck.
"""

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from polyrl.disk import remove_files
from polyrl.errors import UserError

if TYPE_CHECKING:
    from polyrl.journal.files import JournalWriter
    from polyrl.sim.result import Result
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
    parser.epilog = EXAMPLE
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("scenario", metavar="SCENARIO", nargs="?", help="a name of --list, or a file ending in .toml")
    parser.add_argument("overrides", metavar="section.key=value", nargs="*", help="changes to the scenario")
    parser.add_argument("--list", action="store_true", help="list the scenarios that ship with PolyRL")
    add_run_options(parser)
    parser.add_argument("--out", metavar="DIR", help="write result, steps, journal and pictures to a new folder")


def add_run_options(parser: argparse.ArgumentParser) -> None:
    """What `simulate` and `plan` have in common."""
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of everything random (default: 0)")
    parser.add_argument("--steps", type=int, metavar="N", help="the same as run.steps=N")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    parser.add_argument(
        "--no-progress", action="store_true", help="no progress on stderr (a bar, or a line now and then in a log)"
    )


def run(args: argparse.Namespace) -> int:
    if args.list:
        return _list(as_json=args.json)
    from polyrl.sim.simulation import Simulation, StuckError

    scenario = load(args)
    out = None if args.out is None else new_folder(args.out)
    journal = None if out is None else _LateJournal(out)
    sim = Simulation(scenario, args.seed, watch=None if journal is None else journal.append)
    if journal is not None:
        journal.sim = sim
    started = time.perf_counter()
    try:
        with writing_to(out), progress("simulating", scenario.run.steps, shown=not args.no_progress) as on_step:
            _play(sim, journal, on_step)
    except StuckError as error:
        print(f"polyrl: stuck: {error}", file=sys.stderr)
        return EXIT_WRONG
    return _report(sim, time.perf_counter() - started, out, as_json=args.json)


def _play(sim: "Simulation", journal: "_LateJournal | None", on_step: Callable[[int], None] | None) -> None:
    try:
        sim.run(on_step)
    finally:
        if journal is not None:
            journal.close()


def load(args: argparse.Namespace) -> "Scenario":
    """The scenario that the arguments ask for."""
    from polyrl.sim.library import load_scenario

    if args.scenario is None:
        raise UserError("expected a SCENARIO; `polyrl simulate --list` shows those that ship with PolyRL")
    if args.seed < 0:
        raise UserError(f"--seed: got {args.seed}, expected an integer >= 0")
    steps = [] if args.steps is None else [f"run.steps={args.steps}"]
    return load_scenario(args.scenario, [*args.overrides, *steps])


def new_folder(name: str) -> Path:
    """Where files may go: a folder that is empty or not there yet. It is not made here."""
    path = Path(name)
    if path.is_dir():
        if any(path.iterdir()):
            raise UserError(f"--out: {name} exists and is not empty; nothing is written over, name a new folder")
    elif path.exists():
        raise UserError(f"--out: {name} is a file, expected a folder or a new name")
    return path


def make_folder(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--out: cannot make {path}: {error.strerror}") from error


@contextmanager
def writing_to(out: Path | None) -> Iterator[None]:
    """Says in one line that a file of --out cannot be written, and leaves none there."""
    try:
        yield
    except OSError as error:
        if out is None:
            raise
        remove_files(out)
        raise UserError(f"--out: cannot write to {out}: {error.strerror or error}") from error


@contextmanager
def progress(words: str, total: int, *, shown: bool) -> Iterator[Callable[[int], None] | None]:
    """What is done, on stderr: a bar in a terminal, otherwise a line now and then. Gives what to call with a number."""
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


class _LateJournal:
    """The journal of a run, made with its first record: what is refused before that leaves no file behind."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._writer: JournalWriter | None = None
        self.sim: Simulation | None = None

    def append(self, record: bytes) -> None:
        if self._writer is None:
            self._writer = self._open()
        self._writer.append_encoded(record)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()

    def _open(self) -> "JournalWriter":
        from polyrl.journal.files import FILE_NAME, JournalWriter

        assert self.sim is not None, "a record before the simulation began"
        make_folder(self._folder)
        about = {"scenario": self.sim.scenario.name, "seed": str(self.sim.seed)}
        return JournalWriter(self._folder / FILE_NAME, self.sim.config, about)


def _list(*, as_json: bool) -> int:
    from polyrl.config.shipped import show_shipped
    from polyrl.sim.library import list_scenarios

    found = list_scenarios()
    if as_json:
        import json

        print(json.dumps([{"name": name, "about": about} for name, about in found], indent=2))
        return EXIT_OK
    print(show_shipped(found))
    return EXIT_OK


def _report(sim: "Simulation", wall_s: float, out: Path | None, *, as_json: bool) -> int:
    from polyrl.sim.result import summarize, to_json

    result = summarize(sim, wall_s)
    if as_json:
        print(to_json(result))
    else:
        _print_report(sim, result)
    if out is not None:
        with writing_to(out):
            _write_files(sim, result, out)
        if not as_json:
            show_written(out)
    for broken in result.broken_laws:
        print(f"polyrl: law violated: {broken}", file=sys.stderr)
    return EXIT_WRONG if result.law_violations else EXIT_OK


def _print_report(sim: "Simulation", result: "Result") -> None:
    from rich.console import Console

    from polyrl.sim.report import whole_report

    console = Console(highlight=False)
    console.print(whole_report(sim, result, console.width))


def _write_files(sim: "Simulation", result: "Result", out: Path) -> None:
    import msgspec

    from polyrl.config import dump_toml
    from polyrl.sim.pictures import draw_all
    from polyrl.sim.result import to_json
    from polyrl.telemetry.canvas import NoPlottingError

    (out / "result.json").write_text(to_json(result) + "\n", encoding="utf-8")
    (out / "steps.jsonl").write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in sim.lines))
    (out / "scenario.toml").write_text(dump_toml(sim.scenario), encoding="utf-8")
    try:
        draw_all(sim, out)
    except NoPlottingError as error:
        print(f"polyrl: {error}", file=sys.stderr)


def show_written(out: Path) -> None:
    print(f"\nwritten to {out}: {', '.join(sorted(path.name for path in out.iterdir()))}")
