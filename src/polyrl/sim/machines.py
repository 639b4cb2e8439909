"""One machine of the simulated world."""

from collections.abc import Callable

from polyrl.ids import Incarnation, WorkerName
from polyrl.scheduling.core.events import Event
from polyrl.sim.engine_model import EngineModel


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
