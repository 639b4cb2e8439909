"""The version that a worker's engine runs, and getting the next one into it: fetch, verify, install, say so.

Rules kept here: one install at a time, and the newest order wins; the one before is broken off and waited for. Every
order that is not replaced is answered, also when the fault is ours; where no version of the run will ever fit, the
worker leaves. A version's digest is kept from the moment that it
is fetched: its first token may come before the install has returned.
"""

import asyncio
import logging
import threading
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from polyrl.engines.engine import Engine, EngineError, NotOfThisModel, Weights
from polyrl.errors import UserError, one_line
from polyrl.ids import Version
from polyrl.weights.settings import TransferError, Unreadable
from polyrl.wire import frames

if TYPE_CHECKING:
    from polyrl.weights.peer import WeightPeer

log = logging.getLogger("polyrl.worker")


class Installer:
    def __init__(
        self,
        engine: Engine,
        deadline_s: float,
        answer: Callable[[frames.Installed | frames.InstallFailed], Awaitable[None]],
        is_misfit: Callable[[str], None],
    ) -> None:
        """A version that has not come within `deadline_s` has failed. `is_misfit` hears why none can ever be run."""
        self._engine, self._deadline_s, self._answer, self._is_misfit = engine, deadline_s, answer, is_misfit
        self.peer: WeightPeer | None = None
        """The peer that fetches, holds and relays weights; None: versions are only numbers."""
        self.version: Version | None = None
        """The version that the engine runs."""
        self._digests: dict[Version, str] = {}
        """The digests of the versions that were fetched last."""
        self._ordered: frames.PullOrder | None = None
        """The last pull order."""
        self._pull: asyncio.Task[None] | None = None
        self._break_off = threading.Event()
        """Ends the fetch that is under way."""

    @property
    def digest(self) -> str:
        """The digest of the version that the engine runs; empty for a version that was not fetched."""
        return "" if self.version is None else self._digests.get(self.version, "")

    def restarted(self, version: Version | None) -> None:
        """Note that the engine was restarted, and runs the version of its directory, which was not fetched."""
        self.version = version
        if version is not None:
            self._digests.pop(version, None)

    def start(self, pull: frames.PullOrder) -> None:
        """Replace what is under way, unless it is the same: after a break we are asked again.

        The same version from elsewhere is another order: what we fetch from is gone, or too slow.
        """
        before = None if self._pull is None or self._pull.done() else self._pull
        if before is not None and self._ordered is not None and _what(pull) == _what(self._ordered):
            return
        self._break_off.set()
        self._ordered, self._break_off = pull, threading.Event()
        self._pull = asyncio.create_task(self._install(Version(pull.version), pull, self._break_off, before))

    def cancel(self) -> None:
        if self._pull is not None:
            self._pull.cancel()

    async def close(self) -> None:
        if self.peer is not None:
            await asyncio.to_thread(self.peer.close)

    async def _install(
        self, version: Version, pull: frames.PullOrder, break_off: threading.Event, before: asyncio.Task[None] | None
    ) -> None:
        if before is not None:
            await asyncio.wait((before,))
        if break_off.is_set():
            return
        try:
            weights = await self._fetch(version, pull, break_off)
            try:
                await self._engine.install(weights)
            finally:
                if weights.copy is not None:
                    weights.copy.close()
        except (EngineError, TransferError, UserError) as error:
            if break_off.is_set():
                return  # who asked has asked for something else
            if isinstance(error, Unreadable):
                self._is_misfit(str(error))
                return
            if isinstance(error, NotOfThisModel):
                self._is_misfit(f"{error}; the command with which workers join this run names its model")
                return
            log.warning("version %d could not be installed: %s", version, error)
            await self._answer(frames.InstallFailed(version, str(error)[:2000]))
        except Exception as error:  # whoever asked waits for an answer, also when the fault is ours
            log.exception("version %d could not be installed", version)
            await self._answer(frames.InstallFailed(version, one_line(error)))
        else:  # said even of what it ran already: who asked waits for it
            self.version = version
            if pull.digest:
                self._digests[version] = pull.digest
            await self._answer(frames.Installed(version, pull.digest))

    async def _fetch(self, version: Version, pull: frames.PullOrder, break_off: threading.Event) -> Weights:
        """Fetch the version's weights into this machine's memory, verified; nothing where versions are only numbers."""
        if not pull.digest:
            return Weights(version)
        if self.peer is None:
            raise EngineError("this worker was started without a way to fetch weights")
        self._digests = {one: digest for one, digest in self._digests.items() if one == self.version}
        if version != self.version:  # else it was replaced, and what we run is what it was
            self._digests[version] = pull.digest
        began = time.monotonic()
        copy = await asyncio.to_thread(
            self.peer.pull, version, pull.digest, pull.addresses, self._deadline_s,
            relayed=bool(pull.source), stop=break_off,
        )  # fmt: skip
        log.info("version %d from %s in %.2f s", version, pull.source or "the trainer", time.monotonic() - began)
        return Weights(version, copy=copy)


def _what(pull: frames.PullOrder) -> tuple[int, str, tuple[str, ...]]:
    return pull.version, pull.digest, pull.addresses
