"""`polyrl doctor`: why a run waits, since when, what happens next, and where the time of its last steps went; and,
before a run, whether this machine and a recipe fit."""

import argparse
import asyncio
import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from polyrl.cli import dialing
from polyrl.errors import UserError

if TYPE_CHECKING:
    from polyrl.dashboard.alarms import Alarm
    from polyrl.dashboard.waiting import Slowest
    from polyrl.run.findings import Diagnosis
    from polyrl.wire.control import Status

EXIT_OK = 0
EXIT_NEEDS_HELP = 1

EXAMPLE = """\
examples:
  polyrl doctor runs/first
  polyrl doctor runs/first --json
  polyrl doctor --manager http://host:5000 --token-file admin.token
  polyrl doctor --machine
  polyrl doctor --recipe my.toml

RUN is the directory of a run, live, ended or killed. The manager is asked twice, a moment apart; metrics.jsonl says
where the time of the last steps went. Exit code 0: it goes on by itself, or is done. 1: it waits for something that
does not come by itself, and what to do. 2: there is no such run, or its manager does not answer.

--machine looks this machine over before a run, --recipe a recipe on it as well. Exit code 0: nothing is wrong; 1:
something is, and what to do."""

_APART_S = 2.0
_READ_S = 15.0
"""The time for reading a journal: a long run's takes minutes, and `polyrl dash` reads it beside."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_dir", metavar="RUN", nargs="?", help="the directory of a run on this machine")
    parser.add_argument("--manager", metavar="URL", help="default: that of RUN")
    dialing.add_credentials(parser)
    parser.add_argument("--machine", action="store_true", help="look this machine over, before a run")
    parser.add_argument("--recipe", metavar="FILE", help="look a recipe over on this machine: a file, or a name")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")


def run(args: argparse.Namespace) -> int:
    from polyrl.run import diagnosis, hosts, workers
    from polyrl.telemetry import last_steps

    if args.machine or args.recipe is not None:
        return _look_over(args)
    if args.run_dir is None and args.manager is None:
        raise UserError("expected RUN, the directory of a run, or --manager URL")
    run_dir = None if args.run_dir is None else Path(args.run_dir)
    steps = [] if run_dir is None else diagnosis.read_steps(run_dir)
    told: tuple[Status, ...] = ()
    if run_dir is not None and (stopped := diagnosis.diagnose_stopped(run_dir)) is not None:
        found = stopped
    elif run_dir is None or args.manager is not None or (run_dir / "manager.json").exists():
        told = _look_twice(args)
        found = diagnosis.diagnose(*told, shlex.quote(args.run_dir or "RUN_DIR"))
    else:
        found = diagnosis.diagnose_remains(run_dir, steps)
    runs, slow, raised, is_read = bool(told), None, list["Alarm"](), False
    if run_dir is not None and steps:
        slow, raised, is_read = _as_its_page(run_dir, told)
    past = last_steps.tell(steps, "" if slow is None and is_read else None if slow is None else slow.name)
    join = workers.join_command_of(run_dir) if runs and run_dir is not None else ""
    join_hosts = hosts.join_commands_of(run_dir) if runs and run_dir is not None else []
    if args.json:
        findings = [one._asdict() for one in found.findings]
        tree = {"running": runs, "moving": found.is_moving, "needs_help": found.needs_help, "findings": findings}
        tree["slow"] = None if slow is None else slow._asdict()
        tree["alarms"] = [one._asdict() for one in raised]
        print(json.dumps({**tree, "last_steps": past, "join": join, "join_hosts": join_hosts}, indent=2))
    else:
        joining = [f"a worker joins with: {join}"] if join else []
        joining += [f"a host joins with: {one}" for one in join_hosts]
        alarming = [line for one in raised for line in _lines_of_alarm(one)]
        _print(found, [*past, *_lines_of(slow), *alarming, *joining], runs=runs)
    return EXIT_NEEDS_HELP if found.needs_help else EXIT_OK


def _look_over(args: argparse.Namespace) -> int:
    from polyrl.config.recipe_files import load_recipe
    from polyrl.run.machine import check_machine, check_recipe

    recipe = None if args.recipe is None else load_recipe(args.recipe, [])
    run_dir = Path("runs" if recipe is None else recipe.run_dir)
    found = check_machine(run_dir) + ([] if recipe is None else check_recipe(recipe, run_dir))
    is_wrong = any(one.verdict == "wrong" for one in found)
    if args.json:
        print(json.dumps({"wrong": is_wrong, "checks": [one._asdict() for one in found]}, indent=2))
        return EXIT_NEEDS_HELP if is_wrong else EXIT_OK
    width = max(len(one.name) for one in found)
    for one in found:
        print(f"{one.verdict:<7}  {one.name:<{width}}  {one.what}")
        if one.do and one.verdict != "ok":
            print(f"{'':<7}  {'':<{width}}  you could: {one.do}")
    return EXIT_NEEDS_HELP if is_wrong else EXIT_OK


def _look_twice(args: argparse.Namespace) -> "tuple[Status, Status]":
    from polyrl.run.diagnosis import resume_command
    from polyrl.run.event_loop import run_loop
    from polyrl.wire.control import Status
    from polyrl.wire.dial import Unreachable

    async def look_twice() -> tuple[Status, Status]:
        async with dialing.dialer(args) as dialer:
            earlier = await dialing.answer(dialer, "/v1/status", Status)
            await asyncio.sleep(_APART_S)
            return earlier, await dialer.get("/v1/status", Status)

    try:
        return run_loop(look_twice())
    except Unreachable as error:
        raise UserError(f"{error}; if the run was killed: {resume_command(args.run_dir or 'RUN_DIR')}") from error


def _as_its_page(run_dir: Path, told: "Sequence[Status]") -> "tuple[Slowest | None, list[Alarm], bool]":
    """Return what holds the run up and its alarms, as its page says them, and whether the journal was read for that."""
    from polyrl.dashboard.watched import WatchedRun

    try:
        watched = WatchedRun(run_dir, live=bool(told))
    except UserError:  # its journal is empty, or gone
        return None, [], False
    watched.start()
    try:
        is_read = watched.follower.wait(_READ_S)
        for status in told:
            watched.tell(status)
        return watched.slowest(), watched.raised(), is_read
    finally:
        watched.close()


def _lines_of(slow: "Slowest | None") -> list[str]:
    if slow is None:
        return []
    return [slow.what, *_facts(slow)]


def _lines_of_alarm(one: "Alarm") -> list[str]:
    return [f"alarm: {one.name}: {one.what}", *_facts(one)]


def _facts(one: "Slowest | Alarm") -> list[str]:
    facts = {"why": one.why, "costs": one.costs, "you could": one.do, "with": one.run}
    return [f"    {word}: {text}" for word, text in facts.items() if text]


def _print(found: "Diagnosis", past: list[str], *, runs: bool) -> None:
    lines: list[str] = []
    for one in found.findings:
        lines.append(one.what)
        lines += [f"    next: {one.then}"] if runs else []
        lines += [f"    you could: {one.do}"] if one.do else []
    if runs and not found.is_moving:
        lines.append("nothing moved while it was looked at")
    print("\n".join([*lines, *past]))
