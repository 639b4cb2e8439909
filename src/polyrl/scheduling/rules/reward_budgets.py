"""Reward budgets: time limits of test cases, and the order in which rewards run.

With a fixed limit of 30 s, 5% of all sandbox runs use all of it, while 93% end in about a second. The time a case needs
is known once a correct answer has run it.

Rules kept here:
- The limit of a case is 1.5 times the longest CPU time of a CORRECT run of it so far (its anchor), from `t_min_s` to
  `t_max_s`. Wrong runs never move an anchor: an endless loop must not buy the next one more time.
- No anchor yet: `t_max_s`. One run in fifty gets `t_max_s` anyway, so slower valid answers can raise the limit.
- A failure of the infrastructure is tried again, and then drops the sample with a reason. It is never a zero.
- Memory is bounded: the cases that were learned of first are forgotten first, a sixteenth at a time.

Left out: running anything (rewards/pool), wall-clock backstops, and the draw that decides a probe (order.unit).
"""

import itertools
import math
from typing import Annotated

import msgspec

from polyrl.ids import Seconds
from polyrl.scheduling.core.bounds import AtLeastOne, Positive, Share

_EXPECTED_GAIN = 0.2
_FORGET_SHARE = 16  # dropping keys one by one from the front of a large dict scans its dead slots each time


class RewardConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    adaptive: bool = True
    t_min_s: Positive = 2.0
    t_max_s: Positive = 30.0
    slack: Annotated[float, msgspec.Meta(ge=1, le=1e6)] = 1.5
    probe_probability: Share = 0.02
    max_attempts: AtLeastOne = 3
    max_cases: AtLeastOne = 1_000_000
    """The most test cases that are remembered."""
    slots: AtLeastOne = 64
    """Rewards that run at once."""
    wall_s: Annotated[float, msgspec.Meta(ge=0, le=1e9)] = 0.0
    """The least wall time after which an unanswered attempt is lost, the wait for a process included."""
    as_finished: bool = True
    """Score each sample when its answer ends. Off: all of a round when the last one has ended."""

    def __post_init__(self) -> None:
        if self.t_max_s < self.t_min_s:
            raise ValueError(f"t_max_s: {self.t_max_s:g} is below t_min_s = {self.t_min_s:g}")


class Limit(msgspec.Struct, frozen=True, gc=False):
    timeout_s: Seconds
    """CPU time."""
    why: str


class Retry(msgspec.Struct, frozen=True):
    again: bool
    why: str


class RewardBudgets(msgspec.Struct):
    """The time limits learned so far, by test case: any integer that stays the same (a hash of its text)."""

    config: RewardConfig = msgspec.field(default_factory=RewardConfig)
    anchors: dict[int, Seconds] = msgspec.field(default_factory=dict)
    """The longest CPU time of a correct run."""
    expected: dict[int, Seconds] = msgspec.field(default_factory=dict)
    """The moving mean of all runs, right and wrong."""
    expected_any_s: Seconds | None = None
    """The same over all cases: the guess for one not met before."""

    def limit(self, case: int, draw: float) -> Limit:
        """Return how long the next run of this case may take. `draw` is uniform in [0, 1)."""
        config = self.config
        if not config.adaptive:
            return Limit(config.t_max_s, "rewards.adaptive is off")
        anchor = self.anchors.get(case)
        if anchor is None:
            return Limit(config.t_max_s, "no correct run of this case yet")
        if draw < config.probe_probability:
            return Limit(config.t_max_s, "a probe for slower correct answers")
        timeout = min(max(config.t_min_s, config.slack * anchor), config.t_max_s)
        return Limit(timeout, "from the longest correct run of this case")

    def observe(self, case: int, cpu_s: Seconds, *, correct: bool) -> None:
        """Learn from a run of this case that ended, by itself or at its limit."""
        if not 0.0 <= cpu_s < math.inf:
            raise ValueError(f"seconds of CPU time were expected for case {case}; got {cpu_s}")
        max_cases = self.config.max_cases
        if correct and cpu_s > self.anchors.get(case, -1.0):
            self.anchors[case] = cpu_s
            if len(self.anchors) > max_cases:
                _forget_oldest(self.anchors, max_cases)
        known = self.expected.get(case)
        self.expected[case] = cpu_s if known is None else known + _EXPECTED_GAIN * (cpu_s - known)
        if len(self.expected) > max_cases:
            _forget_oldest(self.expected, max_cases)
        of_all = self.expected_any_s
        self.expected_any_s = cpu_s if of_all is None else of_all + _EXPECTED_GAIN * (cpu_s - of_all)

    def expected_s(self, case: int) -> Seconds:
        """Return how long a run of this case is expected to take: rewards run in that order."""
        known = self.expected.get(case, self.expected_any_s)
        return self.config.t_min_s if known is None else known

    def retry(self, num_attempts: int) -> Retry:
        """Decide, after the `num_attempts`-th infrastructure failure, to run the reward again or drop the sample."""
        if num_attempts < self.config.max_attempts:
            return Retry(
                again=True, why=f"attempt {num_attempts} of {self.config.max_attempts} failed outside the answer"
            )
        return Retry(again=False, why=f"the reward could not be run in {num_attempts} attempts; the sample is dropped")


def _forget_oldest(by_case: dict[int, Seconds], max_cases: int) -> None:
    num_over = len(by_case) - max_cases
    for case in list(itertools.islice(by_case, num_over + max_cases // _FORGET_SHARE)):
        del by_case[case]
