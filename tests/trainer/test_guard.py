"""Samples whose log-probabilities cannot be of our weights are left out of the loss, and their workers are named."""

import numpy as np
import pytest
import torch
from tests.trainer.small import CAP, Recording, draw_groups, near, save_small

from polyrl.config.recipe import AlgorithmConfig, OptimizerConfig
from polyrl.trainer.batch import TrainSample, TrainSegment
from polyrl.trainer.guard import MismatchGuard
from polyrl.trainer.model import Policy
from polyrl.trainer.step import StepAccumulator, StepStats


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
    """What is kept of samples whose tokens are so far off, token by token; and who is named."""
    guard = MismatchGuard(bound, 8, few_tokens)
    numbers, own = torch.tensor(apart), torch.zeros(len(apart)) if ours is None else torch.tensor(ours)
    number_of = np.repeat(np.arange(len(samples)), [len(one.answer) for one in samples])
    kept = guard.keeps(own, numbers, samples, torch.from_numpy(number_of))
    assert kept is not None
    return kept.tolist(), guard.too_far()


def test_a_sample_beyond_the_bound_is_left_out_whole_and_its_worker_is_named():
    samples = [sample(2, turn(2, "a")), sample(3, turn(3, "b"))]
    assert look([0.5, -1.4, -4.0, 0.0, 0.0], samples) == ([True] * 2 + [False] * 3, {"b": pytest.approx(4 / 3)})


def test_signs_do_not_cancel_and_workers_of_one_engine_do_not_cover_for_each_other():
    samples = [sample(2, turn(2, "liar")), *(sample(2, turn(2, "honest")) for _ in range(9))]
    kept, named = look([-9.0, 9.0] + [0.0] * 18, samples)
    assert kept == [False] * 2 + [True] * 18
    assert named == {"liar": 9.0}


def test_of_a_sample_that_moved_only_the_worker_of_the_turn_is_named():
    kept, named = look([0.1, 0.1, 7.0, 7.0], [sample(4, turn(2, "honest"), turn(2, "liar"))])
    assert kept == [False] * 4 and named == {"liar": 7.0}


def test_one_rare_token_of_a_short_turn_accuses_nobody_and_a_turn_of_them_does():
    assert look([5.0], [sample(1, turn(1, "honest"))], few_tokens=16) == ([True], {})
    kept, named = look([5.0] * 4, [sample(4, turn(4, "liar"))], few_tokens=16)
    assert kept == [False] * 4 and named == {"liar": 1.25}


def test_older_weights_may_be_further_off():
    one = sample(1, turn(1, "late", version=6))
    assert look([2.9], [one]) == ([True], {})
    assert look([3.1], [one])[0] == [False]


def test_what_is_no_number_is_beyond_any_bound():
    samples = [sample(1, turn(1, "odd")), sample(2, turn(2, "honest")), sample(1, turn(1, "liar"))]
    kept, named = look([float("nan"), 0.0, 0.5, 9.0], samples)
    assert kept == [False, True, True, False] and list(named) == ["liar", "odd"]


def test_where_our_own_model_has_no_number_nobody_is_named():
    samples = [sample(2, turn(2, "honest")), sample(1, turn(1, "next"))]
    assert look([0.0] * 3, samples, ours=[0.0, float("nan"), 0.0]) == ([True] * 3, {})


def test_without_a_bound_nobody_is_looked_at():
    guard = MismatchGuard(0.0, 8)
    assert guard.keeps(torch.zeros(1), torch.ones(1), [sample(1)], torch.zeros(1, dtype=torch.int64)) is None
    assert guard.too_far() == {}


@pytest.fixture(scope="module")
def policy(tmp_path_factory) -> Policy:
    return Policy.load(str(save_small(tmp_path_factory.mktemp("policy"))))


def step(policy: Policy, forged: set[int], old_logprobs: str) -> tuple[StepStats, dict[str, torch.Tensor]]:
    """A step in which these samples have log-probabilities that nobody's weights give; and its gradient."""
    optimizer = Recording(policy.parameters(), OptimizerConfig(lr=1e-30), 1)
    config = AlgorithmConfig(old_logprobs=old_logprobs)  # type: ignore[arg-type]
    steps = StepAccumulator(policy, optimizer, config, max_tokens=60, max_new_tokens=CAP)
    steps.begin(0)
    number = 0
    for group in near(policy, draw_groups(0)):
        made = []
        for one in group:
            worker = "liar" if number in forged else "honest"
            logprobs = np.full_like(one.logprobs, -99.0) if number in forged else one.logprobs
            signed = (TrainSegment(0, len(one.answer), "builtin", worker),)
            made.append(one._replace(logprobs=logprobs, written_by=signed))
            number += 1
        steps.add([made])
    return steps.finish(), optimizer.each[-1]


@pytest.mark.parametrize("old_logprobs", ["recompute", "engine"])
def test_forged_samples_move_nothing_and_everything_stays_finite(policy: Policy, old_logprobs: str):
    stats, honest = step(policy, set(), old_logprobs)
    assert stats.too_far == ()
    assert any(bool(one.any()) for one in honest.values())
    stats, some = step(policy, {0, 3}, old_logprobs)
    ((name, nats),) = stats.too_far
    assert name == "liar" and nats > 25
    assert all(bool(one.isfinite().all()) for one in some.values())
    assert all(np.isfinite(number) for number in stats.metrics.values())
    _, nothing = step(policy, set(range(1000)), old_logprobs)
    assert not any(bool(one.any()) for one in nothing.values())
