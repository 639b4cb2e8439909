"""`algorithm.baseline = "optimal"`: rewards weighted by the squares of the samples' gradients, against transformers in
float64."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.trainer.episodes import Played, group_of
from tests.trainer.small import CAP, Recording, draw_groups, load_plain, near, plain_logprobs, save_small

from polyrl.config.recipe import AlgorithmConfig, OptimizerConfig
from polyrl.trainer.batch import TrainSample, TrainSegment
from polyrl.trainer.model import Policy
from polyrl.trainer.objectives.advantages import above_the_optimal
from polyrl.trainer.step import StepAccumulator

VCPO: dict[str, Any] = {
    "baseline": "optimal",
    "old_logprobs": "recompute",
    "correction": "tis-sequence",
    "correction_high": 1e6,
    "zero_variance": "keep",
    "max_mismatch": 0.0,
}
"""The published loss: the whole ratio of a sample, without a cap or a clip."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return save_small(tmp_path_factory.mktemp("policy"))


@pytest.fixture(scope="module")
def groups(folder) -> list[list[TrainSample]]:
    return near(Policy.load(str(folder)), draw_groups(0))


def gradient(
    folder: Path, calls: Sequence[list[list[TrainSample]]], *, max_tokens: int = 10_000, **settings: Any
) -> dict[str, torch.Tensor]:
    policy = Policy.load(str(folder))
    optimizer = Recording(policy.parameters(), OptimizerConfig(lr=1e-30), 1)
    steps = StepAccumulator(
        policy, optimizer, AlgorithmConfig(**settings), max_tokens=max_tokens, max_new_tokens=CAP, temperature=1.0
    )
    steps.begin(0)
    for groups in calls:
        steps.add(groups)
    steps.finish()
    return optimizer.last


def expected(folder: Path, groups: list[list[TrainSample]], config: AlgorithmConfig) -> dict[str, torch.Tensor]:
    """The formula, one sample after the other: A = (r - b) / std, b = sum of w^2 |grad log p|^2 r over its weights."""
    model = load_plain(folder)
    names = [name for name, _ in model.named_parameters()]
    total = {name: torch.zeros_like(one) for name, one in model.named_parameters()}
    by_sample = config.aggregation == "seq-mean-token-mean"
    for group in groups:
        grads, pulls = [], []
        for one in group:
            logprobs = plain_logprobs(model, one)[0]
            ratio = float(np.exp((logprobs.detach().numpy() - one.logprobs.astype(float)).sum()))
            weight = ratio / len(one.answer) if by_sample else ratio
            its = torch.autograd.grad(weight * logprobs.sum(), list(model.parameters()), allow_unused=True)
            grads.append(its)
            pulls.append(sum(float(part.square().sum()) for part in its if part is not None))
        rewards = np.array([one.reward for one in group])
        baseline = (np.array(pulls) * rewards).sum() / sum(pulls)
        divisor = rewards.std(ddof=1) + 1e-6 if config.advantage == "grpo" else 1.0
        for its, gain in zip(grads, (rewards - baseline) / divisor, strict=True):
            for name, part in zip(names, its, strict=True):
                if part is not None:
                    total[name] -= gain * part
    samples = [one for group in groups for one in group]
    num = len(samples) if by_sample else sum(len(one.answer) for one in samples)
    return {name: one / num for name, one in total.items()}


def apart(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> float:
    """How far off, as a share of its length."""
    size = sum(float(one.double().square().sum()) for one in wanted.values()) ** 0.5
    off = sum(float((found[name].double() - wanted[name].double()).square().sum()) for name in found)
    return off**0.5 / size


@pytest.mark.parametrize("advantage", ["grpo", "dr_grpo"])
@pytest.mark.parametrize("aggregation", ["token-mean", "seq-mean-token-mean"])
def test_a_step_has_the_gradient_of_the_published_baseline(folder, groups, advantage, aggregation):
    settings: dict[str, Any] = {**VCPO, "advantage": advantage, "aggregation": aggregation}
    wanted = expected(folder, groups, AlgorithmConfig(**settings))
    assert apart(gradient(folder, [groups], **settings), wanted) < 1e-4
    assert apart(gradient(folder, [groups], **{**settings, "baseline": "mean"}), wanted) > 0.05


@pytest.mark.parametrize("max_tokens", [24, 10_000])
def test_it_is_the_same_however_groups_arrive_and_are_packed(folder, groups, max_tokens):
    whole = gradient(folder, [groups], **VCPO)
    found = gradient(folder, [[one] for one in reversed(groups)], max_tokens=max_tokens, **VCPO)
    assert apart(found, whole) < 1e-4


def test_two_updates_have_a_baseline_of_the_weights_at_the_start(folder, groups):
    settings: dict[str, Any] = {
        **VCPO,
        "mini_batches": 2,
        "old_logprobs": "engine",
        "correction": None,
        "correction_high": None,
    }
    both = gradient(folder, [groups], **settings)
    assert all(torch.isfinite(one).all() for one in both.values())
    assert apart(both, gradient(folder, [groups], **{**settings, "baseline": "mean"})) > 0.01


def test_an_episode_pulls_with_all_of_its_sequences(folder):
    """Two calls that do not go on from each other are two sequences, and their gradients add up."""
    one = Played((([3, 4], [5, 6]), ([7, 8, 9], [10])), 1.0, logprobs=[-4.0, -4.1, -4.2])
    two = Played((([3, 4], [11]), ([12], [13, 14])), 0.0, logprobs=[-4.0, -4.1, -4.2])
    three = Played((([3, 4], [15, 16, 17]),), 0.5, logprobs=[-4.0, -4.1, -4.2])
    group = group_of([one, two, three])
    assert len(group) == 5
    settings: dict[str, Any] = {**VCPO, "advantage": "dr_grpo", "aggregation": "token-mean", "correction": "none"}
    del settings["correction_high"]
    model = load_plain(folder)
    by_episode: dict[int, torch.Tensor] = {}
    for index, sample in enumerate(group):
        logprobs = plain_logprobs(model, sample)[0]
        its = torch.autograd.grad(logprobs.sum(), list(model.parameters()))
        number = index if sample.episode is None else sample.episode
        flat = torch.cat([part.flatten() for part in its])
        by_episode[number] = by_episode.get(number, torch.zeros_like(flat)) + flat
    pulls = np.array([float(flat.square().sum()) for flat in by_episode.values()])
    rewards = np.array([1.0, 0.0, 0.5])
    gains = rewards - (pulls * rewards).sum() / pulls.sum()
    wanted = -torch.stack([gain * flat for gain, flat in zip(gains, by_episode.values(), strict=True)]).sum(0) / 9
    names = [name for name, _ in model.named_parameters()]
    found = gradient(folder, [[group]], **settings)
    flat = torch.cat([found[name].flatten().double() for name in names])
    assert float((flat - wanted).norm() / wanted.norm()) < 1e-4


def test_samples_that_are_left_out_have_no_part_in_the_baseline(folder, groups):
    honest = [[one._replace(written_by=(TrainSegment(0, len(one.answer), "e", "a"),)) for one in g] for g in groups]
    forged = [
        [*group, group[0]._replace(logprobs=np.full_like(group[0].logprobs, -99.0), reward=50.0)] for group in honest
    ]
    settings: dict[str, Any] = {**VCPO, "max_mismatch": 3.0}
    assert apart(gradient(folder, [forged], **settings), gradient(folder, [honest], **settings)) < 1e-4


# The formula


def test_of_all_baselines_it_leaves_the_least_variance():
    """The mean square of sums of gradients r - b, drawn again and again: no other b does better."""
    rng = np.random.default_rng(0)
    pulls, rewards = rng.exponential(size=8) ** 3, rng.normal(size=8)
    found = above_the_optimal(torch.from_numpy(rewards), torch.from_numpy(pulls), AlgorithmConfig(advantage="dr_grpo"))
    baseline = rewards[0] - float(found[0])

    def variance(b: float) -> float:
        return float((pulls * (rewards - b) ** 2).sum())

    assert all(variance(baseline) <= variance(b) for b in np.linspace(-3, 3, 601))
    assert variance(baseline) < 0.99 * variance(float(rewards.mean()))


@pytest.mark.parametrize("pulls", [[0.0, 0.0], [1.0, float("nan")], [1.0, float("inf")]])
def test_where_no_gradient_is_known_it_is_the_mean(pulls):
    gains = above_the_optimal(
        torch.tensor([1.0, 0.0]).double(), torch.tensor(pulls).double(), AlgorithmConfig(advantage="dr_grpo")
    )
    assert gains.tolist() == [0.5, -0.5]


def test_a_group_of_one_has_nothing_to_compare_with():
    gains = above_the_optimal(torch.ones(1).double(), torch.ones(1).double(), AlgorithmConfig())
    assert gains.tolist() == [0.0]
