"""A worker's side: holds the newest version that it verified, pulls the next one, and relays what it has.

Rules: `held` changes at the very end of a pull, so a version is visible whole or not at all. The held version stays
readable, here and for neighbours, while the next one is built beside it. If the pull of a full version fails, its
verified chunks are kept for the next try, from any source.
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
    """A worker's weights. It makes one pull at a time, and relays all the time."""

    def __init__(
        self, settings: WeightSettings, key: bytes, tls: Tls | None = None, *, number: int | None = None
    ) -> None:
        """Start relaying. `number` tells workers apart, and decides which of a source's addresses is used."""
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
        self._needless = set[str]()
        self.bad_sources: dict[str, str] = {}
        """The addresses that ever gave wrong bytes, each with the fault."""

    @property
    def addresses(self) -> tuple[str, ...]:
        """The addresses at which others can pull from here; none if TLS is on and there is no server certificate."""
        return self._sender.addresses

    @property
    def num_bytes_sent(self) -> int:
        return self._sender.num_bytes_sent

    @property
    def held(self) -> tuple[int, str] | None:
        """The version that is held, and its digest."""
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
        """Pull a version from these addresses, which may belong to one source or to several. Raises TransferError.

        Blocks, so call it in a thread. The version held before stays held until the new one is complete.
        `relayed`: the sources are other workers, not the trainer. Then the version's hash must be unforgeable, and the
        sources must be fast enough, because the trainer has the version too.
        `stop`: setting it ends the pull. The chunks that arrived are kept for the next pull, from any source.
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
            pull = WeightPull(
                self._shelf, self._dialer, self._number, stop, self.bad_sources, self._needless, relayed=relayed
            )
            return pull.run(version, digest, addresses, deadline, on_progress)

    def offered(self, addresses: Sequence[str], deadline_s: float) -> list[BlobEntry]:
        """Return everything that these sources have or are getting. Raises TransferError when none of them answers."""
        with self._one_pull:
            pull = WeightPull(self._shelf, self._dialer, self._number, self._closing, self.bad_sources, self._needless)
            return pull.offered(addresses, time.monotonic() + deadline_s)

    def newest(self, addresses: Sequence[str], deadline_s: float, digest: str | None = None) -> BlobEntry:
        """Return the newest version that these sources have or are getting, or the one with `digest`.

        Raises TransferError.
        """
        full = [
            entry
            for entry in self.offered(addresses, deadline_s)
            if entry.kind == "full" and digest in (None, entry.name)
        ]
        if not full:
            raise TransferError(f"no source offers {'a version' if digest is None else digest}")
        return max(full, key=lambda entry: (entry.version, entry.complete, entry.name))

    def close(self) -> None:
        """End a pull that is under way, stop relaying, and free the buffers."""
        self._closing.set()
        self._stop.set()
        self._watch.close()
        with self._one_pull:
            self._sender.close()
            self._shelf.close()
