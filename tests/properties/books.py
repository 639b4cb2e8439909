"""The world's own books: laws that are checked against what was said to the scheduler and what it answered.

`invariants.py` holds the scheduler's state against itself. Here commands are held against the events that were told, so
a rule that is wrong in one place, and wrong the same way in the check, is still found:

- late news (of a dead lease, an old life, an answered attempt) changes nothing but its own count;
- a sample is resumed exactly at the last token that its own worker brought, and runs at one worker;
- a group is delivered with samples that were finished and scored, each prompt once an epoch, none left out;
- a prompt whose group the trainer rejects for what a worker of the fleet wrote is written again, at once, and not for
  ever;
- no round and no lease breaks the staleness that was promised;
- nobody has more samples than it has shown that it can run, and what it gave back unasked goes to another, if there is
  one;
- every second of every worker is in the ledger under what the worker did then.
"""

import math
from collections import Counter
from collections.abc import Iterable
from itertools import accumulate
from typing import Protocol

import msgspec

from polyrl.errors import LawViolation
from polyrl.ids import GroupId, Incarnation, LeaseId, SampleId, Step, Version, WorkerName, group_of, show_sample
from polyrl.scheduling.core import commands as c
from polyrl.scheduling.core import events as e
from polyrl.scheduling.parts import credit, failures
from polyrl.scheduling.scheduler import Scheduler

WorkerNews = (
    e.WorkerReported
    | e.WorkerLeft
    | e.DrainRequested
    | e.WeightsInstalled
    | e.WeightsFailed
    | e.EngineDown
    | e.EngineBack
    | e.DutyChanged
    | e.TokensArrived
)
Key = tuple[int, int, int]
"""Domain, epoch, prompt."""
NO_TIME_S = 1e-6
SECONDS_EVERY = 8
"""Seconds add up: a wrong one is still wrong a few events later."""


class Process(Protocol):
    """A machine, as far as the books look at it."""

    name: WorkerName
    incarnation: Incarnation
    running: dict[LeaseId, tuple[SampleId, int]]


def law(holds: bool, message: str) -> None:
    if not holds:
        raise LawViolation(message)


class Books:
    """One scheduler's past. Call `before` and `after` around every `handle`."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.config = scheduler.desk.config
        self.published = Version(-1)
        self.requested = Step(-1)
        self.alive: dict[WorkerName, Incarnation] = {}
        self.newest_life: dict[WorkerName, Incarnation] = {}
        self.versions: dict[WorkerName, Version] = {}
        self.slots: dict[WorkerName, int] = {}
        self.local: set[WorkerName] = set()
        self.draining: set[WorkerName] = set()
        self.hands_over_at: dict[WorkerName, float] = {}
        """Who was given notice, until it drains."""
        self.holder: dict[LeaseId, WorkerName] = {}
        self.steps: dict[int, int] = {}
        """What each lease was for."""
        self.asked_back: set[LeaseId] = set()
        self.from_tokens: dict[LeaseId, int] = {}
        """Tokens of its sample when a lease was given."""
        self.shown: dict[WorkerName, int] = {}
        """What a worker has done in this life: its answers, and twice the most samples that it ran at once."""
        self.returned: set[tuple[SampleId, WorkerName, Incarnation]] = set()
        """Who handed which sample over, and nobody had asked."""
        self.tokens: dict[SampleId, int] = {}
        self.finished: set[SampleId] = set()
        self.scored: set[SampleId] = set()
        self.scoring: dict[SampleId, int] = {}
        self.groups: dict[GroupId, tuple[Step, Key]] = {}
        self.asked: dict[GroupId, int] = {}
        self.settled: set[Key] = set()
        self.disbelieved: GroupId | None = None
        """The group that is rejected for what a worker of the fleet wrote."""
        self.to_write_again: list[Key] = []
        self.num_again: Counter[tuple[Step, Key] | None] = Counter()
        """How often they were, by the step too."""
        self.delivered: dict[Step, set[GroupId]] = {}
        self.paid: dict[tuple[WorkerName, str], float] = {}
        self.activities: list[tuple[WorkerName, str]] = []
        self.paid_until = 0.0
        self.gone_at: dict[WorkerName, float] = {}
        self.missed: dict[WorkerName, float] = {}
        """Who was not heard of since the driver was away, and since when."""
        self.num_events = 0
        self.late = False
        self.saved = b""

    # Before an event

    def before(self, scheduler: Scheduler, event: e.Event, now: float, machines: Iterable[Process]) -> None:
        self.check_machines(scheduler, machines)
        self.late = self.is_late(scheduler, event)
        self.pay(scheduler, event, now)
        if self.late:
            self.saved = msgspec.msgpack.encode(scheduler.desk.state)
        else:
            self.note(scheduler, event)

    def pay(self, scheduler: Scheduler, event: e.Event, now: float) -> None:
        """For all who are known to have been there; for an absence of the driver when somebody is heard of again."""
        until = now
        if isinstance(event, e.DriverResumed):
            until = max(self.paid_until, now - event.away_s)
        heard: list[WorkerName] = []
        if not self.late and isinstance(event, WorkerNews):
            heard = [event.worker]
        elif not self.late and isinstance(event, e.SampleFinished | e.LeaseEnded):
            heard = [self.holder[event.lease]]
        elif isinstance(event, e.FleetReported):
            pairs = zip(accumulate(event.seats), event.heard_ago, strict=True)
            known = scheduler.desk.seats  # a seat is never used again, so what is repeated late is of nobody else
            heard = [known[seat].name for seat, ago in pairs if ago >= 0 and seat in known]
        for name, what in self.activities:
            if name not in self.missed or name in heard:
                since = self.missed.pop(name, self.paid_until)
                self.paid[name, what] = self.paid.get((name, what), 0.0) + until - since
            if isinstance(event, e.DriverResumed):
                self.missed.setdefault(name, until)
        self.paid_until = now

    def check_machines(self, scheduler: Scheduler, machines: Iterable[Process]) -> None:
        """Whoever still runs a lease that is over was told to stop."""
        leases = scheduler.desk.leases
        for machine in machines:
            if self.alive.get(machine.name) == machine.incarnation:
                for lease in machine.running:
                    known = lease in leases or lease in self.asked_back
                    law(known, f"{machine.name} runs lease {lease}, which is over, and nobody told it")

    def is_late(self, scheduler: Scheduler, event: e.Event) -> bool:
        match event:
            case e.WorkerJoined():
                return event.incarnation <= self.newest_life.get(event.worker, -1)
            case e.SampleFinished() | e.LeaseEnded():
                return event.lease not in scheduler.desk.leases
            case e.GroupWithdrawn():
                return event.group not in self.asked
            case e.SampleStopped():
                return group_of(event.sample) not in self.asked or event.sample in self.finished
            case e.RewardFinished():
                return self.scoring.get(event.sample) != event.attempt
            case e.VersionPublished():
                return event.version <= self.published
            case e.RoundRequested():
                return event.step <= self.requested
            case e.StepTrained():
                return all(step != event.step for step, _ in self.groups.values()) and event.step not in self.delivered
            case _:
                return isinstance(event, WorkerNews) and self.alive.get(event.worker) != event.incarnation

    def note(self, scheduler: Scheduler, event: e.Event) -> None:  # noqa: C901 (a case for each kind)
        cap = self.config.max_new_tokens
        match event:
            case e.WorkerJoined():
                self.note_join(event)
            case e.WorkerLeft():
                self.note_gone(event.worker)
            case e.DrainRequested():
                if event.worker not in self.draining:
                    margin_s = self.config.fleet_rules.leave_margin_s
                    notice_s = event.notice_s if math.isfinite(event.notice_s) else 0.0
                    self.hands_over_at[event.worker] = self.paid_until + max(0.0, notice_s - margin_s)
                self.note_notices([event.worker])
            case e.TimePassed():
                self.note_notices(list(self.hands_over_at))
            case e.WeightsInstalled():
                if event.version <= self.published:
                    self.versions[event.worker] = max(event.version, self.versions[event.worker])
            case e.EngineBack():
                if event.worker not in self.local and event.worker not in self.draining:
                    known = event.version is not None and event.version <= self.published
                    self.versions[event.worker] = event.version if known and event.version is not None else Version(-1)
            case e.VersionReplaced():
                for name in self.versions.keys() - self.local:
                    if self.versions[name] == event.version:
                        self.versions[name] = Version(-1)
            case e.TokensArrived():
                self.note_progress(scheduler, event)
            case e.SampleFinished() | e.LeaseEnded():
                sample = scheduler.desk.leases[event.lease].id
                worker = self.holder[event.lease]
                self.tokens[sample] = max(self.tokens.get(sample, 0), min(cap, event.num_tokens))
                if isinstance(event, e.SampleFinished):
                    self.finished.add(sample)
                    self.shown[worker] += 1
                elif event.reason == "handed_over" and event.lease not in self.asked_back:
                    self.returned.add((sample, worker, self.alive[worker]))
            case e.SampleStopped():
                self.tokens[event.sample] = max(self.tokens.get(event.sample, 0), min(cap, event.num_tokens))
                self.finished.add(event.sample)
            case e.RewardFinished():
                del self.scoring[event.sample]
                if event.outcome not in ("infrastructure_failed", "no_reward"):
                    self.scored.add(event.sample)
            case e.GroupRejected():
                may_be_again = self.num_again[self.groups.get(event.group)] < self.config.fleet_rules.max_failures
                self.disbelieved = event.group if may_be_again and set(event.blamed) - self.local else None
            case e.VersionPublished():
                self.published = event.version
                for name in self.local:
                    self.versions[name] = event.version
            case e.RoundRequested():
                self.requested = event.step
            case e.StepTrained():
                for group, (step, key) in list(self.groups.items()):
                    if step == event.step:
                        self.settled.add(key)
                        del self.groups[group]
                self.delivered.pop(event.step, None)
            case _:
                pass

    def note_progress(self, scheduler: Scheduler, event: e.TokensArrived) -> None:
        cap = self.config.max_new_tokens
        for lease, num in zip(event.leases, event.num_tokens, strict=True):
            sample = scheduler.desk.leases.get(lease)
            if sample is not None and self.holder[lease] == event.worker:
                self.tokens[sample.id] = max(self.tokens.get(sample.id, 0), min(cap, num))
        running = [lease for lease in scheduler.desk.leases if self.holder[lease] == event.worker]
        grown = [one for one in running if self.tokens.get(scheduler.desk.leases[one].id, 0) > self.from_tokens[one]]
        self.shown[event.worker] = max(self.shown[event.worker], 2 * len(grown))

    def note_join(self, event: e.WorkerJoined) -> None:
        name = event.worker
        self.note_gone(name)
        self.alive[name] = self.newest_life[name] = event.incarnation
        self.slots[name] = max(1, event.slots)
        self.shown[name] = 0
        known = event.version is not None and event.version <= self.published
        self.versions[name] = event.version if known and event.version is not None else Version(-1)
        if event.local:
            self.local.add(name)
            self.versions[name] = self.published
        key = (name, "starting")
        starting_s = min(event.starting_s, self.paid_until - self.gone_at.get(name, -math.inf))
        self.paid[key] = self.paid.get(key, 0.0) + starting_s

    def note_notices(self, names: list[WorkerName]) -> None:
        """Whose notice is over drains, once that is looked at: it gets nothing more, and is let go."""
        for name in names:
            if self.hands_over_at.get(name, math.inf) <= self.paid_until + NO_TIME_S:
                del self.hands_over_at[name]
                self.draining.add(name)

    def note_gone(self, name: WorkerName) -> None:
        if self.alive.pop(name, None) is not None:
            self.gone_at[name] = self.missed.pop(name, self.paid_until)
        self.draining.discard(name)
        self.hands_over_at.pop(name, None)
        self.local.discard(name)

    # After it

    def after(self, scheduler: Scheduler, event: e.Event, commands: list[c.Command]) -> None:
        if self.late:
            self.check_late(scheduler, event, commands)
        for command in commands:
            self.check_command(scheduler, command, commands)
        self.disbelieved = None
        law(not self.to_write_again, f"prompts {self.to_write_again} are dropped for what a worker wrote")
        self.num_events += 1
        if self.num_events % SECONDS_EVERY == 0:
            self.check_seconds(scheduler)
        self.activities = [(one.name, one.activity) for one in scheduler.desk.seats.values()]

    def check_late(self, scheduler: Scheduler, event: e.Event, commands: list[c.Command]) -> None:
        law(not commands, f"late news was acted on: {event} gave {commands}")
        ledger = scheduler.ledger
        ledger.late_news -= 1
        same = msgspec.msgpack.encode(scheduler.desk.state) == self.saved
        ledger.late_news += 1
        law(same, f"late news was believed: {event}")

    def check_command(self, scheduler: Scheduler, command: c.Command, commands: list[c.Command]) -> None:  # noqa: C901 (a case for each kind)
        fleet = scheduler.desk.state.fleet
        match command:
            case c.Generate():
                self.check_generate(scheduler, command)
            case c.Abort():
                law(command.lease not in scheduler.desk.leases, f"lease {command.lease} was aborted and goes on")
            case c.ForgetTokens():
                self.tokens[command.sample] = 0
            case c.HandOver():
                self.asked_back.add(command.lease)
                self.check_hand_over(scheduler, command, commands)
            case c.ReleaseWorker():
                law(command.worker in self.draining, f"{command.worker} is released and was not asked to go")
                forgotten = any(isinstance(one, c.ForgetWorker) and one.worker == command.worker for one in commands)
                law(command.worker in fleet.by_name or forgotten, f"{command.worker} is released and not there")
            case c.Reshape() if self.config.parallelism.engines == "local":
                for name in [*self.local]:  # this command alone tells that they are gone
                    self.note_gone(name)
            case c.ForgetWorker():
                law(command.worker not in fleet.by_name, f"{command.worker} is forgotten and still there")
                self.note_gone(command.worker)
            case c.Score():
                law(command.sample in self.finished, f"{show_sample(command.sample)} is scored and not finished")
                law(command.sample not in self.scoring, f"{show_sample(command.sample)} is scored twice at once")
                law(command.sample in scheduler.desk.samples, f"{show_sample(command.sample)} is scored and given up")
                self.scoring[command.sample] = command.attempt
            case c.CancelScore():
                law(self.scoring.pop(command.sample, None) == command.attempt, f"nothing to cancel: {command}")
            case c.OpenRound():
                newest = self.published + self.config.max_staleness
                law(self.published >= 0 and command.step <= newest, f"round {command.step} opened before its version")
                self.delivered[command.step] = set()
                for planned in command.groups:
                    self.check_planned(scheduler, command.step, planned)
            case c.AddGroup():
                self.check_planned(scheduler, command.step, command.group)
                key = (command.group.domain, command.group.epoch, command.group.prompt)
                if key in self.to_write_again:
                    self.to_write_again.remove(key)
                    self.num_again[command.step, key] += 1
            case c.AddAsked():
                self.asked[command.group] = command.num_samples
            case c.CloseAsked():
                num = self.asked.pop(command.group)
                ended = sum(group_of(one) == command.group for one in self.finished)
                law(not command.answered or ended == num, f"{command} with {ended} of {num} answers")
            case c.DropGroup():
                self.check_drop(scheduler, command)
            case c.DeliverGroup():
                self.check_delivery(command)
            case c.CloseRound():
                num = len(self.delivered[command.step])
                law(command.num_groups == num, f"{command.num_groups} groups close step {command.step}; it has {num}")
            case _:
                pass

    def check_generate(self, scheduler: Scheduler, command: c.Generate) -> None:
        name = f"sample {show_sample(command.sample)}"
        worker = command.worker
        law(worker in self.alive or worker in scheduler.desk.state.fleet.by_name, f"{name} went to the dead {worker}")
        law(worker not in self.missed, f"{name} went to {worker}, which was not heard of since the driver was away")
        law(worker not in self.draining, f"{name} went to {worker}, which is draining")
        law(command.lease not in self.holder, f"lease {command.lease} was given before")
        self.holder[command.lease] = worker
        self.from_tokens[command.lease] = command.from_token
        restarts = not self.config.fleet_rules.migrate and group_of(command.sample) not in self.asked
        if command.from_token == 0 and restarts:
            self.tokens[command.sample] = 0  # its worker was lost
        known = self.tokens.get(command.sample, 0)
        law(command.from_token == known, f"{name} has {known} tokens and is resumed at {command.from_token}")
        held = sum(self.holder.get(lease) == worker for lease in scheduler.desk.leases)
        law(held <= self.slots[worker], f"{worker} has {self.slots[worker]} slots and {held} samples")
        if worker not in self.local:
            trusted = credit.START + self.shown[worker]
            law(held <= trusted, f"{worker} has {held} samples, and has shown nothing that would be worth {trusted}")
            self.check_returned(scheduler, command)
        if group_of(command.sample) in self.asked:
            self.steps[command.lease] = -1
            law(worker not in self.local, f"{name} was asked for and went to the trainer's own {worker}")
            return
        step, _ = self.groups[group_of(command.sample)]
        self.steps[command.lease] = step
        oldest = step - self.config.max_staleness
        version = self.versions[worker]
        law(oldest <= version <= self.published, f"{name} of step {step} is written by version {version}")

    def check_returned(self, scheduler: Scheduler, command: c.Generate) -> None:
        if (command.sample, command.worker, self.alive[command.worker]) not in self.returned:
            return
        willing = failures.others(scheduler.desk, scheduler.desk.groups[group_of(command.sample)])
        others = [one.name for one in willing if one.name != command.worker]
        name = f"sample {show_sample(command.sample)}"
        law(not others, f"{name} goes back to {command.worker}, which returned it unasked, and not to {others}")

    def check_hand_over(self, scheduler: Scheduler, command: c.HandOver, commands: list[c.Command]) -> None:
        """Nothing is taken from a worker that may stay unless somebody can go on with it, or training comes first."""
        others = [one for one in scheduler.desk.seats.values() if one.name != command.worker]
        somebody = any(one.may_generate for one in others)
        stopped = [one for one in commands if isinstance(one, c.HandOver) and one.worker != command.worker]
        gone_since = stopped or any(isinstance(one, c.ForgetWorker | c.StartTraining) for one in commands)
        oldest = next(iter(scheduler.desk.rounds.values()), None)
        may_train = oldest is not None and oldest.closed_at is not None and self.steps[command.lease] > oldest.step
        excused = command.worker in self.draining or somebody or gone_since or may_train
        law(bool(excused), f"{command.worker} hands lease {command.lease} over to nobody: {command.why}")

    def check_planned(self, scheduler: Scheduler, step: Step, planned: c.PlannedGroup) -> None:
        key = (planned.domain, planned.epoch, planned.prompt)
        law(key not in self.settled, f"prompt {key} was trained or dropped and starts again")
        law(all(key != other for _, other in self.groups.values()), f"prompt {key} starts twice")
        self.groups[planned.group] = (step, key)
        if self.config.max_staleness == 0 and planned.epoch > 0:
            before = (planned.domain, planned.epoch - 1)
            num_prompts = self.config.domains[planned.domain].num_prompts
            num = sum(one[:2] == before for one in self.settled)
            law(num == num_prompts, f"epoch {before} of (domain, epoch) ended with {num} of {num_prompts} prompts")

    def check_drop(self, scheduler: Scheduler, command: c.DropGroup) -> None:
        step, key = self.groups.pop(command.group)
        waiting = scheduler.desk.state.tail.deferred[key[0]]
        deferred = any((one.epoch, one.prompt) == key[1:] for one in waiting)
        if command.group == self.disbelieved:
            self.to_write_again.append(key)
        elif not deferred and "waits for a long round" not in command.why:
            self.settled.add(key)
        self.delivered.get(step, set()).discard(command.group)

    def check_delivery(self, command: c.DeliverGroup) -> None:
        name = f"group {command.group}"
        rounds = self.config.rounds
        least = min(rounds.min_group_samples, rounds.samples_per_prompt)
        num = len(command.samples)
        law(least <= num <= rounds.samples_per_prompt, f"{name} is delivered with {num} samples")
        law(self.groups[command.group][0] == command.step, f"{name} is delivered to step {command.step}")
        for sample in command.samples:
            law(group_of(sample) == command.group, f"{name} is delivered with {show_sample(sample)}")
            law(sample in self.finished, f"{name} is delivered with {show_sample(sample)}, which is not finished")
            law(sample in self.scored, f"{name} is delivered with {show_sample(sample)}, which has no reward")
        self.delivered[command.step].add(command.group)

    def check_seconds(self, scheduler: Scheduler) -> None:
        ledger = scheduler.ledger
        written = {(name, what): s for name, line in ledger.workers.items() for what, s in line.seconds.items()}
        for worker in scheduler.desk.seats.values():
            key = (worker.name, worker.activity)
            if worker.name not in self.missed:
                written[key] = written.get(key, 0.0) + self.paid_until - worker.since
        for key in {**self.paid, **written}:
            mine, theirs = self.paid.get(key, 0.0), written.get(key, 0.0)
            if abs(mine - theirs) > 1e-6:
                raise LawViolation(f"{key} took {mine} s, the ledger says {theirs}")
