"""An environment's turn: its clock, its limit, and what is learned from it.

Rules kept here: limits are fixed when a turn or an episode begins (rules/play_limits.py). Only turns and episodes that
ended by themselves teach anything. An episode's time is that of its turns: a slow answer, or one that waits for a
worker, is not the environment's doing. A learned limit of an episode keeps a further turn from beginning, but cuts no
turn short: the turn's own limit does, and `episode_timeout_s`. The time in which the driver was away does not count.
"""

from polyrl.ids import SampleId, Seconds
from polyrl.scheduling.core.desk import Desk
from polyrl.scheduling.core.hosts import Host
from polyrl.scheduling.core.samples import Playtime, TrackedSample
from polyrl.scheduling.rules import play_limits
from polyrl.scheduling.rules.order import unit
from polyrl.scheduling.rules.play_limits import (
    TICKS_PER_S,
    Culprit,
    PlayLimit,
    PlayTimes,
    episode_bounds,
    turn_bounds,
)

_NO_TASK = -1
_NO_PROBE = 1.0
"""A draw that is no probe, as most are."""
_NOTHING_PLAYED = PlayTimes()
LEARNED_SINCE = 4
"""The first of `desk.RULES` by which limits of turns are learned."""
_EPISODES_LEARNED_SINCE = 6
_OF_EPISODE = -1
"""Where turns have the tokens drawn before them: draws for an episode are others than for its turns."""


def begin_episode(desk: Desk, sample: TrackedSample, now: Seconds) -> None:
    """Start the clock of an attempt. The findings of an earlier attempt stay."""
    before = desk.state.playtimes.get(sample.id)
    num_hangs = 0 if before is None else before.num_hangs
    clock = desk.state.playtimes[sample.id] = Playtime(now, now, num_hangs=num_hangs)
    if desk.state.rules < LEARNED_SINCE:
        desk.deadlines.set(("episode", sample.id), now + desk.config.environments.episode_timeout_s)
    elif desk.state.rules >= _EPISODES_LEARNED_SINCE:
        group = desk.groups[sample.group]
        draw = unit(desk.config.seed, sample.id, sample.attempt, _OF_EPISODE)
        limit = _of_episodes(desk, group.domain, group.prompt, now, draw)
        clock.episode_limit_s = limit.timeout_s if limit.learned else 0.0


def begin(desk: Desk, sample: TrackedSample, now: Seconds) -> None:
    """Give the move to the environment."""
    rules = desk.config.environments
    if desk.state.rules < LEARNED_SINCE:
        desk.deadlines.set(("turn", sample.id), now + rules.turn_timeout_s)
        return
    clock, host, group = _clock(desk, sample, now), desk.hosts.seats[sample.host], desk.groups[sample.group]
    draw = unit(desk.config.seed, sample.id, sample.attempt, sample.num_tokens)
    limit = _of_turns(desk, group.domain, group.prompt, now, draw, has_moved=host.moved_at is not None)
    clock.turn_began_at, clock.limit_s = now, limit.timeout_s
    left_s = 0.0 if is_played_out(clock) else rules.episode_timeout_s - clock.played_s
    if left_s <= limit.timeout_s:
        desk.deadlines.set(("episode", sample.id), now + max(0.0, left_s))
    desk.deadlines.set(("turn", sample.id), now + limit.timeout_s)


def end(desk: Desk, sample: TrackedSample, host: Host, now: Seconds) -> None:
    """End the environment's turn with its move: a call, or the episode's end with a reward."""
    if desk.state.rules < LEARNED_SINCE:
        desk.deadlines.clear(("turn", sample.id))
        return
    clock, group = _clock(desk, sample, now), desk.groups[sample.group]
    took_s = max(0.0, now - clock.turn_began_at)
    clock.played_s += took_s
    host.moved_at = now
    desk.state.turns.setdefault(group.domain, PlayTimes()).observe(group.prompt, took_s, now)
    stop(desk, sample.id)


def stop(desk: Desk, sample: SampleId) -> None:
    """Stop waiting for the environment's move."""
    desk.deadlines.clear(("turn", sample))
    if desk.state.rules >= LEARNED_SINCE:
        desk.deadlines.clear(("episode", sample))


def who_hangs(desk: Desk, sample: TrackedSample, now: Seconds) -> Culprit:
    """Return whether the host or the episode hangs, for an episode over its turn's limit; if that is unclear, look
    again later. Episodes that stand still at a hanging host are noted: at the next host they are taken for the
    cause."""
    clock = _clock(desk, sample, now)
    if desk.state.rules < LEARNED_SINCE or clock.num_hangs:
        return "episode"
    host = desk.hosts.seats[sample.host]
    playing = [one for one in host.episodes if one != sample.id and desk.samples[one].state == "playing"]
    others = [_clock(desk, desk.samples[one], now) for one in playing]
    moved_at, is_alone = host.joined_at if host.moved_at is None else host.moved_at, len(host.episodes) == 1
    since = [one.turn_began_at for one in others]
    culprit = play_limits.who_hangs(now, clock.limit_s, clock.turn_began_at, moved_at, since, is_alone=is_alone)
    if culprit == "unclear":
        desk.deadlines.set(("turn", sample.id), now + clock.limit_s / 8)
    elif culprit == "host":
        for one in (clock, *others):
            one.num_hangs += one.turn_began_at <= now - clock.limit_s / 2
    return culprit


def present_turn_limit_s(desk: Desk, domain: int, now: Seconds) -> Seconds:
    """Return the limit of most turns of a domain's environment, as it is now."""
    if desk.state.rules < LEARNED_SINCE:
        return desk.config.environments.turn_timeout_s
    return _of_turns(desk, domain, _NO_TASK, now, _NO_PROBE).timeout_s


def present_episode_limit_s(desk: Desk, domain: int, now: Seconds) -> Seconds:
    """Return the limit of most episodes of a domain, as it is now."""
    if desk.state.rules < _EPISODES_LEARNED_SINCE:
        return desk.config.environments.episode_timeout_s
    return _of_episodes(desk, domain, _NO_TASK, now, _NO_PROBE).timeout_s


def _of_turns(desk: Desk, domain: int, task: int, now: Seconds, draw: float, *, has_moved: bool = True) -> PlayLimit:
    known = desk.state.turns.get(domain, _NOTHING_PLAYED)
    return known.limit(turn_bounds(desk.config.environments), task, now, draw, has_moved=has_moved)


def _of_episodes(desk: Desk, domain: int, task: int, now: Seconds, draw: float) -> PlayLimit:
    known = desk.state.plays.get(domain, _NOTHING_PLAYED)
    return known.limit(episode_bounds(desk.config.environments), task, now, draw)


def is_played_out(clock: Playtime) -> bool:
    """Return whether an episode has played for the learned limit."""
    return 0.0 < clock.episode_limit_s <= clock.played_s


def end_episode(desk: Desk, sample: TrackedSample, now: Seconds, *, finished: bool) -> None:
    """Learn from the time of an episode that ended, or was stopped and would have gone on."""
    clock = desk.state.playtimes.get(sample.id)
    if clock is None or clock.took_s is not None or sample.attempt != 1:
        return
    clock.took_s = max(0.0, now - clock.began_at)
    if finished and desk.state.rules >= _EPISODES_LEARNED_SINCE:
        group = desk.groups[sample.group]
        desk.state.plays.setdefault(group.domain, PlayTimes()).observe(group.prompt, clock.played_s, now)
    if desk.times_episodes:
        desk.state.durations.observe(max(1, round(clock.took_s * TICKS_PER_S)), finished=finished)


def skip(desk: Desk, seconds: Seconds) -> None:
    """Leave out an absence of the driver."""
    for clock in desk.state.playtimes.values():
        clock.skip(seconds)
    for known in (*desk.state.turns.values(), *desk.state.plays.values()):
        known.since = None if known.since is None else known.since + seconds
    for host in desk.hosts.seats.values():
        host.joined_at += seconds
        if host.moved_at is not None:
            host.moved_at += seconds


def adopt(desk: Desk, now: Seconds) -> None:
    """Apply learned limits to the episodes of a run that had none."""
    for sample in desk.samples.values():
        if sample.host >= 0:
            desk.deadlines.clear(("episode", sample.id))
            _clock(desk, sample, now).limit_s = desk.config.environments.turn_timeout_s


def _clock(desk: Desk, sample: TrackedSample, now: Seconds) -> Playtime:
    clock = desk.state.playtimes.get(sample.id)
    if clock is None:  # it began by earlier rules
        clock = desk.state.playtimes[sample.id] = Playtime(now, now)
    return clock
