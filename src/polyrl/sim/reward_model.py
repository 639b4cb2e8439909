"""Scoring: its duration and its outcome.

Rules it keeps: whether an answer is right, and how long its run would take, is a fact of the sample and not of the
attempt: trying again gives the same. Only failures of the sandbox or the judge are drawn anew for each attempt. Answers
whose run never ends are wrong; `correct_share` is of the others. It leaves out queues and the size of the pool.
"""

from math import inf, isinf
from typing import Literal

from polyrl.ids import Seconds
from polyrl.scheduling.rules.lengths import interpolate
from polyrl.sim.draws import unit
from polyrl.sim.scenario import SimDomainSection

_ENDLESS_STREAM = 0x20
_DURATION_STREAM = 0x21
_CORRECT_STREAM = 0x22
_FAILURE_STREAM = 0x23
_FAILED_AFTER_STREAM = 0x24

RewardEnd = Literal["scored", "timed_out", "infrastructure_failed"]


class ModelledRewards:
    """Scoring as the scenario's domains describe it. Domains go by their index in the scenario."""

    def __init__(self, domains: list[SimDomainSection], seed: int) -> None:
        self._rewards = [domain.reward for domain in domains]
        self._seed = seed

    def natural(self, domain: int, prompt: int, visit: int, index: int) -> tuple[Seconds, bool]:
        """Return the seconds without a limit (infinite for a run that never ends), and whether the answer is right."""
        reward, seed = self._rewards[domain], self._seed
        if unit(seed, _ENDLESS_STREAM, domain, prompt, visit, index) < reward.endless_share:
            return inf, False
        probability = unit(seed, _DURATION_STREAM, domain, prompt, visit, index)
        correct = unit(seed, _CORRECT_STREAM, domain, prompt, visit, index) < reward.correct_share
        return interpolate(reward.duration_quantiles, probability), correct

    def outcome(
        self, domain: int, prompt: int, visit: int, index: int, attempt: int, timeout_s: Seconds
    ) -> tuple[RewardEnd, Seconds, bool]:
        """Return how an attempt ends, after how many seconds, and whether a scored answer is right."""
        natural_s, correct = self.natural(domain, prompt, visit, index)
        key = (domain, prompt, visit, index, attempt)
        if unit(self._seed, _FAILURE_STREAM, *key) < self._rewards[domain].failure_share:
            share = unit(self._seed, _FAILED_AFTER_STREAM, *key)
            return "infrastructure_failed", share * min(natural_s, timeout_s), False
        if natural_s > timeout_s or isinf(natural_s):
            return "timed_out", timeout_s, False
        return "scored", natural_s, correct
