"""Episodes: samples that an environment plays at a host, and that workers write call by call.

    unhosted --a host has room--> playing --call--> waiting --> leased --answered--> playing --> ... --> scored
                                     |                                                 |
             <------- its host is lost, or it failed and may be begun again -----------+

Rules kept here:
- An episode holds a place at its host from its beginning to its end, and a place at a worker only during a call.
- Its drawn tokens are kept when its host is lost: the driver answers the calls of the next attempt from them, for as
  long as their prompts are the same, and says at the first that differs from which token on they are unused.
- A failure of the environment is never a zero: the episode is begun again, and in the end leaves its group.
- A turn that is over its limit is held against the episode, unless its host hangs as a whole (turns.py): then the host
  is given up, and its episodes go on elsewhere.
- What hosts that never played an episode to its end make of one is not held against it while another host may play it:
  it goes to one that has (hosts.py).
- An episode that is over time is scored with `timeout_reward` if it has an answer: the policy may be the cause, and an
  episode that is dropped is an exit that it learns. Without an answer it cannot be, and the episode has failed.
"""

from typing import Literal

from polyrl.ids import SampleId, Seconds
from polyrl.scheduling.core.commands import Abort, AnswerCall, ForgetHost, PlayEpisode, ReleaseHost
from polyrl.scheduling.core.desk import Desk
from polyrl.scheduling.core.events import CallMade, CallRepeated, EpisodeEnded, HostDrainRequested, HostJoined, HostLeft
from polyrl.scheduling.core.hosts import Host, host_line, settle_host
from polyrl.scheduling.core.ledger import DiscardCause, EpisodeOutcome
from polyrl.scheduling.core.samples import NO_LEASE, NO_VERSION, Round, TrackedSample
from polyrl.scheduling.parts import hosting, leases, rounds, turns

MAX_HOST_LOSSES = 10
"""An episode whose hosts were lost this often, with no call answered in between, is the likely cause, and leaves its
group. A long episode that gets on from host to host is not: machines die for reasons of their own."""
_MAX_NAMES = 1000
"""Names of hosts that are remembered, beyond those that are there."""
_PROVEN_FIRST_SINCE = 10
"""The first rules that prefer hosts that have played: a stranger may join under as many names as it likes."""

# Hosts


def host_joined(desk: Desk, event: HostJoined, now: Seconds) -> None:
    hosts = desk.hosts
    if event.incarnation <= hosts.last_incarnations.get(event.host, -1):
        desk.ledger.late_news += 1
        return
    former = hosts.seats.get(hosts.by_name.get(event.host, -1))
    if former is not None:
        _lose(desk, former, "another process joined under its name", now)
    host = Host(
        hosts.next_seat, event.host, event.incarnation, event.environment, max(1, event.slots), now, joined_at=now
    )
    hosts.next_seat += 1
    hosts.seats[host.seat] = host
    hosts.by_name[host.name] = host.seat
    hosts.last_incarnations[host.name] = host.incarnation
    line = host_line(desk.ledger, host.name, event.price_usd_per_hour)
    line.num_joins += 1
    _forget_names(desk)
    desk.hosts_due = True


def host_left(desk: Desk, event: HostLeft, now: Seconds) -> None:
    host = desk.hosts.find(event.host, event.incarnation)
    if host is None:
        desk.ledger.late_news += 1
        return
    _lose(desk, host, event.reason, now)


def drain(desk: Desk, event: HostDrainRequested, now: Seconds) -> None:
    host = desk.hosts.find(event.host, event.incarnation)
    if host is None or host.draining:
        desk.ledger.late_news += host is None
        return
    host.draining = desk.hosts_due = True
    desk.deadlines.set(("host_drain", host.seat), now + desk.config.environments.drain_timeout_s)
    if not host.episodes:
        desk.commands.append(ReleaseHost(host.name, event.reason))


def drain_is_over(desk: Desk, seat: int, now: Seconds) -> None:
    """Give up a host that was drained and still plays."""
    host = desk.hosts.seats[seat]
    why = "it was drained, and its episodes took too long"
    desk.commands.append(ForgetHost(host.name, why))
    _lose(desk, host, why, now)


def _lose(desk: Desk, host: Host, why: str, now: Seconds) -> None:
    settle_host(host, desk.ledger, now)
    host.draining = False  # it is not released: it is gone
    is_believed = _is_believed(desk, host)
    if host.episodes:
        desk.ledger.hosts[host.name].num_losses += 1
    for sample_id in list(host.episodes):
        sample = desk.samples[sample_id]
        round_ = desk.round_of(sample)
        _take_back(desk, sample, round_, why, now)
        hosting.leave(desk, sample, now)
        sample.num_losses += is_believed
        if not is_believed:
            sample.failed_at = host.seat
        if sample.num_losses >= MAX_HOST_LOSSES:
            _give_up(desk, sample, round_, "all of its hosts were lost", now)
        else:
            hosting.queue(desk, sample, round_)
    desk.deadlines.clear(("host_drain", host.seat))
    del desk.hosts.seats[host.seat]
    del desk.hosts.by_name[host.name]
    desk.hosts_due = True


def _is_believed(desk: Desk, host: Host) -> bool:
    return desk.state.rules < _PROVEN_FIRST_SINCE or desk.hosts.is_believed(host)


def _forget_names(desk: Desk) -> None:
    """Keep few names of hosts that left: a peer could join under ever new names."""
    hosts, lines = desk.hosts, desk.ledger.hosts
    if len(lines) <= _MAX_NAMES + len(hosts.by_name):
        return
    name = next(one for one in lines if one not in hosts.by_name and one in hosts.last_incarnations)
    desk.ledger.fold_host(name)
    del hosts.last_incarnations[name]


# Episodes


def host_waiting(desk: Desk, now: Seconds) -> None:
    """Begin episodes for which a host has room, earlier rounds first."""
    if desk.state.paused:
        return
    for round_ in desk.rounds.values():
        for domain in round_.unhosted if round_.num_unhosted else ():
            _host_domain(desk, round_, domain, now)


def _host_domain(desk: Desk, round_: Round, domain: int, now: Seconds) -> None:
    waiting, environment = round_.unhosted[domain], desk.environment_of(domain)
    wants_sound: list[SampleId] = []
    """Episodes that failed and wait for a host with answered episodes: others are begun before them."""
    while waiting:
        sample = desk.samples.get(waiting[-1])
        if sample is None or sample.state != "unhosted":
            waiting.pop()
            continue
        is_doubtful = is_in_doubt(desk, sample)
        host = None if is_doubtful and wants_sound else choose_host(desk, sample, environment)
        if host is None and not is_doubtful:
            break
        waiting.pop()
        if host is None:
            wants_sound.append(sample.id)
            continue
        round_.num_unhosted -= 1
        _begin(desk, sample, round_, host, now)
    waiting += reversed(wants_sound)


def is_in_doubt(desk: Desk, sample: TrackedSample) -> bool:
    """Return whether an episode has failed, or was lost with a host that never played one to its end."""
    return sample.failed_at >= 0 and desk.state.rules >= _PROVEN_FIRST_SINCE


def choose_host(desk: Desk, sample: TrackedSample, environment: str) -> Host | None:
    return desk.hosts.choose(environment, sample.failed_at, sound=is_in_doubt(desk, sample))


def _begin(desk: Desk, sample: TrackedSample, round_: Round, host: Host, now: Seconds) -> None:
    settle_host(host, desk.ledger, now)
    host.episodes[sample.id] = None
    sample.host = host.seat
    sample.attempt += 1
    desk.ledger.episodes_begun += 1
    turns.begin_episode(desk, sample, now)
    _play(desk, sample, round_, now)
    why = "a host has room" if sample.attempt == 1 else f"attempt {sample.attempt}"
    desk.commands.append(PlayEpisode(host.name, sample.id, sample.attempt, why))


def _play(desk: Desk, sample: TrackedSample, round_: Round, now: Seconds) -> None:
    """Give the move to the episode's host."""
    sample.state = "playing"
    round_.num_playing += 1
    turns.begin(desk, sample, now)


def _find(desk: Desk, event: CallMade | CallRepeated | EpisodeEnded) -> TrackedSample | None:
    """Return the episode of a host's message; None if another attempt, or no attempt, is under way."""
    sample = desk.samples.get(event.sample)
    if sample is None or sample.host < 0 or sample.attempt != event.attempt:
        desk.ledger.late_news += 1
        return None
    return sample


def call_made(desk: Desk, event: CallMade, now: Seconds) -> None:
    sample = _find(desk, event)
    if sample is None:
        return
    start = max(0, event.start)
    num_tokens = max(start, event.num_tokens)
    if sample.state != "playing" or num_tokens >= min(event.end, desk.max_new_tokens):
        desk.ledger.late_news += 1
        return
    round_ = desk.round_of(sample)
    if sample.version != NO_VERSION:  # one that no worker ever wrote has no tokens
        leases.note_tokens(desk, sample, num_tokens)
    _cut(desk, sample, num_tokens, "environment_lost")
    sample.call_start = min(start, sample.num_tokens)
    sample.call_end = min(event.end, desk.max_new_tokens)
    sample.moved_at = sample.num_tokens
    sample.target = sample.writer
    sample.num_failures += desk.groups[sample.group].num_again > 0  # only some workers may get it (failures.py)
    round_.num_playing -= 1
    desk.ledger.num_calls += 1
    _moved(desk, sample, now)
    leases.wait(desk, sample, round_)
    desk.place_due = desk.devices_due = True


def call_repeated(desk: Desk, event: CallRepeated, now: Seconds) -> None:
    """Take in that a restarted environment has repeated an earlier call and got its answer: its next turn begins."""
    sample = _find(desk, event)
    if sample is None or sample.state != "playing":
        desk.ledger.late_news += sample is not None
        return
    _moved(desk, sample, now)
    turns.begin(desk, sample, now)


def _moved(desk: Desk, sample: TrackedSample, now: Seconds) -> None:
    """Take in an environment's call: its turn is over, and its host is trusted with one more episode."""
    host = desk.hosts.seats[sample.host]
    turns.end(desk, sample, host, now)
    if host.earned < host.slots:
        host.earned += 1
        desk.hosts_due = True


def call_answered(desk: Desk, sample: TrackedSample, now: Seconds) -> None:
    """Take in the policy's answer to a call: the host has the move."""
    round_, host = desk.round_of(sample), desk.hosts.seats[sample.host]
    worker = leases.end_lease(desk, sample, round_, now)
    sample.writer = worker.seat
    sample.num_failures = sample.num_losses = 0
    sample.call_start = sample.num_tokens
    if (clock := desk.state.playtimes.get(sample.id)) is not None:
        clock.num_hangs = 0
    _play(desk, sample, round_, now)
    desk.commands.append(AnswerCall(host.name, sample.id, sample.attempt))


def episode_ended(desk: Desk, event: EpisodeEnded, now: Seconds) -> None:
    sample = _find(desk, event)
    if sample is None:
        return
    round_, host = desk.round_of(sample), desk.hosts.seats[sample.host]
    if event.outcome == "scored" and sample.state == "playing":
        turns.end(desk, sample, host, now)
    host.moved_at = now
    _take_back(desk, sample, round_, "its environment ended the episode", now)
    hosting.leave(desk, sample, now)
    if event.outcome == "failed" or min(event.num_tokens, sample.num_tokens) <= 0:
        _failed(desk, sample, round_, host, now)
        return
    _cut(desk, sample, event.num_tokens, "abandoned")
    if event.outcome == "scored":
        host.is_proven, host.num_failed = True, 0
    host.num_faults = 0
    _blame(desk, sample, host, now)
    _scored(desk, sample, event.outcome, now)


def _blame(desk: Desk, sample: TrackedSample, host: Host, now: Seconds) -> None:
    """Hold a failed episode against its host when another host has played it to its end."""
    guilty = desk.hosts.seats.get(sample.failed_at)
    sample.failed_at = -1
    if guilty is None or guilty is host:
        return
    guilty.num_faults += 1
    if guilty.num_faults >= desk.config.environments.max_attempts and not guilty.draining:
        why = f"it failed {guilty.num_faults} episodes in a row that others played to their end"
        desk.commands.append(ForgetHost(guilty.name, why))
        _lose(desk, guilty, why, now)


def time_is_up(desk: Desk, sample: TrackedSample, wait: Literal["turn", "episode"], now: Seconds) -> None:
    """Act on a limit that is over: an episode's, or a turn's, which means a hanging host or a hanging episode."""
    if wait == "episode":
        _over_time(desk, sample, _why_too_long(desk, sample), now)
        return
    host, culprit = desk.hosts.seats[sample.host], turns.who_hangs(desk, sample, now)
    if culprit == "host":
        stood_s = now - desk.state.playtimes[sample.id].turn_began_at
        why = f"it hangs: none of its {len(host.episodes)} episodes has moved for {stood_s:.0f} s"
        desk.commands.append(ForgetHost(host.name, why, hangs=True))
        desk.ledger.hosts_hung += 1
        _lose(desk, host, why, now)
    elif culprit == "episode":
        _over_time(desk, sample, f"its environment's move took too long{_limit(desk, sample)}", now)


def _why_too_long(desk: Desk, sample: TrackedSample) -> str:
    clock = desk.state.playtimes.get(sample.id)
    if clock is None or not turns.is_played_out(clock):
        return "it took too long"
    return f"it took too long (over {clock.episode_limit_s:.1f} s, five times what others took)"


def _limit(desk: Desk, sample: TrackedSample) -> str:
    clock = desk.state.playtimes.get(sample.id)
    return "" if clock is None or not clock.limit_s else f" (over {clock.limit_s:.1f} s)"


def _over_time(desk: Desk, sample: TrackedSample, why: str, now: Seconds) -> None:
    """End an episode that took too long itself, or whose environment's turn did."""
    round_, host = desk.round_of(sample), desk.hosts.seats[sample.host]
    num_tokens = sample.call_start  # what complete calls have drawn
    _take_back(desk, sample, round_, why, now)
    hosting.leave(desk, sample, now, stop=why, num_tokens=num_tokens or -1)
    if num_tokens <= 0:
        _failed(desk, sample, round_, host, now)
    else:
        _cut(desk, sample, num_tokens, "abandoned")
        _scored(desk, sample, "timed_out", now)


def _take_back(desk: Desk, sample: TrackedSample, round_: Round, why: str, now: Seconds) -> None:
    """Take an episode out of its call, or out of its host's hands. Its tokens stay."""
    if sample.state == "waiting":
        leases.stop_waiting(round_, sample)
    elif sample.lease != NO_LEASE:
        lease = sample.lease
        worker = leases.end_lease(desk, sample, round_, now)
        desk.commands.append(Abort(worker.name, lease, why, sample.id, sample.num_tokens))
    else:
        round_.num_playing -= 1
    sample.num_failures = 0


def _cut(desk: Desk, sample: TrackedSample, num_tokens: int, cause: DiscardCause) -> None:
    """Throw the tokens beyond `num_tokens` away."""
    desk.ledger.discard_tokens(cause, max(0, sample.num_tokens - num_tokens))
    sample.num_tokens = min(sample.num_tokens, num_tokens)
    if sample.num_tokens == 0:
        sample.version = NO_VERSION


def _scored(desk: Desk, sample: TrackedSample, outcome: EpisodeOutcome, now: Seconds) -> None:
    turns.end_episode(desk, sample, now, finished=outcome == "scored")
    ended = desk.ledger.episodes_ended
    ended[outcome] = ended.get(outcome, 0) + 1
    rounds.episode_ended(desk, sample, now)


def _failed(desk: Desk, sample: TrackedSample, round_: Round, host: Host, now: Seconds) -> None:
    ended = desk.ledger.episodes_ended
    ended["failed"] = ended.get("failed", 0) + 1
    sample.num_faults += _is_believed(desk, host)
    sample.failed_at = host.seat
    host.num_failed += 1
    host.earned = max(1, host.earned // 2)
    if sample.num_faults >= desk.config.environments.max_attempts:
        _give_up(desk, sample, round_, "its environment failed", now)
    else:
        hosting.queue(desk, sample, round_)


def _give_up(desk: Desk, sample: TrackedSample, round_: Round, why: str, now: Seconds) -> None:
    hosting.queue(desk, sample, round_)  # where it is counted until it is dropped
    rounds.sample_failed(desk, sample, round_, why, now)
