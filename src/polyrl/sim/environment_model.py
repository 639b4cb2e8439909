"""Episodes as environments make them: how many calls, how the drawn tokens fall on them, how long tools take.

Rules it keeps: calls, tokens and seconds are facts of the episode and not of the attempt, so an episode that is begun
again takes the same way. Attempts differ in whether the environment fails, and whether the result of a
tool is the same as before. An episode has at least one call, and every call draws at least one token; the tokens of all
calls together are the workload's. It leaves out what a tool's result says, and that tools slow each other down.
"""

from itertools import accumulate
from math import sqrt
from statistics import NormalDist

from msgspec import Struct

from polyrl.ids import Seconds
from polyrl.scheduling.rules.lengths import interpolate
from polyrl.sim.draws import exponential, normal, unit
from polyrl.sim.reward_model import ModelledRewards
from polyrl.sim.scenario import SimDomainSection, SimEnvironmentSection

_CALLS_STREAM = 0x50
_SPLIT_STREAM = 0x51
_TOOL_STREAM = 0x52
_FAILURE_STREAM = 0x53
_FAILED_AFTER_STREAM = 0x54
_REPLAY_STREAM = 0x55
_TASK_STREAM = 0x56
_NORMAL = NormalDist()

EpisodeKey = tuple[int, int, int, int]
"""Domain, prompt, visit and index."""


class EpisodeScript(Struct, frozen=True):
    """The way of an undisturbed episode."""

    ends: tuple[int, ...]
    """Drawn tokens of the episode at the end of each call."""
    tools_s: tuple[Seconds, ...]
    """From each answer to what comes next: another call, or the reward. Infinite: that never comes."""
    tool_tokens: int
    begin_s: Seconds
    correct: bool

    def given_tokens(self, call: int) -> int:
        """Return the tokens that tools have added to the prompt of a call."""
        return call * self.tool_tokens

    def start(self, call: int) -> int:
        """Drawn tokens before a call."""
        return self.ends[call - 1] if call else 0

    def num_calls_within(self, num_tokens: int) -> int:
        """Return how many calls end within so many drawn tokens."""
        return sum(end <= num_tokens for end in self.ends)


class EnvironmentModel:
    """The environments of the scenario's domains, which go by their index."""

    def __init__(self, domains: list[SimDomainSection], rewards: ModelledRewards, seed: int) -> None:
        self._environments = [domain.environment for domain in domains]
        self._rewards = rewards
        self._seed = seed

    def script(self, key: EpisodeKey, total_tokens: int) -> EpisodeScript:
        """Return the way of an episode that draws so many tokens in all."""
        environment = self._of(key)
        wanted = interpolate(environment.call_quantiles, unit(self._seed, _CALLS_STREAM, *key))
        num_calls = max(1, min(total_tokens, round(wanted)))
        tools = [
            interpolate(environment.tool_quantiles, self._tool_draw(key, call, environment.tool_correlation))
            for call in range(num_calls - 1)
        ]
        scoring_s, correct = self._rewards.natural(*key)
        return EpisodeScript(
            ends=self._ends(key, num_calls, total_tokens),
            tools_s=(*tools, scoring_s),
            tool_tokens=environment.tool_tokens,
            begin_s=environment.begin_s,
            correct=correct,
        )

    def fails_before(self, key: EpisodeKey, attempt: int, num_calls: int) -> int | None:
        """Return the call, counted from 0, in place of which an attempt fails; None when it does not."""
        if unit(self._seed, _FAILURE_STREAM, *key, attempt) >= self._of(key).failure_share:
            return None
        return int(unit(self._seed, _FAILED_AFTER_STREAM, *key, attempt) * (num_calls + 1))

    def is_the_same(self, key: EpisodeKey, attempt: int, call: int) -> bool:
        """Return whether another attempt makes a call with the prompt that it had before. The first has no result in
        it."""
        return call == 0 or unit(self._seed, _REPLAY_STREAM, *key, attempt, call) < self._of(key).replay_share

    def _tool_draw(self, key: EpisodeKey, call: int, correlation: float) -> float:
        own = unit(self._seed, _TOOL_STREAM, *key, call)
        if correlation == 0.0:
            return own
        of_task = normal(self._seed, _TASK_STREAM, *key[:2])
        score = _NORMAL.inv_cdf(min(1.0 - 1e-9, max(1e-9, own)))
        return _NORMAL.cdf(sqrt(correlation) * of_task + sqrt(1.0 - correlation) * score)

    def _ends(self, key: EpisodeKey, num_calls: int, total_tokens: int) -> tuple[int, ...]:
        """Split the tokens at random: a token for each call, the others by exponential weights."""
        weights = [exponential(1.0, self._seed, _SPLIT_STREAM, *key, call) for call in range(num_calls)]
        free, whole = total_tokens - num_calls, sum(weights)
        reached = accumulate(weights[:-1])
        ends = [call + int(free * part / whole) for call, part in enumerate(reached, start=1)]
        return (*ends, total_tokens)

    def _of(self, key: EpisodeKey) -> SimEnvironmentSection:
        environment = self._environments[key[0]]
        assert environment is not None
        return environment
