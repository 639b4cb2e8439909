"""Samples whose log-probabilities cannot be of our weights are left out of the step, and their workers are named."""

from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.trainer.small import CAP, Recording, draw_groups, near, plain_gradient, save_small

from polyrl.config.recipe import AlgorithmConfig, OptimizerConfig
from polyrl.trainer.batch import TrainSample, TrainSegment
from polyrl.trainer.guard import MismatchGuard
from polyrl.trainer.model import Policy
from polyrl.trainer.step import StepAccumulator
from polyrl.trainer.step_stats import StepStats


def sample(num_tokens: int, *turns: TrainSegment) -> TrainSample:
    tokens, logprobs = np.zeros(num_tokens, np.int32), np.zeros(num_tokens, np.float32)
    return TrainSample(tokens, tokens, logprobs, 0.0, written_by=turns)


def turn(num_tokens: int, worker: str, *, version: int = 8, engine: str = "vllm") -> TrainSegment:
    return TrainSegment(version, num_tokens, engine, worker)


def look(
    apart: list[float],
    samples: list[TrainSample],
    bound: float = 1.0,
    ours: list[float] | None = None,
    few_tokens: int = 1,
) -> tuple[list[bool], dict[str, float]]:
    """Which samples are kept whose tokens are so far off; and who is named."""
    guard = MismatchGuard(bound, 8, few_tokens)
    theirs, own = torch.tensor(apart), torch.zeros(len(apart)) if ours is None else torch.tensor(ours)
    guard.look(own, theirs, samples, range(len(samples)))
    left_out, named = guard.found()
    return [number not in left_out for number in range(len(samples))], named


def test_a_sample_beyond_the_bound_is_left_out_whole_and_its_worker_is_named():
    samples = [sample(2, turn(2, "a")), sample(3, turn(3, "b"))]
    assert look([0.5, -1.4, -4.0, 0.0, 0.0], samples) == ([True, False], {"b": pytest.approx(4 / 3)})


def test_signs_do_not_cancel_and_workers_of_one_engine_do_not_cover_for_each_other():
    samples = [sample(2, turn(2, "liar")), *(sample(2, turn(2, "honest")) for _ in range(9))]
    kept, named = look([-9.0, 9.0] + [0.0] * 18, samples)
    assert kept == [False] + [True] * 9
    assert named == {"liar": 9.0}


def test_of_a_sample_that_moved_only_the_worker_of_the_turn_is_named():
    kept, named = look([0.1, 0.1, 7.0, 7.0], [sample(4, turn(2, "honest"), turn(2, "liar"))])
    assert kept == [False] and named == {"liar": 7.0}


def test_one_rare_token_of_a_short_turn_accuses_nobody_and_a_turn_of_them_does():
    assert look([5.0], [sample(1, turn(1, "honest"))], few_tokens=16) == ([True], {})
    kept, named = look([5.0] * 4, [sample(4, turn(4, "liar"))], few_tokens=16)
    assert kept == [False] and named == {"liar": 1.25}


def test_older_weights_may_be_further_off():
    one = sample(1, turn(1, "late", version=6))
    assert look([2.9], [one]) == ([True], {})
    assert look([3.1], [one])[0] == [False]


def test_what_is_no_number_is_beyond_any_bound():
    samples = [sample(1, turn(1, "odd")), sample(2, turn(2, "honest")), sample(1, turn(1, "liar"))]
    kept, named = look([float("nan"), 0.0, 0.5, 9.0], samples)
    assert kept == [False, True, False] and list(named) == ["liar", "odd"]


def test_where_our_own_model_has_no_number_nobody_is_named():
    samples = [sample(2, turn(2, "honest")), sample(1, turn(1, "next"))]
    assert look([0.0] * 3, samples, ours=[0.0, float("nan"), 0.0]) == ([True] * 2, {})


def test_without_a_bound_nobody_is_looked_at():
    guard = MismatchGuard(0.0, 8)
    guard.look(torch.zeros(1), torch.ones(1), [sample(1)], [0])
    assert guard.found() == (frozenset(), {})


# Whole steps


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return save_small(tmp_path_factory.mktemp("policy"))


@pytest.fixture(scope="module")
def reference(tmp_path_factory) -> Path:
    return save_small(tmp_path_factory.mktemp("reference"), seed=5)


def drawn(policy: Policy, forged: set[int], *, left_out: bool = False) -> list[list[TrainSample]]:
    """Groups in which these samples have log-probabilities that nobody's weights give; or without them."""
    number, groups = count(), []
    for group in near(policy, draw_groups(0)):
        made = []
        for one in group:
            is_forged = next(number) in forged
            logprobs = np.full_like(one.logprobs, -99.0) if is_forged else one.logprobs
            signed = (TrainSegment(0, len(one.answer), "builtin", "liar" if is_forged else "honest"),)
            if not (is_forged and left_out):
                made.append(one._replace(logprobs=logprobs, written_by=signed))
        groups.append(made)
    return [group for group in groups if group]


def step(
    folder: Path, reference: Path | None, groups: list[list[TrainSample]], *, may_be_void: bool = False, **settings: Any
) -> tuple[StepStats, list[dict[str, torch.Tensor]]]:
    """A step, and the gradient of each of its updates."""
    policy = Policy.load(str(folder))
    optimizer = Recording(policy.parameters(), OptimizerConfig(lr=1e-30), 1)
    config = AlgorithmConfig(**settings)
    scorer = None if config.kl == "none" else Policy.load(str(reference))
    steps = StepAccumulator(policy, optimizer, config, max_tokens=60, max_new_tokens=CAP, reference=scorer)
    steps.begin(0)
    for group in groups:
        steps.add([group])
    stats = steps.finish(may_be_void=may_be_void)
    return stats, [] if stats.is_void else optimizer.each


SETTINGS: dict[str, dict[str, Any]] = {
    "as it ships": {},
    "from the engine's": {"old_logprobs": "engine"},
    "means of samples": {"aggregation": "seq-mean-token-mean", "advantage": "rloo"},
    "compared over the step": {"advantage": "reinforce_plus_plus", "old_logprobs": "engine"},
    "KL in the reward, by the engine": {"kl": "reward", "old_logprobs": "engine"},
    "KL in the loss": {"kl": "loss"},
}
MORE: dict[str, dict[str, Any]] = {
    **SETTINGS,
    "two updates": {"mini_batches": 2, "kl": "reward"},
    "two updates, from the engine's": {"mini_batches": 2, "old_logprobs": "engine"},
}


@pytest.mark.parametrize("name", MORE)
def test_a_step_with_forged_samples_is_the_step_without_them(folder: Path, reference: Path, name: str):
    """Its gradients and what is told of it, but for how many were left out, and whose they were."""
    policy, forged = Policy.load(str(folder)), {0, 3, 7}
    stats, found = step(folder, reference, drawn(policy, forged), **MORE[name])
    clean, expected = step(folder, reference, drawn(policy, forged, left_out=True), **MORE[name])
    assert clean.too_far == () and clean.metrics["sample/left_out"] == 0
    ((worker, nats),) = stats.too_far
    assert worker == "liar" and nats > 25
    assert len(found) == len(expected)
    for ours, theirs in zip(found, expected, strict=True):
        assert any(bool(one.any()) for one in theirs.values())
        for key, one in theirs.items():
            torch.testing.assert_close(ours[key], one, rtol=1e-4, atol=1e-7)
    told = {
        key: number for key, number in stats.metrics.items() if key not in ("sample/left_out", "perf/micro_batches")
    }
    assert stats.metrics["sample/left_out"] == 3
    assert told == pytest.approx({key: clean.metrics[key] for key in told}, rel=1e-4, abs=1e-7)
    assert stats.added.num_trained_tokens == clean.added.num_trained_tokens


@pytest.mark.parametrize("name", SETTINGS)
def test_the_gradient_beside_forged_samples_is_the_references_in_float64(folder: Path, reference: Path, name: str):
    policy, forged = Policy.load(str(folder)), {1, 7}
    _, (found,) = step(folder, reference, drawn(policy, forged), **SETTINGS[name])
    clean = drawn(policy, forged, left_out=True)
    _, expected = plain_gradient(folder, clean, AlgorithmConfig(**SETTINGS[name]), reference)
    size = sum(float(one.square().sum()) for one in expected.values()) ** 0.5
    off = sum(float((found[key].double() - one).square().sum()) for key, one in expected.items()) ** 0.5
    assert off < 1e-5 * size


@pytest.mark.parametrize("name", ["as it ships", "two updates", "compared over the step"])
def test_a_step_most_of_whose_samples_are_forged_is_void_where_it_can_be_begun_again(
    folder: Path, reference: Path, name: str
):
    policy = Policy.load(str(folder))
    stats, each = step(folder, reference, drawn(policy, set(range(5))), may_be_void=True, **MORE[name])
    assert stats.is_void and each == [] and [name for name, _ in stats.too_far] == ["liar"]
    stats, each = step(folder, reference, drawn(policy, set(range(4))), may_be_void=True, **MORE[name])
    assert not stats.is_void and each and stats.metrics["sample/left_out"] == 4


@pytest.mark.parametrize("name", ["as it ships", "two updates", "compared over the step"])
def test_a_step_of_nothing_but_forged_samples_moves_nothing(folder: Path, reference: Path, name: str):
    policy = Policy.load(str(folder))
    stats, each = step(folder, reference, drawn(policy, set(range(100))), **MORE[name])
    assert stats.metrics["sample/left_out"] == 9 and stats.metrics["token/trained"] == 0
    assert not any(bool(one.any()) for gradient in each for one in gradient.values())
    assert all(np.isfinite(number) for number in stats.metrics.values())
