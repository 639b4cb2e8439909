"""Whole steps over episodes of several turns and branches, against references in float64.

The reference knows calls alone, and no sequences: each call is scored by itself with transformers, an episode is the
row of all tokens that its calls drew, and the formulas for samples (reference_step.py) are those for such rows.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from tests.trainer import formulas, table
from tests.trainer.episodes import Played, draw_episode, group_of
from tests.trainer.reference_step import Known, slopes
from tests.trainer.small import CAP, VOCAB, Recording, load_plain, plain_logprobs, save_small
from tests.trainer.table import values_of

from polyrl.config.recipe import AlgorithmConfig, OptimizerConfig
from polyrl.trainer.batch import TrainSample
from polyrl.trainer.critic import Critic
from polyrl.trainer.model import Policy
from polyrl.trainer.objectives.registry import BY_CRITIC
from polyrl.trainer.step import StepAccumulator
from polyrl.trainer.step_stats import StepStats
from polyrl.wire.frames import Segment

SIZES = ((1, 3, 4), (2, 2), (5, 1, 2))
"""The calls of each episode, group by group."""


SEED = 5


class Scored(NamedTuple):
    """An episode, call by call: rows of numbers for all drawn tokens, in float64."""

    known: Known
    now: torch.Tensor
    entropy: torch.Tensor
    values: torch.Tensor


def gradient(total: Any, parameters: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    found = torch.autograd.grad(total, list(parameters.values()), retain_graph=True, allow_unused=True)
    return {name: one for name, one in zip(parameters, found, strict=True) if one is not None}


class World:
    """A small policy, a reference, a critic, and three groups of episodes that an engine near the policy has drawn."""

    def __init__(self, folder: Path) -> None:
        places = [save_small(folder / str(seed), seed=seed) for seed in range(3)]
        self.policy, self.reference, trunk = (Policy.load(str(one)) for one in places)
        self.optimizer = Recording(self.policy.parameters(), OptimizerConfig(lr=1e-30), 1)
        self.critic = Critic(trunk, OptimizerConfig(lr=1e-30), 1)
        self.head = torch.randn(32, generator=torch.Generator().manual_seed(5)) * 0.3
        self.critic.parameters()["value_head.weight"].data.copy_(self.head)
        self.critic.optimizer.__class__ = Recording
        self.values: Any = self.critic.optimizer
        self.plain, self.plain_reference, self.plain_trunk = (load_plain(one) for one in places)
        self.weight = self.head.double().requires_grad_()
        rng = np.random.default_rng(SEED)
        self.groups = [self._draw(rng, sizes) for sizes in SIZES]
        self.scored = [[self._score(one) for one in group] for group in self.groups]

    def _draw(self, rng: np.random.Generator, sizes: Sequence[int]) -> list[Played]:
        prompt = rng.integers(3, VOCAB, 4).tolist()
        drawn: list[Played] = []
        for size in sizes:
            calls = draw_episode(rng, VOCAB, prompt, size, max_drawn=3)
            now = np.concatenate([plain_logprobs(self.plain, one)[0].detach() for one in as_samples(calls)])
            theirs = np.minimum(now + rng.normal(0, 0.2, len(now)), 0.0).astype(np.float32)
            finish = "length" if size == 4 else "stop"
            drawn.append(Played(calls, float(rng.normal()), finish, theirs.tolist(), [Segment(0, 0, "w", engine="e")]))
        return drawn

    def _score(self, played: Played) -> Scored:
        calls = as_samples(played.calls)
        pairs = [plain_logprobs(self.plain, one) for one in calls]
        now, entropy = (torch.cat(one) for one in zip(*pairs, strict=True))
        its = torch.cat([plain_logprobs(self.plain_reference, one)[0] for one in calls])
        values = torch.cat([values_of(self.plain_trunk, one) @ self.weight for one in calls])
        assert played.logprobs is not None
        numbers = [one.detach().numpy() for one in (now, its, values)]
        engine = np.array(played.logprobs, np.float32).astype(float)
        known = Known(played.reward, played.finish == "length", numbers[0], numbers[0], engine, *numbers[1:])
        return Scored(known, now, entropy, values)

    def expected(self, config: AlgorithmConfig) -> tuple[float, dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """The loss, the policy's gradient, and the critic's."""
        found = slopes(config, [[one.known for one in group] for group in self.scored], CAP)
        scored = [one for group in self.scored for one in group]
        by_logprob, by_value = (
            [torch.from_numpy(one) for group in groups for one in group] for groups in (found.logprobs, found.values)
        )
        by_entropy = [one for group in found.entropies for one in group]
        rows = list(zip(scored, by_logprob, by_entropy, by_value, strict=True))
        total = sum((one.now * slope).sum() + each * one.entropy.sum() for one, slope, each, _ in rows)
        of_values = sum((one.values * slope).sum() for one, _, _, slope in rows)
        trunk = {**dict(self.plain_trunk.model.named_parameters()), "value_head.weight": self.weight}
        of_critic = gradient(of_values, trunk) if config.advantage == BY_CRITIC else {}
        return found.loss, gradient(total, dict(self.plain.named_parameters())), of_critic

    def step(self, config: AlgorithmConfig, max_tokens: int = 40) -> StepStats:
        has_critic = config.advantage == BY_CRITIC
        steps = StepAccumulator(
            self.policy,
            self.optimizer,
            config,
            max_tokens=max_tokens,
            max_new_tokens=CAP,
            reference=None if config.kl == "none" else self.reference,
            critic=self.critic if has_critic else None,
        )
        self.optimizer.each, self.values.each = [], []
        steps.begin(0)
        for number, group in enumerate(self.groups):
            steps.add([group_of(group, number)])
        return steps.finish()


def as_samples(calls: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[TrainSample]:
    """Each call by itself."""
    pairs = [(np.array(prompt, np.int32), np.array(drawn, np.int32)) for prompt, drawn in calls]
    return [TrainSample(prompt, drawn, np.zeros(len(drawn), np.float32), 0.0) for prompt, drawn in pairs]


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> World:
    return World(tmp_path_factory.mktemp("episodes"))


def distance(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    size = sum(float(one.square().sum()) for one in expected.values()) ** 0.5
    off = (
        sum(float((found[key].double().reshape(one.shape) - one).square().sum()) for key, one in expected.items())
        ** 0.5
    )
    assert size > 0
    return off / size


def test_the_episodes_have_turns_and_branches(world: World):
    sequences = [group_of(group) for group in world.groups]
    num_calls = sum(map(sum, SIZES))
    assert sum(map(len, SIZES)) < sum(map(len, sequences)) < num_calls, "some calls go on, and some branch"
    assert any(one.drawn is not None for group in sequences for one in group)
    orders = [one.order for group in sequences for one in group if one.order is not None]
    assert any((np.diff(one) > 1).any() for one in orders), "a sequence goes on after another one's call"


SETTINGS: dict[str, dict[str, Any]] = {
    "alone": {},
    "KL in the loss": {"kl": "loss", "kl_coef": 0.3, "kl_estimator": "k2"},
    "KL in the reward": {"kl": "reward", "kl_coef": 0.3, "kl_estimator": "k1"},
    "engine's": {"old_logprobs": "engine", "clip_low": 0.1, "clip_high": 0.15},
    "corrected": {"correction": "icepop", "correction_low": 0.9, "correction_high": 1.2, "entropy_coef": 0.1},
    "masked": {"overlong": "mask"},
    "penalised": {"overlong": "penalty", "overlong_buffer_tokens": CAP - 2},
}


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("aggregation", table.choices("aggregation"))
def test_the_gradient_of_a_step_is_the_reference_s_for_every_aggregation(world: World, aggregation: str, settings: str):
    for advantage in table.all_advantages():
        config = AlgorithmConfig(**{"aggregation": aggregation, "advantage": advantage, **SETTINGS[settings]})
        stats = world.step(config)
        loss, of_policy, of_critic = world.expected(config)
        assert stats.metrics["actor/pg_loss"] == pytest.approx(loss, rel=1e-4, abs=1e-5)
        assert distance(world.optimizer.last, of_policy) < 2e-5, advantage
        if advantage == BY_CRITIC:
            assert distance(world.values.last, of_critic) < 2e-5


def test_packing_does_not_change_the_gradient_and_counts_are_of_episodes(world: World):
    config = AlgorithmConfig(aggregation="seq-mean-token-mean", overlong="mask")
    num_episodes = sum(map(len, SIZES))
    drawn = [len(one.drawn) for group in world.groups for one in group if one.finish == "stop"]
    found = []
    for max_tokens in (1, 30, 1000):
        stats = world.step(config, max_tokens)
        assert stats.added.num_samples == num_episodes and stats.added.num_masked == 1
        assert stats.metrics["token/trained"] == sum(drawn)
        found.append(world.optimizer.last)
    for one in found[1:]:
        assert distance(one, {key: each.double() for key, each in found[0].items()}) < 1e-5


def test_two_updates_divide_whole_episodes(world: World):
    """The weights do not move: the means of two mini-batches, weighted by their tokens, are the mean of all."""
    one = AlgorithmConfig(aggregation="token-mean", old_logprobs="engine")
    world.step(one)
    whole = world.optimizer.last
    stats = world.step(AlgorithmConfig(aggregation="token-mean", old_logprobs="engine", mini_batches=3))
    nums = {number: sum(len(one.drawn) for one in group) for number, group in enumerate(world.groups)}
    order = sorted(nums, key=lambda number: table.mix64(0, number))
    parts = list(zip(world.optimizer.each, order, strict=True))
    total = {
        key: torch.stack([each[key].double() * nums[number] for each, number in parts]).sum(0) / sum(nums.values())
        for key in whole
    }
    assert stats.metrics["token/trained"] == sum(nums.values())
    assert distance(whole, total) < 1e-5


def test_with_one_sequence_beyond_the_bound_its_whole_episode_is_left_out(world: World):
    """The gradient is that of a step to which the episode never came, and one sample is told as left out."""
    forged = next(one for one in world.groups[2] if len(group_of([one])) > 1)
    first, *_ = group_of([forged])
    assert first.order is not None and len(first.order) < len(forged.drawn), "another sequence has the rest"
    assert forged.logprobs is not None
    lies = [-99.0 if number in first.order else one for number, one in enumerate(forged.logprobs)]
    honest = world.groups
    changes: list[dict[str, Any]] = [{}, {"mini_batches": 2}, {"advantage": "reinforce_plus_plus"}]
    for settings in changes:
        config = AlgorithmConfig(aggregation="seq-mean-token-mean", max_mismatch=3.0, **settings)
        try:
            world.groups = [
                *honest[:2],
                [one if one is not forged else one._replace(logprobs=lies) for one in honest[2]],
            ]
            stats, found = world.step(config), world.optimizer.each
            world.groups = [*honest[:2], [one for one in honest[2] if one is not forged]]
            clean, expected = world.step(config), world.optimizer.each
        finally:
            world.groups = honest
        assert stats.metrics["sample/left_out"] == 1 and [name for name, _ in stats.too_far] == ["w"]
        assert clean.metrics["sample/left_out"] == 0
        assert stats.metrics["token/trained"] == clean.metrics["token/trained"]
        for ours, theirs in zip(found, expected, strict=True):
            assert distance(ours, {key: one.double() for key, one in theirs.items()}) < 1e-5


@pytest.mark.parametrize(
    "settings", [{"loss": "gspo"}, {"correction": "tis-sequence"}, {"correction": "sequence-mask"}]
)
def test_ratios_of_sequences_are_over_a_training_sequence_and_weights_over_the_episode(world: World, settings: Any):
    old = "engine" if "loss" in settings else "recompute"
    config = AlgorithmConfig(aggregation="seq-mean-token-mean", old_logprobs=old, **settings)
    stats = world.step(config)
    num_episodes, expected = sum(map(len, SIZES)), 0.0
    for group, scored in zip(world.groups, world.scored, strict=True):
        gains = formulas.grpo(np.array([one.reward for one in group]))
        for played, its, gain in zip(group, scored, gains, strict=True):
            for sequence in group_of([played]):
                at = np.arange(sequence.num_drawn) if sequence.order is None else sequence.order
                now, engine = its.known.now[at], its.known.engine[at]
                start = engine if old == "engine" else now
                losses = formulas.LOSSES[config.loss](now, start, gain, *config.clip_range)[0]
                losses = losses * formulas.correction(
                    config.correction or "none", start, engine, *config.correction_range
                )
                expected += losses.sum() / len(played.drawn) / num_episodes
    assert stats.metrics["actor/pg_loss"] == pytest.approx(expected, rel=1e-4, abs=1e-6)
