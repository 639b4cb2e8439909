"""The manager about itself: a status for people and programs."""

import time
from collections.abc import Iterator
from typing import NamedTuple

from msgspec import structs

from polyrl.ids import SampleId, Step, show_sample
from polyrl.manager.lobby import Lobby
from polyrl.manager.payload import Payload
from polyrl.manager.peers.reward_sessions import RewardSession
from polyrl.manager.peers.sessions import HostSession, WorkerSession
from polyrl.manager.run import Run
from polyrl.scheduling.core.desk import Desk
from polyrl.scheduling.core.samples import Round
from polyrl.scheduling.parts import turns
from polyrl.scheduling.rules.play_limits import PlayTimes
from polyrl.wire.control import (
    EnvironmentStatus,
    HostStatus,
    RewardsStatus,
    RewardWorkerStatus,
    RoundStatus,
    Status,
    TurnedAway,
    WaitStatus,
    WorkerStatus,
)


def status(lobby: Lobby, uptime_s: float) -> Status:
    """Return the manager's state for people and programs: its peers, what runs, and what waits for what."""
    return _before_a_run(lobby, uptime_s) if lobby.run is None else _of_a_run(lobby.run, uptime_s)


def _before_a_run(lobby: Lobby, uptime_s: float) -> Status:
    now = lobby.now()
    return Status(
        run="none",
        paused=False,
        uptime_s=uptime_s,
        now_s=now,
        published=-1,
        trainer="none",
        workers=tuple(_worker(one, now) for one in lobby.workers.values()),
        rounds=(),
        queues={},
        waits=(WaitStatus(what="trainer", of="to open a run", age_s=uptime_s, given_up_in_s=None),),
        ledger={},
        refused=dict(lobby.refused),
        turned_away=_turned_away(lobby),
        hosts=[_host(one, now) for one in lobby.hosts.values()],
        reward_workers=[_reward_worker(one) for one in lobby.reward_relay.workers.values()],
    )


def _of_a_run(run: Run, uptime_s: float) -> Status:
    lobby, desk, trainer = run.lobby, run.desk, run.trainer
    now = lobby.now()
    running = _running(desk, run.payload)
    does, since = _trainer(desk)
    return Status(
        run="open",
        paused=desk.state.paused,
        uptime_s=uptime_s,
        now_s=now,
        published=desk.state.published,
        trainer="none" if trainer is None else "away" if trainer.link is None else "attached",
        trainer_does=does,
        trainer_since_s=None if since is None else now - since,
        workers=tuple(_member(run, one, running, now) for one in lobby.workers.values()),
        rounds=tuple(_round(desk, one, running, now) for one in desk.rounds.values()),
        queues=queues(run),
        waits=tuple(_waits(run, now)),
        ledger=_ledger(desk, now),
        refused=dict(lobby.refused),
        turned_away=_turned_away(lobby),
        caveat=lobby.caveat,
        tokens_received=run.num_tokens,
        max_new_tokens=desk.config.max_new_tokens,
        rewards=_rewards(run, now),
        hosts=[_host(one, now, run) for one in lobby.hosts.values()],
        environments=[
            _environment(desk, place, now) for place, one in enumerate(desk.config.domains) if one.environment
        ],
        reward_workers=[_reward_worker(one) for one in lobby.reward_relay.workers.values()],
    )


def _host(session: HostSession, now: float, run: Run | None = None) -> HostStatus:
    host = None if run is None else run.desk.hosts.find(session.name, session.incarnation)
    line = None if run is None else run.desk.ledger.hosts.get(session.name)
    return HostStatus(
        name=session.name,
        environment=session.facts.environment,
        connected=session.link is not None,
        draining=host is not None and host.draining,
        playing=0 if host is None else len(host.episodes),
        slots=session.facts.slots,
        price_usd_per_hour=session.facts.price_usd_per_hour,
        last_heard_s=max(0.0, now - session.heard_at),
        usd=0.0 if line is None else line.usd,
    )


def _environment(desk: Desk, domain: int, now: float) -> EnvironmentStatus:
    name, times = desk.environment_of(domain), desk.state.turns.get(domain, PlayTimes())
    hosts = [one for one in desk.hosts.seats.values() if one.environment == name and not one.draining]
    unhosted = (one for round_ in desk.rounds.values() for one in round_.unhosted.get(domain, ()))
    return EnvironmentStatus(
        name=name,
        places=sum(one.capacity for one in hosts),
        playing=sum(len(one.episodes) for one in hosts),
        waiting=sum(one in desk.samples and desk.samples[one].state == "unhosted" for one in unhosted),
        turn_p50_s=times.within_s(0.5),
        turn_p99_s=times.within_s(0.99),
        turn_limit_s=turns.present_turn_limit_s(desk, domain, now),
        episode_limit_s=turns.present_episode_limit_s(desk, domain, now),
    )


def _reward_worker(session: RewardSession) -> RewardWorkerStatus:
    return RewardWorkerStatus(
        name=session.name,
        state="draining" if session.is_draining else "ready" if session.is_ready else "joined",
        connected=session.link is not None,
        places=session.places,
        running=session.report.num_running,
        scored=session.report.num_scored,
        failed=session.report.num_failed,
        last_heard_s=max(0.0, time.monotonic() - session.heard_at),
    )


def _rewards(run: Run, now: float) -> RewardsStatus | None:
    if run.rewards is None:
        return None
    told, at = run.rewards
    return RewardsStatus(
        running=told.running,
        timeout_s=told.timeout_s,
        longest_s=told.longest_s + (now - at if told.running else 0.0),
        function=told.function,
        failed=told.failed,
        why=told.why,
    )


class _Running(NamedTuple):
    """Tokens of the running samples, from one look at each: there may be tens of thousands."""

    tokens: dict[int, int]
    """By seat."""
    longest: dict[Step, tuple[int, int]]
    """Of each round, its longest sample: the tokens, and the seat where it runs."""


def _running(desk: Desk, payload: Payload) -> _Running:
    tokens = dict.fromkeys(desk.seats, 0)
    longest: dict[Step, tuple[int, int]] = {}
    for sample in desk.leases.values():
        num, seat, step = payload.tokens_of(sample.id).num_tokens, sample.worker, desk.groups[sample.group].step
        tokens[seat] += num
        if step not in longest or num >= longest[step][0]:
            longest[step] = max((num, seat), longest.get(step, (0, -1)))
    return _Running(tokens, longest)


def _worker(session: WorkerSession, now: float) -> WorkerStatus:
    """Return what is known of a worker without a seat in the scheduler."""
    report, facts = session.report, session.facts
    return WorkerStatus(
        name=session.name,
        state="joined",
        connected=session.greeted,
        engine=facts.engine,
        model=facts.model,
        version=-1,
        running=0,
        slots=facts.slots,
        engine_waiting=0 if report is None else report.num_waiting,
        kv_used=0.0 if report is None else report.kv_used,
        tokens_per_s=0.0 if report is None else report.tokens_per_s,
        price_usd_per_hour=facts.price_usd_per_hour,
        spot=facts.spot,
        last_heard_s=max(0.0, now - session.heard_at),
        usd=0.0,
        draft_rounds=0 if report is None else report.num_rounds,
        tokens_drafted=0 if report is None else report.num_drafted,
        tokens_accepted=0 if report is None else report.num_accepted,
        local=facts.local,
    )


def _member(run: Run, session: WorkerSession, running: _Running, now: float) -> WorkerStatus:
    """Return what is known of a worker of the fleet."""
    seat, line = run.seat_of(session), run.desk.ledger.workers.get(session.name)
    found = structs.replace(_worker(session, now), usd=0.0 if line is None else line.usd)
    if seat is None:
        return found
    source = run.desk.seats.get(seat.source)
    return structs.replace(
        found,
        state="down" if seat.down else seat.state,
        version=seat.version,
        running=len(seat.leases),
        duty=seat.duty,
        pulling=seat.pulling,
        source="" if source is None else source.name,
        tokens_running=running.tokens[seat.seat],
        newest_lease=max(seat.leases, default=-1),
    )


def _turned_away(lobby: Lobby) -> list[TurnedAway]:
    now = time.monotonic()
    return [TurnedAway(name=name, why=why, ago_s=now - at) for name, (why, at) in lobby.turned_away.items()]


def _trainer(desk: Desk) -> tuple[str, float | None]:
    """Return what the trainer does, and since when."""
    clock = desk.state.clock
    if clock.validating_since is not None:
        return "validates", clock.validating_since
    if clock.busy_since is not None:
        return "trains", clock.busy_since
    return ("", None) if clock.idle_since is None else ("waits", clock.idle_since)


def _round(desk: Desk, round_: Round, running: _Running, now: float) -> RoundStatus:
    longest, seat = running.longest.get(round_.step, (0, -1))
    return RoundStatus(
        step=round_.step,
        kind=round_.kind,
        age_s=now - round_.opened_at,
        groups=sum(round_.quotas),
        samples_waiting=round_.num_waiting,
        samples_running=round_.num_leased,
        episodes_unhosted=round_.num_unhosted,
        episodes_playing=round_.num_playing,
        samples_generated=round_.num_generated,
        groups_generated=sum(round_.claims),
        groups_delivered=round_.num_delivered,
        closed=round_.closed_at is not None,
        longest_tokens=longest,
        longest_on="" if seat < 0 else desk.seats[seat].name,
    )


def queues(run: Run) -> dict[str, int]:
    desk = run.desk
    rounds = desk.rounds.values()
    scoring = len(desk.scoring.running)
    scored_now = scoring if run.rewards is None else min(scoring, run.rewards[0].running)
    return {
        "samples_waiting": sum(one.num_waiting for one in rounds),
        "samples_running": len(desk.leases),
        "samples_asked": sum(one.num_samples for one in run.questions.values()),
        "rewards_running": scored_now,
        "rewards_waiting": len(desk.scoring.queue) + scoring - scored_now,
        "prompts_deferred": sum(map(len, desk.state.tail.deferred)),
        "groups_delivered": sum(1 for one in desk.groups.values() if one.state == "delivered"),
        "groups_without_prompt": sum(1 for one in desk.groups if one not in run.payload.prompts),
        "rounds_requested": len(desk.state.requested),
    }


def _waits(run: Run, now: float) -> Iterator[WaitStatus]:
    """Yield every wait: first those without a deadline, then every deadline with its name."""
    desk, trainer = run.desk, run.trainer
    if trainer is not None and trainer.away_since is not None:
        yield WaitStatus(what="trainer", of="to dial in", age_s=now - trainer.away_since, given_up_in_s=None)
    if desk.state.published < 0:
        yield WaitStatus(what="weights", of="a first version", age_s=None, given_up_in_s=None)
    num_unknown = sum(1 for one in desk.groups if one not in run.payload.prompts)
    if num_unknown:
        yield WaitStatus(what="prompts", of=f"{num_unknown} groups", age_s=None, given_up_in_s=None)
    unhosted = next((one for one in desk.rounds.values() if one.num_unhosted), None)
    if unhosted is not None and not desk.hosts.seats:
        of = f"{unhosted.num_unhosted} episodes of round {unhosted.step}"
        yield WaitStatus(what="hosts", of=of, age_s=now - unhosted.opened_at, given_up_in_s=None)
    waiting = next((one for one in desk.rounds.values() if one.num_waiting), None)
    if waiting is not None and (desk.state.paused or not any(one.may_generate for one in desk.seats.values())):
        what = "a resume" if desk.state.paused else "workers"
        yield WaitStatus(what=what, of=f"round {waiting.step}", age_s=now - waiting.opened_at, given_up_in_s=None)
    scoring, relay = desk.scoring.running, run.lobby.reward_relay
    if scoring and relay.num_local == 0 and not relay.num_ready:
        age_s = time.monotonic() - relay.none_since
        yield WaitStatus(what="reward workers", of=f"{len(scoring)} answers", age_s=age_s, given_up_in_s=None)
    elif scoring:
        told = _rewards(run, now)
        if told is not None and told.running:
            left_s, age_s, of = told.timeout_s - told.longest_s, told.longest_s, f"{told.function}, {told.running} run"
        else:  # reward workers alone are waited for as long as it takes
            left_s = None if relay.num_local == 0 else min(scoring.values()) - now
            age_s, of = None, f"{len(scoring)} answers"
        given_up_in_s = None if left_s is None else max(0.0, left_s)
        yield WaitStatus(what="reward", of=of, age_s=age_s, given_up_in_s=given_up_in_s)
    for (name, key), at in sorted(desk.deadlines.entries.items(), key=lambda entry: entry[1]):
        if name != "reward":  # a look at those above
            age_s = _age_s(run, name, key, at - now)
            yield WaitStatus(what=name, of=_of(desk, name, key), age_s=age_s, given_up_in_s=at - now)


def _age_s(run: Run, name: str, key: int, left_s: float) -> float | None:
    """Return how long a wait lasts already; None where its deadline is put off, and its beginning is unknown."""
    desk, now = run.desk, run.lobby.now()
    rules, environments = desk.config.fleet_rules, desk.config.environments
    allowed = {
        "balance": desk.config.routing.balance_interval_s,
        "host_drain": environments.drain_timeout_s,
        "hand_over": rules.hand_over_timeout_s,
        "pull": rules.pull_timeout_s,
        "switch": rules.switch_timeout_s,
        "drain": rules.drain_timeout_s,
    }
    if name in ("turn", "episode"):
        clock = desk.state.playtimes.get(SampleId(key))
        return None if clock is None else max(0.0, now - clock.turn_began_at)
    if name in allowed:
        return max(0.0, allowed[name] - left_s)
    if name == "stall":  # it is looked at now and then, by this
        return max(0.0, now - desk.seats[key].last_tokens_at)
    round_ = desk.rounds.get(Step(key)) if name == "seed" else None
    if round_ is not None:
        return max(0.0, now - max(round_.opened_at, desk.state.clock.step_began_at))
    session = run.lobby.workers.get(desk.seats[key].name) if name == "heartbeat" else None
    return None if session is None else max(0.0, now - session.heard_at)


def _of(desk: Desk, name: str, key: int) -> str:
    if name in ("heartbeat", "unheard", "stall", "pull", "retry_pull", "switch", "notice", "drain"):
        return desk.seats[key].name
    if name in ("turn", "episode"):
        return f"episode {show_sample(SampleId(key))}"
    if name == "host_drain":
        return desk.hosts.seats[key].name
    return f"lease {key}" if name == "hand_over" else f"step {key}" if name == "seed" else "the fleet"


def _ledger(desk: Desk, now: float) -> dict[str, object]:
    ledger = desk.ledger
    return {
        "prompts_started": ledger.prompts_started,
        "prompts_trained": ledger.prompts_trained,
        "prompts_dropped": dict(ledger.prompts_dropped),
        "samples_started": ledger.samples_started,
        "samples_trained": ledger.samples_trained,
        "samples_answered": ledger.samples_answered,
        "samples_discarded": dict(ledger.samples_discarded),
        "tokens_arrived": ledger.tokens_arrived,
        "tokens_kept": ledger.tokens_kept,
        "tokens_answered": ledger.tokens_answered,
        "tokens_discarded": dict(ledger.tokens_discarded),
        "tokens_reprefilled": ledger.tokens_reprefilled,
        "moves": dict(ledger.moves),
        "late_news": ledger.late_news,
        "workers_joined": sum(one.num_joins for one in ledger.workers.values()),
        "workers_lost": sum(one.num_losses for one in ledger.workers.values()),
        "episodes_begun": ledger.episodes_begun,
        "episodes_ended": dict(ledger.episodes_ended),
        "calls": ledger.num_calls,
        "hosts_hung": ledger.hosts_hung,
        "host_seconds": sum(one.seconds for one in ledger.hosts.values()),
        "host_usd": sum(one.usd for one in ledger.hosts.values()),
        "usd": ledger.usd(now),
    }
