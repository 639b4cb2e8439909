"""From a requested round to its last group: groups race, claim their places, are scored and delivered.

Rules kept here:
- The race is decided by the order in which samples are generated, never by how fast their rewards are: a slow sandbox
  must not send a short answer to the long queue. The group that has enough answers claims its place; when a domain's
  places are all claimed, its other groups are deferred at that moment.
- Whole groups only, each delivered once. A group that cannot be completed is dropped with a reason and replaced by a
  fresh prompt, or the step goes on with one less; both are in the ledger.
- A prompt whose group the trainer rejects for what a worker wrote is written again in the same round: such groups cost
  neither prompts nor places, so a process with a worker token can use up neither.

taking.py has what follows: groups that the trainer takes.
"""

from polyrl.ids import GroupId, Seconds, Step
from polyrl.scheduling.core.commands import (
    AddGroup,
    CloseRound,
    DeliverGroup,
    DropGroup,
    EndData,
    OpenRound,
    PlannedGroup,
)
from polyrl.scheduling.core.desk import Desk
from polyrl.scheduling.core.ledger import DiscardCause, length_bin
from polyrl.scheduling.core.samples import Round, TrackedGroup, TrackedSample
from polyrl.scheduling.parts import hosting, leases, scoring
from polyrl.scheduling.rules.order import mix64
from polyrl.scheduling.rules.staleness import newest_step
from polyrl.scheduling.rules.tail_batching import PlannedPrompt, RoundPlan


def open_requested(desk: Desk, now: Seconds) -> list[Round]:
    """Open requested rounds for which a fresh enough version is published and no earlier round has samples to place."""
    state = desk.state
    opened: list[Round] = []
    while may_open_next(desk):
        step = state.requested[0]
        plan = desk.planner.plan_round(state.tail, step)
        if plan is None and any(round_.closed_at is None for round_ in desk.rounds.values()):
            break  # an open round may still defer prompts: the data has not ended yet
        state.requested.pop(0)
        if plan is None:
            if state.data_ended_at is None:
                state.data_ended_at = step
            desk.commands.append(EndData(step, "every prompt of the last epoch is trained or dropped"))
        else:
            opened.append(_open(desk, step, plan, now))
    return opened


def may_open_next(desk: Desk) -> bool:
    """Return whether a round is requested that staleness and the open rounds allow."""
    state = desk.state
    if not state.requested or state.published < 0 or len(desk.rounds) > desk.config.max_staleness:
        return False
    if state.requested[0] > newest_step(state.published, desk.config.max_staleness):
        return False
    return not any(round_.num_waiting or round_.num_unhosted for round_ in desk.rounds.values())


def _open(desk: Desk, step: Step, plan: RoundPlan, now: Seconds) -> Round:
    ledger = desk.ledger
    round_ = Round(
        step=step,
        kind=plan.kind,
        opened_at=now,
        quotas=list(plan.quotas),
        claims=[0] * len(plan.quotas),
        num_open=[0] * len(plan.quotas),
        groups={},
        num_planned=len(plan.choices) * plan.num_samples,
        fresh=[],
        resumed=[],
        next_hand_back_share=desk.config.hand_back.first_share,
    )
    desk.rounds[step] = round_
    ledger.rounds[plan.kind] = ledger.rounds.get(plan.kind, 0) + 1
    ledger.prompts_started += plan.num_passed_over + sum(one.first_deferred_step < 0 for one in plan.choices)
    ledger.num_deferrals += plan.num_passed_over
    planned = [_add_group(desk, round_, choice, plan.num_samples) for choice in plan.choices]
    round_.fresh.reverse()
    for waiting in round_.unhosted.values():
        waiting.reverse()
    desk.commands.append(OpenRound(step, plan.kind, tuple(planned), plan.why))
    desk.place_due = True
    return round_


def _add_group(desk: Desk, round_: Round, choice: PlannedPrompt, num_samples: int) -> PlannedGroup:
    state = desk.state
    group_id = GroupId(state.next_group)
    state.next_group += 1
    group = TrackedGroup(
        id=group_id,
        step=round_.step,
        domain=choice.domain,
        prompt=choice.prompt,
        epoch=choice.epoch,
        times_deferred=choice.times_deferred,
        first_deferred_step=choice.first_deferred_step,
        num_samples=num_samples,
        need=desk.config.rounds.samples_per_prompt,
    )
    desk.groups[group_id] = group
    round_.groups[group_id] = None
    round_.num_open[choice.domain] += 1
    kept = _designated(desk, group)
    for index, sample in enumerate(group.sample_ids()):
        desk.samples[sample] = TrackedSample(sample, group_id, index in kept)
    if desk.environment_of(choice.domain):
        for sample in group.sample_ids():
            hosting.queue(desk, desk.samples[sample], round_)
    else:
        round_.fresh += group.sample_ids()
        round_.num_waiting += num_samples
    desk.ledger.samples_started += num_samples
    return PlannedGroup(group_id, choice.domain, choice.prompt, choice.epoch, num_samples)


def _designated(desk: Desk, group: TrackedGroup) -> range | frozenset[int]:
    """Return which samples may be trained: all, or in designated mode as many as are needed, drawn before any is
    generated."""
    if desk.config.rounds.tail_batching != "designated" or group.num_samples == group.need:
        return range(group.num_samples)
    draws = sorted((mix64(desk.config.seed, group.id, index), index) for index in range(group.num_samples))
    return frozenset(index for _, index in draws[: group.need])


# Generating


def sample_generated(desk: Desk, sample: TrackedSample, now: Seconds) -> None:
    """Take in a finished answer."""
    group = desk.groups[sample.group]
    round_ = desk.rounds[group.step]
    leases.end_lease(desk, sample, round_, now)
    _count_generated(desk, sample, group, round_)
    if not sample.kept:
        leases.discard_sample(desk, sample, round_, "speculation", "only designated samples are trained", now)
    elif desk.as_finished:
        scoring.score(desk, sample, group)
    if group.state == "open" and group.num_generated >= group.need:
        _claim(desk, group, round_, now)
    if not desk.as_finished:
        score_if_generated(desk, round_)


def episode_ended(desk: Desk, sample: TrackedSample, now: Seconds) -> None:
    """Take in the end of an episode with its environment's reward, which is final unless the trainer scores the episode
    too."""
    group = desk.groups[sample.group]
    round_ = desk.rounds[group.step]
    _count_generated(desk, sample, group, round_)
    if not sample.kept:
        leases.discard_sample(desk, sample, round_, "speculation", "only designated samples are trained", now)
    elif desk.config.domains[group.domain].scores_episodes:
        sample.attempt = 0  # of its environment; attempts at its reward are counted from here on
        if desk.as_finished:
            scoring.score(desk, sample, group)
    else:
        sample.state = "scored"
        group.num_scored += 1
    if group.state == "open" and group.num_generated >= group.need:
        _claim(desk, group, round_, now)
    else:
        _deliver_if_complete(desk, group, round_, now)
    score_if_generated(desk, round_)


def _count_generated(desk: Desk, sample: TrackedSample, group: TrackedGroup, round_: Round) -> None:
    sample.state = "generated"
    num_tokens = sample.num_tokens
    leases.note_length(desk, sample, round_, finished=num_tokens < desk.max_new_tokens)
    desk.ledger.ended_by_bin[length_bin(num_tokens)] += 1
    group.num_generated += 1
    round_.num_generated += 1
    round_.ended_tokens += num_tokens


def score_if_generated(desk: Desk, round_: Round) -> None:
    """Score the whole round once nothing of it is left to generate, with `as_finished` off."""
    if desk.config.rewards.as_finished or round_.is_generating:
        return
    for group_id in list(round_.groups):
        group = desk.groups[group_id]
        for sample in samples_of(desk, group):
            if sample.state == "generated":
                scoring.score(desk, sample, group)


def sample_failed(desk: Desk, sample: TrackedSample, round_: Round, why: str, now: Seconds) -> None:
    """Drop a sample that cannot be had; its group goes on without it if enough samples are left."""
    _drop_sample(desk, sample, round_, "failed", why, now)


def group_refused(desk: Desk, group: TrackedGroup, round_: Round, why: str, now: Seconds) -> None:
    """Drop a group that every worker refuses."""
    drop_group(desk, group, round_, "refused", why, now)
    score_if_generated(desk, round_)


def _claim(desk: Desk, group: TrackedGroup, round_: Round, now: Seconds) -> None:
    group.state = "claimed"
    round_.claims[group.domain] += 1
    round_.num_open[group.domain] -= 1
    designated = desk.config.rounds.tail_batching == "designated"
    for sample in samples_of(desk, group):
        running = sample.state in ("unhosted", "playing", "waiting", "leased", "stopping")
        if running and not (designated and sample.kept):
            leases.discard_sample(desk, sample, round_, "speculation", "its group has enough answers", now)
    _defer_if_full(desk, round_, group.domain, now)
    _deliver_if_complete(desk, group, round_, now)


def _defer_if_full(desk: Desk, round_: Round, domain: int, now: Seconds) -> None:
    """Defer a domain's groups that still race to a long round when its places are all claimed."""
    if round_.claims[domain] < round_.quotas[domain] or round_.num_open[domain] == 0:
        return
    for group_id in list(round_.groups):
        group = desk.groups[group_id]
        if group.domain == domain and group.state == "open":
            _defer(desk, group, round_, now)


def _defer(desk: Desk, group: TrackedGroup, round_: Round, now: Seconds) -> None:
    why = "the step's places are taken: it waits for a long round"
    discard_group(desk, group, round_, "deferral", why, now)
    round_.num_open[group.domain] -= 1
    desk.planner.defer(desk.state.tail, _choice_of(group), round_.step)
    desk.ledger.num_deferrals += 1
    desk.commands.append(DropGroup(group.id, why))


# Scoring


def sample_scored(desk: Desk, sample: TrackedSample, now: Seconds) -> None:
    """Take in a reward."""
    sample.state = "scored"
    group = desk.groups[sample.group]
    group.num_scored += 1
    _deliver_if_complete(desk, group, desk.rounds[group.step], now)


def reward_failed(desk: Desk, sample: TrackedSample, now: Seconds, *, again: bool) -> None:
    """Take in a failed reward: retry where that may help, and drop the sample in the end. A failure is never a zero."""
    if again and desk.budgets.retry(sample.attempt).again:
        scoring.score(desk, sample, desk.groups[sample.group])
        return
    round_ = desk.rounds[desk.groups[sample.group].step]
    _drop_sample(desk, sample, round_, "reward_failed", "its reward could not be had", now)


def _drop_sample(desk: Desk, sample: TrackedSample, round_: Round, cause: DiscardCause, why: str, now: Seconds) -> None:
    group = desk.groups[sample.group]
    counted = sample.state == "scoring"
    leases.discard_sample(desk, sample, round_, cause, why, now)
    alive = sum(1 for one in samples_of(desk, group) if one.state != "discarded" and one.kept)
    if counted:
        group.num_generated -= 1
    if alive < group.need:
        group.need -= 1
    if group.need < min(desk.config.rounds.min_group_samples, desk.config.rounds.samples_per_prompt):
        drop_group(desk, group, round_, cause, why, now)
    elif group.state == "open" and group.num_generated >= group.need:
        _claim(desk, group, round_, now)
    else:
        _deliver_if_complete(desk, group, round_, now)
    score_if_generated(desk, round_)


# Delivering


def _deliver_if_complete(desk: Desk, group: TrackedGroup, round_: Round, now: Seconds) -> None:
    if group.state != "claimed" or group.num_scored < group.need:
        return
    group.state = "ready"
    round_.num_ready += 1
    if desk.config.streaming:
        _deliver(desk, group, round_)
    _close_if_complete(desk, round_, now)


def _deliver(desk: Desk, group: TrackedGroup, round_: Round) -> None:
    group.state = "delivered"
    round_.num_ready -= 1
    round_.num_delivered += 1
    desk.devices_due = True
    kept = tuple(sample.id for sample in samples_of(desk, group) if sample.state == "scored")
    desk.commands.append(DeliverGroup(round_.step, group.id, kept, "all its samples are scored"))


def _close_if_complete(desk: Desk, round_: Round, now: Seconds) -> None:
    due = sum(round_.quotas)
    if round_.closed_at is not None or round_.num_ready + round_.num_delivered < due:
        return
    for group_id in list(round_.groups) if round_.num_ready else ():
        group = desk.groups[group_id]
        if group.state == "ready":
            _deliver(desk, group, round_)
    round_.closed_at = now
    desk.rounds_due = True
    desk.devices_due = True
    desk.commands.append(CloseRound(round_.step, round_.num_delivered, "every place of the step is filled"))


# Losing a group


def drop_group(desk: Desk, group: TrackedGroup, round_: Round, cause: DiscardCause, reason: str, now: Seconds) -> None:
    """Drop a prompt from the run. A fresh one takes its place, or the step goes on with one less."""
    domain = group.domain
    _leave(desk, group, round_, cause, reason, now)
    desk.ledger.drop_prompt(cause)
    if round_.claims[domain] + round_.num_open[domain] < round_.quotas[domain]:
        _refill(desk, round_, domain)
    _defer_if_full(desk, round_, domain, now)
    _close_if_complete(desk, round_, now)


def write_again(desk: Desk, group: TrackedGroup, round_: Round, cause: DiscardCause, reason: str, now: Seconds) -> None:
    """Have a prompt written anew, in another group of its round. It is no refill, of which a round has so many."""
    _leave(desk, group, round_, cause, reason, now)
    again = _replace(
        desk, round_, _choice_of(group), "in place of a group that was rejected for what its workers wrote"
    )
    again.num_again = group.num_again + 1
    for sample in samples_of(desk, again):
        if sample.state == "waiting":  # only some workers may get it, as an episode's calls (episodes.py)
            sample.num_failures = 1
            round_.failed.append(sample.id)


def _leave(desk: Desk, group: TrackedGroup, round_: Round, cause: DiscardCause, reason: str, now: Seconds) -> None:
    before, domain = group.state, group.domain
    discard_group(desk, group, round_, cause, reason, now)
    desk.commands.append(DropGroup(group.id, reason))
    if before == "open":
        round_.num_open[domain] -= 1
    else:
        round_.claims[domain] -= 1
    if before == "ready":
        round_.num_ready -= 1
    elif before in ("delivered", "taken"):
        round_.num_delivered -= 1
        round_.closed_at = None  # the trainer is told anew, with the number that is due now


def _refill(desk: Desk, round_: Round, domain: int) -> None:
    config = desk.config.rounds
    num_prompts = sum(one.prompts_per_step for one in desk.config.domains)
    may = config.refill and round_.num_refills < config.max_refill_share * num_prompts
    choice = desk.planner.take_fresh(desk.state.tail, domain) if may else None
    if choice is None:
        round_.quotas[domain] -= 1
        return
    round_.num_refills += 1
    desk.ledger.prompts_started += 1
    _replace(desk, round_, choice, "in place of a dropped prompt")


def _replace(desk: Desk, round_: Round, choice: PlannedPrompt, why: str) -> TrackedGroup:
    planned = _add_group(desk, round_, choice, desk.config.rounds.samples_per_prompt)
    desk.commands.append(AddGroup(round_.step, planned, why))
    desk.place_due = True
    desk.devices_due = True
    return desk.groups[planned.group]


def _choice_of(group: TrackedGroup) -> PlannedPrompt:
    return PlannedPrompt(group.domain, group.prompt, group.epoch, group.times_deferred, group.first_deferred_step)


def discard_group(desk: Desk, group: TrackedGroup, round_: Round, cause: DiscardCause, why: str, now: Seconds) -> None:
    """End all of a group's samples untrained, and forget it."""
    for sample in samples_of(desk, group):
        if sample.state != "discarded":
            scoring.cancel(desk, sample, why)
            leases.discard_sample(desk, sample, round_, cause, why, now)
    forget(desk, group)
    del round_.groups[group.id]


def forget(desk: Desk, group: TrackedGroup) -> None:
    """Remove a group and its samples from the state."""
    playtimes = desk.state.playtimes
    for one in group.sample_ids():
        del desk.samples[one]
        if playtimes:
            playtimes.pop(one, None)
    del desk.groups[group.id]


def samples_of(desk: Desk, group: TrackedGroup) -> list[TrackedSample]:
    samples = desk.samples
    return [samples[one] for one in group.sample_ids()]
