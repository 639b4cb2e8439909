"""Fetching one blob from several sources at once: which source gives which chunk, and what happens when one fails.

Each stream takes a chunk that its source has and the fewest neighbours have, chosen at random among those. The trainer
is only asked for chunks that no neighbour has or is getting, unless the neighbours have given nothing for a while. With
one source this is a chain: chunks arrive as the source gets them. With the trainer and all neighbours it is a swarm:
each chunk leaves the trainer about once.

A chunk is verified by the thread that received it, while it is still in the cache, and only then marked as right. From
then on it is relayed and never written again. A stream that breaks returns its chunks and is dialled again; a source
that keeps breaking counts as dead. One cut may break all streams of a source: streams dialled before the source's last
failure count towards that failure, and all of them wait before they dial again. A wrong chunk makes its source bad,
unless the source says that it no longer has the blob: then the chunk was overwritten in transit (`store`). The fetch
continues as long as one source is alive.
"""

import math
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np

from polyrl.weights.protocol import Code, ProtocolError, SourceRefused
from polyrl.weights.receiver import HostStream, MooncakeStream, RemoteStream, SourceDialer, SourceLink
from polyrl.weights.settings import TransferError
from polyrl.weights.store import Blob, Store

NUM_AHEAD = 2
"""The requests that a stream has in flight. A chunk in flight cannot be taken from another source."""
REQUEST_BYTES = 16 << 20
"""The most bytes of a request. Each request costs Python time, and a wake-up, on both sides."""
PATIENCE_S = 1.0
"""The trainer is asked for chunks that neighbours have once the neighbours have given nothing for this long."""
APPEAR_S = 20.0
"""How long nothing may arrive before the fetch gives up."""
IDLE_S = 3600.0
"""How long a connection may wait with nothing to ask. If the source ends it earlier, it is dialled again."""
_MAX_FAILURES = 4
"""The number of failures in a row, without a chunk in between, after which a source counts as dead."""
_FIRST_PAUSE_S, _PAUSE_GROWTH = 0.1, 4.0
_NUM_BITES = 32
_HAVE_WAIT_S = 2.0
_HAVE_PAUSE_S = 0.005
_MAX_HAVE_PAUSE_S = 0.05
_PROGRESS_EVERY_S = 0.1

OnProgress = Callable[[int, int], None]
"""A callback that gets the number of verified bytes and the total."""


Stream: TypeAlias = RemoteStream | HostStream | MooncakeStream


class WrongChunk(Exception):
    """A source gave bytes that do not match their digest."""


class ChunkSource:
    """One process that may have chunks of the blob, at one address."""

    def __init__(self, address: str, node: bytes, *, origin: bool, complete: bool) -> None:
        self.address, self.node, self.origin, self.is_complete = address, node, origin, complete
        self.have = np.zeros(0, np.bool_)
        self.claimed = np.zeros(0, np.bool_)
        """The chunks that the source is getting from the trainer."""
        self.is_followed = not complete
        """Whether the source is still getting chunks, and is asked which it has."""
        self.failure = ""
        """Why the source is not asked any more; empty while it is."""
        self.is_bad = False
        self.lacks_mooncake = False
        self.num_failures = 0
        """The number of failures since the last chunk."""
        self.failed_at = self.dial_at = -math.inf
        """When the source last failed, and when it may be dialled again."""


class Fetch:
    """The fetch of one blob. The caller's thread coordinates; every stream has a thread of its own."""

    def __init__(
        self,
        blob: Blob,
        store: Store,
        sources: list[ChunkSource],
        dialer: SourceDialer,
        stop: threading.Event,
        *,
        relayed: bool = False,
    ) -> None:
        """Prepare the fetch.

        `relayed` means that no source is the trainer. Then a minimum speed is required, because the trainer has the
        blob too.
        """
        self._relayed = relayed
        self._blob, self._store, self._dialer, self._stop = blob, store, dialer, stop
        num_chunks = blob.table.num_chunks
        self._sources = sources
        for source in sources:
            source.have = np.full(num_chunks, source.is_complete, np.bool_)
            source.claimed = np.zeros(num_chunks, np.bool_)
        self._open = ~blob.right
        self._holders = np.zeros(num_chunks, np.int16)
        bite = num_chunks // (_NUM_BITES * len(sources))  # small, so that chunks are left to share among sources
        self._run_chunks = max(1, min(REQUEST_BYTES // blob.table.chunk_bytes, bite))
        self._changed = threading.Condition()
        self._over = False
        self._helped_at = self._moved_at = time.monotonic()
        self._threads: list[threading.Thread] = []
        self._links: dict[SourceLink, ChunkSource] = {}
        self._count_holders()

    def run(self, deadline: float, on_progress: OnProgress | None = None) -> None:
        """Return when every chunk is verified. Raises TransferError."""
        if self._blob.complete:
            return
        num_streams = max(1, self._dialer.settings.streams // len(self._sources))
        try:
            for source in self._sources:
                if source.is_followed:
                    self._start(self._follow, source, "weights-follow")
                for _ in range(num_streams):
                    self._start(self._stream, source, "weights-stream")
            self._wait(deadline, on_progress)
        finally:
            with self._changed:
                self._over = True
                self._changed.notify_all()
            for source in self._sources:
                self._cut(source, "the fetch is over")
            for thread in self._threads:
                thread.join()

    def _start(self, target: Callable[[ChunkSource], None], source: ChunkSource, name: str) -> None:
        def run() -> None:
            is_over = False
            try:
                target(source)
                is_over = True
            finally:
                if not is_over:  # a bug of ours: its traceback is printed, and the fetch does not wait for this source
                    self._bury(source, "this side failed", is_bad=False)

        thread = threading.Thread(target=run, name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _wait(self, deadline: float, on_progress: OnProgress | None) -> None:
        table = self._blob.table
        began, num_before = time.monotonic(), self._blob.num_right
        pace = self._pace_bytes_per_s(deadline - began)
        while True:
            with self._changed:
                if not self._blob.complete:
                    self._changed.wait(_PROGRESS_EVERY_S)
                alive = [source for source in self._sources if not source.failure]
                is_done, num_right = self._blob.complete, self._blob.num_right
                quiet_s = time.monotonic() - max([self._moved_at, *(link.moved_at for link in self._links)])
            if on_progress is not None:
                on_progress(min(table.num_bytes, num_right * table.chunk_bytes), table.num_bytes)
            if is_done:
                return
            if not alive:
                raise self._failed("no source is left")
            if self._stop.is_set():
                raise self._failed("broken off")
            arrived, took_s = (num_right - num_before) * table.chunk_bytes, time.monotonic() - began
            least = self._least_bytes_per_s(pace, alive)
            if arrived < least * (took_s - self._dialer.settings.relay_patience_s):
                rate = f"{arrived / took_s / 1e6:.2f} MB/s, expected at least {least / 1e6:.2f}"
                raise self._failed(f"too slow for a relay, which the trainer can do without: {rate}")
            if time.monotonic() > deadline:
                raise self._failed("the deadline has passed")
            if quiet_s > max(APPEAR_S, 2 * self._dialer.settings.stall_s):
                raise self._failed(f"nothing came for {quiet_s:.0f} s")

    def _pace_bytes_per_s(self, left_s: float) -> float:
        """Return the rate that finishes in half of the time left, so that the trainer can still be tried after it."""
        left = (self._blob.table.num_chunks - self._blob.num_right) * self._blob.table.chunk_bytes
        return left / max(1.0, left_s / 2)

    def _least_bytes_per_s(self, pace: float, alive: Sequence[ChunkSource]) -> float:
        """Return the minimum rate of relays. A relay that is still fetching is no faster than its own source."""
        if not self._relayed:
            return 0.0
        floor = self._dialer.settings.min_relay_mb_s * 1e6
        return floor if any(source.is_followed for source in alive) else max(floor, pace)

    def _failed(self, what: str) -> TransferError:
        bad = tuple(source.address for source in self._sources if source.is_bad)
        said = [f"{source.address}: {source.failure}" for source in self._sources if source.failure]
        num = f"{self._blob.num_right} of {self._blob.table.num_chunks} chunks arrived"
        return TransferError("; ".join([what, num, *said]), source_is_bad=bool(bad), bad_addresses=bad)

    # What a source has.

    def _follow(self, source: ChunkSource) -> None:
        """Learn which chunks a source has, until it has all of them."""
        revision = 0
        while self._goes_on(source):
            began = self._wait_to_dial(source)
            if not self._goes_on(source):
                return
            link: SourceLink | None = None
            try:
                link = self._reach(source)
                while self._goes_on(source):
                    found = link.have(self._blob.name, len(self._open), revision, _HAVE_WAIT_S)
                    revision = found.revision
                    self._learn(source, self._bits(found.right), self._bits(found.claimed))
                    if source.is_complete:
                        source.is_followed = False
                        return
                    self._pause(min(_MAX_HAVE_PAUSE_S, _HAVE_PAUSE_S * len(self._sources)))
            except SourceRefused as no:
                self._forget(source)
                revision = 0
                self._pause(0.05 if no.code is Code.GONE else 0.5)
            except (OSError, ProtocolError) as error:
                self._stumble(source, began, error)
            finally:
                if link is not None:
                    self._leave(link)

    def _bits(self, packed: bytes) -> np.ndarray:
        unpacked = np.unpackbits(np.frombuffer(packed, np.uint8), count=len(self._open), bitorder="little")
        return unpacked.astype(np.bool_)

    def _learn(self, source: ChunkSource, have: np.ndarray, claimed: np.ndarray) -> None:
        with self._changed:
            source.have, source.claimed = have, claimed
            source.is_complete = bool(have.all())
            self._count_holders()
            self._changed.notify_all()

    def _forget(self, source: ChunkSource) -> None:
        nothing = np.zeros(len(self._open), np.bool_)
        self._learn(source, nothing, nothing)

    def _count_holders(self) -> None:
        self._holders = np.zeros(len(self._open), np.int16)
        self._claimed = np.zeros(len(self._open), np.bool_)
        for source in self._sources:
            if not source.origin and not source.failure:
                self._holders += source.have
                self._claimed |= source.claimed

    # Streams.

    def _stream(self, source: ChunkSource) -> None:
        while self._goes_on(source):
            if not self._wait_for_chunks(source):
                continue
            began = self._wait_to_dial(source)
            if not self._goes_on(source):
                return
            link: SourceLink | None = None
            try:
                link = self._reach_on_host(source) or self._reach(source)
                self._drain(source, link)
            except WrongChunk as error:
                self._suspect(source, error)
            except SourceRefused as no:
                self._was_refused(source, began, no)
            except (OSError, ProtocolError) as error:
                source.lacks_mooncake = True  # in case mooncake failed: the next try uses plain TCP
                self._stumble(source, began, error)
            finally:
                if link is not None:
                    self._leave(link)

    def _wait_for_chunks(self, source: ChunkSource) -> bool:
        with self._changed:
            if not (self._open & source.have).any():
                self._changed.wait(_PROGRESS_EVERY_S)
            return bool((self._open & source.have).any())

    def _wait_to_dial(self, source: ChunkSource) -> float:
        """Wait out the pause after a failure, and return the time at its end."""
        with self._changed:
            while (now := time.monotonic()) < source.dial_at and self._goes_on(source):
                self._changed.wait(source.dial_at - now)
        return now

    def _reach(self, source: ChunkSource) -> SourceLink:
        link = self._dialer.dial(source.address)
        if link.node != source.node:
            link.close()
            raise ConnectionError("another process answers at this address now")
        return self._enter(source, link)

    def _reach_on_host(self, source: ChunkSource) -> SourceLink | None:
        """Connect to a source on this host and in this network namespace, which then shares its buffer.

        Return None if the source is elsewhere, is still getting chunks, or does not share.
        """
        if not self._dialer.settings.shared_memory or not source.is_complete:
            return None
        try:
            return self._enter(source, self._dialer.dial_on_host(source.node))
        except (OSError, ProtocolError):
            return None

    def _enter(self, source: ChunkSource, link: SourceLink) -> SourceLink:
        with self._changed:
            self._links[link] = source
            is_late = not self._goes_on(source)
        if is_late:
            link.cut("the fetch is over")
        return link

    def _leave(self, link: SourceLink) -> None:
        with self._changed:
            self._links.pop(link, None)
            link.look()  # bytes may have moved since the watch last looked
            self._moved_at = max(self._moved_at, link.moved_at)  # a part of a chunk is progress, too
        link.close()

    def _drain(self, source: ChunkSource, link: SourceLink) -> None:
        """Keep a few requests in flight and read the answers, until there is nothing left for this stream."""
        asked: deque[range] = deque()
        stream = self._stream_over(link, source)
        try:
            while True:
                if not asked:
                    link.keep(IDLE_S)
                chosen = self._choose(source, NUM_AHEAD - len(asked), can_wait=not asked)
                for run in chosen:
                    asked.append(run)
                for run in chosen:
                    stream.request(run)
                if not asked:
                    return
                stream.expect(asked[0])
                for index in asked[0]:
                    self._take(source, stream, index)
                asked.popleft()
        finally:
            stream.close()
            self._give_back(asked)

    def _stream_over(self, link: SourceLink, source: ChunkSource) -> Stream:
        if link.is_on_host:
            return HostStream(link, self._blob.name, self._blob.table)
        if self._dialer.mooncake is not None and source.is_complete and not source.lacks_mooncake:
            try:
                return MooncakeStream(link, self._blob.name, self._blob, self._dialer.mooncake)
            except SourceRefused:
                source.lacks_mooncake = True
        return RemoteStream(link, self._blob.name, self._blob.table)

    def _take(self, source: ChunkSource, stream: Stream, index: int) -> None:
        place = self._blob.chunk(index)
        stream.read(index, place)
        if not self._blob.table.holds(index, place):
            raise WrongChunk(f"chunk {index} is not what its digest says")
        self._store.mark(self._blob, index)
        with self._changed:
            source.num_failures = 0
            self._moved_at = time.monotonic()
            if not source.origin:
                self._helped_at = self._moved_at
            if self._blob.complete:
                self._changed.notify_all()

    def _choose(self, source: ChunkSource, most: int, *, can_wait: bool) -> list[range]:
        """Choose the next requests of a stream and reserve their chunks for it.

        With `can_wait`, wait until there is one. Return an empty list when nothing is left.
        """
        with self._changed:
            while True:
                chosen: list[range] = []
                while len(chosen) < most and (run := self._pick(source)):
                    self._open[run.start : run.stop] = False
                    chosen.append(run)
                    if source.origin:
                        self._store.claim(self._blob, run, claimed=True)
                if chosen or not can_wait or not self._goes_on(source):
                    return chosen
                self._changed.wait(_PROGRESS_EVERY_S)

    def _pick(self, source: ChunkSource) -> range | None:
        wanted = np.flatnonzero(self._open & source.have)
        if not len(wanted):
            return None
        if source.origin:
            alone = wanted[(self._holders[wanted] == 0) & ~self._claimed[wanted]]
            if not len(alone) and time.monotonic() - self._helped_at < PATIENCE_S:
                return None
            wanted = alone if len(alone) else wanted
        holders = self._holders[wanted]
        rarest = wanted[holders == holders.min()]
        first = int(rarest[0] if len(self._sources) == 1 else random.choice(rarest))
        stop = first + 1
        while stop - first < self._run_chunks and stop < len(self._open) and self._open[stop] and source.have[stop]:
            stop += 1
        return range(first, stop)

    def _give_back(self, runs: deque[range]) -> None:
        with self._changed:
            for run in runs:
                self._open[run.start : run.stop] = ~self._blob.right[run.start : run.stop]
                self._store.claim(self._blob, run, claimed=False)
            if runs:
                self._changed.notify_all()

    # Failures.

    def _suspect(self, source: ChunkSource, error: WrongChunk) -> None:
        """Find out whether the source of a wrong chunk is bad, or gave the blob up while the chunk was read."""
        link: SourceLink | None = None
        try:
            link = self._reach(source)
            link.have(self._blob.name, len(self._open), 0, 0.0)
        except SourceRefused:
            self._bury(source, "it gave the version up", is_bad=False)
        except (OSError, ProtocolError):
            self._bury(source, f"{error}, and then it was gone", is_bad=True)
        else:
            self._bury(source, str(error), is_bad=True)
        finally:
            if link is not None:
                self._leave(link)

    def _was_refused(self, source: ChunkSource, began: float, no: SourceRefused) -> None:
        """Handle a refusal. A source that still gets chunks may have lost some; a complete one gave the blob up."""
        if source.is_followed:
            self._forget(source)
            self._stumble(source, began, no)
        else:
            self._bury(source, str(no), is_bad=False)

    def _stumble(self, source: ChunkSource, began: float, error: Exception) -> None:
        """Handle a failed connection, dialled at `began`: dial again after a backoff, a few times at most."""
        is_nonsense = isinstance(error, ProtocolError)
        with self._changed:
            if self._over:
                return
            if began > source.failed_at:
                pause_s = _FIRST_PAUSE_S * _PAUSE_GROWTH**source.num_failures * random.uniform(0.5, 1.0)
                source.num_failures += 1
                source.failed_at = time.monotonic()
                source.dial_at = source.failed_at + pause_s
            is_dead = source.num_failures >= _MAX_FAILURES
        if is_nonsense or is_dead:
            self._bury(source, str(error), is_bad=is_nonsense)

    def _bury(self, source: ChunkSource, why: str, *, is_bad: bool) -> None:
        with self._changed:
            if not source.failure:
                source.failure, source.is_bad = why, is_bad
            self._count_holders()
            self._changed.notify_all()
        self._cut(source, why)

    def _cut(self, source: ChunkSource, why: str) -> None:
        """Cut all links to a source, which wakes the threads that wait on them."""
        with self._changed:
            links = [link for link, its in self._links.items() if its is source]
        for link in links:
            link.cut(why)

    def _goes_on(self, source: ChunkSource) -> bool:
        return not (self._over or source.failure or self._stop.is_set() or self._blob.complete)

    def _pause(self, seconds: float) -> None:
        with self._changed:
            if not self._over:
                self._changed.wait_for(lambda: self._over, seconds)
