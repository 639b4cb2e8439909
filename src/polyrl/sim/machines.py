"""One machine of the simulated world, and the timeline of what all of them did."""

from collections.abc import Callable

from msgspec import Struct

from polyrl.ids import Incarnation, Seconds, WorkerName
from polyrl.scheduling.events import Event
from polyrl.sim.engine_model import EngineModel


class Span(Struct, frozen=True):
    """What a machine did, from one moment to another."""

    start_s: Seconds
    end_s: Seconds
    activity: str


class Machine:
    def __init__(self, name: WorkerName, incarnation: Incarnation, engine: EngineModel, *, local: bool) -> None:
        self.name = name
        self.incarnation = incarnation
        self.engine = engine
        self.local = local
        self.alive = True
        self.cut = False
        self.held_back: list[Event] = []
        """News that waits for a partition to heal."""
        self.pull = 0
        """The flow that brings it weights, or 0."""
        self.change_stamp = 0
        """Grows whenever its next change is found anew, so that older alarms are ignored."""


Send = Callable[[Machine, Event], None]


class Timeline:
    """Spans by machine; a machine that lives again under its name goes on in its row."""

    def __init__(self) -> None:
        self.rows: dict[str, list[Span]] = {}
        self._open: dict[str, tuple[Seconds, str]] = {}

    def mark(self, name: str, activity: str | None, now: Seconds) -> None:
        """From now on the machine does this; None: it is gone."""
        before = self._open.get(name)
        if before is not None:
            if before[1] == activity:
                return
            if now > before[0]:
                self.rows.setdefault(name, []).append(Span(before[0], now, before[1]))
        if activity is None:
            self._open.pop(name, None)
        else:
            self.rows.setdefault(name, [])
            self._open[name] = (now, activity)

    def end(self, now: Seconds) -> None:
        for name in list(self._open):
            self.mark(name, None, now)
