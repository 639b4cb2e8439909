"""How long answers are: a survival function learned from samples that finished and samples that were cut off.

Rules kept here:
- A sample cut off at n tokens (aborted, or at the cap) is censored: its answer is longer than n, so it counts in every
  bin that it outlived and in none after. Leaving such samples out makes answers look short exactly
  where it hurts (the life-table form of Kaplan and Meier; a cut sample counts for half of the bin it was cut in).
- Beyond the longest sample seen nothing is known: survival stays level there, and remaining lengths lean on the guess
  "half of what the cap leaves", which weighs as much as one sample.
- Reading changes nothing. The table that readers use is part of the state and is renewed by `observe` (after an eighth
  more samples, at the latest after 256) and by `age`; so a model saved and loaded answers like the one that went on.

Bins are an eighth of a doubling wide (9%), from 1 to 2^20 tokens; a length is known to about half a bin.

Left out: the choice of samples to observe (one model for a run, a domain or a round kind is the caller's choice), and
when to forget.
"""

import math
from bisect import bisect_right
from collections.abc import Sequence
from math import log2 as _log2

import msgspec

BINS_PER_DOUBLING = 8
NUM_BINS = 20 * BINS_PER_DOUBLING
EDGES: tuple[float, ...] = tuple(2.0 ** (i / BINS_PER_DOUBLING) for i in range(NUM_BINS + 1))

_LAST_BIN = NUM_BINS - 1
_MAX_UNSEEN = 256
_GUESS_WEIGHT = 1.0


def interpolate(points: Sequence[tuple[float, float]], x: float) -> float:
    """Return the value at `x`, linear between (x, value) points that rise in x, and flat outside them."""
    at = bisect_right(points, x, key=lambda point: point[0])
    if at == 0:
        return points[0][1]
    if at == len(points):
        return points[-1][1]
    (low, from_value), (high, to_value) = points[at - 1], points[at]
    return from_value + (x - low) / (high - low) * (to_value - from_value)


def _zeros() -> list[float]:
    return [0.0] * NUM_BINS


def _ones() -> list[float]:
    return [1.0] * (NUM_BINS + 1)


class LengthModel(msgspec.Struct):
    """Counts by bin, and the table derived from them: at each bin's lower edge, what survives and the area under it."""

    finished: list[float] = msgspec.field(default_factory=_zeros)
    cut: list[float] = msgspec.field(default_factory=_zeros)
    num_observed: int = 0
    unseen_finished: list[int] = msgspec.field(default_factory=list)
    """Lengths observed since the table was renewed."""
    unseen_cut: list[int] = msgspec.field(default_factory=list)
    at_risk: list[float] = msgspec.field(default_factory=_zeros)
    survival_at: list[float] = msgspec.field(default_factory=_ones)
    area_at: list[float] = msgspec.field(default_factory=lambda: list(EDGES))

    def observe(self, num_tokens: int, *, finished: bool) -> None:
        """Count a sample that ended at `num_tokens` (finished), or was stopped there and would have gone on."""
        (self.unseen_finished if finished else self.unseen_cut).append(num_tokens)
        self.num_observed = num_observed = self.num_observed + 1
        num_unseen = len(self.unseen_finished) + len(self.unseen_cut)
        if num_unseen >= _MAX_UNSEEN or num_unseen * 8 >= num_observed:
            self._renew()

    def age(self, factor: float) -> None:
        """Make all that was observed weigh `factor` times as much; 1.0 forgets nothing and renews the table."""
        if not 0.0 <= factor <= 1.0:
            raise ValueError(f"a factor from 0 to 1 was expected; got {factor}")
        self._count_unseen()
        self.finished = [count * factor for count in self.finished]
        self.cut = [count * factor for count in self.cut]
        self._renew()

    def survival(self, x: float) -> float:
        """Return the share of answers longer than `x` tokens. 1 when nothing was observed."""
        if x <= 1.0:
            return 1.0
        if x >= EDGES[-1]:
            return self.survival_at[-1]
        i = _bin(x)
        share = min(1.0, max(0.0, (x - EDGES[i]) / (EDGES[i + 1] - EDGES[i])))  # log2 rounds next to an edge
        return self.survival_at[i] + share * (self.survival_at[i + 1] - self.survival_at[i])

    def quantile(self, q: float) -> float:
        """Return the least length that a share `q` of answers does not exceed.

        math.inf when fewer than that were seen to finish: the answer lies beyond all observation. Bound it by the cap.
        """
        if not 0.0 <= q <= 1.0:
            raise ValueError(f"a share from 0 to 1 was expected; got {q}")
        left = 1.0 - q
        if left >= 1.0:
            return 0.0
        low, high = 0, NUM_BINS
        if self.survival_at[high] > left:
            return math.inf
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if self.survival_at[middle] <= left else (middle, high)
        above, below = self.survival_at[low], self.survival_at[high]
        return EDGES[low] + (above - left) / (above - below) * (EDGES[high] - EDGES[low])

    def mean(self, cap: float) -> float:
        """Return the mean length of answers that are stopped at `cap`."""
        return self.expected_remaining(0, cap)

    def expected_remaining(self, num_tokens: float, cap: float) -> float:
        """Return how many more tokens a sample with `num_tokens` is expected to make before it ends or is capped."""
        room = cap - num_tokens
        if room <= 0.0:
            return 0.0
        guess = room / 2.0
        alive = self.survival(num_tokens)
        num_alike = self.at_risk[_bin(num_tokens)]
        if alive <= 0.0 or num_alike <= 0.0:
            return guess
        learned = min(room, max(0.0, (self._area(cap) - self._area(num_tokens)) / alive))
        return (num_alike * learned + _GUESS_WEIGHT * guess) / (num_alike + _GUESS_WEIGHT)

    def _area(self, x: float) -> float:
        """Return the integral of survival from 0 to x."""
        if x <= 1.0:
            return max(0.0, x)
        if x >= EDGES[-1]:
            return self.area_at[-1] + (x - EDGES[-1]) * self.survival_at[-1]
        i = _bin(x)
        return self.area_at[i] + (x - EDGES[i]) * (self.survival_at[i] + self.survival(x)) / 2.0

    def _count_unseen(self) -> None:
        for counts, unseen in ((self.finished, self.unseen_finished), (self.cut, self.unseen_cut)):
            for num_tokens in unseen:
                counts[_bin(num_tokens)] += 1.0
            unseen.clear()

    def _renew(self) -> None:
        self._count_unseen()
        at_risk = 0.0
        for i in range(_LAST_BIN, -1, -1):
            at_risk += self.finished[i] + self.cut[i]
            self.at_risk[i] = at_risk
        alive, area = 1.0, 1.0
        for i in range(NUM_BINS):
            exposed = self.at_risk[i] - self.cut[i] / 2.0
            before = alive
            if self.finished[i] > 0.0:
                alive *= max(0.0, 1.0 - self.finished[i] / exposed)
            area += (EDGES[i + 1] - EDGES[i]) * (before + alive) / 2.0
            self.survival_at[i + 1] = alive
            self.area_at[i + 1] = area


def _bin(x: float) -> int:
    if x <= 1.0:
        return 0
    i = int(_log2(x) * BINS_PER_DOUBLING)
    return i if i < _LAST_BIN else _LAST_BIN
