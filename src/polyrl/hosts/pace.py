"""How fast a host makes calls: slower than the manager takes for a flood.

An episode that is replayed after its host died has its answers at once, hundreds of them; a harness that asks again and
again for what it was refused makes calls in a loop. Neither may cost the other episodes of the host their place.
"""

from polyrl.ids import Seconds
from polyrl.wire.host_frames import FRAMES_A_SECOND, FRAMES_AT_ONCE, LEAST_EPISODES

_SHARE = 0.5
"""Of what the manager allows. The rest is for ends and heartbeats, and for clocks that differ."""


class CallPace:
    def __init__(self) -> None:
        self._num_ahead = 0.0
        """Calls that were made, less those that time has paid for."""
        self._counted_at: Seconds = 0.0

    def wait_s(self, now: Seconds, num_episodes: int) -> Seconds:
        """Count a call, and return how long it has to wait."""
        a_second = _SHARE * FRAMES_A_SECOND * max(LEAST_EPISODES, num_episodes)
        passed_s = max(0.0, now - self._counted_at)
        self._counted_at = now
        self._num_ahead = max(0.0, self._num_ahead - passed_s * a_second) + 1.0
        return max(0.0, (self._num_ahead - _SHARE * FRAMES_AT_ONCE) / a_second)
