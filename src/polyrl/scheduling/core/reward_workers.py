"""Reward workers, as far as the ledger counts them: since when each is there, what it costs, and what it has done.

Which answers they score is the trainer's business (rewards/remote/places.py): no decision here depends on them.
"""

from msgspec import Struct

from polyrl.ids import Seconds
from polyrl.scheduling.core.ledger import Ledger, RewardWorkerLine


class SeatedRewardWorker(Struct):
    """One life of a reward worker."""

    name: str
    life: str
    since: Seconds
    """Up to here its time is in the ledger."""
    num_jobs: int = 0
    cpu_s: float = 0.0
    """The work that it has reported in this life, which is in the ledger."""


class RewardWorkersState(Struct):
    seats: dict[int, SeatedRewardWorker] = {}
    by_name: dict[str, int] = {}
    next_seat: int = 1

    def find(self, name: str, life: str) -> SeatedRewardWorker | None:
        """Return the reward worker in that very life; None for news of the dead."""
        seat = self.by_name.get(name)
        return None if seat is None or self.seats[seat].life != life else self.seats[seat]


def settle_reward_worker(worker: SeatedRewardWorker, ledger: Ledger, now: Seconds) -> None:
    """Write the seconds since the last time into the ledger."""
    seconds = now - worker.since
    if seconds <= 0.0:
        return
    line = ledger.reward_workers[worker.name]
    line.seconds += seconds
    line.usd += seconds * line.price_usd_per_hour / 3600
    worker.since = now


def reward_worker_line(ledger: Ledger, name: str, price_usd_per_hour: float) -> RewardWorkerLine:
    line = ledger.reward_workers.setdefault(name, RewardWorkerLine(price_usd_per_hour))
    line.price_usd_per_hour = price_usd_per_hour
    return line
