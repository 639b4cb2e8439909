"""An argparse parser that raises UserError: one line, with the nearest known name.

An unknown option is reported before any other mistake: it may be a misspelling of the argument that is missing.
A command that does several things has no subcommands: its first argument is the action. Options belong to all actions
of a command; their help says which action they are for.
"""

import argparse
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

from polyrl.errors import UserError


class Parser(argparse.ArgumentParser):
    def __init__(self, argv: Sequence[str], **settings: Any) -> None:
        """`argv` are the arguments that will be parsed."""
        super().__init__(formatter_class=argparse.RawDescriptionHelpFormatter, **settings)
        self._argv = argv

    def error(self, message: str) -> NoReturn:
        raise UserError(self._unknown_option() or f"{message}; `{self.prog} --help` explains it")

    def _unknown_option(self) -> str:
        from polyrl.config.explain import did_you_mean

        known = [one for one in self._option_string_actions if one.startswith("--")]
        given = self._argv[: self._argv.index("--")] if "--" in self._argv else self._argv
        for one in given:
            name = one.partition("=")[0]
            if name.startswith("--") and " " not in name and not any(option.startswith(name) for option in known):
                hint = did_you_mean(name, known) or f"expected one of {', '.join(known)}"
                return f"{name}: unknown option; {hint}"
        return ""

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is None or value in action.choices:
            return
        from polyrl.config.explain import did_you_mean

        name = "/".join(action.option_strings) or action.metavar or action.dest
        known = list(map(str, action.choices))
        hint = did_you_mean(str(value), known)
        raise UserError(f"{name}: got {value!r}, expected one of {', '.join(known)}{hint and f'; {hint}'}")


class CliAction(NamedTuple):
    usage: str
    help: str


Actions = Mapping[str, CliAction]


def add_action(parser: argparse.ArgumentParser, actions: Actions) -> None:
    """Add the first argument, with the list of its actions before the examples."""
    width = max(len(f"{name} {action.usage}") for name, action in actions.items())
    lines = [f"  {f'{name} {action.usage}':<{width}}  {action.help}" for name, action in actions.items()]
    parser.epilog = "\n".join(["actions:", *lines, "", "examples:", parser.epilog or ""])
    parser.add_argument("action", choices=list(actions), metavar="ACTION", help="one of those below")
