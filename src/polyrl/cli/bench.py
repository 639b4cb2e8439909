"""`polyrl bench`: measure a part of PolyRL on this machine."""

import argparse
import json
from typing import Any

PARTS = ("scheduler", "relay", "recovery", "engine", "train", "weights", "served")

EXAMPLE = """\
examples:
  polyrl bench scheduler            about two minutes
  polyrl bench scheduler --json     one object, for a machine
  polyrl bench scheduler --quick    seconds; shows that it runs, its figures mean little
  polyrl bench relay                a quarter of an hour: the manager beside nginx, sglang-router and vllm-router, which
                                    are installed into a cache of their own; what cannot be is said
  polyrl bench recovery             about two minutes: how fast a manager that was killed has its run again
  polyrl bench engine --arch qwen3-1.7b --batch 256 --prompt 256 --new 512 --peer transformers
                                    the builtin engine against what memory allows, and a peer
  polyrl bench train                two minutes: the trainer against the matrix limit and plain loops
  polyrl bench weights              about five minutes: versions over loopback beside iperf3, memcpy and mooncake;
                                    deltas; with root, late joiners in network namespaces
  polyrl bench served --server vllm --batch 32 --prompt 64 --new 256
                                    about three minutes: a server straight, and through worker and manager"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EXAMPLE
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("part", choices=PARTS, help="what to measure")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the table")
    parser.add_argument("--quick", action="store_true", help="a small load, for trying the command out")
    relay = parser.add_argument_group("relay")
    relay.add_argument("--workers", type=int, default=16, help="that the samples are shared by (default: %(default)s)")
    engine = parser.add_argument_group("engine and served")
    models = parser.add_argument_group("engine and train")
    models.add_argument("--arch", metavar="NAME", help="random weights of this shape: qwen3-1.7b, tiny-qwen3 (default)")
    models.add_argument("--model", metavar="DIR", help="or a Hugging Face directory")
    models.add_argument("--eager", action="store_true", help="on a GPU: do not compile")
    train = parser.add_argument_group("train")
    train.add_argument("--pack-tokens", type=int, default=2048, help="through the model at once (default: %(default)s)")
    train.add_argument(
        "--shorter", type=int, default=16, help="divide published lengths by this (default: %(default)s)"
    )
    train.add_argument("--checkpointing", action="store_true", help="keep less memory, compute more")
    engine.add_argument("--batch", type=int, default=8, help="samples at once (default: %(default)s)")
    engine.add_argument("--prompt", type=int, default=16, help="tokens of a prompt (default: %(default)s)")
    engine.add_argument("--new", type=int, default=64, help="tokens of an answer (default: %(default)s)")
    served = parser.add_argument_group("served")
    served.add_argument(
        "--server", choices=["vllm", "sglang"], default="vllm", help="which server (default: %(default)s)"
    )
    engine.add_argument("--peer", choices=["transformers", "vllm"], help="measure it on the same work, in the same run")


def run(args: argparse.Namespace) -> int:
    if args.part == "engine":
        result = _measure_engine(args)
        lines = [f"{key:<20}{value}" for key, value in result.items()]
    elif args.part == "train":
        result, lines = _measure_train(args)
    elif args.part == "served":
        result, lines = _measure_served(args)
    elif args.part == "relay":
        from benchmarks.relay import compare

        result = compare.measure(args.workers, quick=args.quick)
        lines = compare.table(result)
    elif args.part == "recovery":
        from benchmarks import recovery as bench_recovery

        result = bench_recovery.measure(quick=args.quick)
        lines = bench_recovery.table(result)
    elif args.part == "weights":
        from benchmarks.weights import compare as weights

        result = weights.measure(quick=args.quick)
        lines = weights.table(result)
    else:
        from polyrl.bench import scheduler as bench_scheduler

        result = bench_scheduler.measure(quick=args.quick)
        lines = _table(result)
    print(json.dumps(result, indent=2) if args.json else "\n".join(lines))
    return 0


def _measure_engine(args: argparse.Namespace) -> dict[str, Any]:
    from polyrl.bench.engine import Work, measure

    arch = _arch(args, "batch", "prompt", "new")
    work = Work(arch, args.model, args.batch, args.prompt, args.new, not args.eager)
    return measure(work, peer=args.peer)


def _measure_served(args: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    from benchmarks import served as bench_served
    from polyrl.errors import UserError

    _arch(args, "batch", "prompt", "new")
    if args.batch % 8:
        raise UserError(f"--batch: {args.batch}; expected a multiple of 8, the samples of a prompt")
    work = bench_served.ServedWork(args.server, args.model, args.batch, args.prompt, args.new)
    if args.quick:
        work = work._replace(turns=1, repetitions=4, new=min(work.new, 32))
    result = bench_served.measure(work)
    return result, bench_served.table(result)


def _measure_train(args: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    from polyrl.bench import train as bench_train

    work = bench_train.TrainWork(
        arch=_arch(args, "pack_tokens", "shorter"),
        model=args.model,
        pack_tokens=args.pack_tokens,
        shorter=args.shorter,
        compile=not args.eager,
        checkpointing=args.checkpointing,
    )
    if args.quick:
        work = work._replace(num_groups=2, repetitions=1, shorter=64)
    result = bench_train.measure(work)
    return result, bench_train.table(result)


def _arch(args: argparse.Namespace, *counts: str) -> str | None:
    """The shape to measure; None: a directory. Raises UserError for what cannot be measured at all."""
    from importlib.util import find_spec

    from polyrl.errors import UserError

    if find_spec("torch") is None or find_spec("transformers") is None:
        raise UserError("this part needs more than the base install: pip install polyrl[train]")
    if args.arch is not None and args.model is not None:
        raise UserError("--arch and --model exclude each other")
    for name in counts:
        if getattr(args, name) < 1:
            raise UserError(f"--{name.replace('_', '-')}: {getattr(args, name)}; expected at least 1")
    return args.arch if args.arch is not None or args.model is not None else "tiny-qwen3"


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
