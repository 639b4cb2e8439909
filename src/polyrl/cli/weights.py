"""`polyrl weights ACTION ...`: look at weight versions, check them, compare them, move them.

A command has no subcommands, so the first argument is the action, and options belong to all of them. An action is a
module with `add_options(parser)` and `run(args) -> int`, which finds `args.action` and `args.places`; options of a
module are added once, and say in their help which action they are for.
"""

import argparse
import importlib
from collections.abc import Mapping
from typing import NamedTuple, Protocol, cast


class Action(NamedTuple):
    usage: str
    help: str
    module: str


ACTIONS: Mapping[str, Action] = {
    "inspect": Action("DIR", "what a version, or a model directory, consists of", "polyrl.cli.weights_look"),
    "verify": Action("DIR", "compare every byte with the manifest", "polyrl.cli.weights_look"),
    "diff": Action("DIR DIR", "which tensors changed, and what their delta would cost", "polyrl.cli.weights_look"),
    "serve": Action("DIR", "let others pull the version in a directory", "polyrl.cli.weights_transfer"),
    "pull": Action("HOST:PORT...", "get a version, verified, from any of these", "polyrl.cli.weights_transfer"),
}


class ActionModule(Protocol):
    """What a module of actions holds."""

    def add_options(self, parser: argparse.ArgumentParser) -> None: ...

    def run(self, args: argparse.Namespace) -> int: ...


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    width = max(len(f"{name} {action.usage}") for name, action in ACTIONS.items())
    lines = [f"  {f'{name} {action.usage}':<{width}}  {action.help}" for name, action in ACTIONS.items()]
    parser.epilog = "\n".join(["actions:", *lines])
    parser.add_argument("action", choices=list(ACTIONS), metavar="ACTION", help="one of those below")
    parser.add_argument("places", nargs="*", metavar="PLACE", help="a directory, or what the action says")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--threads", type=int, default=1, metavar="N", help="for hashing and deltas (default: 1)")
    for name in dict.fromkeys(action.module for action in ACTIONS.values()):
        _module(name).add_options(parser)


def run(args: argparse.Namespace) -> int:
    return _module(ACTIONS[args.action].module).run(args)


def _module(name: str) -> ActionModule:
    return cast("ActionModule", importlib.import_module(name))
