"""The handlers of events, and the table `HANDLERS` that finds one by the type of an event.

A handler changes the desk through the part that the event concerns, and says in the desk's flags what became possible;
scheduler.py acts on it afterwards. A test checks that every event has a handler. Late news is counted, and no more.
"""

from collections.abc import Callable, Mapping
from typing import Any, assert_never

from polyrl.ids import Seconds
from polyrl.scheduling.core import events as e
from polyrl.scheduling.core.commands import Abort
from polyrl.scheduling.core.deadlines import Wait
from polyrl.scheduling.core.desk import Desk
from polyrl.scheduling.core.fleet import Worker
from polyrl.scheduling.core.samples import TrackedSample
from polyrl.scheduling.parts import (
    asking,
    balancing,
    credit,
    devices,
    episodes,
    failures,
    hearing,
    leases,
    membership,
    notices,
    rejecting,
    reward_workers,
    rounds,
    scoring,
    steps,
    taking,
    turns,
)

# Samples


def _sample_finished(desk: Desk, event: e.SampleFinished, now: Seconds) -> None:
    sample = desk.leases.get(event.lease)
    if sample is None:
        desk.ledger.late_news += 1
        return
    leases.note_tokens(desk, sample, event.num_tokens)
    _clear(desk, sample, now)
    if sample.group in desk.asked.groups:
        asking.sample_answered(desk, sample, now)
    elif sample.host >= 0:
        episodes.call_answered(desk, sample, now)
    else:
        rounds.sample_generated(desk, sample, now)


def _clear(desk: Desk, sample: TrackedSample, now: Seconds) -> None:
    """Clear the worker that answered, and blame the workers that failed the same group before."""
    worker, group = desk.seats[sample.worker], desk.groups[sample.group]
    if worker.unheard:
        membership.heard_from(desk, worker, now)
    worker.num_deaths, worker.has_answered = 0, True
    if desk.state.rules >= rejecting.WRITTEN_AGAIN:
        sample.writer = worker.seat
    if worker.earned < worker.slots or worker.has_stalled:
        credit.answered(desk, worker)
    if not worker.is_doubtful and not group.failed_on:
        return
    for guilty in failures.answered(desk, worker, group):
        why = f"it failed samples of {guilty.num_faults} groups in a row that others answered"
        # The trainer's own comes back: it is there to train.
        membership.lose(desk, guilty, why, now, tell=True, rejoin=guilty.local)
        devices.arm_window(desk, now)


def _tokens_discarded(desk: Desk, event: e.TokensDiscarded, now: Seconds) -> None:
    num = max(0, event.num_tokens)
    desk.ledger.tokens_arrived += num
    desk.ledger.discard_tokens(event.cause, num)


def _reward_finished(desk: Desk, event: e.RewardFinished, now: Seconds) -> None:
    sample = scoring.accept(desk, event)
    if sample is None:
        return
    if event.outcome in ("infrastructure_failed", "no_reward"):
        rounds.reward_failed(desk, sample, now, again=event.outcome == "infrastructure_failed")
        return
    if 0.0 <= event.cpu_s < float("inf"):  # the reward counts all the same; no time, or a lie, teaches nothing
        case = scoring.case_of(desk, desk.groups[sample.group])
        desk.budgets.observe(case, event.cpu_s, correct=event.correct and event.outcome == "scored")
    rounds.sample_scored(desk, sample, now)


def _tokens_arrived(desk: Desk, event: e.TokensArrived, now: Seconds) -> None:
    worker = desk.state.fleet.find(event.worker, event.incarnation)
    if worker is None:
        desk.ledger.late_news += 1
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
        desk.ledger.tokens_arrived += gained
        balancing.learn_speed(worker, len(event.leases), most, now)
        if worker.earned < worker.slots:
            credit.progressed(desk, worker)


def _lease_ended(desk: Desk, event: e.LeaseEnded, now: Seconds) -> None:
    sample = desk.leases.get(event.lease)
    if sample is None:
        desk.ledger.late_news += 1
        return
    leases.note_tokens(desk, sample, event.num_tokens)
    round_ = desk.round_of(sample)
    worker = desk.seats[sample.worker]
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
    if has_failed:
        _assign_fault(desk, sample, worker, now, is_refused=event.reason == "refused" and not is_inherited)


def _assign_fault(desk: Desk, sample: TrackedSample, worker: Worker, now: Seconds, *, is_refused: bool) -> None:
    """Hold a failed sample against its worker, and give the sample or its group up where that is due."""
    group, round_ = desk.groups[sample.group], desk.round_of(sample)
    is_asked = round_ is desk.asked
    if is_refused and is_asked:  # the asker's fault, not the worker's
        asking.fail(desk, sample, now)
        return
    if not worker.down:  # one death, however many samples it took along
        failures.note(desk, worker, group)
    why = failures.why_given_up(desk, group) if is_refused else ""
    if why and sample.host >= 0:  # its call's prompt is its own: siblings may go on
        rounds.sample_failed(desk, sample, round_, why, now)
    elif why:
        rounds.group_refused(desk, group, round_, why, now)
    elif failures.fails_for_good(desk, sample, group):
        if is_asked:
            asking.fail(desk, sample, now)
        else:
            rounds.sample_failed(desk, sample, round_, "no worker could generate it", now)


def _group_asked(desk: Desk, event: e.GroupAsked, now: Seconds) -> None:
    asking.ask(desk, event.num_samples)


# The fleet


def _worker(
    desk: Desk,
    event: e.WorkerReported
    | e.WorkerLeft
    | e.DrainRequested
    | e.WeightsInstalled
    | e.WeightsFailed
    | e.EngineDown
    | e.EngineBack
    | e.DutyChanged,
    now: Seconds,
) -> Worker | None:
    """Return the worker that sent the news, and note that it lives; None for late news of a life that is over."""
    worker = desk.state.fleet.find(event.worker, event.incarnation)
    if worker is None:
        desk.ledger.late_news += 1
        return None
    membership.heard_from(desk, worker, now)
    return worker


def _worker_reported(desk: Desk, event: e.WorkerReported, now: Seconds) -> None:
    if (worker := _worker(desk, event, now)) is not None:
        balancing.learn_plateau(desk, worker, event.num_waiting)
        worker.num_preemptions = max(worker.num_preemptions, event.num_preemptions)


def _weights_installed(desk: Desk, event: e.WeightsInstalled, now: Seconds) -> None:
    if (worker := _worker(desk, event, now)) is not None:
        membership.weights_installed(desk, worker, event, now)


def _weights_failed(desk: Desk, event: e.WeightsFailed, now: Seconds) -> None:
    if (worker := _worker(desk, event, now)) is not None:
        membership.weights_failed(desk, worker, event, now)


def _engine_down(desk: Desk, event: e.EngineDown, now: Seconds) -> None:
    if (worker := _worker(desk, event, now)) is not None:
        membership.engine_down(desk, worker, now)


def _engine_back(desk: Desk, event: e.EngineBack, now: Seconds) -> None:
    if (worker := _worker(desk, event, now)) is not None:
        membership.engine_back(desk, worker, event, now)


def _duty_changed(desk: Desk, event: e.DutyChanged, now: Seconds) -> None:
    if (worker := _worker(desk, event, now)) is not None:
        devices.duty_changed(desk, worker, event.duty, now)


def _worker_joined(desk: Desk, event: e.WorkerJoined, now: Seconds) -> None:
    if membership.join(desk, event, now):
        devices.arm_window(desk, now)


def _worker_left(desk: Desk, event: e.WorkerLeft, now: Seconds) -> None:
    if (worker := _worker(desk, event, now)) is not None:
        membership.lose(desk, worker, event.reason, now, tell=False)
        devices.arm_window(desk, now)


def _drain_requested(desk: Desk, event: e.DrainRequested, now: Seconds) -> None:
    if (worker := _worker(desk, event, now)) is not None:
        notices.given(desk, worker, event.reason, event.notice_s, now)


# The trainer


def _groups_taken(desk: Desk, event: e.GroupsTaken, now: Seconds) -> None:
    if taking.groups_taken(desk, event.step, event.groups):
        steps.training_began(desk, event.step, event.worker, now)


def _micro_batch_trained(desk: Desk, event: e.MicroBatchTrained, now: Seconds) -> None:
    steps.training_paused(desk, event.step, event.worker, now)


def _step_restarted(desk: Desk, event: e.StepRestarted, now: Seconds) -> None:
    steps.step_restarted(desk, event.step, now)


def _step_trained(desk: Desk, event: e.StepTrained, now: Seconds) -> None:
    steps.step_trained(desk, event.step, event.left_out, now)


def _validation_began(desk: Desk, event: e.ValidationBegan, now: Seconds) -> None:
    steps.validation_began(desk, now)


def _validation_ended(desk: Desk, event: e.ValidationEnded, now: Seconds) -> None:
    steps.validation_ended(desk, now)


def _version_published(desk: Desk, event: e.VersionPublished, now: Seconds) -> None:
    if membership.publish(desk, event.version, now):
        steps.published(desk, now)


def _version_replaced(desk: Desk, event: e.VersionReplaced, now: Seconds) -> None:
    membership.replace(desk, event.version, now)


def _round_requested(desk: Desk, event: e.RoundRequested, now: Seconds) -> None:
    state = desk.state
    if event.step <= state.last_requested:
        desk.ledger.late_news += 1
        return
    state.last_requested = event.step
    state.requested.append(event.step)
    desk.rounds_due = True


def _trainer_left(desk: Desk, event: e.TrainerLeft, now: Seconds) -> None:
    if desk.state.trainer_away_since is None:
        desk.state.trainer_away_since, desk.state.absence_skipped_s = now, 0.0
    desk.ledger.trainer_left(now - max(0.0, event.away_s))


def _trainer_replaced(desk: Desk, event: e.TrainerReplaced, now: Seconds) -> None:
    desk.ledger.trainer_replaced(now)
    if desk.state.trainer_away_since is not None:
        absent_s = now - desk.state.trainer_away_since
        steps.stand_still(desk, absent_s - desk.state.absence_skipped_s, now)
    steps.validation_ended(desk, now)  # the process that validated is gone


def _trainer_returned(desk: Desk, event: e.TrainerReturned, now: Seconds) -> None:
    desk.ledger.trainer_left_at = None
    if desk.state.trainer_away_since is not None:
        scoring.postpone(desk, now - desk.state.trainer_away_since)
        desk.state.trainer_away_since = None


# The driver


def _placing_paused(desk: Desk, event: e.PlacingPaused, now: Seconds) -> None:
    desk.state.paused = True


def _placing_resumed(desk: Desk, event: e.PlacingResumed, now: Seconds) -> None:
    desk.state.paused = False
    desk.place_due = desk.hosts_due = True


def _rules_changed(desk: Desk, event: e.RulesChanged, now: Seconds) -> None:
    desk.change_rules(event.config)
    scoring.fit(desk, "the run goes on with fewer places")
    desk.place_due = desk.pulls_due = desk.devices_due = True


def _driver_resumed(desk: Desk, event: e.DriverResumed, now: Seconds) -> None:
    scoring.postpone(desk, max(0.0, event.away_s))
    left_at = max(now - max(0.0, event.away_s), desk.before)  # it was there when it last told us something
    membership.nobody_was_late(desk, event.away_s, event.grace_s, left_at, now)
    steps.stand_still(desk, now - left_at, now)
    turns.skip(desk, max(0.0, event.away_s))
    leases.skip_numbers(desk)


# Time


def _time_passed(desk: Desk, event: e.TimePassed, now: Seconds) -> None:
    while (wait := desk.deadlines.pop_due(now)) is not None:
        _give_up_waiting(desk, wait, now)


_WHY_LOST = {
    "heartbeat": "no heartbeat",
    "drain": "it did not hand over in time",
    "switch": "its devices did not change over in time",
}


def _give_up_waiting(desk: Desk, wait: Wait, now: Seconds) -> None:  # noqa: C901 (a case for each kind)
    name, key = wait
    match name:
        case "stall":
            membership.give_up_stalled(desk, desk.seats[key], now)
        case "heartbeat" | "drain" | "switch":
            worker = desk.seats[key]
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
            worker = desk.seats[key]
            event = e.WeightsFailed(worker.name, worker.incarnation, worker.pulling, "it took too long")
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
        case "turn" | "episode":
            episodes.time_is_up(desk, desk.samples[key], name, now)  # type: ignore[index]
        case "host_drain":
            episodes.drain_is_over(desk, key, now)
        case _:
            assert_never(name)


HANDLERS: Mapping[type, Callable[[Desk, Any, Seconds], None]] = {
    e.CallMade: episodes.call_made,
    e.CallRepeated: episodes.call_repeated,
    e.DrainRequested: _drain_requested,
    e.DriverResumed: _driver_resumed,
    e.DutyChanged: _duty_changed,
    e.EngineBack: _engine_back,
    e.EngineDown: _engine_down,
    e.EpisodeEnded: episodes.episode_ended,
    e.FleetReported: hearing.fleet_reported,
    e.GroupAsked: _group_asked,
    e.GroupRejected: rejecting.group_rejected,
    e.GroupsTaken: _groups_taken,
    e.GroupUnscored: rejecting.group_unscored,
    e.GroupWithdrawn: asking.withdraw,
    e.HostDrainRequested: episodes.drain,
    e.HostJoined: episodes.host_joined,
    e.HostLeft: episodes.host_left,
    e.LeaseEnded: _lease_ended,
    e.MicroBatchTrained: _micro_batch_trained,
    e.PlacingPaused: _placing_paused,
    e.PlacingResumed: _placing_resumed,
    e.RewardFinished: _reward_finished,
    **reward_workers.HANDLERS,
    e.RoundRequested: _round_requested,
    e.RulesChanged: _rules_changed,
    e.SampleFinished: _sample_finished,
    e.SampleStopped: asking.stop,
    e.StepRestarted: _step_restarted,
    e.StepTrained: _step_trained,
    e.SupplyOffered: steps.supply_offered,
    e.TimePassed: _time_passed,
    e.TokensArrived: _tokens_arrived,
    e.TokensDiscarded: _tokens_discarded,
    e.TrainerLeft: _trainer_left,
    e.TrainerReplaced: _trainer_replaced,
    e.TrainerReturned: _trainer_returned,
    e.ValidationBegan: _validation_began,
    e.ValidationEnded: _validation_ended,
    e.VersionPublished: _version_published,
    e.VersionReplaced: _version_replaced,
    e.WeightsFailed: _weights_failed,
    e.WeightsInstalled: _weights_installed,
    e.WorkerJoined: _worker_joined,
    e.WorkerLeft: _worker_left,
    e.WorkerReported: _worker_reported,
}
