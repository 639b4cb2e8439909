"""A worker's side: holds the newest version that it verified, gets the next one, and passes on what it has.

Rules: `held` changes at the very end of a pull, so a version is visible whole or not at all; what is held stays
readable, here and for neighbours, while the next one is built beside it. A full version that was broken off keeps its
verified chunks for the next try, from whichever source.
"""

import random
import threading
import time
from collections.abc import Sequence

from polyrl.weights.channel import DeadlineWatch
from polyrl.weights.fetch import OnProgress
from polyrl.weights.protocol import BlobEntry
from polyrl.weights.pull import WeightPull
from polyrl.weights.receiver import SourceDialer
from polyrl.weights.sender import Sender
from polyrl.weights.settings import Tls, TransferError, WeightSettings
from polyrl.weights.shelf import HostCopy, Shelf
from polyrl.weights.store import Store


class WeightPeer:
    """One pull at a time; relaying goes on all the time."""

    def __init__(
        self, settings: WeightSettings, key: bytes, tls: Tls | None = None, *, number: int | None = None
    ) -> None:
        """`number` tells workers apart: it decides which of a source's addresses is used."""
        self._number = random.randrange(1 << 20) if number is None else number
        self._store = Store()
        self._shelf = Shelf(self._store, settings.num_deltas, settings.grace_s)
        self._sender = Sender(self._store, settings, key, None if tls is None else tls.server, origin=False)
        if tls is None or tls.server is not None:
            self._sender.start()
        self._watch = DeadlineWatch("weights-pull-watch")
        self._dialer = SourceDialer(settings, key, tls, self._watch, self._sender.mooncake)
        self._one_pull = threading.Lock()
        self._closing = threading.Event()
        self._stop = threading.Event()
        """Ends the pull that is under way."""
        self.bad_sources: dict[str, str] = {}
        """Addresses that ever gave wrong bytes, and which."""

    @property
    def addresses(self) -> tuple[str, ...]:
        """Where others can get what is here; none if TLS is on and there is no certificate to serve with."""
        return self._sender.addresses

    @property
    def num_bytes_sent(self) -> int:
        return self._sender.num_bytes_sent

    @property
    def held(self) -> tuple[int, str] | None:
        """Version and digest of what is held."""
        held = self._shelf.held
        return None if held is None else (held[1].version, held[1].digest)

    def pull(
        self,
        version: int,
        digest: str,
        addresses: Sequence[str],
        deadline_s: float,
        on_progress: OnProgress | None = None,
        *,
        relayed: bool = False,
        stop: threading.Event | None = None,
    ) -> HostCopy:
        """Get a version, from any of these addresses: several of one source, or of several. Raises TransferError.

        Blocks, so call it in a thread. Whatever happens, what was held is held until the new version is complete.
        `relayed`: the sources are other workers, not the trainer. Then what they give must be known by a hash that they
        cannot forge, and they must be fast enough: the trainer has it too.
        `stop`, when it is set, breaks it off; what has come is there for the next one, from whichever source.
        """
        deadline = time.monotonic() + deadline_s
        stop = threading.Event() if stop is None else stop
        with self._one_pull:
            self._stop = stop
            if self._closing.is_set():
                raise TransferError("closing")
            if stop.is_set():
                raise TransferError("broken off")
            if self._shelf.held is not None and self._shelf.held[1].digest == digest:
                return HostCopy(*self._shelf.held)
            pull = WeightPull(self._shelf, self._dialer, self._number, stop, self.bad_sources, relayed=relayed)
            return pull.run(version, digest, addresses, deadline, on_progress)

    def offered(self, addresses: Sequence[str], deadline_s: float) -> list[BlobEntry]:
        """Everything that these sources have or are getting. Raises TransferError when none of them answers."""
        with self._one_pull:
            pull = WeightPull(self._shelf, self._dialer, self._number, self._closing, self.bad_sources)
            return pull.offered(addresses, time.monotonic() + deadline_s)

    def newest(self, addresses: Sequence[str], deadline_s: float, digest: str | None = None) -> BlobEntry:
        """The newest version that these sources have or are getting; with a digest, that one. Raises TransferError."""
        full = [
            entry
            for entry in self.offered(addresses, deadline_s)
            if entry.kind == "full" and digest in (None, entry.name)
        ]
        if not full:
            raise TransferError(f"no source offers {'a version' if digest is None else digest}")
        return max(full, key=lambda entry: (entry.version, entry.complete, entry.name))

    def close(self) -> None:
        """Ends a pull that is under way."""
        self._closing.set()
        self._stop.set()
        self._watch.close()
        with self._one_pull:
            self._sender.close()
            self._shelf.close()
