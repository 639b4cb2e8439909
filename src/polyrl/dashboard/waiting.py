"""Where the time of a run goes: what its trainer does or waits for at every moment, what that costs, and what helps.

    doing(desk)                 one word for this moment, from the scheduler's state
    TimeUse                     those words as they follow one another, told by the reader of the journal
    slowest(parts, ...)         the part that holds the run up, in sentences

Rules kept here: seconds and dollars are measured, from the journal; no share is guessed. A run that waits little has no
slowest part.
"""

from bisect import bisect_left
from collections.abc import Sequence
from itertools import islice
from statistics import fmean
from typing import NamedTuple

from polyrl.ids import Seconds
from polyrl.scheduling.core.desk import Desk
from polyrl.scheduling.core.ledger import StepLine
from polyrl.telemetry.looks import show_seconds
from polyrl.telemetry.timeline import Timeline, seconds_by_activity
from polyrl.wire.control import Status

_ROW = "trainer"
_LAST_SHARE = 0.25
"""The share of a round's samples that are called its last answers, once no sample waits."""
_NUM_STEPS = 10
"""The number of newest steps whose time is told."""
_MUCH = 0.3
"""The least share of the time at which a wait is reported."""
_SHORT_S = 0.5
"""The least seconds a step at which a wait is reported."""
_PER_HOUR = 3600.0

WORDS = {
    "trains": "training",
    "validates": "validating",
    "writes": "writing answers with its own device",
    "updates": "updating, publishing or saving weights",
    "rewards": "waiting for rewards",
    "last answers": "waiting for the last answers of a round",
    "answers": "waiting while all answers are written",
    "places": "waiting while answers wait for a place on a worker",
    "environments": "waiting for environments",
    "no worker": "waiting for a worker",
    "no host": "waiting for a host",
    "pause": "paused by request",
}
"""The name of each on the page."""
_USEFUL = ("trains", "writes")
"""The use of time that a run is for."""


class TimePart(NamedTuple):
    name: str
    """A key of WORDS."""
    words: str
    seconds: float
    share: float
    usd: float
    """This part's share of what was spent meanwhile."""
    a_step_s: float
    """Seconds for each of the steps."""


class Slowest(NamedTuple):
    """The part of a run that holds the rest up."""

    name: str
    """A key of WORDS."""
    what: str
    why: str
    costs: str
    do: str


def doing(desk: Desk) -> str:
    """Return what the trainer does, or what it waits for: a key of WORDS."""
    clock = desk.state.clock
    if clock.validating_since is not None:
        return "validates"
    if clock.busy_since is not None:
        return "trains"
    if any(one.leases and one.may_generate for one in desk.state.fleet.local()):
        return "writes"
    round_ = next(iter(desk.rounds.values()), None)
    if round_ is None or round_.num_delivered >= sum(round_.quotas):
        return "updates"
    if desk.state.paused:
        return "pause"
    if round_.num_unhosted and not desk.hosts.seats:
        return "no host"
    if round_.num_waiting:
        can_write = bool(round_.num_leased) or any(one.may_generate for one in desk.seats.values())
        return "places" if can_write else "no worker"
    if round_.num_unhosted or round_.num_playing:
        return "environments"
    if round_.num_leased:
        return "last answers" if round_.num_leased <= _LAST_SHARE * round_.num_planned else "answers"
    return "rewards" if desk.scoring.running or desk.scoring.queue else "updates"


class TimeUse:
    """The trainer's work and waits, moment by moment."""

    def __init__(self) -> None:
        self._spans = Timeline()

    def mark(self, desk: Desk, now: Seconds) -> None:
        self._spans.mark(_ROW, doing(desk), now)

    def parts(self, lines: Sequence[StepLine], began: Seconds, now: Seconds, usd: float) -> list[TimePart]:
        """Return the parts of the newest steps and of the open one, the largest first. `usd`: spent so far."""
        start, before = began, 0.0
        if len(lines) > _NUM_STEPS:
            start, before = lines[-_NUM_STEPS - 1].trained_at, lines[-_NUM_STEPS - 1].usd
        spans = self._spans.rows.get(_ROW, [])
        first = bisect_left(spans, start, key=lambda one: one.end_s)
        seconds = seconds_by_activity(islice(spans, first, None), start, now)
        open_span = self._spans.doing(_ROW)
        if open_span is not None and now > (since := max(start, open_span[0])):
            seconds[open_span[1]] = seconds.get(open_span[1], 0.0) + now - since
        total, num_steps = sum(seconds.values()), max(1, min(len(lines), _NUM_STEPS))
        parts = [
            TimePart(name, WORDS[name], took, took / total, max(0.0, usd - before) * took / total, took / num_steps)
            for name, took in seconds.items()
        ]
        return sorted(parts, key=lambda one: -one.seconds)


class WaitingContext(NamedTuple):
    """Other facts of a run, from which the reason of a wait is told."""

    status: Status | None = None
    lines: Sequence[StepLine] = ()
    slow_workers: Sequence[str] = ()
    """Their names."""
    join: str = ""
    """The command with which a worker joins."""
    is_async: bool = False
    validation_every: int | None = None
    """The recipe's `validation.every_steps`."""
    packs_tails: bool = False
    """Whether the recipe has `rounds.tail_batching` on."""
    reward_function: str = ""
    """The reward function that takes longest, as far as is known."""


def slowest(parts: Sequence[TimePart], around: WaitingContext) -> Slowest | None:
    """Return what holds the run up; None: nothing is waited for much."""
    begun = bool(around.lines)  # before a first step, versions are offered, models loaded and validated at leisure
    waits = [one for one in parts if one.name not in _USEFUL and (begun or one.name not in ("updates", "validates"))]
    if not waits or waits[0].share < _MUCH or waits[0].a_step_s < _SHORT_S:
        return None
    worst = waits[0]
    seconds = sum(one.seconds for one in parts)
    what = f"{worst.share:.0%} of the trainer's time goes to {worst.words}"
    costs = f"{show_seconds(worst.seconds)} of the last {show_seconds(seconds)}"
    if worst.usd > 0:
        an_hour = worst.usd / seconds * _PER_HOUR
        costs += f", and {_dollars(worst.usd)} of what they cost: {_dollars(an_hour)} an hour"
    why, do = _why(worst.name, around)
    return Slowest(worst.name, what, why, costs, do)


def _dollars(usd: float) -> str:
    return f"${usd:,.2f}" if usd >= 0.1 else f"${usd:.4f}"


def _why(name: str, around: WaitingContext) -> tuple[str, str]:
    """Return why it is waited for, and what helps."""
    worker = f"have more workers join: {around.join}" if around.join else "have more workers join"
    match name:
        case "rewards":
            return _of_rewards(around)
        case "last answers":
            return _of_last_answers(around)
        case "answers":
            why = "all answers of the round are being written: the fleet's pace is the limit"
            return why, worker if around.is_async else f'{worker}; or train.mode = "async" trains meanwhile'
        case "places":
            return _of_places(around.status), f"{worker}; or give each more slots, if its memory allows"
        case "no worker":
            return _of_no_worker(around.status), worker
        case "environments":
            return _of_environments(around)
        case "validates":
            every = around.validation_every
            when = "" if not every else "after every step, " if every == 1 else f"after every {every} steps, "
            why = f"{when}all validation prompts are answered and scored, and nothing is trained meanwhile"
            return why, "raise validation.every_steps, or lower validation.num_prompts or validation.num_samples"
        case "updates":
            why = "between steps the trainer puts weights together, offers them to workers, or saves them"
            return why, (
                "see time/step_publish and time/step_save in Curves: for saving, raise checkpoint.every_steps or take "
                "a faster disk; for publishing, see docs/concepts/weights.md"
            )
        case "no host":
            return "no host is there to play episodes", "start a host: `polyrl doctor RUN` prints the command"
        case _:
            return "the run is paused", "POST /v1/resume with the admin token lets it go on"


def _of_rewards(around: WaitingContext) -> tuple[str, str]:
    told = None if around.status is None else around.status.rewards
    named = f" {around.reward_function}" if around.reward_function else ""
    why = f"answers are written sooner than the reward function{named} scores them"
    if told is not None and told.running:
        why += f"; the call that has run longest has for {show_seconds(told.longest_s)}"
    return why, (
        "raise rewards.processes, start reward workers on other machines (polyrl worker --rewards), or make the "
        "function quicker"
    )


def _of_environments(around: WaitingContext) -> tuple[str, str]:
    why = "environments have the move: tools, games or graders of episodes"
    told = [] if around.status is None else around.status.environments
    slow = max(told, key=lambda one: one.turn_p50_s or 0.0, default=None)
    if slow is not None and slow.turn_p50_s is not None and slow.turn_p99_s is not None:
        why += (
            f"; half of the turns of {slow.name} take longer than {show_seconds(slow.turn_p50_s)}, "
            f"one in a hundred longer than {show_seconds(slow.turn_p99_s)}"
        )
    more = "another host, or a larger environments.slots, plays more at once"
    if waiting := sum(one.waiting for one in told):
        return why, f"{more}: {waiting:,} episodes wait for a place; see what tools wait for"
    meanwhile = "" if around.is_async else '; train.mode = "async" trains meanwhile'
    return why, f"see what its tools wait for, and make them quicker{meanwhile}; another host helps a busy one"


def _of_last_answers(around: WaitingContext) -> tuple[str, str]:
    if around.slow_workers:
        names = ", ".join(around.slow_workers)
        why = f"most answers have ended, and those on {names}, slower than the other workers, keep the step waiting"
        return why, f"look at that machine, or drain it: polyrl drain {around.slow_workers[0]}"
    why = "most answers have ended, and a few long ones keep the step waiting"
    last = around.lines[-_NUM_STEPS:]
    mean = fmean(one.trained_mean for one in last) if last else 0.0
    longest = fmean(one.longest for one in last) if last else 0.0
    if longest > 2 * mean > 0:
        why += f": the longest of a step has {longest:,.0f} tokens, {longest / mean:.0f} times the mean of {mean:,.0f}"
    do = [] if around.packs_tails else ["rounds.tail_batching packs the longest answers into rare long rounds"]
    do += [] if around.is_async else ['train.mode = "async" trains meanwhile']
    return why, "; ".join([*do, "a lower rollout.max_new_tokens cuts them off"])


def _of_places(status: Status | None) -> str:
    why = "there are more samples than places on workers"
    if status is None or not status.workers:
        return why
    places, num = (
        sum(one.slots for one in status.workers if not one.local),
        sum(not one.local for one in status.workers),
    )
    return f"{why}: {places:,} places on {num:,} {'worker' if num == 1 else 'workers'}"


def _of_no_worker(status: Status | None) -> str:
    if status is None or not status.ledger:
        return "no worker could write"
    joined, lost = status.ledger.get("workers_joined", 0), status.ledger.get("workers_lost", 0)
    there = len(status.workers)
    return f"{there} workers are there now; a worker joined {joined} times, and was lost {lost} times"
