"""Rewards beside generation: a bounded pool, cheapest expected first, learned limits; a failure is never a zero.

A sample's reward starts when its answer ends (or, with `as_finished` off, when the whole round has been generated).
Every attempt has a number; only the answer to the latest one counts. An attempt that the outside never answers is taken
for an infrastructure failure after its deadline.

Free places are filled at the end of an event, never within it: until then, a waiting sample may be given up.
"""

import heapq

from polyrl.ids import SampleId, Seconds
from polyrl.scheduling.core.commands import CancelScore, Score
from polyrl.scheduling.core.deadlines import Wait
from polyrl.scheduling.core.desk import Desk
from polyrl.scheduling.core.events import RewardFinished
from polyrl.scheduling.core.samples import TrackedGroup, TrackedSample
from polyrl.scheduling.rules.order import quick_unit

_LOOK: Wait = ("reward", 0)
_LOOK_EVERY_S = 10.0
_BACKSTOP_S = 30.0
_BACKSTOP_FACTOR = 4.0
"""A time limit is CPU time of one case; an attempt may take this many times as long on the wall, and a while more."""


def case_of(desk: Desk, group: TrackedGroup) -> int:
    """Return the key of a learned time limit: the prompt."""
    return group.prompt * desk.num_domains + group.domain


def score(desk: Desk, sample: TrackedSample, group: TrackedGroup) -> None:
    """Queue a generated sample, to be scored as soon as the pool has a place."""
    sample.state = "scoring"
    scoring = desk.scoring
    expected = desk.budgets.expected_s(case_of(desk, group))
    heapq.heappush(scoring.queue, (expected, sample.id))
    if len(scoring.running) < desk.num_rewards:
        desk.scores_due = True


def start_waiting(desk: Desk, now: Seconds) -> None:
    """Fill the places that are free, cheapest expected first."""
    scoring = desk.scoring
    while scoring.queue and len(scoring.running) < desk.num_rewards:
        _, sample_id = heapq.heappop(scoring.queue)
        sample = desk.samples.get(sample_id)
        if sample is not None and sample.state == "scoring":
            _start(desk, sample, desk.groups[sample.group], now)


def _start(desk: Desk, sample: TrackedSample, group: TrackedGroup, now: Seconds) -> None:
    sample.attempt = attempt = sample.attempt + 1
    sample_id = sample.id
    draw = quick_unit(sample_id ^ desk.config.seed ^ attempt << 32)
    limit = desk.budgets.limit(case_of(desk, group), draw)
    timeout_s = limit.timeout_s
    wall_s = _BACKSTOP_S + _BACKSTOP_FACTOR * timeout_s
    desk.scoring.running[sample_id] = now + max(wall_s, desk.config.rewards.wall_s)
    if _LOOK not in desk.deadlines.entries:
        desk.deadlines.set(_LOOK, now + _LOOK_EVERY_S)
    desk.commands.append(Score(sample_id, attempt, timeout_s, limit.why))


def accept(desk: Desk, event: RewardFinished) -> TrackedSample | None:
    """Take in an answer. Returns the sample if it is the one waited for, None for late or repeated news."""
    scoring = desk.scoring
    sample = desk.samples.get(event.sample)
    if sample is None or sample.attempt != event.attempt or sample.id not in scoring.running:
        desk.ledger.late_news += 1
        return None
    _free_place(desk, sample.id)
    return sample


def cancel(desk: Desk, sample: TrackedSample, why: str) -> None:
    """Take a sample that is no longer wanted out of the pool, if it is there."""
    if sample.id in desk.scoring.running:
        desk.commands.append(CancelScore(sample.id, sample.attempt, why))
        _free_place(desk, sample.id)


def fit(desk: Desk, why: str) -> None:
    """Adapt to a new number of places: the samples that began last give theirs up, and wait again."""
    scoring = desk.scoring
    while len(scoring.running) > desk.num_rewards:
        sample = desk.samples[next(reversed(scoring.running))]
        cancel(desk, sample, why)
        score(desk, sample, desk.groups[sample.group])
    desk.scores_due = bool(scoring.queue)


def postpone(desk: Desk, seconds: Seconds) -> None:
    """Move the scoring deadlines by `seconds`, a time in which no answer could arrive."""
    running = desk.scoring.running
    for sample_id in running:
        running[sample_id] += seconds


def give_up_overdue(desk: Desk, now: Seconds) -> list[TrackedSample]:
    """Cancel overdue scoring attempts, return their samples, and arm the next check. Called now and then."""
    running = desk.scoring.running
    if desk.state.trainer_away_since is not None:
        desk.deadlines.set(_LOOK, now + _LOOK_EVERY_S)
        return []
    overdue = [desk.samples[sample_id] for sample_id, due in running.items() if due <= now]
    for sample in overdue:
        desk.commands.append(CancelScore(sample.id, sample.attempt, "it was not answered in time"))
        _free_place(desk, sample.id)
    if running:
        desk.deadlines.set(_LOOK, now + _LOOK_EVERY_S)
    return overdue


def _free_place(desk: Desk, sample_id: SampleId) -> None:
    del desk.scoring.running[sample_id]
    if desk.scoring.queue:
        desk.scores_due = True
