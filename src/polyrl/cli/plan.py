"""`polyrl plan`: play a scenario with other fleets, factors and staleness, price it, and say what to choose.

With `--hosts` the number of processes that play environments is tried instead, everything else as the scenario says.
"""

import argparse
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from polyrl.cli.simulate import add_run_options, load, progress, without_pictures
from polyrl.errors import UserError

if TYPE_CHECKING:
    from polyrl.sim.host_planner import HostPlan
    from polyrl.sim.out_folder import OutFolder
    from polyrl.sim.planner import Plan
    from polyrl.sim.scenario import Scenario

EXIT_OK = 0
EXIT_WRONG = 1
MAX_WORKERS = 1000
MAX_HOSTS = 1000
MAX_STALENESS = 16
MAX_FACTOR = 8.0

EXAMPLE = """\
examples:
  polyrl plan elastic-8b                                  42 short simulations, some minutes on two cores
  polyrl plan elastic-8b --workers 0-8 --factors 1 --staleness 0
  polyrl plan my-scenario.toml --worker-price 2.66,5.32 --out out/plan
  polyrl plan --explain runs/first                        every decision of its autoscaler, with its reason
  polyrl plan agent-tools-8b fleet.workers=3 --hosts 2-16,24      how many processes for its environments

Fastest means most tokens trained a second; cheapest the fewest dollars a token. A factor of 1 is no over-provisioning,
above 1 a race over prompts and samples. Files of --out: plan.json and, with matplotlib, plan.png."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "scenario", metavar="SCENARIO", help="a name of `polyrl simulate --list`, or a file ending in .toml"
    )
    parser.add_argument("overrides", metavar="section.key=value", nargs="*", help="changes to the scenario")
    parser.add_argument(
        "--workers", metavar="LIST", help="remote workers to try (default: 0-6; 1-6 if only they generate)"
    )
    parser.add_argument("--factors", metavar="LIST", help="over-provisioning (default: 1,1.25,1.5)")
    parser.add_argument("--staleness", metavar="LIST", help="max_staleness to try (default: 0,1)")
    parser.add_argument("--worker-price", metavar="LIST", help="dollars an hour (default: the scenario's)")
    parser.add_argument("--hosts", metavar="LIST", help="host processes to try, in place of all of the above")
    parser.add_argument(
        "--explain", action="store_true", help="SCENARIO is the directory of a run: say why its fleet grew and shrank"
    )
    add_run_options(parser)
    parser.add_argument("--out", metavar="DIR", help="write plan.json and plan.png to a new folder")


def run(args: argparse.Namespace) -> int:
    from polyrl.sim import planner
    from polyrl.sim.out_folder import OutFolder

    if args.explain:
        return _explain(args)
    args.steps = planner.DEFAULT_STEPS if args.steps is None else args.steps
    scenario = load(args)
    if args.hosts is not None:
        return _plan_hosts(args, scenario)
    own_price = scenario.fleet.price_usd_per_hour
    prices = [own_price] if args.worker_price is None else _numbers("--worker-price", args.worker_price, 0.0, 1e6)
    wanted = planner.choices(
        _integers("--workers", _default_workers(scenario) if args.workers is None else args.workers, MAX_WORKERS),
        _numbers("--factors", "1,1.25,1.5" if args.factors is None else args.factors, 1.0, MAX_FACTOR),
        _integers("--staleness", "0,1" if args.staleness is None else args.staleness, MAX_STALENESS),
    )
    out = None if args.out is None else OutFolder(args.out)
    _say_how_many(args, len(wanted), "narrow --workers, --factors, --staleness")
    with progress("planning", len(wanted), shown=not args.no_progress) as on_done:
        played = planner.play_all(scenario, wanted, args.steps, args.seed, on_done=on_done)
    plan = planner.make_plan(scenario, played, prices, args.seed, args.steps)
    return _report_plan(plan, out, as_json=args.json)


def _default_workers(scenario: "Scenario") -> str:
    return "0-6" if scenario.trainer.local_workers else "1-6"


def _explain(args: argparse.Namespace) -> int:
    from polyrl.telemetry.scaling_story import explain

    if args.overrides or args.hosts is not None:
        raise UserError("--explain: reads what a run decided; leave everything else out")
    for line in explain(args.scenario):
        print(line)
    return EXIT_OK


def _plan_hosts(args: argparse.Namespace, scenario: "Scenario") -> int:
    from polyrl.sim.host_planner import plan_hosts
    from polyrl.sim.out_folder import OutFolder

    for option in ("workers", "factors", "staleness", "worker_price"):
        if getattr(args, option) is not None:
            name = f"--{option.replace('_', '-')}"
            raise UserError(f"{name}: --hosts tries nothing else; change the scenario instead, like fleet.workers=4")
    if not scenario.has_environments:
        raise UserError(f"--hosts: no domain of {scenario.name} has an environment; expected domains.NAME.environment")
    numbers = _integers("--hosts", args.hosts, MAX_HOSTS, least=1)
    out = None if args.out is None else OutFolder(args.out)
    _say_how_many(args, len(numbers), "narrow --hosts")
    with progress("planning", len(numbers), shown=not args.no_progress) as on_done:
        plan = plan_hosts(scenario, numbers, args.steps, args.seed, on_done=on_done)
    return _report_hosts(plan, out, as_json=args.json)


def _say_how_many(args: argparse.Namespace, num_runs: int, how_fewer: str) -> None:
    from polyrl.sim import planner

    if not args.no_progress:
        num = min(num_runs, planner.num_cores())
        words = f"{num_runs} simulations of {args.steps} steps, {num} at a time; {how_fewer}"
        print(f"polyrl: planning: {words} for fewer", file=sys.stderr)


def _integers(option: str, text: str, most: int, *, least: int = 0) -> list[int]:
    """Read `0-3,6` as [0, 1, 2, 3, 6]."""
    numbers: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise UserError(
                f"{option}: got {part.strip()!r}, expected integers >= {least} like {least}-6 or {least},2,4"
            )
        low, high = int(first), int(last if dash else first)
        if high < low or high > most or low < least:
            raise UserError(f"{option}: got {part.strip()!r}, expected a rising range from {least} up to {most}")
        numbers.update(range(low, high + 1))
    return sorted(numbers)


def _numbers(option: str, text: str, least: float, most: float) -> list[float]:
    """Read `1,1.25` as [1.0, 1.25]."""
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


def _report_plan(plan: "Plan", out: "OutFolder | None", *, as_json: bool) -> int:
    from polyrl.sim.pictures import draw_plan
    from polyrl.sim.plan_report import print_plan
    from polyrl.sim.planner import show_choice
    from polyrl.sim.result import to_json

    if not as_json:
        print_plan(plan)
    _write(to_json(plan), out, lambda folder: draw_plan(plan, folder), as_json=as_json)
    return _exit_code(f"{show_choice(row)}: {row.problem}" for row in plan.rows if row.problem)


def _report_hosts(plan: "HostPlan", out: "OutFolder | None", *, as_json: bool) -> int:
    from polyrl.sim.pictures import draw_host_plan
    from polyrl.sim.plan_report import print_host_plan
    from polyrl.sim.result import to_json

    if not as_json:
        print_host_plan(plan)
    _write(to_json(plan), out, lambda folder: draw_host_plan(plan, folder), as_json=as_json)
    return _exit_code(f"{row.processes} host processes: {row.problem}" for row in plan.rows if row.problem)


def _write(json: str, out: "OutFolder | None", draw: Callable[[Path], object], *, as_json: bool) -> None:
    if as_json:
        print(json)
    if out is not None:
        with without_pictures():
            out.write({"plan.json": json.encode() + b"\n"}, draw)
        if not as_json:
            print(f"\nwritten to {out}")


def _exit_code(problems: Iterable[str]) -> int:
    """Say what is wrong with choices that are out of the question."""
    found = sorted(set(problems))
    for problem in found:
        print(f"polyrl: {problem}", file=sys.stderr)
    return EXIT_WRONG if found else EXIT_OK
