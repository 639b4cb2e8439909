"""The leases of a run: which sample was in which worker's hands, from when to when, and how fast each worker wrote.

Rules kept here: what is kept is bounded; the oldest go first. A worker's leases are looked up without those of others.
"""

from bisect import bisect_left
from collections import deque
from collections.abc import Container, Iterator
from itertools import islice
from typing import NamedTuple

from polyrl.ids import Seconds, show_sample
from polyrl.scheduling.core import commands as c

_MAX_LEASES = 400_000
_PACE_LEASES = 32
"""The number of a worker's newest leases from which its pace is computed."""


class LeaseSpan(NamedTuple):
    """A sample in a worker's hands."""

    start_s: Seconds
    end_s: Seconds | None
    sample: str
    num_tokens: int
    """The sample's tokens at the end of the lease; of one that is open, at its start."""
    ending: str
    """finished, moved, stopped, lost; empty: it is still there."""


class KeptLeases:
    """Every lease that is open, and the newest that have ended, by worker."""

    def __init__(self) -> None:
        self._worker_of: dict[int, str] = {}
        """The worker of each open lease."""
        self._open: dict[str, dict[int, LeaseSpan]] = {}
        self._ended: dict[str, list[LeaseSpan]] = {}
        """In the order of their ends."""
        self._num_ended = 0
        self._paces: dict[str, deque[tuple[int, Seconds]]] = {}
        """Tokens and seconds of each worker's newest leases."""

    def begin(self, given: c.Generate, now: Seconds) -> None:
        span = LeaseSpan(now, None, show_sample(given.sample), given.from_token, "")
        self._open.setdefault(given.worker, {})[given.lease] = span
        self._worker_of[given.lease] = given.worker

    def end(self, lease: int, now: Seconds, ending: str, num_tokens: int | None) -> None:
        """End a lease that may be known. `num_tokens`: of the sample, as far as it is known."""
        worker = self._worker_of.pop(lease, None)
        if worker is None:
            return
        span = self._open[worker].pop(lease)
        num = span.num_tokens if num_tokens is None else num_tokens
        if num > span.num_tokens and now > span.start_s:
            written = (num - span.num_tokens, now - span.start_s)
            self._paces.setdefault(worker, deque(maxlen=_PACE_LEASES)).append(written)
        self._ended.setdefault(worker, []).append(span._replace(end_s=now, num_tokens=num, ending=ending))
        self._num_ended += 1
        if self._num_ended > _MAX_LEASES:
            self._ended = {name: spans[len(spans) // 2 :] for name, spans in self._ended.items()}
            self._num_ended = sum(map(len, self._ended.values()))

    def end_lost(self, held: Container[int], now: Seconds) -> None:
        """End the leases that no worker holds any more."""
        for lease in [one for one in self._worker_of if one not in held]:
            self.end(lease, now, "lost", None)

    def within(self, worker: str, between: tuple[Seconds, Seconds]) -> Iterator[LeaseSpan]:
        """Yield a worker's leases between two moments."""
        start, end = between
        ended, running = self._ended.get(worker, []), self._open.get(worker, {})
        first = bisect_left(ended, start, key=lambda one: one.end_s or start)
        yield from (one for one in islice(ended, first, None) if one.start_s < end)
        yield from (one for one in running.values() if one.start_s < end)

    def paces(self) -> dict[str, float]:
        """Return the tokens a second per sample of each worker, from its newest leases; left out: those with few."""
        known = {name: found for name, found in self._paces.items() if len(found) >= _PACE_LEASES // 4}
        return {name: sum(one[0] for one in found) / sum(one[1] for one in found) for name, found in known.items()}
