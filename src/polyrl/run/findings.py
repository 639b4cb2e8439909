"""What `diagnose` finds out about a run that waits (diagnosis.py)."""

from typing import NamedTuple


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
