"""`polyrl top`: a live run in the terminal, from another one or over ssh: rounds, workers, waits, the last steps."""

import argparse
import asyncio
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from polyrl.cli import dialing
from polyrl.errors import UserError

if TYPE_CHECKING:
    from polyrl.run.display import Display

EXAMPLE = """\
examples:
  polyrl top runs/first
  polyrl top --manager http://host:5000 --token-file admin.token

RUN is the directory of a live run. Ctrl+C ends it; the run does not notice. Without a terminal: polyrl status."""

_STEPS_SHOWN = 5
_LOOK_EVERY_S = 0.5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_dir", metavar="RUN", nargs="?", help="the directory of a live run on this machine")
    parser.add_argument("--manager", metavar="URL", help="default: that of RUN")
    dialing.add_credentials(parser)


def run(args: argparse.Namespace) -> int:
    from polyrl.run.event_loop import run_loop

    if args.run_dir is None and args.manager is None:
        raise UserError("expected RUN, the directory of a live run, or --manager URL")
    if not sys.stdout.isatty():
        raise UserError("standard output is no terminal; expected one, or use polyrl status")
    run_loop(_watch(args))
    return 0


async def _watch(args: argparse.Namespace) -> None:
    from polyrl.run.display import Display
    from polyrl.run.kept_samples import recipe_of
    from polyrl.wire.control import Status

    run_dir = None if args.run_dir is None else Path(args.run_dir)
    async with dialing.dialer(args) as dialer:
        await dialing.answer(dialer, "/v1/status", Status)  # a wrong address or token is said once, and ends it
    num_steps = 0 if run_dir is None else recipe_of(run_dir).get("train", {}).get("steps", 0)
    name = args.manager if run_dir is None else run_dir.resolve().name
    async with Display(str(name), num_steps, dialing.dialer(args), follows=True) as display:
        if run_dir is None:
            await asyncio.Event().wait()
        else:
            await _follow_steps(display, run_dir)


async def _follow_steps(display: "Display", run_dir: Path) -> None:
    """Tell the display of the steps in the run's metrics, as they come: of the file, only what is new is read."""
    from polyrl.telemetry.metrics import FILE_NAME, GrowingMetrics

    lines, is_first = GrowingMetrics(run_dir / FILE_NAME), True
    while True:
        anew, new = lines.read_new()
        for metrics in new[-_STEPS_SHOWN:] if is_first or anew else new:
            display.step_ended(int(metrics["step"] or 0), metrics)
        is_first = False
        await asyncio.sleep(_LOOK_EVERY_S)
