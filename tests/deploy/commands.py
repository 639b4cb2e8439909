"""The `polyrl` commands of a shell script, read by the command line's own parser."""

import argparse
import re
import shlex
from collections.abc import Mapping, Sequence

from polyrl.cli.main import COMMANDS, parse


def commands_of(script: str, environment: Mapping[str, str], arguments: Sequence[str] = ()) -> list[list[str]]:
    """Return the words of each command after `polyrl`, with variables and "$@" filled in. A variable that is not set
    is a KeyError."""
    script = script.replace('"$@"', shlex.join(arguments))
    script = re.sub(r"\$(\w+)", lambda found: environment[found[1]], script)
    words = [shlex.split(line) for line in re.findall(r"\bpolyrl ([^;\n]+)", script)]
    assert words, "a script without a command of PolyRL"
    return words


def parsed(words: Sequence[str]) -> argparse.Namespace:
    """Raises UserError for what the command line would refuse."""
    name, *rest = words
    _, args = parse(name, COMMANDS[name], rest)
    return args
