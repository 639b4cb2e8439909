"""The findings of `diagnose` about a run that waits (diagnosis.py), and reading a status for it."""

from typing import NamedTuple

from polyrl.telemetry.looks import show_seconds
from polyrl.wire.control import Status, WaitStatus


class Finding(NamedTuple):
    what: str
    then: str
    """The next thing that happens by itself."""
    do: str = ""
    """The action that a person could take; empty: none is needed."""
    needs_help: bool = False
    """Whether the wait needs a person to end it."""
    stalls: bool = False
    """Whether nothing is generated or trained meanwhile: a long wait is then worth a line in the log."""


class Diagnosis(NamedTuple):
    is_moving: bool
    """Whether anything was generated, delivered or trained between the two replies."""
    findings: tuple[Finding, ...]
    """Reasons for waiting; the first is the one that holds up the whole run."""

    @property
    def needs_help(self) -> bool:
        return any(one.needs_help for one in self.findings)


def wait_of(now: Status, what: str, of: str | None = None) -> WaitStatus | None:
    return next((one for one in now.waits if one.what == what and of in (None, one.of)), None)


def left(wait: WaitStatus) -> str:
    return show_seconds(max(0.0, wait.given_up_in_s or 0.0))


def count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"
