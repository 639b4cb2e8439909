"""The virtual clock, and one machine of the simulated world."""

import heapq
from collections.abc import Callable

from polyrl.engines.lockstep import EngineModel
from polyrl.ids import Incarnation, Seconds, WorkerName
from polyrl.scheduling.core.events import Event

Action = Callable[[], None]


class Agenda:
    """Actions due on the virtual clock. Those of one moment happen in the order in which they were put down."""

    def __init__(self) -> None:
        self.now: Seconds = 0.0
        self._due: list[tuple[Seconds, int, Action]] = []
        self._num_put = 0

    def at(self, at: Seconds, action: Action) -> None:
        """Do it then; now, if then has passed."""
        self._num_put += 1
        heapq.heappush(self._due, (max(at, self.now), self._num_put, action))

    def later(self, seconds: Seconds, action: Action) -> None:
        self.at(self.now + seconds, action)

    def next_at(self) -> Seconds | None:
        return self._due[0][0] if self._due else None

    def do_next(self) -> None:
        self.now, _, action = heapq.heappop(self._due)
        action()


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
