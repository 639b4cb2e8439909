"""`polyrl doctor`: why a run waits, since when, what happens next, and where the time of its last steps went."""

import argparse
import asyncio
import json
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

from polyrl.cli import dialing
from polyrl.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from polyrl.run.diagnosis import Diagnosis
    from polyrl.telemetry.metrics import MetricValue

EXIT_OK = 0
EXIT_NEEDS_HELP = 1

EXAMPLE = """\
examples:
  polyrl doctor runs/first
  polyrl doctor runs/first --json
  polyrl doctor --manager http://host:5000 --token-file admin.token

RUN is the directory of a run, live, ended or killed. The manager is asked twice, a moment apart; metrics.jsonl says
where the time of the last steps went. Exit code 0: it goes on by itself, or is done. 1: it waits for something that
does not come by itself, and what to do. 2: there is no such run, or its manager does not answer."""

_APART_S = 2.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EXAMPLE
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("run_dir", metavar="RUN", nargs="?", help="the directory of a run on this machine")
    parser.add_argument("--manager", metavar="URL", help="default: that of RUN")
    dialing.add_credentials(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")


def run(args: argparse.Namespace) -> int:
    from polyrl.telemetry import last_steps

    if args.run_dir is None and args.manager is None:
        raise UserError("expected RUN, the directory of a run, or --manager URL")
    run_dir = None if args.run_dir is None else Path(args.run_dir)
    steps = [] if run_dir is None else _read_steps(run_dir)
    if run_dir is None or args.manager is not None or (run_dir / "manager.json").exists():
        runs, found = True, _examine(args)
    else:
        runs, found = False, _examine_remains(run_dir, steps)
    past = last_steps.tell(steps)
    join = _join_command(run_dir) if runs and run_dir is not None else ""
    if args.json:
        findings = [one._asdict() for one in found.findings]
        tree = {"running": runs, "moving": found.is_moving, "needs_help": found.needs_help, "findings": findings}
        print(json.dumps({**tree, "last_steps": past, "join": join}, indent=2))
    else:
        _print(found, [*past, *([f"a worker joins with: {join}"] if join else [])], runs=runs)
    return EXIT_NEEDS_HELP if found.needs_help else EXIT_OK


def _join_command(run_dir: Path) -> str:
    """How a worker joins a run that `polyrl train` runs; empty where that is not known here."""
    from polyrl.config import build, load_toml
    from polyrl.config.recipe import Recipe
    from polyrl.run import workers
    from polyrl.run.encryption import encryption

    try:
        recipe = build(load_toml(run_dir / "recipe.toml"), Recipe)
        url = json.loads((run_dir / "manager.json").read_text())["url"]
        tls = encryption(recipe.manager)
        url = url if tls is None else tls.url(int(url.rpartition(":")[2]))
    except (UserError, OSError, ValueError, KeyError):
        return ""
    return workers.join_command(recipe, run_dir, url)


def _read_steps(run_dir: Path) -> "list[dict[str, MetricValue]]":
    from polyrl.telemetry.metrics import FILE_NAME, read_steps

    if not (run_dir / "journal").is_dir():
        raise UserError(f"{run_dir}: no run there; expected a directory with a journal")
    metrics = run_dir / FILE_NAME
    return read_steps(metrics) if metrics.exists() else []


def _examine_remains(run_dir: Path, steps: "Sequence[Mapping[str, MetricValue]]") -> "Diagnosis":
    """Of a run that nobody runs. What it wanted is in the recipe that it was started with."""
    from polyrl.config import load_toml
    from polyrl.run.diagnosis import Diagnosis, Finding

    file = run_dir / "recipe.toml"
    if not file.exists():
        return Diagnosis(False, (Finding("no manager runs there", "nothing"),))
    recipe = load_toml(file)
    if why := _why_done(run_dir, recipe, steps):
        return Diagnosis(False, (Finding(f"the run is done: {why}", "nothing"),))
    what = f"nobody runs it: {len(steps)} of {recipe.get('train', {}).get('steps')} steps are trained"
    kept = recipe.get("checkpoint", {}).get("enabled", True)
    do = f"go on with it: {_resume(str(run_dir))}" if kept else _begin_anew(run_dir)
    return Diagnosis(False, (Finding(what, "nothing", do, needs_help=True),))


def _why_done(run_dir: Path, recipe: dict[str, Any], steps: "Sequence[Mapping[str, MetricValue]]") -> str | None:
    """None: something is left to train. A run that is done is not gone on with: `--resume` refuses it."""
    train, num_steps = recipe.get("train", {}), len(steps)
    if num_steps == train.get("steps"):
        return f"all {num_steps} steps are trained"
    enough, reward = train.get("stop_at_reward"), steps[-1].get("reward/mean") if steps else None
    if enough is not None and isinstance(reward, int | float) and reward >= enough:
        return f"the mean reward has reached {enough:g}, after {num_steps} steps"
    if recipe.get("data", {}).get("num_epochs") is None:
        return None
    from polyrl.trainer.state import checkpoint

    return f"the data has ended, after {num_steps} steps" if checkpoint.has_data_ended(run_dir, num_steps) else None


def _begin_anew(run_dir: Path) -> str:
    from polyrl.run.changes import begin_anew

    return f"{begin_anew(run_dir, has_weights=False)}: checkpoint.enabled = false kept nothing"


def _resume(run_dir: str) -> str:
    return f"polyrl train --resume {shlex.quote(run_dir)}"


def _examine(args: argparse.Namespace) -> "Diagnosis":
    from polyrl.run.diagnosis import diagnose
    from polyrl.run.event_loop import run_loop
    from polyrl.wire.control import Status
    from polyrl.wire.dial import Unreachable

    async def ask_twice() -> tuple[Status, Status]:
        async with dialing.dialer(args) as dialer:
            earlier = await dialing.answer(dialer, "/v1/status", Status)
            await asyncio.sleep(_APART_S)
            return earlier, await dialer.get("/v1/status", Status)

    try:
        earlier, now = run_loop(ask_twice())
    except Unreachable as error:
        raise UserError(f"{error}; if the run was killed: {_resume(args.run_dir or 'RUN_DIR')}") from error
    return diagnose(earlier, now, shlex.quote(args.run_dir or "RUN_DIR"))


def _print(found: "Diagnosis", past: list[str], *, runs: bool) -> None:
    lines: list[str] = []
    for one in found.findings:
        lines.append(one.what)
        lines += [f"    next: {one.then}"] if runs else []
        lines += [f"    you could: {one.do}"] if one.do else []
    if runs and not found.is_moving:
        lines.append("nothing moved while it was looked at")
    print("\n".join([*lines, *past]))
