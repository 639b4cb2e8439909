"""How long streams of answers are left alone before all that came of them is read.

A server that writes 32 answers sends 32 chunks a step, one by one, and waking for each costs more than reading it: of
two cores that server and worker shared, the server lost a tenth. So with many answers the whole event loop stands
still, and what gathers in the sockets meanwhile is read in one go. Nobody else in a worker minds 40 ms, and all that
computes there does so in threads.
"""

import asyncio
import time

_EVERY_S = 0.025
"""Half of what a worker gathers tokens for before it sends them."""
_MANY = 4
_MANY_EVERY_S = 0.05
_READ_S = 0.008
"""Of them, for reading what is in the sockets."""


class Pause:
    """`rests`: whether the event loop may stand still."""

    def __init__(self, *, rests: bool = True) -> None:
        self._rests = rests
        self._rested_at = 0.0

    async def take(self, num_answers: int) -> None:
        """Returns when what came of so many answers should be read."""
        if num_answers < _MANY or not self._rests:
            await asyncio.sleep(_EVERY_S)
            return
        time.sleep(max(0.0, self._rested_at + _MANY_EVERY_S - time.monotonic()))
        self._rested_at = time.monotonic()
        await asyncio.sleep(_READ_S)
