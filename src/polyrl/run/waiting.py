"""What a run says of a wait, where no display shows it: that no worker has joined, or that a reward takes long.

Zero workers are a normal state, so this is no warning. It is told once in a wait, when that has lasted a while, and
once more when it is over. run/diagnosis.py knows what is waited for. And what the trainer says of its rewards, so that
others can know it too.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable

from polyrl.client import Fleet
from polyrl.errors import UserError
from polyrl.ids import Seconds
from polyrl.run.diagnosis import Finding, diagnose
from polyrl.run.tasks import Tasks, UnderWay
from polyrl.telemetry.looks import show_seconds

_LOOK_EVERY_S = 1.0
_PATIENCE_S = 15.0


class Waiting:
    """The wait that the run is in, if it is in one."""

    def __init__(self, doctor: str) -> None:
        """`doctor` is the command that says what to do."""
        self._doctor = doctor
        self._since: Seconds | None = None
        self._is_told = False

    def look(self, finding: Finding, now: Seconds, *, is_moving: bool = True) -> str | None:
        """What is to be said, now that this is what all wait for. `is_moving`: something is written, or trained."""
        if is_moving and not finding.needs_help and not finding.stalls:
            return self._end(now)
        if self._since is None:
            self._since = now
        if self._is_told or now - self._since < _PATIENCE_S:
            return None
        self._is_told = True
        says = "says what to do" if finding.needs_help else "says more"
        return f"waits: {finding.what}; `{self._doctor}` {says}"

    def _end(self, now: Seconds) -> str | None:
        since, is_told = self._since, self._is_told
        self._since, self._is_told = None, False
        return f"goes on, after {show_seconds(now - since)}" if is_told and since is not None else None


async def tell_of_rewards(fleet: Fleet, tasks: Tasks) -> None:
    """Tell the manager what reward functions do, until it is cancelled: while some run, and when one has failed."""
    said: UnderWay | None = None
    with contextlib.suppress(UserError):
        while True:
            await asyncio.sleep(_LOOK_EVERY_S)
            now = tasks.rewards_under_way()
            if now is not None and (now.running or said is None or now._replace(longest=said.longest) != said):
                await fleet.tell_rewards(*now)
                said = now


async def tell_of_waits(fleet: Fleet, doctor: str, say: Callable[[str], None]) -> None:
    """Until it is cancelled; or the manager is given up, which the run says itself."""
    waiting = Waiting(doctor)
    with contextlib.suppress(UserError):
        earlier = await fleet.status()
        while True:
            await asyncio.sleep(_LOOK_EVERY_S)
            status = await fleet.status()
            found = diagnose(earlier, status)
            line = waiting.look(found.findings[0], time.monotonic(), is_moving=found.is_moving)
            if line is not None:
                say(line)
            earlier = status
