"""Decides when drafts are verified rather than tokens decoded one by one: only where measured times say that it pays.

A *round* computes several rows of each sample: its newest token and a draft behind it. It draws a token for each row,
and those up to the first that the draft did not foresee stand. A round takes longer than a decoding step, and brings
one token of each sample, and one more for each draft token that was right.

Rules kept here:
- Rounds begin where the tokens that they are expected to bring, at the measured speed of decoding, are worth more than
  the time that they are expected to take. How often drafts are right is known before the first round: the drafts that
  there would have been are compared with what was decoded (`saw`).
- The time that rounds took beyond what decoding would have taken for the same tokens is *lost*. Later gains pay it
  back, down to zero. Past ALLOWED of all time, none begins and none goes on. So the engine is never slower by more
  than that, and by one round, than without drafts.
- Drafts that are only compared cost time too: no more than WATCHED of all time goes into them.
- Decoding is measured again after REFRESH rounds' bursts, since contexts grow.

Pure: times are passed in. Left out: the drafts themselves (drafting.py).
"""

from collections.abc import Sequence

from polyrl.engines.builtin.drafting import Draft

ROWS = (2, 4, 8)
"""The numbers of rows of a sample in a round: few, so that a GPU has a graph for each."""
MAX_SAMPLES = 32
"""With more, decoding is left as it is."""
ALLOWED = 0.01
"""The share of all time that may be lost."""
WATCHED = 0.005
"""The share of all time that may go into drafts that are only compared with what was decoded."""
REFRESH = 32
_MARGIN = 1.05
"""The expected gain with which rounds begin."""
_NEW = 0.2
"""The weight of a new measurement."""
_FEW = 48
"""Observations that the mean of accepted tokens is over, about."""
_MIN_SEEN = 8
_ROW_COST = 0.03
"""Of a decoding step, for each row of a sample: assumed until it is measured."""
_MATCHES = (5, 9, 16)
"""Drafts are told apart by the length of their match: below the first, ..., from the last on."""
_LIKELY = (0.4, 0.6, 0.75, 0.9)
"""How often a drafted token is right, assumed until it is measured; by match."""
_WEIGHT = 4.0
"""Observations that the assumption is worth."""
_MEMORY = 256.0
"""Observations of a kind of match that count; older ones fade."""


class Gate:
    def __init__(self, max_draft: int = ROWS[-1] - 1, *, always: bool = False) -> None:
        """`always`: measure, and verify regardless."""
        self.max_draft = max_draft
        self.lost_s = 0.0
        self.elapsed_s = 0.0
        self.watched_s = 0.0
        self._always = always
        self._decoding_s: dict[int, float] = {}
        """By number of samples, the time of a step."""
        self._first_s: dict[int, float] = {}
        """Times that were measured once."""
        self._round_s: dict[tuple[int, int], float] = {}
        """By number of samples and rows of each."""
        self._mean_round_s: dict[int, float] = {}
        self._accepted = 0.0
        self._num_seen = 0
        self._hits = [[0.0] * (max_draft + 1) for _ in _LIKELY]
        """By kind of match: how often so many tokens and more were right."""
        self._tries = [[0.0] * (max_draft + 1) for _ in _LIKELY]
        self._num_bursts = 0

    # Measurements

    def decoded(self, num_samples: int, num_steps: int, seconds: float) -> None:
        """Steps of this many samples were run, without drafts. The slower of the first two times is not believed:
        something was compiled in it."""
        self.elapsed_s += seconds
        self._num_bursts = 0
        step_s = seconds / num_steps
        known = self._decoding_s.get(num_samples)
        if known is not None:
            self._decoding_s[num_samples] = _blend(known, step_s)
        elif num_samples in self._first_s:
            self._decoding_s[num_samples] = min(step_s, self._first_s.pop(num_samples))
        else:
            self._first_s[num_samples] = step_s

    def saw(self, draft: Draft, num_right: int) -> None:
        """Learn from a draft, empty or not, that was compared with the drawn tokens."""
        self._num_seen += 1
        self._accepted += (num_right - self._accepted) / min(self._num_seen, _FEW)
        if not draft.tokens:
            return
        kind = _kind(draft)
        hits, tries = self._hits[kind], self._tries[kind]
        for depth in range(1, len(draft.tokens) + 1):
            tries[depth] += 1
            hits[depth] += num_right >= depth
        if tries[1] > _MEMORY:
            self._hits[kind], self._tries[kind] = [one / 2 for one in hits], [one / 2 for one in tries]

    def verified(self, num_samples: int, rows: int, num_tokens: int, seconds: float) -> None:
        """Learn from a round of verification that brought `num_tokens` tokens in all."""
        self.elapsed_s += seconds
        shape = (num_samples, rows)
        self._round_s[shape] = _blend(self._round_s.get(shape), seconds)
        self._mean_round_s[num_samples] = _blend(self._mean_round_s.get(num_samples), seconds)
        decoding_s = self._decoding_s.get(num_samples)
        if decoding_s is not None:
            self.lost_s = max(0.0, self.lost_s + seconds - decoding_s * num_tokens / num_samples)

    def prepared(self, seconds: float) -> None:
        """Time went into the texts that the next rounds copy from."""
        self.elapsed_s += seconds
        self.lost_s += seconds

    def watched(self, seconds: float) -> None:
        """Time went into drafts that are only compared with what is decoded."""
        self.elapsed_s += seconds
        self.watched_s += seconds

    def state(self) -> dict[str, float]:
        """Return what decisions rest on, rounded, for checks."""
        told = {"elapsed_s": self.elapsed_s, "lost_s": self.lost_s, "watched_s": self.watched_s}
        told |= {"accepted": self._accepted, "seen": self._num_seen}
        told |= {f"step_{num}_s": took for num, took in self._decoding_s.items()}
        told |= {f"round_{num}x{rows}_s": took for (num, rows), took in self._round_s.items()}
        return {name: round(one, 6) for name, one in told.items()}

    # Decisions

    def should_begin(self, num_samples: int) -> bool:
        """Return whether a burst of rounds should follow, with this many samples."""
        if num_samples > MAX_SAMPLES:
            return False
        if self._always:
            return True
        decoding_s = self._decoding_s.get(num_samples)
        if decoding_s is None or self._num_seen < _MIN_SEEN or self._num_bursts >= REFRESH:
            return False
        if self.lost_s + 2 * decoding_s > ALLOWED * self.elapsed_s:
            return False
        if self._gain(num_samples, decoding_s) < _MARGIN:
            return False
        self._num_bursts += 1
        return True

    def may_watch(self) -> bool:
        """Return whether drafts may be compared with what the next burst decodes."""
        return self.watched_s <= WATCHED * self.elapsed_s

    def should_go_on(self, num_samples: int) -> bool:
        """Return whether another round should follow the last."""
        if self._always:
            return True
        decoding_s = self._decoding_s.get(num_samples)
        if decoding_s is None or self.lost_s > ALLOWED * self.elapsed_s:
            return False
        return self._gain(num_samples, decoding_s) >= 1.0

    def _gain(self, num_samples: int, decoding_s: float) -> float:
        """Return the speed of rounds, as expected, over that of decoding."""
        round_s = self._mean_round_s.get(num_samples, decoding_s * (1 + _ROW_COST * ROWS[1]))
        return (1 + self._accepted) * decoding_s / round_s

    def rows(self, drafts: Sequence[Draft]) -> int:
        """Return the number of rows of each sample that promises most tokens a second."""
        num_samples = len(drafts)
        longest = max(len(one.tokens) for one in drafts)
        best, chosen = 0.0, ROWS[0]
        for rows in ROWS:
            expected = 1 + sum(self._expected(one, rows - 1) for one in drafts) / num_samples
            speed = expected / self._time_of(num_samples, rows)
            if speed > best:
                best, chosen = speed, rows
            if rows > longest:
                break
        return chosen

    def _time_of(self, num_samples: int, rows: int) -> float:
        """Return the time of a round, measured or assumed from others."""
        known = self._round_s.get((num_samples, rows))
        if known is not None:
            return known
        decoding_s = self._decoding_s.get(num_samples)
        if decoding_s is None:  # only compared with each other
            others = ((one, self._round_s.get((num_samples, one))) for one in ROWS)
            decoding_s = max((took / (1 + _ROW_COST * one) for one, took in others if took is not None), default=1.0)
        return decoding_s * (1 + _ROW_COST * rows)

    def _expected(self, draft: Draft, most: int) -> float:
        """Return how many of the first `most` tokens of the draft will be right."""
        if not draft.tokens:
            return 0.0
        kind = _kind(draft)
        likely, hits, tries = _LIKELY[kind], self._hits[kind], self._tries[kind]
        return sum(
            (hits[depth] + _WEIGHT * likely**depth) / (tries[depth] + _WEIGHT)
            for depth in range(1, min(most, len(draft.tokens)) + 1)
        )


def _kind(draft: Draft) -> int:
    return sum(draft.match >= length for length in _MATCHES)


def _blend(known: float | None, new: float) -> float:
    """Return a mean of recent measurements, of which none counts as less than half or more than twice the mean."""
    return new if known is None else known + _NEW * (min(max(new, known / 2), known * 2) - known)
