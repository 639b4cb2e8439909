"""`polyrl drain`: have a worker, or a reward worker, hand everything over and leave."""

import argparse
from urllib.parse import quote

from polyrl.cli import dialing

EXAMPLE = """\
example:
  polyrl drain spot-3 --run-dir runs/first --reason "the machine is needed elsewhere"
  polyrl drain grader-1 --rewards --run-dir runs/first"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("worker", metavar="NAME", help="as `polyrl status` shows it")
    parser.add_argument("--rewards", action="store_true", help="NAME is a reward worker")
    parser.add_argument("--reason", default="asked to drain", help="what the journal says (default: %(default)s)")
    parser.add_argument(
        "--notice",
        type=float,
        default=0.0,
        metavar="S",
        help="its machine goes in S seconds: it generates until shortly before (default: it hands over now)",
    )
    dialing.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    from polyrl.errors import UserError
    from polyrl.wire.control import DrainRequest
    from polyrl.wire.frames import MAX_NOTICE_S

    if not 0 <= args.notice <= MAX_NOTICE_S:
        raise UserError(f"--notice: {args.notice:g}; expected seconds from 0 to {MAX_NOTICE_S:g}")
    if args.rewards and args.notice:
        raise UserError("--notice: is for workers that generate; leave it out with --rewards")
    wanted = DrainRequest(reason=args.reason, notice_s=args.notice)
    kind = "reward-workers" if args.rewards else "workers"
    path = f"/v1/{kind}/{quote(args.worker, safe='')}/drain"
    dialing.run_with(args, lambda dialer: dialer.post(path, wanted, dict))
    if args.notice:
        print(f"{args.worker}: given notice; it hands over what has not ended, and leaves, within {args.notice:g} s")
    elif args.rewards:
        print(f"{args.worker}: draining; it finishes what it scores, or hands it back, and leaves")
    else:
        print(f"{args.worker}: draining; it hands its samples over and leaves")
    return 0
