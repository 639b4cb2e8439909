"""Credit: how many samples a worker is trusted with at once. Few at first, more as answers come, fewer after a stall.

    it joins                      START, whatever number of slots it claims
    an answer of it ends          one more: twice as many with every generation of its answers
    n samples progress at once    2 n
    some samples stall on it      half as many
    all of them do                it is given up, and begins with less if it joins again
    it has reached its slots      its plateau alone decides from then on (balancing.py)

The number of slots is the worker's own claim. A worker that claims a million and brings nothing keeps a few samples
from the others for as long as a stall takes, and fewer the next time. An honest worker has as many as it can run after
a few reports of progress, each of which doubles them. The trainer's own workers are trusted from the start.
"""

from polyrl.scheduling.core.desk import Desk
from polyrl.scheduling.core.fleet import UNBOUNDED, Worker
from polyrl.scheduling.core.ledger import WorkerLine

START = 8
_LESS_A_STALL = 4
"""The divisor of a worker's first credit for each time that its name has stalled."""


def at_join(desk: Desk, line: WorkerLine, slots: int, *, local: bool) -> int:
    start = max(1, START // _LESS_A_STALL**line.num_stalls)
    return UNBOUNDED if local or start >= slots or not desk.state.rules else start


def answered(desk: Desk, worker: Worker) -> None:
    """Count an answer of a worker. Its lease ends in the same event, after which waiting samples are placed anew."""
    if worker.has_stalled:  # it is forgiven
        worker.has_stalled = False
        desk.ledger.workers[worker.name].num_stalls = 0
    worker.earned = UNBOUNDED if worker.earned + 1 >= worker.slots else worker.earned + 1


def progressed(desk: Desk, worker: Worker) -> None:
    """Raise the credit of a worker that brought tokens, by its samples that have grown since it got them."""
    held = map(desk.samples.__getitem__, worker.leases.values())
    _raise(desk, worker, 2 * sum(sample.num_tokens > sample.moved_at for sample in held))


def _raise(desk: Desk, worker: Worker, earned: int) -> None:
    if earned > worker.earned:
        worker.earned = UNBOUNDED if earned >= worker.slots else earned
        desk.router.update(worker)
        desk.place_due = True


def halve(desk: Desk, worker: Worker) -> None:
    """Halve the credit of a worker that let samples stall."""
    if desk.state.rules and not worker.local:
        worker.earned = max(1, worker.capacity // 2)
        desk.router.update(worker)


def may_rejoin(desk: Desk, worker: Worker) -> bool:
    """Count a stall of all its samples; return whether it may join again: not after `max_failures` stalls in a row."""
    if worker.local or not desk.state.rules:
        return True
    line = desk.ledger.workers[worker.name]
    line.num_stalls += 1
    return line.num_stalls < desk.config.fleet_rules.max_failures
