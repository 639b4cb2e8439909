"""A sample's life in plain lines, from the journal alone: what happened to it, when, and why it took so long.

The journal holds what was heard; what was decided, and why, comes from telling it to a scheduler again. After every
event we look where the sample stands, so its phases add up to its life. Times are seconds since its round opened.

Left out: text and tokens, which the scheduler never sees. The story ends with the sample: what becomes of its group
after it was discarded is not told.
"""

from collections.abc import Iterable, Sequence
from typing import Literal

from msgspec import structs

from polyrl.errors import plain
from polyrl.ids import GroupId, SampleId, Seconds, WorkerName, group_of, index_of, sample_id, show_sample
from polyrl.journal.records import CAVEAT, Journal, resume_scheduler
from polyrl.scheduling.core.commands import (
    Abort,
    AddAsked,
    AddGroup,
    CancelScore,
    CloseAsked,
    Command,
    DeliverGroup,
    DropGroup,
    ForgetWorker,
    Generate,
    HandOver,
    OpenRound,
    PlannedGroup,
    Score,
)
from polyrl.scheduling.core.desk import State
from polyrl.scheduling.core.events import (
    Event,
    GroupsTaken,
    LeaseEnded,
    RewardFinished,
    RulesChanged,
    SampleFinished,
    StepTrained,
    WorkerLeft,
)
from polyrl.scheduling.core.parameters import SchedulerConfig
from polyrl.scheduling.core.samples import NO_LEASE, Sample
from polyrl.scheduling.scheduler import Scheduler

Phase = Literal[
    "waiting for a worker",
    "generating",
    "waiting for all answers of its round",
    "waiting for a place to be scored",
    "scoring",
    "waiting for its siblings",
    "waiting for the rest of its round",
    "waiting for the trainer",
    "in training",
]

_LEASE_ENDS = {
    "handed_over": "handed over by",
    "engine_failed": "stopped by a failure of the engine of",
    "refused": "refused by",
}
_SILENT_S = 1.0
"""A worker that had been silent for longer than this when it was lost is said to have been."""


class UnknownSample(ValueError):
    """There is no such sample in the journal. The message says which there are."""


def tell_story(journals: Iterable[Journal], sample: SampleId) -> list[str]:
    """The run's caveat, if it has one; a sample's life, a line an event; where its time went. Raises UnknownSample."""
    scheduler: Scheduler | None = None
    teller: _Teller | None = None
    caveat: list[str] = []
    for header, records in journals:
        caveat = [header.about[CAVEAT]] if CAVEAT in header.about else []
        scheduler = resume_scheduler(header, scheduler)
        teller = _Teller(header.config, sample) if teller is None else teller
        for record in records:
            teller.hear(record.event, scheduler.handle(record.event, record.now), scheduler.desk.state, record.now)
            if teller.ended_at is not None:
                return [*caveat, *teller.story()]
    if teller is None:
        raise UnknownSample("there is no journal")
    return [*caveat, *teller.story()]


class _Teller:
    def __init__(self, config: SchedulerConfig, sample: SampleId) -> None:
        self._config = config
        self._id = sample
        self._group = group_of(sample)
        self._known_groups: dict[GroupId, int] = {}
        self._lines: list[str] = []
        self._title = ""
        self._why_dropped: str | None = None
        self._is_answered = False
        # Where it stood after the last event.
        self._opened_at: Seconds | None = None
        self._now: Seconds = 0.0
        self._before: Sample | None = None
        self._heard_at: Seconds = 0.0
        self._phase: Phase | None = None
        self._since: Seconds = 0.0
        self._leased_at: Seconds = 0.0
        self._from_token = 0
        self._lease = NO_LEASE
        self._worker: WorkerName | None = None
        # For the sum.
        self._spent: dict[Phase, Seconds] = {}
        self._num_leases = 0
        self._num_tokens = 0
        self._num_attempts = 0
        self.ended_at: Seconds | None = None
        self._until = ""

    # Taking in

    def hear(self, event: Event, commands: Sequence[Command], state: State, now: Seconds) -> None:
        self._now = now
        if isinstance(event, RulesChanged):
            self._config = self._config.with_rules_of(event.config)
        if self._opened_at is None:
            self._look_for_opening(commands, now)
            if self._opened_at is None:
                return
        sample = state.samples.get(self._id)
        self._tell_event(event, now)
        self._tell_lease_end(event, commands, sample, now)
        for command in commands:
            self._tell_command(command, now)
        self._move_on(state, sample, now)
        if self._phase is None:
            self._tell_end(event, commands, sample, now)
        self._remember(sample, now)

    def _look_for_opening(self, commands: Sequence[Command], now: Seconds) -> None:
        for command in commands:
            match command:
                case OpenRound():
                    for group in command.groups:
                        self._note_group(group, f"round {command.step} ({command.kind})", command.why, now)
                case AddGroup():
                    self._note_group(command.group, f"round {command.step}", command.why, now)
                case AddAsked():
                    self._note_asked(command, now)
                case _:
                    pass

    def _note_group(self, group: PlannedGroup, where: str, why: str, now: Seconds) -> None:
        self._known_groups[group.group] = group.num_samples
        if group.group != self._group or index_of(self._id) >= group.num_samples:
            return
        self._opened_at = self._since = now
        self._phase = "waiting for a worker"
        domain = self._config.domains[group.domain].name
        self._title = (
            f"sample {show_sample(self._id)}: prompt {group.prompt} of {domain}, epoch {group.epoch}, "
            f"one of {group.num_samples}; {where} opened at {now:.1f} s"
        )
        self._say(now, f"opened in {where}: {why}")

    def _note_asked(self, command: AddAsked, now: Seconds) -> None:
        self._known_groups[command.group] = command.num_samples
        if command.group == self._group and index_of(self._id) < command.num_samples:
            self._opened_at = self._since = now
            self._phase = "waiting for a worker"
            self._title = f"sample {show_sample(self._id)}: one of {command.num_samples} asked for at {now:.1f} s"
            self._say(now, f"asked: {command.why}")

    def _remember(self, sample: Sample | None, now: Seconds) -> None:
        before = self._before
        if sample is None or before is None or (sample.lease, sample.num_tokens) != (before.lease, before.num_tokens):
            self._heard_at = now
        self._before = None if sample is None else structs.replace(sample)

    def _move_on(self, state: State, sample: Sample | None, now: Seconds) -> None:
        phase = None if sample is None else _phase_of(state, sample)
        if phase != self._phase:
            if self._phase is not None:
                self._spent[self._phase] = self._spent.get(self._phase, 0.0) + now - self._since
            self._phase, self._since = phase, now

    # Telling

    def _say(self, now: Seconds, text: str) -> None:
        since = now - (now if self._opened_at is None else self._opened_at)
        self._lines.append(f"{since:+10.1f} s  {plain(text)}")  # journals of old hold words as they came

    def _tell_event(self, event: Event, now: Seconds) -> None:
        match event:
            case RewardFinished() if event.sample == self._id:
                self._tell_reward(event, now)
            case GroupsTaken() if self._group in event.groups and self._phase == "waiting for the trainer":
                self._say(now, f"its group was taken into a micro-batch of step {event.step}")
            case _:
                pass

    def _tell_reward(self, event: RewardFinished, now: Seconds) -> None:
        if self._before is None or self._phase != "scoring" or event.attempt != self._before.attempt:
            self._say(now, f"scoring attempt {event.attempt} was answered again: {event.outcome}, too late to count")
            return
        outcome = event.outcome.replace("_", " ")
        if self._config.rewards.adaptive:  # otherwise nobody need say what was correct, or how long it took
            if event.outcome == "scored":
                outcome = f"scored, {'correct' if event.correct else 'not correct'},"
            outcome += f" with {event.cpu_s:.1f} s of CPU time"
        self._say(now, f"scoring attempt {event.attempt}: {outcome}")

    def _tell_lease_end(self, event: Event, commands: Sequence[Command], sample: Sample | None, now: Seconds) -> None:
        before = self._before
        if before is None or before.lease == NO_LEASE:
            return
        if sample is not None and sample.lease == before.lease:
            return
        num_tokens = before.num_tokens
        if isinstance(event, SampleFinished | LeaseEnded) and event.lease == before.lease:
            num_tokens = min(max(num_tokens, event.num_tokens), self._config.max_new_tokens)
        self._num_tokens = num_tokens
        span = now - self._leased_at
        pace = f"{num_tokens - self._from_token} tokens in {span:.1f} s"
        self._say(now, f"{self._how_lease_ended(event, commands, before, now)} at token {num_tokens} ({pace})")
        if sample is not None and sample.state != "discarded" and sample.num_tokens == 0 and num_tokens:
            self._say(now, f"its {num_tokens} tokens are thrown away: fleet_rules.migrate is off")

    def _how_lease_ended(self, event: Event, commands: Sequence[Command], before: Sample, now: Seconds) -> str:
        match event:
            case SampleFinished(lease=before.lease):
                return f"finished on {self._worker}"
            case LeaseEnded(lease=before.lease):
                return f"{_LEASE_ENDS[event.reason]} {self._worker}"
            case _:
                pass
        for command in commands:
            match command:
                case Abort(lease=before.lease):
                    return f"stopped on {self._worker}: {command.why};"
                case ForgetWorker(worker=self._worker):
                    return f"lost: {self._worker} was given up ({command.why}){self._silence(now)}"
                case _:
                    pass
        if isinstance(event, WorkerLeft) and event.worker == self._worker:
            return f"lost: {self._worker} is gone ({event.reason}){self._silence(now)}"
        return f"lost: {self._worker} started anew{self._silence(now)}"

    def _silence(self, now: Seconds) -> str:
        silent_s = now - self._heard_at
        return f", silent for {silent_s:.1f} s," if silent_s > _SILENT_S else ""

    def _tell_command(self, command: Command, now: Seconds) -> None:
        match command:
            case Generate(sample=self._id):
                self._num_leases += 1
                self._lease, self._worker = command.lease, command.worker
                self._leased_at, self._from_token = now, command.from_token
                start = "started" if command.from_token == 0 else f"resumed at token {command.from_token}"
                waited_s = now - self._since if self._phase == "waiting for a worker" else 0.0
                self._say(now, f"{start} on {command.worker} ({command.why}), after {waited_s:.1f} s of waiting")
            case HandOver(lease=self._lease):
                self._say(now, f"asked back from {command.worker}: {command.why}")
            case Score(sample=self._id):
                self._num_attempts += 1
                limit = f": at most {command.timeout_s:.1f} s of CPU time ({command.why})"
                learned = limit if self._config.rewards.adaptive else ""
                self._say(now, f"scoring attempt {command.attempt} began{learned}")
            case CancelScore(sample=self._id):
                self._say(now, f"scoring attempt {command.attempt} was cancelled: {command.why}")
            case DeliverGroup(group=self._group) if self._id in command.samples:
                self._say(now, f"its group was delivered to the trainer: {command.why}")
            case DropGroup(group=self._group):
                self._why_dropped = command.why
            case CloseAsked(group=self._group):
                self._is_answered, self._why_dropped = command.answered, command.why
            case _:
                pass

    def _tell_end(self, event: Event, commands: Sequence[Command], sample: Sample | None, now: Seconds) -> None:
        self.ended_at = now
        if isinstance(event, StepTrained) and "in training" in self._spent:
            self._until = f"it was trained in step {event.step}"
            self._say(now, f"trained in step {event.step}")
        elif self._is_answered:
            self._until = "it was answered"
            self._say(now, f"answered: {self._why_dropped}")
        else:
            self._until = "it was discarded"
            self._say(now, f"discarded: {self._why_discarded(event, commands, sample)}")

    def _why_discarded(self, event: Event, commands: Sequence[Command], sample: Sample | None) -> str:
        if self._why_dropped is not None:
            return self._why_dropped
        if isinstance(event, StepTrained):
            return "the step ended without its group"
        before = self._before
        if before is not None:
            for command in commands:
                if isinstance(command, Abort) and command.lease == before.lease:
                    return command.why
            if before.state == "scoring":
                return "its reward could not be had"
            if isinstance(event, SampleFinished) and event.lease == before.lease:
                return "only designated samples are trained"
        if sample is not None and sample.num_failures >= self._config.fleet_rules.max_failures:
            return "no worker could generate it"
        return "its group has enough answers"

    # The whole

    def story(self) -> list[str]:
        if self._opened_at is None:
            raise UnknownSample(self._why_unknown())
        last = self._now if self.ended_at is None else self.ended_at
        if self.ended_at is None and self._phase is not None:
            self._say(last, f"the journal ends; it is {self._phase} for {last - self._since:.1f} s")
            self._spent[self._phase] = self._spent.get(self._phase, 0.0) + last - self._since
            self._until = "the journal ends"
        return [self._title, *self._lines, *self._sum(last - self._opened_at)]

    def _sum(self, total_s: Seconds) -> list[str]:
        lines = [f"{total_s:.1f} s until {self._until}:"]
        notes: dict[Phase, str] = {
            "generating": f"{self._num_tokens} tokens, {_several(self._num_leases, 'lease')}",
            "scoring": _several(self._num_attempts, "attempt"),
        }
        for phase, seconds in sorted(self._spent.items(), key=lambda item: -item[1]):
            share = seconds / total_s if total_s > 0 else 0.0
            note = f"  {notes[phase]}" if phase in notes else ""
            lines.append(f"{seconds:10.1f} s {share:5.0%}  {phase}{note}".rstrip())
        return lines

    def _why_unknown(self) -> str:
        shown = show_sample(self._id)
        if not self._known_groups:
            return f"there is no sample {shown}: no round was opened in this journal"
        num_samples = self._known_groups.get(self._group)
        if num_samples is not None:
            last = show_sample(sample_id(self._group, num_samples - 1))
            return f"there is no sample {shown}: group {self._group} has samples {self._group}/0 to {last}"
        first, last = min(self._known_groups), max(self._known_groups)
        return f"there is no sample {shown}: this journal has groups {first} to {last}"


def _several(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _phase_of(state: State, sample: Sample) -> Phase | None:
    """What a sample's time is spent on, or None when it has ended."""
    match sample.state:
        case "waiting":
            return "waiting for a worker"
        case "leased" | "stopping":
            return "generating"
        case "generated" if sample.group in state.asked.groups:
            return "waiting for its siblings"
        case "generated":
            return "waiting for all answers of its round"
        case "scoring":
            return "scoring" if sample.id in state.scoring.running else "waiting for a place to be scored"
        case "scored":
            return _phase_of_group(state, sample)
        case "discarded":
            return None


def _phase_of_group(state: State, sample: Sample) -> Phase:
    match state.groups[sample.group].state:
        case "ready":
            return "waiting for the rest of its round"
        case "delivered":
            return "waiting for the trainer"
        case "taken":
            return "in training"
        case _:
            return "waiting for its siblings"
