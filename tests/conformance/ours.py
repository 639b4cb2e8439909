"""PolyRL's trainer as the suite sees it: whole steps of a policy that is a table.

The table has one free number for each trained token of each sequence: its log-probability. So the gradient of a step is
what the trainer does with that token, and nothing else: minus its advantage times its weight.
"""

from typing import Any

import numpy as np
import torch

from polyrl.config.recipe import AlgorithmConfig
from polyrl.trainer.batch import TrainSample
from polyrl.trainer.model import Scores
from polyrl.trainer.optimizer import Update
from polyrl.trainer.packing import Pack
from polyrl.trainer.reports import make_report
from polyrl.trainer.step import StepAccumulator
from polyrl.trainer.step_stats import StepStats
from tests.trainer.episodes import Played, group_of

from .adapter import FIXED_TOKENS, CaseEpisode, CaseSequence

Tokens = tuple[int, ...]


class Loaded:
    vocab = 100


class TablePolicy:
    """The policy and its optimizer. Names a token by all tokens of its sequence and its position there."""

    device = torch.device("cpu")
    loaded = Loaded()
    gradient_checkpointing = False

    def __init__(self) -> None:
        self._numbers = torch.zeros(1000, requires_grad=True)
        self._places: dict[tuple[Tokens, int], int] = {}
        self.slopes: dict[tuple[Tokens, int], float] = {}

    def score(self, pack: Pack, temperature: float = 1.0, *, entropy_grad: bool = False) -> Scores:
        ends = np.cumsum(pack.lengths)
        at: list[int] = []
        for row, target in zip(pack.predicting.tolist(), pack.targets.tolist(), strict=True):
            which = int(np.searchsorted(ends, row, side="right"))
            first = int(ends[which]) - pack.lengths[which]
            last = int(pack.targets[np.flatnonzero(pack.sample == which)[-1]])
            tokens = (*pack.tokens[first : ends[which]].tolist(), last)
            assert tokens[row - first + 1] == target
            at.append(self._places.setdefault((tokens, row - first + 1), len(self._places)))
        logprobs = self._numbers[torch.tensor(at)] - 1.0
        return Scores(logprobs, torch.zeros_like(logprobs))

    def update(self, step: int, denominator: float, num_steps: int | None = None, **more: float) -> Update:
        assert self._numbers.grad is not None
        slopes = (self._numbers.grad.double() / denominator).tolist()
        self.slopes = {key: slopes[at] for key, at in self._places.items()}
        return Update(0.0, 0.0, applied=True)

    def discard(self) -> None:
        self._numbers.grad = None

    def how_to_take_less(self) -> str:
        return ""


def one_each(rewards: torch.Tensor, config: AlgorithmConfig) -> torch.Tensor:
    """An advantage of 1, so that slopes are weights."""
    return torch.ones_like(rewards)


class PolyrlTrainer:
    def sequences(self, episodes: list[CaseEpisode]) -> list[list[CaseSequence] | None]:
        return [
            None if one is None else [CaseSequence(list(tokens_of(sequence)), mask_of(sequence)) for sequence in one]
            for one in _by_episode(episodes)
        ]

    def advantages(self, name: str, episodes: list[CaseEpisode]) -> list[float | None]:
        weights, slopes = (
            self._slopes(episodes, AlgorithmConfig(advantage=each, aggregation="token-mean")).slopes
            for each in (f"{__name__}:one_each", name)
        )
        found: list[float | None] = []
        for one in _by_episode(episodes):
            keys = [] if one is None else [key for sequence in one for key in keys_of(sequence)]
            gains = [slopes[key] / weights[key] for key in keys]
            assert not gains or max(gains) - min(gains) < 1e-6, "all tokens of an episode share its advantage"
            found.append(gains[0] if gains else None)
        return found

    def weights(self, aggregation: str, episodes: list[CaseEpisode]) -> list[list[list[float]] | None]:
        config = AlgorithmConfig(
            advantage=f"{__name__}:one_each",
            aggregation=aggregation,  # type: ignore[arg-type]
            fixed_tokens=FIXED_TOKENS if aggregation == "fixed" else None,
        )
        slopes = self._slopes(episodes, config).slopes
        return [
            None if one is None else [[-slopes.get((tokens_of(s), at), 0.0) for at in range(s.num_tokens)] for s in one]
            for one in _by_episode(episodes)
        ]

    def mean_reward(self, episodes: list[CaseEpisode]) -> float:
        groups = _groups(episodes)
        report = make_report(StepStats(0, None, {}), [groups], {}, [], {})  # type: ignore[arg-type]
        return sum(report.rewards) / len(report.rewards)

    def _slopes(self, episodes: list[CaseEpisode], config: AlgorithmConfig) -> TablePolicy:
        policy: Any = TablePolicy()
        steps = StepAccumulator(policy, policy, config, max_tokens=20, max_new_tokens=FIXED_TOKENS)
        steps.begin(0)
        for group in _groups(episodes):
            steps.add([group])
        steps.finish()
        return policy


def tokens_of(one: TrainSample) -> Tokens:
    return (*one.prompt.tolist(), *one.answer.tolist())


def mask_of(one: TrainSample) -> str:
    drawn = np.arange(len(one.answer)) if one.drawn is None else one.drawn
    return "0" * len(one.prompt) + "".join("01"[at in drawn] for at in range(len(one.answer)))


def keys_of(one: TrainSample) -> list[tuple[Tokens, int]]:
    return [(tokens_of(one), at) for at, bit in enumerate(mask_of(one)) if bit == "1"]


def _played(one: CaseEpisode) -> Played:
    logprobs = [-1.0] * sum(len(call.drew) for call in one.calls)
    unpaid = [number for number, call in enumerate(one.calls) if not call.paid]
    calls = [(call.saw, call.drew) for call in one.calls]
    return Played(calls, one.reward, one.calls[-1].finish, logprobs, untrained=unpaid)


def _groups(episodes: list[CaseEpisode]) -> list[list[TrainSample]]:
    """The groups that the fleet delivers: episodes that failed are in none."""
    numbers = sorted({one.group for one in episodes})
    members = [[_played(one) for one in episodes if one.group == number and not one.failed] for number in numbers]
    return [group_of(each, number) for number, each in zip(numbers, members, strict=True)]


def _by_episode(episodes: list[CaseEpisode]) -> list[list[TrainSample] | None]:
    return [None if one.failed else group_of([_played(one)]) for one in episodes]
