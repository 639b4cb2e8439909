"""Reward workers join, report and leave, for the ledger alone.

Rules kept here: a name has one life at a time; news of another life is late. A worker's account of its jobs and its
CPU time only grows within a life, so that a report that is told again, or out of order, counts once.
"""

from collections.abc import Callable, Mapping
from typing import Any

from polyrl.ids import Seconds
from polyrl.scheduling.core.desk import Desk
from polyrl.scheduling.core.events import RewardWorkerJoined, RewardWorkerLeft, RewardWorkerReported
from polyrl.scheduling.core.ledger import OTHERS
from polyrl.scheduling.core.reward_workers import SeatedRewardWorker, reward_worker_line, settle_reward_worker

_MAX_NAMES = 1000
"""Names of reward workers that are remembered, beyond those that are there."""


def joined(desk: Desk, event: RewardWorkerJoined, now: Seconds) -> None:
    """Seat a reward worker. The same life that joins again, after a restart of the manager, was there all the time."""
    known = desk.reward_workers
    if known.find(event.worker, event.life) is not None:
        return
    if event.worker in known.by_name:
        _leave(desk, event.worker, now)
    line = reward_worker_line(desk.ledger, event.worker, event.price_usd_per_hour)
    line.num_joins += 1
    known.seats[known.next_seat] = SeatedRewardWorker(event.worker, event.life, now)
    known.by_name[event.worker] = known.next_seat
    known.next_seat += 1
    _forget_names(desk)


def reported(desk: Desk, event: RewardWorkerReported, now: Seconds) -> None:
    worker = desk.reward_workers.find(event.worker, event.life)
    if worker is None:
        desk.ledger.late_news += 1
        return
    settle_reward_worker(worker, desk.ledger, now)
    line = desk.ledger.reward_workers[worker.name]
    line.num_jobs += max(0, event.num_jobs - worker.num_jobs)
    line.cpu_s += max(0.0, event.cpu_s - worker.cpu_s)
    worker.num_jobs, worker.cpu_s = max(worker.num_jobs, event.num_jobs), max(worker.cpu_s, event.cpu_s)


def left(desk: Desk, event: RewardWorkerLeft, now: Seconds) -> None:
    if desk.reward_workers.find(event.worker, event.life) is None:
        desk.ledger.late_news += 1
        return
    desk.ledger.reward_workers[event.worker].num_losses += event.is_lost
    _leave(desk, event.worker, now)


def settle_all(desk: Desk, now: Seconds) -> None:
    for worker in desk.reward_workers.seats.values():
        settle_reward_worker(worker, desk.ledger, now)


def _leave(desk: Desk, name: str, now: Seconds) -> None:
    known = desk.reward_workers
    settle_reward_worker(known.seats.pop(known.by_name.pop(name)), desk.ledger, now)


def _forget_names(desk: Desk) -> None:
    """Keep few names of reward workers that left: a peer could join under one new name after the other for ever."""
    lines, there = desk.ledger.reward_workers, desk.reward_workers.by_name
    if len(lines) > _MAX_NAMES + len(there):
        desk.ledger.fold_reward_worker(next(one for one in lines if one not in (*there, OTHERS)))


HANDLERS: Mapping[type, Callable[[Desk, Any, Seconds], None]] = {
    RewardWorkerJoined: joined,
    RewardWorkerLeft: left,
    RewardWorkerReported: reported,
}
