"""Reward workers in the ledger: seconds, dollars, jobs and CPU time, however their news comes."""

from typing import Any

from polyrl.scheduling.core import events as e
from polyrl.scheduling.core.parameters import DomainData, SchedulerConfig
from polyrl.scheduling.invariants import check
from polyrl.scheduling.scheduler import Scheduler

CONFIG = SchedulerConfig(domains=(DomainData(name="d", prompts_per_step=1, num_prompts=10),))


def told(*events: tuple[float, Any]) -> Scheduler:
    scheduler = Scheduler(CONFIG)
    for now, event in events:
        assert scheduler.handle(event, now) == []
        check(scheduler, now)
    return scheduler


def test_a_reward_worker_is_paid_from_joining_to_leaving():
    ledger = told(
        (10.0, e.RewardWorkerJoined("g", "a", 3.6)),
        (20.0, e.RewardWorkerReported("g", "a", 5, 2.5)),
        (110.0, e.RewardWorkerLeft("g", "a", "drained")),
        (500.0, e.RewardWorkerJoined("g", "b", 7.2)),
        (510.0, e.RewardWorkerLeft("g", "b", "no heartbeat", is_lost=True)),
    ).ledger
    line = ledger.reward_workers["g"]
    assert (line.seconds, round(line.usd, 9), line.num_jobs, line.cpu_s) == (110.0, 0.12, 5, 2.5)
    assert (line.num_joins, line.num_losses, ledger.late_news) == (2, 1, 0)
    assert round(ledger.usd(600.0), 9) == 0.12


def test_news_that_is_repeated_out_of_order_or_of_another_life_counts_once():
    ledger = told(
        (0.0, e.RewardWorkerJoined("g", "a", 1.0)),
        (5.0, e.RewardWorkerJoined("g", "a", 1.0)),  # after a restart of the manager
        (6.0, e.RewardWorkerReported("g", "a", 7, 3.0)),
        (7.0, e.RewardWorkerReported("g", "a", 4, 1.0)),
        (8.0, e.RewardWorkerReported("g", "old", 100, 100.0)),
        (9.0, e.RewardWorkerLeft("g", "old", "late")),
        (10.0, e.RewardWorkerJoined("g", "b", 1.0)),  # another process under its name
        (12.0, e.RewardWorkerReported("g", "b", 1, 0.5)),
    ).ledger
    line = ledger.reward_workers["g"]
    assert (line.seconds, line.num_jobs, line.cpu_s, line.num_joins) == (12.0, 8, 3.5, 2)
    assert ledger.late_news == 2


def test_names_of_long_ago_are_folded_into_one_line():
    events = []
    for number in range(1200):
        events += [(number, e.RewardWorkerJoined(f"g{number}", "a", 3600.0))]
        events += [(number + 0.5, e.RewardWorkerLeft(f"g{number}", "a", "gone"))]
    ledger = told(*events).ledger
    assert len(ledger.reward_workers) <= 1003
    assert sum(line.num_joins for line in ledger.reward_workers.values()) == 1200
    assert round(ledger.usd(5000.0), 6) == 600.0
