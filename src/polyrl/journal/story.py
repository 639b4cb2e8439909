"""A sample's life in plain lines, from the journal alone: what happened to it, when, and why it took so long.

The journal holds what was heard; what was decided, and why, comes from telling it to a scheduler again. After every
event we look where the sample stands, so its phases add up to its life. Times are seconds since its round opened.

Left out: text and tokens, which the scheduler never sees. The story ends with the sample: what becomes of its group
after it was discarded is not told.
"""

from collections.abc import Iterable, Sequence

from msgspec import structs

from polyrl.errors import plain
from polyrl.ids import GroupId, SampleId, Seconds, group_of, index_of, sample_id, show_sample
from polyrl.journal.episode_story import EpisodeTeller, why_given_up
from polyrl.journal.records import CAVEAT, Journal, resume_scheduler
from polyrl.scheduling.core import commands as c
from polyrl.scheduling.core import events as e
from polyrl.scheduling.core.desk import State
from polyrl.scheduling.core.parameters import SchedulerConfig
from polyrl.scheduling.core.samples import NO_LEASE, TrackedSample
from polyrl.scheduling.scheduler import Scheduler

_PHASES = {
    "unhosted": "waiting for a host",
    "playing": "with its environment",
    "waiting": "waiting for a worker",
    "leased": "generating",
    "stopping": "generating",
    "generated": "waiting for all answers of its round",
}
_PHASES_OF_GROUP = {
    "ready": "waiting for the rest of its round",
    "delivered": "waiting for the trainer",
    "taken": "in training",
}
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
    """Return the run's caveat, if any, a line for each event of a sample's life, and where its time went.

    Raises UnknownSample.
    """
    scheduler: Scheduler | None = None
    teller: _Teller | None = None
    caveat: list[str] = []
    for header, records in journals:
        caveat = [header.about[CAVEAT]] if CAVEAT in header.about else []
        scheduler = resume_scheduler(header, scheduler)
        teller = _Teller(header.config, sample) if teller is None else teller
        for record in records:
            teller.hear(record.event, scheduler.handle(record.event, record.now), scheduler.desk.state, record.now)
            if teller.until:
                return [*caveat, *teller.story()]
    if teller is None:
        raise UnknownSample("there is no journal")
    return [*caveat, *teller.story()]


class _Teller:
    """Takes in events with the commands that followed, and keeps those of one sample."""

    def __init__(self, config: SchedulerConfig, sample: SampleId) -> None:
        self.until = ""
        """The sample's end in words; empty before."""
        self._config = config
        self._id = sample
        self._group = group_of(sample)
        self._known_groups: dict[GroupId, int] = {}
        self._lines: list[str] = []
        self._title = ""
        self._why_closed: str | None = None
        self._is_answered = False
        # The sample after the last event.
        self._opened_at: Seconds | None = None
        self._now: Seconds = 0.0
        self._before: TrackedSample | None = None
        self._heard_at: Seconds = 0.0
        self._phase: str | None = "waiting for a worker"
        self._since: Seconds = 0.0
        self._given: c.Generate | None = None
        """Its latest lease, given at `_leased_at`."""
        self._leased_at: Seconds = 0.0
        # For the sum.
        self._spent: dict[str, Seconds] = {}
        self._num_leases = 0
        self._num_tokens = 0
        self._num_attempts = 0
        self._episode = EpisodeTeller(sample)

    # Taking in

    def hear(self, event: e.Event, commands: Sequence[c.Command], state: State, now: Seconds) -> None:
        self._now = now
        if isinstance(event, e.RulesChanged):
            self._config = self._config.with_rules_of(event.config)
        if self._opened_at is None:
            self._look_for_opening(commands)
            if self._opened_at is None:
                return
        sample = state.samples.get(self._id)
        self._tell_event(event)
        self._tell_lease_end(event, commands, sample)
        if self._before is not None and self._before.host >= 0 and (sample is None or sample.host != self._before.host):
            self._say_all(self._episode.tell_loss(event, commands, sample))
        for command in commands:
            self._tell_command(command)
        phase = None if sample is None else _phase_of(state, sample)
        if phase != self._phase:
            self._spend()
            self._phase, self._since = phase, now
        if phase is None:
            self._tell_end(event, commands, sample)
        before = self._before
        if sample is None or before is None or (sample.lease, sample.num_tokens) != (before.lease, before.num_tokens):
            self._heard_at = now
        self._before = None if sample is None else structs.replace(sample)

    def _look_for_opening(self, commands: Sequence[c.Command]) -> None:
        for command in commands:
            match command:
                case c.OpenRound():
                    for group in command.groups:
                        self._note_group(group, f"round {command.step} ({command.kind})", command.why)
                case c.AddGroup():
                    self._note_group(command.group, f"round {command.step}", command.why)
                case c.AddAsked(group=group, num_samples=num):
                    self._note(group, num, f"one of {num} asked for at {self._now:.1f} s", f"asked: {command.why}")
                case _:
                    pass

    def _note_group(self, group: c.PlannedGroup, where: str, why: str) -> None:
        domain = self._config.domains[group.domain].name
        whose = f"prompt {group.prompt} of {domain}, epoch {group.epoch}, one of {group.num_samples}"
        title = f"{whose}; {where} opened at {self._now:.1f} s"
        self._note(group.group, group.num_samples, title, f"opened in {where}: {why}")

    def _note(self, group: GroupId, num_samples: int, title: str, line: str) -> None:
        self._known_groups[group] = num_samples
        if group == self._group and index_of(self._id) < num_samples:
            self._opened_at = self._since = self._now
            self._title = f"sample {show_sample(self._id)}: {title}"
            self._say(line)

    def _spend(self) -> None:
        if self._phase is not None:
            self._spent[self._phase] = self._spent.get(self._phase, 0.0) + self._now - self._since

    # Telling

    def _say_all(self, texts: Iterable[str]) -> None:
        for text in texts:
            self._say(text)

    def _say(self, text: str) -> None:
        since = self._now - (self._now if self._opened_at is None else self._opened_at)
        self._lines.append(f"{since:+10.1f} s  {plain(text)}")  # journals of old hold words as they came

    def _tell_event(self, event: e.Event) -> None:
        match event:
            case e.RewardFinished(sample=self._id):
                self._tell_reward(event)
            case e.CallMade(sample=self._id) | e.EpisodeEnded(sample=self._id):
                self._say_all(self._episode.tell_event(event, self._before))
            case e.GroupsTaken() if self._group in event.groups and self._phase == "waiting for the trainer":
                self._say(f"its group was taken into a micro-batch of step {event.step}")
            case _:
                pass

    def _tell_reward(self, event: e.RewardFinished) -> None:
        if self._before is None or self._phase != "scoring" or event.attempt != self._before.attempt:
            self._say(f"scoring attempt {event.attempt} was answered again: {event.outcome}, too late to count")
            return
        outcome = event.outcome.replace("_", " ")
        if self._config.rewards.adaptive:  # otherwise nobody need say what was correct, or how long it took
            if event.outcome == "scored":
                outcome = f"scored, {'correct' if event.correct else 'not correct'},"
            outcome += f" with {event.cpu_s:.1f} s of CPU time" if event.cpu_s >= 0.0 else " in unknown CPU time"
        self._say(f"scoring attempt {event.attempt}: {outcome}")

    def _tell_lease_end(self, event: e.Event, commands: Sequence[c.Command], sample: TrackedSample | None) -> None:
        before, given = self._before, self._given
        if before is None or given is None or before.lease in (NO_LEASE, None if sample is None else sample.lease):
            return
        num_tokens = before.num_tokens
        if isinstance(event, e.SampleFinished | e.LeaseEnded) and event.lease == before.lease:
            num_tokens = min(max(num_tokens, event.num_tokens), self._config.max_new_tokens)
        self._num_tokens = num_tokens
        pace = f"{num_tokens - given.from_token} tokens in {self._now - self._leased_at:.1f} s"
        self._say(f"{self._how_lease_ended(event, commands, given)} at token {num_tokens} ({pace})")
        if sample is not None and sample.state != "discarded" and sample.num_tokens == 0 and num_tokens:
            self._say(f"its {num_tokens} tokens are thrown away: fleet_rules.migrate is off")

    def _how_lease_ended(self, event: e.Event, commands: Sequence[c.Command], given: c.Generate) -> str:
        silent_s = self._now - self._heard_at
        silence = f", silent for {silent_s:.1f} s," if silent_s > _SILENT_S else ""
        for one in (event, *commands):
            match one:
                case e.SampleFinished(lease=given.lease):
                    is_call = self._episode.is_episode
                    return self._episode.answered(given.worker) if is_call else f"finished on {given.worker}"
                case e.LeaseEnded(lease=given.lease):
                    return f"{_LEASE_ENDS[one.reason]} {given.worker}"
                case c.Abort(lease=given.lease):
                    return f"stopped on {given.worker}: {one.why};"
                case c.ForgetWorker(worker=given.worker):
                    return f"lost: {given.worker} was given up ({one.why}){silence}"
                case _:
                    pass
        if isinstance(event, e.WorkerLeft) and event.worker == given.worker:
            return f"lost: {given.worker} is gone ({event.reason}){silence}"
        return f"lost: {given.worker} started anew{silence}"

    def _tell_command(self, command: c.Command) -> None:
        match command:
            case c.Generate(sample=self._id):
                self._num_leases += 1
                self._given, self._leased_at = command, self._now
                start = "started on" if command.from_token == 0 else f"resumed at token {command.from_token} on"
                if self._episode.is_episode:
                    start = self._episode.started(command.from_token)
                waited_s = self._now - self._since if self._phase == "waiting for a worker" else 0.0
                self._say(f"{start} {command.worker} ({command.why}), after {waited_s:.1f} s of waiting")
            case c.PlayEpisode(sample=self._id) | c.StopEpisode(sample=self._id):
                waited_s = self._now - self._since if self._phase == "waiting for a host" else 0.0
                self._say_all(self._episode.tell_command(command, waited_s))
            case c.HandOver() if self._given is not None and command.lease == self._given.lease:
                self._say(f"asked back from {command.worker}: {command.why}")
            case c.Score(sample=self._id):
                self._num_attempts += 1
                limit = f": at most {command.timeout_s:.1f} s of CPU time ({command.why})"
                learned = limit if self._config.rewards.adaptive else ""
                self._say(f"scoring attempt {command.attempt} began{learned}")
            case c.CancelScore(sample=self._id):
                self._say(f"scoring attempt {command.attempt} was cancelled: {command.why}")
            case c.DeliverGroup(group=self._group) if self._id in command.samples:
                self._say(f"its group was delivered to the trainer: {command.why}")
            case c.DropGroup(group=self._group) | c.CloseAsked(group=self._group):
                self._is_answered = isinstance(command, c.CloseAsked) and command.answered
                self._why_closed = command.why
            case _:
                pass

    def _tell_end(self, event: e.Event, commands: Sequence[c.Command], sample: TrackedSample | None) -> None:
        if isinstance(event, e.StepTrained) and "in training" in self._spent:
            self.until, line = f"it was trained in step {event.step}", f"trained in step {event.step}"
        elif self._is_answered:
            self.until, line = "it was answered", f"answered: {self._why_closed}"
        else:
            self.until, line = "it was discarded", f"discarded: {self._why_discarded(event, commands, sample)}"
        self._say(line)

    def _why_discarded(self, event: e.Event, commands: Sequence[c.Command], sample: TrackedSample | None) -> str:
        if self._why_closed is not None:
            return self._why_closed
        if isinstance(event, e.StepTrained):
            return "the step ended without its group"
        if isinstance(event, e.GroupUnscored):
            return event.reason
        if (before := self._before) is not None:
            given_up = why_given_up(before, sample, self._config.environments)
            if given_up is not None:
                return given_up
            for command in commands:
                if isinstance(command, c.Abort) and command.lease == before.lease:
                    return command.why
            if before.state == "scoring":
                return "its reward could not be had"
            if isinstance(event, e.SampleFinished) and event.lease == before.lease:
                return "only designated samples are trained"
        if sample is not None and sample.num_failures >= self._config.fleet_rules.max_failures:
            return "no worker could generate it"
        return "its group has enough answers"

    # The whole

    def story(self) -> list[str]:
        if self._opened_at is None:
            raise UnknownSample(f"there is no sample {show_sample(self._id)}: {self._which_there_are()}")
        if not self.until:
            self._say(f"the journal ends; it is {self._phase} for {self._now - self._since:.1f} s")
            self._spend()
        return [self._title, *self._lines, *self._sum(self._now - self._opened_at)]

    def _sum(self, total_s: Seconds) -> list[str]:
        notes = {
            "generating": f"  {self._num_tokens} tokens, {_several(self._num_leases, 'lease')}",
            "scoring": f"  {_several(self._num_attempts, 'attempt')}",
            "with its environment": f"  {_several(self._episode.num_calls, 'call')}, "
            + _several(self._episode.num_attempts, "attempt"),
        }
        return [f"{total_s:.1f} s until {self.until or 'the journal ends'}:"] + [
            f"{seconds:10.1f} s {seconds / total_s if total_s > 0 else 0.0:5.0%}  {phase}{notes.get(phase, '')}"
            for phase, seconds in sorted(self._spent.items(), key=lambda item: -item[1])
        ]

    def _which_there_are(self) -> str:
        known = self._known_groups
        if not known:
            return "no round was opened in this journal"
        if self._group in known:
            last = show_sample(sample_id(self._group, known[self._group] - 1))
            return f"group {self._group} has samples {self._group}/0 to {last}"
        return f"this journal has groups {min(known)} to {max(known)}"


def _several(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _phase_of(state: State, sample: TrackedSample) -> str | None:
    """Return what a sample's time is spent on, or None when it has ended."""
    if sample.state == "discarded":
        return None
    if sample.state == "scoring":
        return "scoring" if sample.id in state.scoring.running else "waiting for a place to be scored"
    if sample.state == "scored":
        return _PHASES_OF_GROUP.get(state.groups[sample.group].state, "waiting for its siblings")
    if sample.state == "generated" and sample.group in state.asked.groups:
        return "waiting for its siblings"
    return _PHASES[sample.state]
