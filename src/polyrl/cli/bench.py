"""`polyrl bench`: measure a part of PolyRL on this machine."""

import argparse
import json
from typing import Any

EXAMPLE = """\
examples:
  polyrl bench scheduler            about two minutes
  polyrl bench scheduler --json     one object, for a machine
  polyrl bench scheduler --quick    seconds; shows that it runs, its figures mean little
  polyrl bench relay                about ten minutes: the manager beside nginx, sglang-router and vllm-router, which
                                    are installed into a cache of their own; what cannot be is said"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EXAMPLE
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("part", choices=["scheduler", "relay"], help="what to measure")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the table")
    parser.add_argument("--quick", action="store_true", help="a small load, for trying the command out")


def run(args: argparse.Namespace) -> int:
    if args.part == "relay":
        from polyrl.cli.bench_relay import compare

        result = compare.measure(quick=args.quick)
        lines = compare.table(result)
    else:
        from polyrl.cli import bench_scheduler

        result = bench_scheduler.measure(quick=args.quick)
        lines = _table(result)
    print(json.dumps(result, indent=2) if args.json else "\n".join(lines))
    return 0


def _table(result: dict[str, Any]) -> list[str]:
    goals, growth = result["goals"], result["growth"]
    few, many = growth["workers"]
    lines = [
        f"events a second             {result['events_per_s']:>12,}   goal: at least {goals['events_per_s']:,}",
        f"  of {result['workers']} workers, {result['peak_samples_in_flight']:,} samples in flight, "
        f"{result['events']:,} events, {result['lease_updates_per_s']:,} leases updated a second",
        f"cost, {many:,} to {few} workers    {result['cost_ratio_1000_to_10_workers']:>12.2f}   "
        f"goal: below {goals['cost_ratio_1000_to_10_workers']:g}",
        f"  {growth['us_per_event'][0]} and {growth['us_per_event'][1]} us an event, "
        f"{growth['mean_leases_in_flight']:,} leases in flight",
        f"bytes a sample              {result['bytes_per_sample']:>12,}   goal: below {goals['bytes_per_sample']:,}",
        f"  with {result['bytes_per_sample_in_flight']:,} in flight",
        "",
        f"{'event':<20}{'count':>10}{'us each':>12}{'of all time':>13}",
    ]
    for name, count in result["events_by_type"].items():
        share = result["share_of_time"][name]
        lines.append(f"{name:<20}{count:>10,}{result['us_per_event'][name]:>12,.1f}{share:>13.1%}")
    machine = result["machine"]
    where = f"{machine['cpu']}, Python {machine['python']}, gc {result['gc']}, commit {result['commit']}"
    return [*lines, "", where]
