"""How long an environment's turn may take, learned from turns that ended; and whether an episode hangs, or its host.

A turn is the time from an answer to the environment's next call, or to the episode's end; the first begins with the
episode. With one limit for every environment, a tool call that never ends holds its episode for ten minutes where
turns take a second.

Rules kept here:
- The limit is five times what 999 of 1000 turns of the environment took that ended, or five times the longest turn of
  the same task that ended, whichever is longer; from `least_turn_timeout_s` to `turn_timeout_s`. A turn that was
  stopped at its limit moves nothing: an endless tool call must not buy the next one more time.
- `turn_timeout_s` until the environment was watched for that long: before, the turns that ended are the quick ones. So
  too while fewer than 64 turns have ended, and at a host that has not made its first move: a new process may be
  loading. One turn in fifty gets it all the same, so that turns which are slow for a reason can raise the limit.
- At the limit it is the episode that hangs if another one of its host has moved within half of that time. If none has,
  the host hangs if another one has had the move for half of it too, or there is no other one, as nobody can tell. If
  the others have only just got the move, or wait for the policy, they are watched for up to the same time again. An
  episode that stood still at a host which hung, and does so again at the next one, is taken for the cause.
- Memory is bounded: a task is remembered only if a turn of it was longer than most, and those met longest ago are
  forgotten first.

Left out: acting on it (parts/episodes), and what a time-out earns.
"""

import math
from collections.abc import Sequence
from typing import Literal

import msgspec

from polyrl.ids import Seconds
from polyrl.scheduling.core.parameters import EnvironmentRules
from polyrl.scheduling.rules.lengths import LengthModel

SLACK = 5.0
TYPICAL_SHARE = 0.999
MIN_TURNS = 64
PROBE_PROBABILITY = 0.02
MAX_TASKS = 65_536
TICKS_PER_S = 100
"""Times are counted in hundredths of a second: the length model counts from 1 to 2^20, which is 10 ms to 2.9 hours."""


class TurnLimit(msgspec.Struct, frozen=True, gc=False):
    timeout_s: Seconds
    why: str


class TurnTimes(msgspec.Struct):
    """The turns of one environment, as far as they ended."""

    times: LengthModel = msgspec.field(default_factory=LengthModel)
    slowest: dict[int, Seconds] = msgspec.field(default_factory=dict)
    """By task, the longest turn beyond the typical ones."""
    since: Seconds | None = None
    """When the first turn began."""

    def observe(self, task: int, seconds: Seconds, now: Seconds) -> None:
        """Learn from a turn that ended by itself, and now."""
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
        """The time that 999 of 1000 turns do not exceed."""
        return self.within_s(TYPICAL_SHARE) or 0.0

    def within_s(self, share: float) -> Seconds | None:
        """Return the time that this share of turns does not exceed; None while none has ended."""
        return self.times.quantile(share) / TICKS_PER_S if self.times.num_observed else None

    def limit(
        self, rules: EnvironmentRules, task: int, now: Seconds, draw: float, *, has_moved: bool = True
    ) -> TurnLimit:
        """Say how long a turn of this task may take that begins now. `draw` is uniform in [0, 1); `has_moved`: its host
        has made a move before."""
        most = rules.turn_timeout_s
        if not rules.learn_turn_timeouts:
            return TurnLimit(most, "environments.learn_turn_timeouts is off")
        if self.times.num_observed < MIN_TURNS:
            return TurnLimit(most, f"fewer than {MIN_TURNS} turns have ended")
        if self.since is None or now - self.since < most:
            return TurnLimit(most, "slow turns may not have ended yet")
        if not has_moved:
            return TurnLimit(most, "its host is new")
        if draw < PROBE_PROBABILITY:
            return TurnLimit(most, "a probe for slower turns")
        longest_s, of_task = self.typical_s, self.slowest.get(task, 0.0)
        timeout = min(most, max(rules.least_turn_timeout_s, SLACK * max(longest_s, of_task)))
        whose = "this task's longest" if of_task > longest_s else "999 of 1000 turns"
        return TurnLimit(timeout, f"learned: {max(longest_s, of_task):.2f} s for {whose}")


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
