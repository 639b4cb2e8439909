"""The contract of a provider: it starts workers under names, says which of them it has, and ends them.

A provider knows nothing of training. The keeper (run/keeping.py) decides how many workers there should be, and calls:

    held()         all workers that this provider has for this run, by name, also those that another process started
    start(order)   ask for a worker. If it has one of that name already, nothing happens
    stop(name)     have the worker hand over (SIGTERM, or what stands for it), then end it. Unknown names are ignored
    close()        let go of connections; workers stay

Rules: a name is held at most once. Each call may be repeated. `held` asks the outside world and not a memory of this
process, so that `polyrl up` and `polyrl down` can be run by different processes, and again. Supply that is not there,
or a cluster that does not answer, is a ProviderError: the keeper tries again. A setting that can never work is a
UserError, raised by the constructor or by `check`.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar, Literal, Protocol

from msgspec import Struct

from polyrl.errors import PolyrlError

HeldState = Literal["starting", "running", "stopping", "ended"]


class ProviderError(PolyrlError):
    """A provider cannot do what was asked now. The message is one line."""


class ProviderRun(Struct, frozen=True):
    """The run that a provider works for."""

    id: str
    """A name of lower-case letters, digits and dashes that no other run has. All that is started is labelled so."""
    folder: Path
    """Where the provider may keep files: the folder `fleet` in the run's directory."""
    logs: Path
    ends_with_us: bool = True
    """Workers on this machine are to end with this process. Not so for those that `polyrl up` starts."""


class WorkerOrder(Struct, frozen=True):
    """A worker to start."""

    name: str
    arguments: tuple[str, ...]
    """The arguments of `polyrl`. They hold no secret."""
    token: str
    """For the environment variable POLYRL_TOKEN."""
    log_file: Path
    environment: dict[str, str] = {}
    """Further environment variables, for workers on this machine: the devices that are theirs."""


class HeldWorker(Struct, frozen=True):
    name: str
    state: HeldState
    place: str = ""
    """Where it runs, in the provider's words: a process, a job, a node."""
    why: str = ""
    """How it ended, or what it waits for."""
    failed: bool = False
    """It ended by a mistake that another start would repeat."""

    @property
    def is_there(self) -> bool:
        return self.state in ("starting", "running")


class Provider(Protocol):
    shares_files: ClassVar[bool]
    """Workers see the run's directory: they are given the file of the token, and keep their session there."""
    is_here: ClassVar[bool]
    """Workers run on this machine, and reach the manager on its loopback."""

    def check(self) -> None:
        """Raise UserError if this machine lacks what the provider needs."""
        ...

    async def held(self) -> Mapping[str, HeldWorker]: ...

    async def start(self, order: WorkerOrder) -> None: ...

    async def stop(self, name: str) -> None: ...

    async def close(self) -> None: ...
