"""The virtual clock, and one machine of the simulated world with what its cache keeps between calls."""

import heapq
from collections.abc import Callable

from polyrl.engines.lockstep import EngineModel
from polyrl.ids import Incarnation, LeaseId, SampleId, Seconds, WorkerName
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


class KeptContexts:
    """Contexts of episodes between two calls, which an engine keeps while it has room; the oldest goes first."""

    def __init__(self) -> None:
        self._tokens: dict[SampleId, int] = {}
        self._sum = 0

    def keep(self, sample: SampleId, num_tokens: int) -> None:
        self._sum += num_tokens - self._tokens.pop(sample, 0)
        self._tokens[sample] = num_tokens

    def take(self, sample: SampleId, room: float) -> int:
        """Return the tokens that are still there of an episode's context, when all that is kept has so much room."""
        while self._sum > room and self._tokens:
            self._sum -= self._tokens.pop(next(iter(self._tokens)))
        num_tokens = self._tokens.pop(sample, 0)
        self._sum -= num_tokens
        return num_tokens

    def clear(self) -> None:
        self._tokens.clear()
        self._sum = 0


class Machine:
    def __init__(
        self, name: WorkerName, incarnation: Incarnation, engine: EngineModel, kv_tokens: int, *, local: bool
    ) -> None:
        self.name = name
        self.incarnation = incarnation
        self.engine = engine
        self.kv_tokens = kv_tokens
        self.local = local
        self.kept = KeptContexts()
        self.calls: dict[LeaseId, tuple[SampleId, int]] = {}
        """Calls of episodes that run here: the episode, and the tokens of its prompt."""
        self.alive = True
        self.cut = False
        self.held_back: list[Event] = []
        """News that waits for a partition to heal."""
        self.pull = 0
        """The flow that brings it weights, or 0."""
        self.change_stamp = 0
        """Grows whenever its next change is found anew, so that older alarms are ignored."""


Send = Callable[[Machine, Event], None]
