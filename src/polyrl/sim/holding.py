"""Which of the machines that a market grants are held: those that a fleet keeper would ask for.

A granted machine is *offered*. Held ones are started, and paid from that moment on; the others cost nothing. Where more
are wanted than are held, the next offered ones are started; where fewer, those that the advice names, or the newest,
are drained. A machine that is taken away is replaced by another one that is offered.

It leaves out what a start costs: the fleet model plays that.
"""

from collections.abc import Container, Sequence

from polyrl.ids import WorkerName


class Holding:
    def __init__(self, target: int | None) -> None:
        """`target` is the number of machines that are wanted at first; None: all of them."""
        self.target = target
        self._offered: dict[WorkerName, None] = {}
        """Machines that the market grants, and has not given notice to."""
        self._held: dict[WorkerName, None] = {}

    @property
    def num_offered(self) -> int:
        return len(self._offered)

    def is_held(self, name: WorkerName) -> bool:
        return name in self._held

    def offer(self, name: WorkerName) -> None:
        self._offered[name] = None

    def close(self, name: WorkerName) -> None:
        """Start a machine no more: it was given notice."""
        self._offered.pop(name, None)

    def withdraw(self, name: WorkerName) -> None:
        """Take a machine away."""
        self.close(name)
        self._held.pop(name, None)

    def aim(self, target: int, least_useful: Sequence[WorkerName] = ()) -> list[WorkerName]:
        """Want so many. Returns the machines to let go."""
        self.target = target
        order = [*(name for name in least_useful if name in self._held), *reversed(self._held)]
        goes = list(dict.fromkeys(order))[: max(0, len(self._held) - target)]
        for name in goes:
            del self._held[name]
        return goes

    def take_more(self, busy: Container[WorkerName] = ()) -> list[WorkerName]:
        """Return the machines to start now: offered ones, as long as fewer are held than wanted. Those that still hand
        over (`busy`) are left out."""
        free = [name for name in self._offered if name not in self._held and name not in busy]
        room = len(free) if self.target is None else max(0, self.target - len(self._held))
        for name in free[:room]:
            self._held[name] = None
        return free[:room]
