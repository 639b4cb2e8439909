"""A step's gradient: against a formula of its own, and streamed against all at once."""

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from tests.trainer.small import CAP, Recording, draw_groups, near, plain_gradient, plain_logprobs, save_small

from polyrl.config.recipe import AlgorithmConfig, OptimizerConfig
from polyrl.errors import ConfigError, UserError
from polyrl.scheduling.rules.order import mix64
from polyrl.telemetry.metric_names import describe
from polyrl.trainer.batch import TrainSample, TrainSegment
from polyrl.trainer.model import Policy, Scores
from polyrl.trainer.objectives.registry import LOSSES, TokenBatch, loss
from polyrl.trainer.optimizer import Update
from polyrl.trainer.packing import Pack
from polyrl.trainer.step import StepAccumulator

AGGREGATIONS = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "fixed")
LOSS_CASES: dict[str, dict[str, Any]] = {
    "symmetric": {},
    "clip-higher": {"clip_high": 0.28, "advantage": "rloo"},
    "dual clip": {"clip_low": 0.1, "clip_high": 0.3, "dual_clip": 1.3, "advantage": "dr_grpo"},
}
LATER_CASES: dict[str, dict[str, Any]] = {
    "gspo": {"loss": "gspo", "clip_low": 0.05, "clip_high": 0.05, "aggregation": "seq-mean-token-mean"},
    "cispo": {"loss": "cispo", "clip_low": 0.3, "clip_high": 0.2},
    "tis of tokens": {"correction": "tis-token", "correction_high": 1.2, "old_logprobs": "recompute"},
    "tis of samples": {"correction": "tis-sequence", "old_logprobs": "recompute", "loss": "gspo"},
    "icepop": {"correction": "icepop", "correction_low": 0.7, "correction_high": 1.3, "old_logprobs": "recompute"},
    "sequence mask": {"correction": "sequence-mask", "correction_high": 1.05, "old_logprobs": "recompute"},
    "reinforce++": {"advantage": "reinforce_plus_plus"},
    "reinforce++, mask": {"advantage": "reinforce_plus_plus", "overlong": "mask", "aggregation": "fixed"},
    "reinforce++, baseline": {"advantage": "reinforce_plus_plus_baseline", "overlong": "mask"},
    "mini-batches": {"mini_batches": 2, "old_logprobs": "recompute"},
    "mini-batches, reinforce++": {"mini_batches": 3, "advantage": "reinforce_plus_plus", "correction": "icepop"}
    | {"old_logprobs": "recompute"},
}
KL_CASES: dict[str, dict[str, Any]] = {
    "no kl": {},
    "kl loss": {"kl": "loss", "kl_coef": 0.3},
    "kl reward": {"kl": "reward", "kl_coef": 0.05, "kl_estimator": "k1"},
}


class World(NamedTuple):
    folder: Path
    reference_folder: Path
    policy: Policy
    reference: Policy
    groups: list[list[TrainSample]]


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> World:
    folder = save_small(tmp_path_factory.mktemp("policy"))
    other = save_small(tmp_path_factory.mktemp("reference"), seed=1)
    policy = Policy.load(str(folder))
    return World(folder, other, policy, Policy.load(str(other)).freeze(), near(policy, draw_groups(0)))


def gradient(world: World, config: AlgorithmConfig, calls, max_tokens=10_000, **more):
    """Of one step in which groups arrive in `calls`; its weights do not move."""
    optimizer = Recording(world.policy.parameters(), OptimizerConfig(lr=1e-30), 1)
    reference = None if config.kl == "none" else world.reference
    steps = StepAccumulator(
        world.policy, optimizer, config, max_tokens=max_tokens, max_new_tokens=CAP, reference=reference, **more
    )
    steps.begin(0)
    for groups in calls:
        steps.add(groups)
    return steps.finish(), optimizer.last


def assert_same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor], tolerance: float) -> None:
    assert ours.keys() == theirs.keys()
    whole = torch.cat([one.double().flatten() for one in theirs.values()]).norm()
    apart = torch.cat([(ours[name].double() - theirs[name].double()).flatten() for name in ours]).norm()
    assert whole > 0
    assert apart / whole < tolerance


def config_of(*cases: dict[str, Any], **more: Any) -> AlgorithmConfig:
    merged = {"old_logprobs": "engine", **more}
    for case in cases:
        merged |= case
    if merged.get("aggregation") == "fixed":
        merged["fixed_tokens"] = 20
    return AlgorithmConfig(**merged)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("kl", KL_CASES)
@pytest.mark.parametrize("case", LOSS_CASES)
def test_a_streamed_step_is_the_step_of_one_big_batch(world, case, kl, aggregation):
    config = config_of(LOSS_CASES[case], KL_CASES[kl], aggregation=aggregation)
    stats, at_once = gradient(world, config, [world.groups])
    assert_streams(world, config, stats, at_once)


@pytest.mark.parametrize("kl", KL_CASES)
@pytest.mark.parametrize("case", LATER_CASES)
def test_so_is_one_with_any_other_loss_correction_or_advantage(world, case, kl):
    config = config_of(LATER_CASES[case], KL_CASES[kl])
    stats, at_once = gradient(world, config, [world.groups])
    assert_streams(world, config, stats, at_once)


def assert_streams(world, config, stats, at_once):
    backwards = [[group] for group in reversed(world.groups)]
    for calls, max_tokens in ((backwards, 10_000), ([world.groups[1:], world.groups[:1]], 30)):
        its_stats, streamed = gradient(world, config, calls, max_tokens)
        assert_same(streamed, at_once, 1e-5)
        for name, value in stats.metrics.items():
            if name not in ("perf/micro_batches", "actor/lr"):
                assert its_stats.metrics[name] == pytest.approx(value, rel=1e-4, abs=1e-6), name
                assert describe(name) is not None, name


ALONE = [
    config_of(LOSS_CASES[case], KL_CASES[kl], aggregation=aggregation)
    for case, kl, aggregation in (
        ("symmetric", "no kl", "token-mean"),
        ("clip-higher", "no kl", "seq-mean-token-sum"),
        ("dual clip", "no kl", "fixed"),
        ("symmetric", "kl loss", "seq-mean-token-mean"),
        ("clip-higher", "kl reward", "token-mean"),
    )
] + [
    config_of(KL_CASES["kl loss"], kl_estimator="k1"),
    config_of(KL_CASES["kl loss"], kl_estimator="k2"),
    config_of(KL_CASES["kl reward"], old_logprobs="recompute"),
    config_of(old_logprobs="recompute"),
    config_of(entropy_coef=0.2),
    config_of(overlong="mask", aggregation="seq-mean-token-mean"),
    config_of(overlong="penalty", overlong_buffer_tokens=8, overlong_penalty=2.0),
    *(config_of(case) for case in LATER_CASES.values() if "mini_batches" not in case),
    config_of(LATER_CASES["reinforce++"], KL_CASES["kl reward"]),
    config_of(LATER_CASES["icepop"], KL_CASES["kl loss"], entropy_coef=0.2),
]


@pytest.mark.parametrize("config", ALONE, ids=[str(number) for number in range(len(ALONE))])
def test_a_step_s_gradient_is_the_formula_s(world, config):
    reference = None if config.kl == "none" else world.reference_folder
    value, theirs = plain_gradient(world.folder, world.groups, config, reference, 0.9)
    stats, ours = gradient(world, config, [world.groups[:1], world.groups[1:]], 60, temperature=0.9)
    assert_same(ours, theirs, 2e-5)
    assert stats.metrics["actor/pg_loss"] == pytest.approx(value, rel=1e-4, abs=1e-6)


def test_masked_samples_count_for_their_siblings_alone(world):
    stats, _ = gradient(world, config_of(overlong="mask"), [world.groups])
    cut = sum(one.finish == "length" for group in world.groups for one in group)
    assert cut > 0
    assert stats.added.num_masked == cut
    assert stats.metrics["sample/trained"] == stats.added.num_samples - cut


def test_an_aborted_step_leaves_no_trace(world):
    config = config_of()
    optimizer = Recording(world.policy.parameters(), OptimizerConfig(lr=1e-30), 1)
    steps = StepAccumulator(world.policy, optimizer, config, max_tokens=100, max_new_tokens=CAP)
    steps.begin(0)
    steps.add(world.groups[:2])
    steps.abort()
    assert not optimizer.gradients()
    steps.begin(0)
    steps.add(world.groups)
    stats = steps.finish()
    expected, at_once = gradient(world, config, [world.groups])
    assert_same(optimizer.last, at_once, 1e-5)
    assert stats.added.num_samples == expected.added.num_samples


def test_a_step_without_samples_moves_nothing(world):
    optimizer = Recording(world.policy.parameters(), OptimizerConfig(lr=1.0), 1)
    steps = StepAccumulator(world.policy, optimizer, config_of(overlong="mask"), max_tokens=100, max_new_tokens=CAP)
    cut = [one._replace(finish="length") for one in world.groups[0]]
    before = {name: one.detach().clone() for name, one in world.policy.parameters().items()}
    for groups in ([], [cut]):
        steps.begin(0)
        steps.add(groups)
        stats = steps.finish()
        assert stats.metrics["actor/skipped_updates"] == 1.0
    assert all(torch.equal(before[name], one) for name, one in world.policy.parameters().items())


def test_what_is_told_is_right(world):
    groups = world.groups
    stats, _ = gradient(world, config_of(), [groups])
    scores, entropies = [], []
    for one in (one for group in groups for one in group):
        logp, entropy = plain_logprobs(world.policy.model, one)
        scores.append(logp.detach().numpy().astype(float) - one.logprobs)
        entropies.append(entropy.detach().numpy())
    apart = np.concatenate(scores)
    mismatches = np.exp(apart) - apart - 1
    metrics = stats.metrics
    assert metrics["actor/entropy"] == pytest.approx(np.concatenate(entropies).mean(), rel=1e-4)
    assert metrics["actor/mismatch_kl"] == pytest.approx(mismatches.mean(), rel=1e-3)
    assert metrics["actor/mismatch_abs"] == pytest.approx(np.abs(apart).mean(), rel=1e-4)
    assert metrics["token/trained"] == len(apart)
    assert 0 < metrics["actor/clip_frac_low"] < 1
    assert 0 < metrics["actor/clip_frac_high"] < 1
    assert metrics["actor/grad_norm"] > 0


def test_the_starting_weights_are_the_old_ones_without_another_pass(world):
    """Recomputed beforehand or taken from the pass that trains: the same to rounding, and ratios are one."""
    config = config_of(old_logprobs="recompute")
    stats, ours = gradient(world, config, [world.groups])
    assert stats.metrics["actor/ppo_kl"] == 0.0
    brought = [
        [one._replace(old_logprobs=plain_logprobs(world.policy.model, one)[0].detach().numpy()) for one in group]
        for group in world.groups
    ]
    again, theirs = gradient(world, config, [brought])
    assert_same(ours, theirs, 1e-5)
    assert abs(again.metrics["actor/ppo_kl"]) < 1e-5


class CountingPolicy(Policy):
    """Counts the rows that are scored without being trained on."""

    num_scored = 0

    def score_only(self, pack: Pack, temperature: float = 1.0) -> Scores:
        self.num_scored += len(pack.tokens)
        return super().score_only(pack, temperature)


@pytest.mark.parametrize("mini_batches", [1, 2])
def test_old_log_probabilities_are_computed_once_for_kl_in_the_reward_and_for_the_ratio(world, mini_batches):
    policy = CountingPolicy.load(str(world.folder))
    assert isinstance(policy, CountingPolicy)
    config = config_of(KL_CASES["kl reward"], old_logprobs="recompute", mini_batches=mini_batches)
    gradient(world._replace(policy=policy), config, [world.groups])
    once = sum(len(one.prompt) + len(one.answer) for group in world.groups for one in group)
    assert 0.5 * once < policy.num_scored <= once


MINI_BATCH_CASES: dict[str, dict[str, Any]] = {
    "clip": {"clip_low": 0.01, "clip_high": 0.01},
    "gspo": {"loss": "gspo", "kl": "loss", "kl_coef": 0.3, "aggregation": "seq-mean-token-mean"},
    "cispo": {"loss": "cispo", "clip_low": 0.01, "clip_high": 0.01, "kl": "reward", "kl_coef": 0.05},
    "icepop": {"correction": "icepop", "correction_high": 1.3, "advantage": "reinforce_plus_plus"},
    "engine": {"old_logprobs": "engine", "advantage": "reinforce_plus_plus_baseline"},
}


@pytest.mark.parametrize("epochs", [1, 2])
@pytest.mark.parametrize("case", MINI_BATCH_CASES)
def test_each_mini_batch_has_the_formula_s_gradient_with_ratios_from_the_step_s_start(world, case, epochs):
    policy = Policy.load(str(world.folder))
    config = AlgorithmConfig(mini_batches=2, epochs=epochs, **MINI_BATCH_CASES[case])
    optimizer = Recording(policy.parameters(), OptimizerConfig(lr=3e-3), 1)
    reference, folder = (world.reference, world.reference_folder) if config.kl != "none" else (None, None)
    steps = StepAccumulator(policy, optimizer, config, max_tokens=60, max_new_tokens=CAP, reference=reference)
    steps.begin(5)
    for group in reversed(world.groups):
        assert steps.add([group]).num_packs == 0
    assert not optimizer.gradients()
    stats = steps.finish()
    seeds = [(5,), *((5, epoch) for epoch in range(1, epochs))]
    orders = [sorted(range(3), key=lambda group, seed=seed: mix64(*seed, group)) for seed in seeds]
    parts = [part for order in orders for part in (order[:1], order[1:])]
    values = []
    for part, ours, weights in zip(parts, optimizer.each, optimizer.weights_before, strict=True):
        value, theirs = plain_gradient(
            world.folder, world.groups, config, folder, weights_now=weights, only=tuple(part)
        )
        if values and not any(one.any() for one in theirs.values()):  # a later update: every token is clipped
            assert not any(one.any() for one in ours.values())
        else:
            assert_same(ours, theirs, 5e-5)
        values.append(value)
    assert stats.metrics["actor/pg_loss"] == pytest.approx(np.mean(values), rel=1e-3, abs=1e-5)
    assert stats.metrics["actor/skipped_updates"] == 0
    assert stats.added.num_groups == 3
    num_tokens = sum(len(one.answer) for group in world.groups for one in group)
    assert stats.added.num_trained_tokens == num_tokens
    assert stats.added.num_tokens == epochs * sum(
        len(one.prompt) + len(one.answer) - 1 for group in world.groups for one in group
    )
    assert abs(stats.metrics["actor/ppo_kl"]) > 1e-4
    if config.old_logprobs == "recompute":
        told, _ = gradient(world, config_of(old_logprobs="recompute"), [world.groups])
        assert stats.metrics["actor/mismatch_kl"] == pytest.approx(told.metrics["actor/mismatch_kl"], rel=1e-4)
    steps.begin(6)
    steps.add(world.groups[:1])
    steps.abort()
    steps.begin(6)
    assert steps.finish().metrics["actor/skipped_updates"]


def test_an_engine_that_agrees_is_found_to_agree_also_where_updates_move_the_weights(world):
    """With the engine's ratio and several mini-batches the starting weights are known of the first one alone."""
    policy = Policy.load(str(world.folder))
    by = (TrainSegment(5, 0, "builtin"),)
    groups = [
        [one._replace(written_by=(by[0]._replace(num_tokens=len(one.answer)),)) for one in group]
        for group in near(policy, draw_groups(0), spread=0.0)
    ]
    optimizer = Recording(policy.parameters(), OptimizerConfig(lr=3e-3), 1)
    config = AlgorithmConfig(mini_batches=2, old_logprobs="engine")
    steps = StepAccumulator(policy, optimizer, config, max_tokens=500, max_new_tokens=CAP)
    steps.begin(5)
    steps.add(groups)
    metrics = steps.finish().metrics
    assert abs(metrics["actor/ppo_kl"]) > 1e-3
    for name in ("actor/mismatch_kl", "actor/mismatch_kl/builtin/0", "actor/mismatch_abs"):
        assert metrics[name] < 1e-5
    assert not [name for name in metrics if "share" in name]


def test_the_mean_mismatch_is_of_the_tokens_that_were_compared(world):
    policy = Policy.load(str(world.folder))
    optimizer = Recording(policy.parameters(), OptimizerConfig(lr=3e-3), 1)
    config = AlgorithmConfig(mini_batches=3, old_logprobs="engine")
    steps = StepAccumulator(policy, optimizer, config, max_tokens=500, max_new_tokens=CAP)
    steps.begin(5)
    steps.add(world.groups)
    first = min(range(3), key=lambda group: mix64(5, group))
    apart = [plain_logprobs(world.policy.model, one)[0].detach().numpy() - one.logprobs for one in world.groups[first]]
    assert steps.finish().metrics["actor/mismatch_abs"] == pytest.approx(np.abs(np.concatenate(apart)).mean(), rel=1e-4)


def test_more_mini_batches_than_groups_are_as_many_as_there_are_groups(world):
    policy = Policy.load(str(world.folder))
    optimizer = Recording(policy.parameters(), OptimizerConfig(lr=1e-3), 1)
    steps = StepAccumulator(policy, optimizer, AlgorithmConfig(mini_batches=8), max_tokens=500, max_new_tokens=CAP)
    steps.begin(0)
    steps.add(world.groups)
    assert not steps.finish().metrics["actor/skipped_updates"]
    assert len(optimizer.each) == len(world.groups)


def test_rewards_are_learned(tmp_path):
    """The likelihood of rewarded answers rises, that of the others falls."""
    policy = Policy.load(str(save_small(tmp_path)))
    optimizer = Recording(policy.parameters(), OptimizerConfig(lr=3e-3, grad_clip=1.0), 12)
    config = AlgorithmConfig(max_mismatch=0.0)  # the weights move, and what was drawn stays
    steps = StepAccumulator(policy, optimizer, config, max_tokens=500, max_new_tokens=CAP)
    groups = [[one._replace(reward=float(k % 2)) for k, one in enumerate(group)] for group in draw_groups(5)]

    def gap() -> float:
        means = {0.0: [], 1.0: []}
        for one in (one for group in groups for one in group):
            means[one.reward].append(plain_logprobs(policy.model, one)[0].mean().item())
        return float(np.mean(means[1.0]) - np.mean(means[0.0]))

    before = gap()
    for step in range(12):
        steps.begin(step)
        steps.add(groups)
        assert not steps.finish().metrics["actor/skipped_updates"]
    assert gap() > before + 1.0


def test_out_of_memory_is_one_line_with_the_setting_that_helps(world):
    def hungry(batch: TokenBatch, config: AlgorithmConfig):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate")

    if "hungry" not in LOSSES:
        loss("hungry")(hungry)
    optimizer = Recording(world.policy.parameters(), OptimizerConfig(), 1)
    steps = StepAccumulator(world.policy, optimizer, config_of(loss="hungry"), max_tokens=77, max_new_tokens=CAP)
    steps.begin(0)
    with pytest.raises(UserError, match=r"train.micro_batch_tokens \(now 77\).*gradient_checkpointing") as caught:
        steps.add(world.groups)
    assert "\n" not in str(caught.value)
    assert not optimizer.gradients()


class Hungry(Recording):
    """Has no room for its moments."""

    def update(self, step: int, denominator: float, num_steps: int | None = None, **more: float) -> Update:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 12.00 GiB")


@pytest.mark.parametrize("mini_batches", [1, 2])
def test_out_of_memory_in_the_update_names_the_optimizer_s_settings(world, mini_batches):
    optimizer = Hungry(world.policy.parameters(), OptimizerConfig(), 1)
    config = AlgorithmConfig(mini_batches=mini_batches)
    steps = StepAccumulator(world.policy, optimizer, config, max_tokens=500, max_new_tokens=CAP)
    steps.begin(0)
    steps.add(world.groups)
    with pytest.raises(UserError, match=r"^out of memory on cpu.*optimizer\.offload=true.*adamw8bit") as caught:
        steps.finish()
    assert "\n" not in str(caught.value)
    assert not optimizer.gradients()
    steps.begin(0)


@pytest.mark.parametrize(
    ("config", "advice", "useless"),
    [
        (OptimizerConfig(), "optimizer.kind=adamw8bit", "micro_batch"),
        (OptimizerConfig(offload=True), "lora.rank", "offload=true"),
    ],
)
def test_an_optimizer_advises_what_is_not_done_already(world, config, advice, useless):
    said = Recording(world.policy.parameters(), config, 1).how_to_take_less()
    assert advice in said and useless not in said


def test_functions_of_the_user_s_own_are_found(world):
    config = config_of(loss="tests.trainer.own:reinforce", advantage="tests.trainer.own:plain")
    _, ours = gradient(world, config, [world.groups])
    assert ours
    for key, name, hint in (
        ("loss", "ppo_clp", "did you mean ppo_clip"),
        ("advantage", "grop", "did you mean grpo"),
        ("loss", "no_such_module_here:f", "cannot be imported"),
        ("loss", "tests.trainer.own:missing", "has no function missing"),
    ):
        with pytest.raises(ConfigError, match=f"algorithm.{key}: .*{hint}"):
            gradient(world, config_of(**{key: name}), [world.groups])
    for key, name, gave in (
        ("loss", "wrong_loss", "shape"),
        ("loss", "lonely_loss", "one Tensor; expected a pair: "),
        ("loss", "talkative_loss", r"\(Tensor, dict\); expected a pair: "),
        ("advantage", "wrong_advantage", "shape"),
        ("advantage", "wrong_of_step", "shape"),
        ("advantage", "listed_advantage", "one list for a group of"),
    ):
        with pytest.raises(UserError, match=f"^algorithm.{key}: tests.trainer.own:{name} gave {gave}"):
            gradient(world, config_of(**{key: f"tests.trainer.own:{name}"}), [world.groups])
        world.policy.model.zero_grad()


def test_nonsense_is_refused(world):
    one = world.groups[0][0]
    for sample in (
        one._replace(logprobs=one.logprobs[:-1]),
        one._replace(answer=one.answer[:0], logprobs=one.logprobs[:0]),
        one._replace(prompt=one.prompt[:0]),
        one._replace(reward=float("nan")),
    ):
        with pytest.raises(ValueError, match="a sample of group 0 has"):
            gradient(world, config_of(), [[[sample, one]]])


def test_epochs_without_mini_batches_move_the_weights_as_often(world):
    policy = Policy.load(str(world.folder))
    optimizer = Recording(policy.parameters(), OptimizerConfig(lr=3e-3), 1)
    steps = StepAccumulator(policy, optimizer, AlgorithmConfig(epochs=4), max_tokens=500, max_new_tokens=CAP)
    steps.begin(0)
    steps.add(world.groups)
    stats = steps.finish()
    assert len(optimizer.each) == 4
    assert abs(stats.metrics["actor/ppo_kl"]) > 1e-4  # by the old log-probabilities of the step's start
