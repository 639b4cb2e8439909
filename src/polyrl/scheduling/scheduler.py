"""The scheduler: facts in, wishes out.

    handle(event, now) -> commands        one task calls it; `now` never goes back
    wakeup_at                             when to send TimePassed if nothing else happens

An event is taken in by the part it concerns (leases, scoring, rounds, membership, devices). Then, once, in this order:
rounds that may open are opened, waiting samples are placed, the trainer's devices are reviewed, pulls are started. So a
decision sees all that the event changed. The result depends on the state and the event alone: the same journal gives
the same commands, byte for byte.
"""

import math
from typing import assert_never

import msgspec

from polyrl.errors import LawViolation
from polyrl.ids import Seconds
from polyrl.scheduling.core.commands import Abort, Command
from polyrl.scheduling.core.deadlines import Wait
from polyrl.scheduling.core.desk import RULES, Desk, State, new_state
from polyrl.scheduling.core.events import (
    DrainRequested,
    DriverResumed,
    DutyChanged,
    EngineBack,
    EngineDown,
    Event,
    FleetReported,
    GroupAsked,
    GroupRejected,
    GroupsTaken,
    GroupWithdrawn,
    LeaseEnded,
    MicroBatchTrained,
    PlacingPaused,
    PlacingResumed,
    RewardFinished,
    RoundRequested,
    RulesChanged,
    SampleFinished,
    SampleStopped,
    StepRestarted,
    StepTrained,
    TimePassed,
    TokensArrived,
    TokensDiscarded,
    TrainerLeft,
    TrainerReplaced,
    TrainerReturned,
    ValidationBegan,
    ValidationEnded,
    VersionPublished,
    VersionReplaced,
    WeightsFailed,
    WeightsInstalled,
    WorkerJoined,
    WorkerLeft,
    WorkerReported,
)
from polyrl.scheduling.core.fleet import Worker
from polyrl.scheduling.core.ledger import Ledger
from polyrl.scheduling.core.parameters import SchedulerConfig
from polyrl.scheduling.core.samples import TrackedSample
from polyrl.scheduling.parts import (
    asking,
    balancing,
    credit,
    devices,
    failures,
    hearing,
    leases,
    membership,
    notices,
    rounds,
    scoring,
    steps,
)


class Saved(msgspec.Struct, frozen=True):
    config: SchedulerConfig
    state: State
    now: Seconds
    """The last moment heard of: time does not go back after a load either."""


class Scheduler:
    def __init__(self, config: SchedulerConfig, state: State | None = None, rules: int = RULES) -> None:
        """A new run, by these rules of ours; or one that goes on from a state, by its own."""
        self.desk = Desk(config, new_state(config, rules) if state is None else state)
        self._now: Seconds = -math.inf
        self._before: Seconds = -math.inf
        """When the event before this one came."""

    @property
    def ledger(self) -> Ledger:
        return self.desk.state.ledger

    @property
    def rules(self) -> int:
        """Which of our rules it decides by."""
        return self.desk.state.rules

    def adopt(self, rules: int) -> None:
        """Decide by newer rules from now on. What was decided before stays."""
        self.desk.state.rules = max(self.rules, rules)

    @property
    def now(self) -> Seconds:
        """The last moment heard of; minus infinity before the first."""
        return self._now

    @property
    def wakeup_at(self) -> Seconds | None:
        return self.desk.deadlines.earliest()

    def is_due(self, now: Seconds) -> bool:
        """Whether it wants to hear that time has passed."""
        at = self.wakeup_at
        return at is not None and at <= now

    def save(self) -> bytes:
        """Everything that is needed to go on from here."""
        return msgspec.msgpack.encode(Saved(self.desk.config, self.desk.state, self._now))

    @classmethod
    def load(cls, saved: bytes) -> "Scheduler":
        """Go on from what `save` gave. Raises msgspec.DecodeError if it is not that."""
        loaded = msgspec.msgpack.decode(saved, type=Saved)
        scheduler = cls(loaded.config, loaded.state)
        scheduler._now = loaded.now
        return scheduler

    def handle(self, event: Event, now: Seconds) -> list[Command]:
        if not now >= self._now:  # so written, NaN is refused too
            raise LawViolation(f"time went back from {self._now} to {now} at {event}")
        self._before, self._now = self._now, now
        desk = self.desk
        desk.commands = []
        if desk.ledger.started_at is None:
            desk.ledger.started_at = now
        self._take_in(event, now)
        if desk.scores_due:
            desk.scores_due = False
            scoring.start_waiting(desk, now)
        if desk.failed_wait:
            desk.place_due = True
        if desk.place_due or desk.rounds_due or desk.devices_due or desk.pulls_due:
            self._pursue(now)
        return desk.commands

    def _take_in(self, event: Event, now: Seconds) -> None:
        desk = self.desk
        match event:  # the frequent ones first: each case is a test
            case SampleFinished():
                sample = desk.leases.get(event.lease)
                if sample is None:
                    desk.state.ledger.late_news += 1
                    return
                leases.note_tokens(desk, sample, event.num_tokens)
                self._clear(sample, now)
                if sample.group in desk.asked.groups:
                    asking.sample_answered(desk, sample, now)
                else:
                    rounds.sample_generated(desk, sample, now)
            case TokensDiscarded():
                num = max(0, event.num_tokens)
                desk.state.ledger.tokens_arrived += num
                desk.state.ledger.discard_tokens(event.cause, num)
            case RewardFinished():
                self._reward_finished(event, now)
            case TokensArrived():
                self._tokens_arrived(event, now)
            case WorkerReported():
                worker = self._worker(event)
                if worker is not None:
                    balancing.learn_plateau(desk, worker, event.num_waiting)
                    worker.num_preemptions = max(worker.num_preemptions, event.num_preemptions)
            case FleetReported():
                hearing.fleet_reported(desk, event, now)
            case LeaseEnded():
                self._lease_ended(event, now)
            case TimePassed():
                self._time_passed(now)
            case GroupsTaken():
                if rounds.groups_taken(desk, event.step, event.groups):
                    steps.training_began(desk, event.step, now)
            case MicroBatchTrained():
                steps.training_paused(desk, event.step, now)
            case WeightsInstalled():
                worker = self._worker(event)
                if worker is not None:
                    membership.weights_installed(desk, worker, event, now)
            case WeightsFailed():
                worker = self._worker(event)
                if worker is not None:
                    membership.weights_failed(desk, worker, event, now)
            case EngineDown():
                worker = self._worker(event)
                if worker is not None:
                    membership.engine_down(desk, worker, now)
            case EngineBack():
                worker = self._worker(event)
                if worker is not None:
                    membership.engine_back(desk, worker, event, now)
            case DutyChanged():
                worker = self._worker(event)
                if worker is not None:
                    devices.duty_changed(desk, worker, event.duty, now)
            case WorkerJoined():
                if membership.join(desk, event, now):
                    devices.arm_window(desk, now)
            case WorkerLeft():
                worker = self._worker(event)
                if worker is not None:
                    membership.lose(desk, worker, event.reason, now, tell=False)
                    devices.arm_window(desk, now)
            case DrainRequested():
                worker = self._worker(event)
                if worker is not None:
                    notices.given(desk, worker, event.reason, event.notice_s, now)
            case GroupRejected():
                self._group_rejected(event, now)
            case StepRestarted():
                steps.step_restarted(desk, event.step, now)
            case ValidationBegan():
                steps.validation_began(desk, now)
            case ValidationEnded():
                steps.validation_ended(desk, now)
            case StepTrained():
                steps.step_trained(desk, event.step, now)
            case VersionPublished():
                if membership.publish(desk, event.version, now):
                    steps.published(desk, now)
            case VersionReplaced():
                membership.replace(desk, event.version, now)
            case RoundRequested():
                self._round_requested(event)
            case GroupAsked():
                asking.ask(desk, event.num_samples)
            case SampleStopped():
                asking.stop(desk, event, now)
            case GroupWithdrawn():
                asking.withdraw(desk, event, now)
            case PlacingPaused():
                desk.state.paused = True
            case PlacingResumed():
                desk.state.paused = False
                desk.place_due = True
            case TrainerLeft():
                if desk.state.trainer_away_since is None:
                    desk.state.trainer_away_since, desk.state.absence_skipped_s = now, 0.0
                desk.ledger.trainer_left(now - max(0.0, event.away_s))
            case TrainerReplaced():
                desk.ledger.trainer_replaced(now)
                if desk.state.trainer_away_since is not None:
                    absent_s = now - desk.state.trainer_away_since
                    steps.stand_still(desk, absent_s - desk.state.absence_skipped_s, now)
                steps.validation_ended(desk, now)  # who validated is gone
            case TrainerReturned():
                desk.ledger.trainer_left_at = None
                if desk.state.trainer_away_since is not None:
                    scoring.postpone(desk, now - desk.state.trainer_away_since)
                    desk.state.trainer_away_since = None
            case RulesChanged():
                desk.change_rules(event.config)
                scoring.fit(desk, "the run goes on with fewer places")
                desk.place_due = desk.pulls_due = desk.devices_due = True
            case DriverResumed():
                scoring.postpone(desk, max(0.0, event.away_s))
                left_at = max(now - max(0.0, event.away_s), self._before)  # it was there when it last told us something
                membership.nobody_was_late(desk, event.away_s, event.grace_s, left_at, now)
                steps.stand_still(desk, now - left_at, now)
                leases.skip_numbers(desk)
            case _:
                assert_never(event)

    def _pursue(self, now: Seconds) -> None:
        """Do what has become possible."""
        desk = self.desk
        while desk.rounds_due or desk.place_due or desk.devices_due or desk.pulls_due:
            if desk.rounds_due:
                desk.rounds_due = False
                opened = rounds.open_requested(desk, now)
                if opened:
                    steps.rounds_opened(desk, opened, now)
            if desk.place_due:
                desk.place_due = False
                leases.place_waiting(desk, now)
                desk.rounds_due = bool(desk.state.requested) and rounds.may_open_next(desk)
            if desk.devices_due:
                desk.devices_due = False
                devices.review(desk, now)
            if desk.pulls_due:
                desk.pulls_due = False
                membership.start_pulls(desk, now)

    # Finding what an event is about

    def _worker(
        self,
        event: WorkerReported
        | WorkerLeft
        | DrainRequested
        | WeightsInstalled
        | WeightsFailed
        | EngineDown
        | EngineBack
        | DutyChanged,
    ) -> Worker | None:
        worker = self.desk.state.fleet.find(event.worker, event.incarnation)
        if worker is None:
            self.desk.state.ledger.late_news += 1
            return None
        membership.heard_from(self.desk, worker, self._now)
        return worker

    # Events that need more than a line

    def _tokens_arrived(self, event: TokensArrived, now: Seconds) -> None:
        desk = self.desk
        worker = desk.state.fleet.find(event.worker, event.incarnation)
        if worker is None:
            desk.state.ledger.late_news += 1
            return
        membership.heard_from(desk, worker, now)
        seat = worker.seat
        cap = desk.config.max_new_tokens
        gained = most = 0
        # The hottest loop there is: once a report and sample. See `polyrl bench scheduler`.
        for sample, num_tokens in zip(map(desk.leases.get, event.leases), event.num_tokens, strict=False):
            if sample is None or sample.worker != seat:
                continue
            more = num_tokens - sample.num_tokens
            if more > 0:
                if num_tokens > cap:
                    more -= num_tokens - cap
                    num_tokens = cap
                sample.num_tokens = num_tokens
                gained += more
                if more > most:
                    most = more
        if gained:
            desk.state.ledger.tokens_arrived += gained
            balancing.learn_speed(worker, len(event.leases), most, now)
            if worker.earned < worker.slots:
                credit.progressed(desk, worker)

    def _lease_ended(self, event: LeaseEnded, now: Seconds) -> None:
        desk = self.desk
        sample = desk.leases.get(event.lease)
        if sample is None:
            desk.state.ledger.late_news += 1
            return
        leases.note_tokens(desk, sample, event.num_tokens)
        round_ = desk.round_of(sample)
        worker = desk.state.fleet.seats[sample.worker]
        if worker.unheard:
            membership.heard_from(desk, worker, now)
        group = desk.groups[sample.group]
        has_failed = failures.has_failed(desk, worker, sample, event.reason)
        is_inherited = failures.is_inherited(desk, sample, event.reason)
        sample.num_failures += has_failed
        if has_failed and event.reason == "handed_over":
            credit.halve(desk, worker)
        if is_inherited:
            leases.forget_tokens(desk, sample, f"{worker.name} refused to go on from them")
            if (writer := desk.seats.get(sample.writer)) is not None and not worker.is_doubtful:
                failures.note(desk, writer, group)
        leases.requeue(desk, sample, round_, now, event.reason)
        if not has_failed:
            return
        is_refused, is_asked = event.reason == "refused" and not is_inherited, round_ is desk.asked
        if is_refused and is_asked:  # the asker's fault, not the worker's
            asking.fail(desk, sample, now)
            return
        if not worker.down:  # one death, however many samples it took along
            failures.note(desk, worker, group)
        if is_refused and (why := failures.why_given_up(desk, group)):
            rounds.group_refused(desk, group, round_, why, now)
        elif sample.num_failures >= desk.config.fleet_rules.max_failures:
            if is_asked:
                asking.fail(desk, sample, now)
            else:
                rounds.sample_failed(desk, sample, round_, now)

    def _clear(self, sample: TrackedSample, now: Seconds) -> None:
        """An answer shows that its worker is well, and that whoever failed the group before is not."""
        desk = self.desk
        worker, group = desk.seats[sample.worker], desk.groups[sample.group]
        if worker.unheard:
            membership.heard_from(desk, worker, now)
        if worker.earned < worker.slots or worker.has_stalled:
            credit.answered(desk, worker)
        if not worker.is_doubtful and not group.failed_on:
            return
        for guilty in failures.answered(desk, worker, group):
            why = f"it failed samples of {guilty.num_faults} groups in a row that others answered"
            # The trainer's own comes back: it is there to train.
            membership.lose(desk, guilty, why, now, tell=True, rejoin=guilty.local)
            devices.arm_window(desk, now)

    def _reward_finished(self, event: RewardFinished, now: Seconds) -> None:
        desk = self.desk
        sample = scoring.accept(desk, event)
        if sample is None:
            return
        if event.outcome in ("infrastructure_failed", "no_reward"):
            rounds.reward_failed(desk, sample, now, again=event.outcome == "infrastructure_failed")
            return
        if 0.0 <= event.cpu_s < float("inf"):  # the reward counts all the same; a clock that lies teaches nothing
            case = scoring.case_of(desk, desk.state.groups[sample.group])
            desk.state.budgets.observe(case, event.cpu_s, correct=event.correct and event.outcome == "scored")
        rounds.sample_scored(desk, sample, now)

    def _group_rejected(self, event: GroupRejected, now: Seconds) -> None:
        group = self.desk.state.groups.get(event.group)
        if group is None or group.state not in ("delivered", "taken"):
            self.desk.state.ledger.late_news += 1
            return
        rounds.drop_group(self.desk, group, self.desk.state.rounds[group.step], "filtered", event.reason, now)
        for name in event.blamed:
            worker = self.desk.seats.get(self.desk.state.fleet.by_name.get(name, -1))
            if worker is not None and not worker.local and failures.rejected(self.desk, worker):
                why = f"{worker.num_rejected} groups were rejected for what it wrote, the last for {event.reason}"
                membership.lose(self.desk, worker, why, now, tell=True, rejoin=False)
                devices.arm_window(self.desk, now)

    def _round_requested(self, event: RoundRequested) -> None:
        state = self.desk.state
        if event.step <= state.last_requested:
            state.ledger.late_news += 1
            return
        state.last_requested = event.step
        state.requested.append(event.step)
        self.desk.rounds_due = True

    def _time_passed(self, now: Seconds) -> None:
        while (wait := self.desk.deadlines.pop_due(now)) is not None:
            self._give_up_waiting(wait, now)

    def _give_up_waiting(self, wait: Wait, now: Seconds) -> None:
        desk = self.desk
        name, key = wait
        match name:
            case "stall":
                membership.give_up_stalled(desk, desk.state.fleet.seats[key], now)
            case "heartbeat" | "drain" | "switch":
                worker = desk.state.fleet.seats[key]
                membership.lose(desk, worker, _WHY_LOST[name], now, tell=True)
                devices.arm_window(desk, now)
            case "notice":
                notices.look(desk, desk.seats[key], now)
            case "unheard":
                membership.let_others_go_on(desk, desk.seats[key], now)
            case "hand_over":
                sample = desk.leases[key]  # type: ignore[index]
                worker = desk.seats[sample.worker]
                desk.commands.append(
                    Abort(worker.name, sample.lease, "it was not handed over in time", sample.id, sample.num_tokens)
                )
                leases.requeue(desk, sample, desk.round_of(sample), now, "hand_over_timeout")
            case "pull":
                worker = desk.state.fleet.seats[key]
                event = WeightsFailed(worker.name, worker.incarnation, worker.pulling, "it took too long")
                membership.weights_failed(desk, worker, event, now)
            case "retry_pull":
                desk.pulls_due = True
            case "reward":
                for sample in scoring.give_up_overdue(desk, now):
                    if sample.state == "scoring":  # a sibling's failure may have dropped its group
                        rounds.reward_failed(desk, sample, now, again=True)
            case "seed":
                devices.window_over(desk, key, now)
            case "balance":
                balancing.balance(desk, now)
            case _:
                assert_never(name)


_WHY_LOST = {
    "heartbeat": "no heartbeat",
    "drain": "it did not hand over in time",
    "switch": "its devices did not change over in time",
}
