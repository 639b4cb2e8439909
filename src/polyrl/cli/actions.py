"""Commands that do several things: a command has no subcommands, so its first argument is the action.

Options belong to all actions of a command; their help says which action they are for.
"""

import argparse
from collections.abc import Mapping
from typing import NamedTuple


class CliAction(NamedTuple):
    usage: str
    help: str


Actions = Mapping[str, CliAction]


def add_action(parser: argparse.ArgumentParser, actions: Actions, examples: str) -> None:
    """The first argument, and the list of what it may be; `examples` are whole commands, a line each."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    width = max(len(f"{name} {action.usage}") for name, action in actions.items())
    lines = [f"  {f'{name} {action.usage}':<{width}}  {action.help}" for name, action in actions.items()]
    parser.epilog = "\n".join(["actions:", *lines, "", "examples:", examples])
    parser.add_argument("action", choices=list(actions), metavar="ACTION", help="one of those below")
