"""`polyrl weights ACTION ...`: look at weight versions, check them, compare them, move them.

An action finds directories or addresses in `args.places`.
"""

import argparse

from polyrl.cli.actions import Action, Actions, add_action, add_options, run_action

ACTIONS: Actions = {
    "inspect": Action("DIR", "what a version, or a model directory, consists of", "polyrl.cli.weights_look"),
    "verify": Action("DIR", "compare every byte with the manifest", "polyrl.cli.weights_look"),
    "diff": Action("DIR DIR", "which tensors changed, and what their delta would cost", "polyrl.cli.weights_look"),
    "serve": Action("DIR", "let others pull the version in a directory", "polyrl.cli.weights_transfer"),
    "pull": Action("HOST:PORT...", "get a version, verified, from any of these", "polyrl.cli.weights_transfer"),
}

EXAMPLES = """\
  polyrl weights diff models/arithmetic models/trained
  polyrl weights serve models/trained --port 7000 --token-file worker.token
  polyrl weights pull HOST:7000 --token-file worker.token --out models/pulled
  polyrl weights verify models/pulled"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_action(parser, ACTIONS, EXAMPLES)
    parser.add_argument("places", nargs="*", metavar="PLACE", help="a directory, or what the action says")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--threads", type=int, default=1, metavar="N", help="for hashing and deltas (default: 1)")
    add_options(parser, ACTIONS)


def run(args: argparse.Namespace) -> int:
    return run_action(args, ACTIONS)
