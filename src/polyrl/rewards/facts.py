"""Facts about a run that its reward processes are told: where it is, and the limits of its rewards.

They travel as one environment variable, so that a class of ours needs no argument for what the run knows already.
A process of another machine, or a test, has none of them.
"""

import os
from typing import Self

import msgspec

_VARIABLE = "POLYRL_REWARDS"
_PATIENCE = 0.9


class RunFacts(msgspec.Struct, frozen=True, kw_only=True):
    run_dir: str = ""
    """The run's directory; empty: there is none."""
    timeout_s: float = 30.0
    """The wall time that an answer has in all."""
    processes: int = 1
    """The most processes that score beside each other."""
    max_usd: float | None = None
    max_tokens: int | None = None
    manager_host: str = ""
    """The name in the manager's certificate; empty: it has none."""
    manager_ca: str = ""

    @property
    def patience_s(self) -> float:
        """The time in which another service, or a program, must be done; the rest of `timeout_s` is for saying so."""
        return _PATIENCE * self.timeout_s

    def share(self, concurrency: int) -> int:
        """Return how many of the run's `concurrency` requests to a service this process may have under way."""
        return max(1, concurrency // self.processes)

    @classmethod
    def variables(cls, facts: Self | None) -> dict[str, str]:
        """Return the environment variables that tell a process of them."""
        return {} if facts is None else {_VARIABLE: msgspec.json.encode(facts).decode()}

    @classmethod
    def read(cls) -> Self:
        """Return the facts that this process was told."""
        told = os.environ.get(_VARIABLE, "")
        return msgspec.json.decode(told, type=cls) if told else cls()
