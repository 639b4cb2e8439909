"""How long to wait before sending, so that a process stays below its bandwidth. Takes the time, and returns a time."""

BURST_S = 0.05
"""What was not sent in the last moments may be made up for; more may not."""
_MIN_PIECE_BYTES = 4096


class Pace:
    def __init__(self, bytes_per_s: float) -> None:
        """0 is no limit."""
        self._bytes_per_s = bytes_per_s
        self._free_at = float("-inf")

    @property
    def is_limited(self) -> bool:
        return self._bytes_per_s > 0

    def piece_bytes(self, most: int) -> int:
        """How much to send at once, so that many readers of a low bandwidth all get something often."""
        return int(min(most, max(_MIN_PIECE_BYTES, self._bytes_per_s * BURST_S))) if self.is_limited else most

    def reserve(self, num_bytes: int, now: float) -> float:
        """Seconds to wait before these bytes may go."""
        if not self.is_limited:
            return 0.0
        start = max(self._free_at, now - BURST_S)
        self._free_at = start + num_bytes / self._bytes_per_s
        return max(0.0, start - now)
