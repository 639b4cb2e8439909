"""Where the time of a run goes: what its trainer does or waits for at every moment, what that costs, and what helps.

    doing(desk)                 one word for this moment, from the scheduler's state
    TimeUse                     those words as they follow one another, told by the reader of the journal
    slowest(parts, ...)         the part that holds the run up, in sentences

Rules kept here: seconds and dollars are measured, from the journal; no share is guessed. A run that waits little has no
slowest part.
"""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from itertools import islice
from math import ceil
from statistics import fmean
from typing import Any, NamedTuple

from polyrl.dashboard.alarms import drain_command, pulls
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
_SHORT_S = 2.0
"""The least seconds of the newest steps at which a wait is reported."""
_REACHES = 0.98
"""The share of the cap from which on an answer counts as one that reached it."""
_AT_ONCE = 8
"""The most reward processes that are proposed, as a multiple of those there are."""
_SELDOM = 10
"""The steps between validations that are reckoned with, where they come more often."""
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
_ENDLESS = ("no worker", "no host", "pause")
"""Waits that end by a person, so that the past says nothing about what they will take."""
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
    run: str = ""
    """A command that does it."""


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


def seconds_a_step(lines: Sequence[StepLine]) -> Seconds | None:
    """Return the seconds from the end of a step to that of the next, of the newest steps; None: of fewer than two."""
    last = lines[-_NUM_STEPS - 1 :]
    return (last[-1].trained_at - last[0].trained_at) / (len(last) - 1) if len(last) > 1 else None


class WaitingContext(NamedTuple):
    """Other facts of a run, from which the reason of a wait is told."""

    status: Status | None = None
    lines: Sequence[StepLine] = ()
    slow_workers: Sequence[str] = ()
    """Their names."""
    join: str = ""
    """The command with which a worker joins."""
    recipe: Mapping[str, Any] | None = None
    """As the run's directory has it."""
    run_dir: str = "RUN"
    reward_function: str = ""
    """The reward function that takes longest, as far as is known."""
    last_loss: str = ""
    """Why the last worker that was lost was; empty: it is not known."""

    def setting(self, section: str, key: str) -> Any:
        """Return what the recipe says; None: nothing."""
        return (self.recipe or {}).get(section, {}).get(key)

    def named(self, section: str, key: str) -> str:
        """Return a setting's name, with its present value where that is known."""
        value = self.setting(section, key)
        return f"{section}.{key}" if value is None else f"{section}.{key} ({value} now)"

    @property
    def is_async(self) -> bool:
        return self.setting("train", "mode") == "async"

    @property
    def steps_left(self) -> int:
        wanted = self.setting("train", "steps") or 0
        return max(0, wanted - self.lines[-1].step - 1) if self.lines else 0


def slowest(parts: Sequence[TimePart], around: WaitingContext) -> Slowest | None:
    """Return what holds the run up; None: nothing is waited for much."""
    begun = bool(around.lines)  # before a first step, versions are offered, models loaded and validated at leisure
    waits = [one for one in parts if one.name not in _USEFUL and (begun or one.name not in ("updates", "validates"))]
    if not waits or waits[0].share < _MUCH or waits[0].seconds < _SHORT_S:
        return None
    worst = waits[0]
    seconds = sum(one.seconds for one in parts)
    what = f"{worst.share:.0%} of the trainer's time goes to {worst.words}"
    costs = f"{show_seconds(worst.seconds)} of the last {show_seconds(seconds)}"
    if worst.usd > 0:
        an_hour = worst.usd / seconds * _PER_HOUR
        costs += f", and {_dollars(worst.usd)} of what they cost: {_dollars(an_hour)} an hour"
    if around.steps_left and worst.name not in _ENDLESS:
        costs += f"; at this pace {_to_the_end(worst, around.steps_left)} by the last step"
    why, do, command = _why(worst, around)
    return Slowest(worst.name, what, why, costs, do, command)


def _to_the_end(part: TimePart, num_steps: int) -> str:
    """Return what a part will take in the steps to come."""
    usd = part.usd * num_steps * part.a_step_s / part.seconds if part.usd else 0.0
    return show_seconds(part.a_step_s * num_steps) + (f" and {_dollars(usd)} more" if usd else " more")


def _dollars(usd: float) -> str:
    return f"${usd:,.2f}" if usd >= 0.1 else f"${usd:.4f}"


def _why(worst: TimePart, around: WaitingContext) -> tuple[str, str, str]:
    """Return why it is waited for, what helps, and a command for that where there is one."""
    match worst.name:
        case "rewards":
            return *_of_rewards(worst, around), ""
        case "last answers":
            return _of_last_answers(around)
        case "answers":
            why = "all answers of the round are being written: the fleet's pace is the limit"
            more = "have more workers join"
            return why, more if around.is_async else f"{_async(around)}; or {more}", around.join
        case "places":
            do = "have more workers join; or give each more slots, if its memory allows"
            return _of_places(around.status), do, around.join
        case "no worker":
            return _of_no_worker(around)
        case "environments":
            return *_of_environments(around), ""
        case "validates":
            return *_of_validation(worst, around), ""
        case "updates":
            why = "between steps the trainer puts weights together, offers them to workers, or saves them"
            return why, (
                "see time/step_publish and time/step_save in Curves: for saving, raise checkpoint.every_steps or take "
                "a faster disk; for publishing, see docs/concepts/weights.md"
            ), ""  # fmt: skip
        case "no host":
            return "no host is there to play episodes", "start a host: polyrl doctor prints the command", ""
        case _:
            return "the run is paused", "POST /v1/resume with the admin token lets it go on", ""


def _async(around: WaitingContext) -> str:
    mode = around.setting("train", "mode")
    now = f' ("{mode}" now)' if mode else ""
    return f'train.mode = "async"{now} trains meanwhile, on answers of an older version (train.max_staleness)'


def _of_validation(worst: TimePart, around: WaitingContext) -> tuple[str, str]:
    every = around.setting("validation", "every_steps")
    when = "" if not every else "after every step, " if every == 1 else f"after every {every} steps, "
    why = f"{when}all validation prompts are answered and scored, and nothing is trained meanwhile"
    would = ""
    if every and worst.share < 1.0:
        seldom = _SELDOM if every < _SELDOM else 2 * every
        seconds = worst.share * every / seldom
        share = seconds / (1.0 - worst.share + seconds)
        would = f": {seldom} would make it {share:.0%} of the time in place of {worst.share:.0%}"
    lower = f"{around.named('validation', 'num_prompts')} or {around.named('validation', 'num_samples')}"
    return why, f"raise {around.named('validation', 'every_steps')}{would}; or lower {lower}"


def _of_rewards(worst: TimePart, around: WaitingContext) -> tuple[str, str]:
    told = None if around.status is None else around.status.rewards
    named = f" {around.reward_function}" if around.reward_function else ""
    why = f"answers are written sooner than the reward function{named} scores them"
    processes, last = around.setting("rewards", "processes"), around.lines[-_NUM_STEPS:]
    if processes and last and (num := fmean(one.num_samples for one in last)):
        why += (
            f": a step waits {show_seconds(worst.a_step_s)} for {num:,.0f} of them and rewards.processes = {processes},"
            f" so that one takes about {show_seconds(worst.a_step_s * processes / num)}"
        )
    if told is not None and told.running:
        why += f"; the call that has run longest has for {show_seconds(told.longest_s)}"
    enough = ""
    if processes and worst.share < 1.0:
        needed = ceil(round(processes * worst.share / (1.0 - worst.share), 6))
        wanted = max(processes + 1, min(needed, _AT_ONCE * processes))
        waits_s = worst.a_step_s * processes / wanted
        enough = (
            f": with {wanted}, a step would wait {show_seconds(waits_s)} in place of {show_seconds(worst.a_step_s)}, "
            "where the function waits for a service or this machine has that many cores"
        )
    return why, (
        f"raise {around.named('rewards', 'processes')}{enough}; start reward workers on other machines "
        "(polyrl worker --rewards); or make the function quicker"
    )


def _of_environments(around: WaitingContext) -> tuple[str, str]:
    why = "episodes wait for their environments: tools, games or graders"
    told = [] if around.status is None else around.status.environments
    slow = max(told, key=lambda one: one.turn_p50_s or 0.0, default=None)
    if slow is not None and slow.turn_p50_s is not None and slow.turn_p99_s is not None:
        why += (
            f"; a turn of {slow.name} takes {show_seconds(slow.turn_p50_s)} (median; "
            f"p99 {show_seconds(slow.turn_p99_s)})"
        )
    more = "another host, or a larger environments.slots, plays more at once"
    if waiting := sum(one.waiting for one in told):
        return why, f"{more}: {waiting:,} episodes wait for a place; see what tools wait for"
    meanwhile = "" if around.is_async else f"; {_async(around)}"
    return why, f"see what its tools wait for, and make them quicker{meanwhile}; another host helps a busy one"


def _of_last_answers(around: WaitingContext) -> tuple[str, str, str]:
    if around.slow_workers:
        names = ", ".join(around.slow_workers)
        why = f"most answers have ended, and those on {names}, slower than the other workers, keep the step waiting"
        drain = drain_command(around.slow_workers[0], around.run_dir)
        return why, "look at that machine, or drain it: its samples are handed over", drain
    why = "most answers have ended, and a few long ones keep the step waiting"
    last, cap = around.lines[-_NUM_STEPS:], around.setting("rollout", "max_new_tokens")
    mean = fmean(one.trained_mean for one in last) if last else 0.0
    longest = fmean(one.longest for one in last) if last else 0.0
    if longest > 2 * mean > 0:
        why += f": the longest of a step has {longest:,.0f} tokens, {longest / mean:.0f} times the mean of {mean:,.0f}"
    if cap and last:
        num = sum(one.longest >= _REACHES * cap for one in last)
        reach = f"in {num} of the last {len(last)} steps" if num else "in none of the last steps"
        why += f"; it reaches the cap, rollout.max_new_tokens = {cap}, {reach}"
    tails = around.setting("rounds", "tail_batching")
    do = []
    if tails in (None, "off"):
        do.append(
            f"{around.named('rounds', 'tail_batching')} packs the longest answers into rare long rounds: nothing is "
            "cut, and prompts with long answers are trained later"
        )
    do += [] if around.is_async else [_async(around)]
    do.append(f"a lower {around.named('rollout', 'max_new_tokens')} cuts the longest, which then mostly earn nothing")
    return why, "; ".join(f"{place}. {one}" for place, one in enumerate(do, 1)) if len(do) > 1 else do[0], ""


def _of_places(status: Status | None) -> str:
    why = "there are more samples than places on workers"
    if status is None or not status.workers:
        return why
    places, num = (
        sum(one.slots for one in status.workers if not one.local),
        sum(not one.local for one in status.workers),
    )
    return f"{why}: {places:,} places on {num:,} {'worker' if num == 1 else 'workers'}"


def _of_no_worker(around: WaitingContext) -> tuple[str, str, str]:
    status, here = around.status, ""
    if "127.0.0.1" in around.join:
        here = ' on this machine: 127.0.0.1 is this one alone, and manager.host = "0.0.0.0" lets others in'
    if status is not None and (found := pulls(status)):
        why = "no worker could write: " + "; ".join(found)
        do = "have more workers join, so that some write while others pull"
        return why, f"{do}{here}; or look at the link between worker and trainer", around.join
    do = f"have a worker join{here}"
    if status is None or not status.ledger:
        return "no worker could write", do, around.join
    joined, lost = status.ledger.get("workers_joined", 0), status.ledger.get("workers_lost", 0)
    there = len(status.workers)
    why = (
        f"{_times(there, 'worker')} {'is' if there == 1 else 'are'} there now; a worker joined {_times(joined, 'time')}"
    )
    why += f", and was lost {_times(lost, 'time')}"
    return why + (f", the last because: {around.last_loss}" if around.last_loss and lost else ""), do, around.join


def _times(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"
