"""`polyrl plan`: play a scenario with other fleets, factors and staleness, price it, and say what to choose."""

import argparse
import sys
from typing import TYPE_CHECKING

from polyrl.cli.simulate import add_run_options, load, progress, without_pictures
from polyrl.errors import UserError

if TYPE_CHECKING:
    from polyrl.sim.out_folder import OutFolder
    from polyrl.sim.planner import Plan

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
    from polyrl.sim.out_folder import OutFolder

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
    out = None if args.out is None else OutFolder(args.out)
    if not args.no_progress:
        num = min(len(wanted), planner.num_cores())
        words = f"{len(wanted)} simulations of {steps} steps, {num} at a time; narrow --workers, --factors, --staleness"
        print(f"polyrl: planning: {words} for fewer", file=sys.stderr)
    with progress("planning", len(wanted), shown=not args.no_progress) as on_done:
        played = planner.play_all(scenario, wanted, steps, args.seed, on_done=on_done)
    plan = planner.make_plan(scenario, played, prices, args.seed, steps)
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


def _report(plan: "Plan", out: "OutFolder | None", *, as_json: bool) -> int:
    from polyrl.sim.pictures import draw_plan
    from polyrl.sim.plan_report import print_plan
    from polyrl.sim.planner import show_choice
    from polyrl.sim.result import to_json

    if as_json:
        print(to_json(plan))
    else:
        print_plan(plan)
    if out is not None:
        with without_pictures():
            out.write({"plan.json": to_json(plan).encode() + b"\n"}, lambda folder: draw_plan(plan, folder))
        if not as_json:
            print(f"\nwritten to {out}")
    problems = sorted({f"{show_choice(row)}: {row.problem}" for row in plan.rows if row.problem})
    for problem in problems:
        print(f"polyrl: {problem}", file=sys.stderr)
    return EXIT_WRONG if problems else EXIT_OK
