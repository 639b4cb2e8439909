"""How long to wait before sending, so that a process keeps to its bandwidth limit. The time is an argument."""

BURST_S = 0.05
"""How much unused sending time may be made up for."""
_MIN_PIECE_BYTES = 4096


class Pace:
    def __init__(self, bytes_per_s: float) -> None:
        """Set the limit; 0 means no limit."""
        self._bytes_per_s = bytes_per_s
        self._free_at = float("-inf")

    @property
    def is_limited(self) -> bool:
        return self._bytes_per_s > 0

    def piece_bytes(self, most: int) -> int:
        """Return how much to send at once, so that many readers at a low bandwidth all get bytes often."""
        return int(min(most, max(_MIN_PIECE_BYTES, self._bytes_per_s * BURST_S))) if self.is_limited else most

    def reserve(self, num_bytes: int, now: float) -> float:
        """Return the seconds to wait before these bytes may be sent."""
        if not self.is_limited:
            return 0.0
        start = max(self._free_at, now - BURST_S)
        self._free_at = start + num_bytes / self._bytes_per_s
        return max(0.0, start - now)
