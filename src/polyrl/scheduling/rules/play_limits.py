"""Time limits of environments' turns and episodes, learned from those that ended; and whether a late turn means a
hanging episode or a hanging host.

A turn is the time from an answer to the environment's next call, or to the episode's end; the first begins with the
episode. An episode's time is the sum of its turns. With one limit for every environment, a tool call that never ends
holds its episode for ten minutes where turns take a second, and a harness that loops holds it for an hour.

Rules kept here, for turns and for episodes alike:
- The limit is five times the 99.9th percentile of the environment's ended turns (or episodes), or five times the
  longest one of the same task, whichever is longer, within the minimum and maximum of the recipe. A turn or episode
  that was stopped at its limit does not count: an endless tool call must not buy the next one more time.
- The maximum applies until the environment was watched for that long, since only the quick turns have ended before, and
  until 64 have ended. About every fiftieth turn gets the maximum later too, so that turns that are slow for a reason
  can raise the limit.
- The maximum also applies at a host that has not made its first move: a new process may be loading.
- At a turn's limit the episode hangs if another episode of its host has moved within half of that time. Otherwise the
  host hangs if another episode has had the move for half of that time too, or if there is no other episode to compare
  with. If the others have only just got the move, or wait for the policy, they are watched for up to the same time
  again. An episode that hung together with its host, and hangs again at the next host, is taken for the cause.
- Memory is bounded: a task is remembered only if one of its turns took longer than most, and the tasks met longest ago
  are forgotten first.

Left out: acting on it (parts/turns, parts/episodes), and what a time-out earns.
"""

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

import msgspec

from polyrl.ids import Seconds
from polyrl.scheduling.core.parameters import EnvironmentRules
from polyrl.scheduling.rules.lengths import LengthModel

SLACK = 5.0
TYPICAL_SHARE = 0.999
MIN_ENDED = 64
PROBE_PROBABILITY = 0.02
MAX_TASKS = 65_536
TICKS_PER_S = 100
"""Times are counted in hundredths of a second: the length model counts from 1 to 2^20, which is 10 ms to 2.9 hours."""


class PlayLimit(msgspec.Struct, frozen=True, gc=False):
    timeout_s: Seconds
    why: str
    learned: bool = False


class SetLimits(NamedTuple):
    """The settings of a kind of limit."""

    things: str
    most_s: Seconds
    least_s: Seconds
    off: str = ""
    """Why nothing is to be learned."""


def turn_bounds(rules: EnvironmentRules) -> SetLimits:
    off = "" if rules.learn_turn_timeouts else "environments.learn_turn_timeouts is off"
    return SetLimits("turns", rules.turn_timeout_s, rules.least_turn_timeout_s, off)


def episode_bounds(rules: EnvironmentRules) -> SetLimits:
    """Return what is set for episodes. The least is that of a turn: an episode has one at least."""
    off = "" if rules.learn_episode_timeouts else "environments.learn_episode_timeouts is off"
    return SetLimits("episodes", rules.episode_timeout_s, rules.least_turn_timeout_s, off)


class PlayTimes(msgspec.Struct):
    """The times of an environment's turns, or of its episodes, that have ended."""

    times: LengthModel = msgspec.field(default_factory=LengthModel)
    slowest: dict[int, Seconds] = msgspec.field(default_factory=dict)
    """By task, the longest one beyond the typical ones."""
    since: Seconds | None = None
    """When the first one began."""

    def observe(self, task: int, seconds: Seconds, now: Seconds) -> None:
        """Learn from one that ended by itself, and now."""
        if self.since is None:
            self.since = now - seconds
        self.times.observe(max(1, round(seconds * TICKS_PER_S)), finished=True)
        if seconds > max(self.typical_s, self.slowest.get(task, 0.0)):
            self.slowest.pop(task, None)
            self.slowest[task] = seconds
            if len(self.slowest) > MAX_TASKS:
                del self.slowest[next(iter(self.slowest))]

    @property
    def typical_s(self) -> Seconds:
        """The time that 999 of 1000 do not exceed."""
        return self.within_s(TYPICAL_SHARE) or 0.0

    def within_s(self, share: float) -> Seconds | None:
        """Return the time that this share does not exceed; None while none has ended."""
        return self.times.quantile(share) / TICKS_PER_S if self.times.num_observed else None

    def limit(self, bounds: SetLimits, task: int, now: Seconds, draw: float, *, has_moved: bool = True) -> PlayLimit:
        """Say how long one of this task may take that begins now. `draw` is uniform in [0, 1); `has_moved`: its host
        has made a move before."""
        most, things = bounds.most_s, bounds.things
        if bounds.off:
            return PlayLimit(most, bounds.off)
        if self.times.num_observed < MIN_ENDED:
            return PlayLimit(most, f"fewer than {MIN_ENDED} {things} have ended")
        if self.since is None or now - self.since < most:
            return PlayLimit(most, f"slow {things} may not have ended yet")
        if not has_moved:
            return PlayLimit(most, "its host is new")
        if draw < PROBE_PROBABILITY:
            return PlayLimit(most, f"a probe for slower {things}")
        typical_s, of_task = self.typical_s, self.slowest.get(task, 0.0)
        timeout = min(most, max(bounds.least_s, SLACK * max(typical_s, of_task)))
        whose = "this task's longest" if of_task > typical_s else f"999 of 1000 {things}"
        return PlayLimit(timeout, f"learned: {max(typical_s, of_task):.2f} s for {whose}", learned=True)


Culprit = Literal["episode", "host", "unclear"]


def who_hangs(
    now: Seconds,
    limit_s: Seconds,
    began_at: Seconds,
    moved_at: Seconds,
    others_since: Sequence[Seconds],
    *,
    is_alone: bool,
) -> Culprit:
    """Say who hangs where a turn that began at `began_at` is over its limit.

    `moved_at` is when any episode of the host last moved, or the host joined; `others_since`, since when each of its
    other episodes whose turn it is has had the move; `is_alone`: it has no other episode.
    """
    if now - moved_at < limit_s / 2:
        return "episode"
    if is_alone or min(others_since, default=math.inf) <= now - limit_s / 2:
        return "host"
    return "unclear" if now - began_at < 2.0 * limit_s else "episode"
