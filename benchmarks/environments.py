"""Other people's software, installed into virtual environments under the cache, and nothing outside of it."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from polyrl.errors import UserError

CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "polyrl"
_INSTALL_S = 300
_VERSION = "import sys; from importlib.metadata import version; print(version(sys.argv[1]))"


class CannotMeasure(UserError):
    """A peer is missing, cannot be installed, or does not start. The message is one line."""


class Environment(NamedTuple):
    folder: Path
    """That of its programs."""
    version: str
    """Of what was asked for."""


def environment(folder: Path, distribution: str) -> Environment:
    """An environment that has this distribution from PyPI; it is made if it is not there. Raises CannotMeasure."""
    programs = folder / "bin"
    ask = [programs / "python", "-c", _VERSION, distribution]
    try:
        return Environment(programs, run(ask))
    except CannotMeasure:
        run([sys.executable, "-m", "venv", "--clear", folder])
        run([programs / "python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check", distribution])
        return Environment(programs, run(ask))


def run(argv: Sequence[str | Path], cwd: Path | None = None) -> str:
    """Return what a command prints. Raises CannotMeasure with the command and its last line."""
    try:
        done = subprocess.run(
            argv, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=_INSTALL_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CannotMeasure(f"{argv[0]} did not run: {error}") from error
    if done.returncode:
        last = done.stdout.strip().splitlines()[-1:] or ["it said nothing"]
        raise CannotMeasure(f"`{' '.join(map(str, argv))}` failed: {last[0][-300:]}")
    return done.stdout.strip()
