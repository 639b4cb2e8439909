"""`polyrl data ACTION ...`: make what a run starts from.

A command has no subcommands, so the first argument is the action, and options belong to all of them. An action is a
module with `add_options(parser)` and `run(args) -> int`, which finds `args.action` and `args.what`.
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
    "prepare": Action("openr1|gsm8k|FILE", "write a data set as JSON lines", "polyrl.cli.data_prepare"),
    "model": Action("arithmetic", "train a small model for the arithmetic task to start from", "polyrl.cli.data_model"),
}


class ActionModule(Protocol):
    """What a module of an action holds."""

    def add_options(self, parser: argparse.ArgumentParser) -> None: ...

    def run(self, args: argparse.Namespace) -> int: ...


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    width = max(len(f"{name} {action.usage}") for name, action in ACTIONS.items())
    lines = [f"  {f'{name} {action.usage}':<{width}}  {action.help}" for name, action in ACTIONS.items()]
    parser.epilog = "\n".join(["actions:", *lines])
    parser.add_argument("action", choices=list(ACTIONS), metavar="ACTION", help="one of those below")
    parser.add_argument("what", metavar="WHAT", help="what the action says")
    parser.add_argument("--out", required=True, metavar="PATH", help="where to write it")
    for name in dict.fromkeys(action.module for action in ACTIONS.values()):
        _module(name).add_options(parser)


def run(args: argparse.Namespace) -> int:
    return _module(ACTIONS[args.action].module).run(args)


def _module(name: str) -> ActionModule:
    return cast("ActionModule", importlib.import_module(name))
