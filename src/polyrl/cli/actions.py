"""Commands that do several things: a command has no subcommands, so its first argument is the action.

Options belong to all actions of a command. An action is a module with `add_options(parser)` and `run(args) -> int`,
which finds `args.action`; a module of several actions adds its options once, and says in their help which action they
are for.
"""

import argparse
import importlib
from collections.abc import Mapping
from typing import NamedTuple, Protocol, cast


class Action(NamedTuple):
    usage: str
    help: str
    module: str


Actions = Mapping[str, Action]


class ActionModule(Protocol):
    """What a module of actions holds."""

    def add_options(self, parser: argparse.ArgumentParser) -> None: ...

    def run(self, args: argparse.Namespace) -> int: ...


def add_action(parser: argparse.ArgumentParser, actions: Actions, examples: str) -> None:
    """The first argument, and the list of what it may be; `examples` are whole commands, a line each."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    width = max(len(f"{name} {action.usage}") for name, action in actions.items())
    lines = [f"  {f'{name} {action.usage}':<{width}}  {action.help}" for name, action in actions.items()]
    parser.epilog = "\n".join(["actions:", *lines, "", "examples:", examples])
    parser.add_argument("action", choices=list(actions), metavar="ACTION", help="one of those below")


def add_options(parser: argparse.ArgumentParser, actions: Actions) -> None:
    """The options of every action."""
    for name in dict.fromkeys(action.module for action in actions.values()):
        _module(name).add_options(parser)


def run_action(args: argparse.Namespace, actions: Actions) -> int:
    return _module(actions[args.action].module).run(args)


def _module(name: str) -> ActionModule:
    return cast("ActionModule", importlib.import_module(name))
