"""The devices that each worker of a run has on this machine: those after the trainer's ranks.

Rules kept here: a device has one worker at a time. A worker's devices are its own until it has ended, also while it
hands over, and also when another process keeps the fleet from then on: a file says whose they are.
"""

from collections.abc import Container
from pathlib import Path

import msgspec
from msgspec import Struct

from polyrl.disk import write_whole

_FILE = "devices.json"


class DeviceSpan(Struct, frozen=True):
    """So many devices that follow each other, counted from the first that is no rank's."""

    first: int
    num: int

    def meets(self, other: "DeviceSpan") -> bool:
        return self.first < other.first + other.num and other.first < self.first + self.num


class DevicesInUse:
    """Which devices are whose."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / _FILE
        try:
            self._of = msgspec.json.decode(self._file.read_bytes(), type=dict[str, DeviceSpan])
        except (OSError, ValueError):
            self._of: dict[str, DeviceSpan] = {}

    def of(self, name: str) -> DeviceSpan | None:
        return self._of.get(name)

    def take(self, name: str, width: int, most: int, there: Container[str]) -> bool:
        """Give a worker the first `width` of `most` devices that no other has that is `there`. Returns False if there
        are none."""
        others = {other: its for other, its in self._of.items() if other != name and other in there}
        starts = [self._of[name].first] if name in self._of and self._of[name].num == width else []
        for first in [*starts, *range(0, most - width + 1, width)]:
            wanted = DeviceSpan(first, width)
            if not any(wanted.meets(its) for its in others.values()):
                self._keep({**others, name: wanted})
                return True
        return False

    def _keep(self, now: dict[str, DeviceSpan]) -> None:
        if now != self._of:
            self._of = now
            self._file.parent.mkdir(parents=True, exist_ok=True)
            write_whole(self._file, msgspec.json.encode(now), 0o600)
