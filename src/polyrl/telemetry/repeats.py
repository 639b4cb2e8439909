"""Repeated events: worth a line in a log the first time, and then at the 10th, the 100th, ...

Weights that diverged fail every sample of a round, several times: thousands of equal lines would hide all others.
"""

from collections import Counter

_MAX_KINDS = 256
"""Kinds that are counted at a time: some name the very prompt. Beyond that all are counted anew."""


class Repeats:
    def __init__(self) -> None:
        self._times: Counter[str] = Counter()

    def again(self, kind: str) -> str | None:
        """Count one more occurrence. Return the suffix of its log line, or None if it should not be logged."""
        if len(self._times) >= _MAX_KINDS and kind not in self._times:
            self._times.clear()
        self._times[kind] += 1
        times = self._times[kind]
        if str(times).rstrip("0") != "1":
            return None
        return "" if times == 1 else f" ({times} times by now)"
