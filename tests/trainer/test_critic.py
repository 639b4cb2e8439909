"""PPO with a critic: advantages, values and both gradients against formulas of their own; streamed as at once."""

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from tests.trainer import formulas
from tests.trainer.small import CAP, Recording, draw_groups, near, plain_logprobs, save_small
from tests.trainer.test_step import assert_same
from transformers import AutoModelForCausalLM

from polyrl.config import apply_overrides, build
from polyrl.config.recipe import AlgorithmConfig, CriticConfig, OptimizerConfig, Recipe
from polyrl.errors import UserError
from polyrl.run.models import load_critic
from polyrl.scheduling.rules.order import mix64
from polyrl.telemetry.metric_names import describe
from polyrl.trainer.batch import TrainSample
from polyrl.trainer.critic import Critic, explained_variance, value_losses
from polyrl.trainer.model import Policy
from polyrl.trainer.objectives import gae
from polyrl.trainer.packing import make_packs
from polyrl.trainer.step import StepAccumulator
from polyrl.trainer.step_stats import StepStats

CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "discounted": {"critic": CriticConfig(gamma=0.9, gae_lambda=0.8, value_clip=0.0), "old_logprobs": "engine"},
    "kl of each token": {"kl": "reward", "kl_coef": 0.2, "overlong": "mask", "critic": CriticConfig(gae_lambda=0.5)},
}


class World(NamedTuple):
    folder: Path
    critic_folder: Path
    reference: Policy
    groups: list[list[TrainSample]]


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> World:
    folder, critic, reference = (save_small(tmp_path_factory.mktemp("m"), seed=seed) for seed in (0, 1, 2))
    policy = Policy.load(str(folder))
    return World(folder, critic, Policy.load(str(reference)).freeze(), near(policy, draw_groups(0)))


class RecordingCritic(Critic):
    """With a head that says something, and an optimizer that keeps its gradients."""

    def __init__(self, folder: Path, lr: float) -> None:
        super().__init__(Policy.load(str(folder)), OptimizerConfig(lr=lr), 1)
        torch.manual_seed(5)
        self.parameters()["value_head.weight"].data.normal_(0, 0.3)
        self.recorded = Recording(self.parameters(), OptimizerConfig(lr=lr), 1)
        self.optimizer = self.recorded


class Ran(NamedTuple):
    stats: StepStats
    policy: Recording
    critic: Recording


def run(world: World, config: AlgorithmConfig, calls, max_tokens: int = 10_000, lr: float = 1e-30) -> Ran:
    policy, critic = Policy.load(str(world.folder)), RecordingCritic(world.critic_folder, lr)
    optimizer = Recording(policy.parameters(), OptimizerConfig(lr=lr), 1)
    reference = None if config.kl == "none" else world.reference
    steps = StepAccumulator(
        policy, optimizer, config, max_tokens=max_tokens, max_new_tokens=CAP, reference=reference, critic=critic
    )
    steps.begin(0)
    for groups in calls:
        steps.add(groups)
    return Ran(steps.finish(), optimizer, critic.recorded)


def test_the_norm_that_is_told_of_a_step_is_the_mean_over_its_updates_for_both_models(world: World):
    ran = run(world, AlgorithmConfig(advantage="gae", mini_batches=2), [world.groups])
    for name, recorded in (("critic", ran.critic), ("actor", ran.policy)):
        norms = [sum(float((one**2).sum()) for one in gradients.values()) ** 0.5 for gradients in recorded.each]
        assert len(norms) == 2 and abs(norms[0] - norms[1]) > 0.01 * norms[0]
        assert ran.stats.metrics[f"{name}/grad_norm"] == pytest.approx(sum(norms) / 2, rel=1e-4)


class Plain:
    """The step once more, in float64 and sample by sample."""

    def __init__(self, world: World, config: AlgorithmConfig, head: dict[str, torch.Tensor]) -> None:
        self.world, self.config = world, config
        self.samples = [one for group in world.groups for one in group]
        self.kept = [config.overlong != "mask" or one.finish != "length" for one in self.samples]
        self.start, self.trunk = self.load(world.folder), self.load(world.critic_folder)
        self.values = [self.value(self.trunk, head, one).detach().numpy() for one in self.samples]
        pairs = [self.estimate(*pair) for pair in zip(self.samples, self.values, strict=True)]
        self.returns = [one for _, one in pairs]
        trained = np.concatenate([gains for (gains, _), keep in zip(pairs, self.kept, strict=True) if keep])
        self.gains = [(gains - trained.mean()) / (trained.std(ddof=1) + 1e-6) for gains, _ in pairs]

    @staticmethod
    def load(folder: Path, weights: dict[str, torch.Tensor] | None = None, prefix: str = "") -> Any:
        model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").double()
        if weights is not None:
            model.load_state_dict({prefix + name: one for name, one in weights.items()}, strict=False)
            model.tie_weights()
        return model

    @staticmethod
    def value(trunk: Any, head: dict[str, torch.Tensor], one: TrainSample) -> torch.Tensor:
        ids = torch.from_numpy(np.concatenate([one.prompt, one.answer])).long()
        hidden = trunk.model(ids.unsqueeze(0), use_cache=False).last_hidden_state[0]
        rows = hidden[len(one.prompt) - 1 : -1]
        return rows @ head["value_head.weight"].double()[0] + head["value_head.bias"].double()

    def estimate(self, one: TrainSample, values: Any) -> tuple[Any, Any]:
        config = self.config
        rewards = np.zeros(len(one.answer))
        if config.kl == "reward":
            reference = plain_logprobs(self.world.reference.model, one)[0].detach().numpy()
            rewards -= config.kl_coef * formulas.kl(config.kl_estimator or "", self.old(one), reference)[0]
        rewards[-1] += one.reward
        return formulas.gae(rewards, values, config.critic.gamma, config.critic.gae_lambda)

    def old(self, one: TrainSample) -> Any:
        if self.config.old_logprobs == "engine":
            return one.logprobs.astype(float)
        return plain_logprobs(self.start, one)[0].detach().numpy()

    def trained(self, only: list[int]) -> list[int]:
        return [number for number, one in enumerate(self.samples) if self.kept[number] and one.group in only]

    def of_policy(self, weights: dict[str, torch.Tensor], only: list[int]) -> dict[str, torch.Tensor]:
        model = self.load(self.world.folder, weights)
        trained = self.trained(only)
        num = sum(len(self.samples[number].answer) for number in trained)
        for number in trained:
            one = self.samples[number]
            logp = plain_logprobs(model, one)[0]
            now, old = logp.detach().numpy(), self.old(one)
            slopes = [
                formulas.ppo_clip(now[t : t + 1], old[t : t + 1], gain, *self.config.clip_range, None)[1][0]
                for t, gain in enumerate(self.gains[number])
            ]
            (logp * torch.tensor(slopes) / num).sum().backward()
        return {name: one.grad for name, one in model.named_parameters() if one.grad is not None}

    def of_critic(self, weights: dict[str, torch.Tensor], only: list[int]) -> dict[str, torch.Tensor]:
        trunk = self.load(self.world.critic_folder, weights, "model.")
        names = ("value_head.weight", "value_head.bias")
        head = {name: weights[name].double().clone().requires_grad_() for name in names}
        trained = self.trained(only)
        num = sum(len(self.samples[number].answer) for number in trained)
        for number in trained:
            values = self.value(trunk, head, self.samples[number])
            now = values.detach().numpy()
            old, returns, clip = self.values[number], self.returns[number], self.config.critic.value_clip
            slope = formulas.value_loss(now, old, returns, clip)[1]
            (values * torch.from_numpy(slope) / num).sum().backward()
        found = {name: one.grad for name, one in trunk.model.named_parameters() if one.grad is not None}
        return found | {name: one.grad for name, one in head.items() if one.grad is not None}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("num_mini_batches", [1, 2])
def test_both_gradients_are_the_formula_s(world, case, num_mini_batches):
    config = AlgorithmConfig(advantage="gae", mini_batches=num_mini_batches, **CASES[case])
    ran = run(world, config, [world.groups[:1], world.groups[1:]], 60, lr=3e-3)
    plain = Plain(world, config, ran.critic.weights_before[0])
    order = sorted(range(3), key=lambda group: mix64(0, group))
    parts = [order] if num_mini_batches == 1 else [order[:1], order[1:]]
    assert len(ran.policy.each) == len(ran.critic.each) == num_mini_batches
    for number, part in enumerate(parts):
        ours, theirs = ran.policy.each[number], plain.of_policy(ran.policy.weights_before[number], part)
        assert_same(ours, theirs, 5e-5)
        ours, theirs = ran.critic.each[number], plain.of_critic(ran.critic.weights_before[number], part)
        assert_same(ours, theirs, 5e-5)
    metrics = ran.stats.metrics
    trained = plain.trained(order)
    returns = np.concatenate([plain.returns[number] for number in trained])
    values = np.concatenate([plain.values[number] for number in trained])
    assert metrics["critic/return_mean"] == pytest.approx(returns.mean(), rel=1e-4, abs=1e-6)
    explained = 1 - np.var(returns - values) / np.var(returns)
    assert metrics["critic/explained_variance"] == pytest.approx(explained, rel=1e-3)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("num_mini_batches", [1, 2])
def test_a_streamed_step_is_the_step_of_one_big_batch(world, case, num_mini_batches):
    config = AlgorithmConfig(advantage="gae", mini_batches=num_mini_batches, **CASES[case])
    at_once = run(world, config, [world.groups])
    streamed = run(world, config, [[group] for group in reversed(world.groups)], 30)
    for ours, theirs in zip(
        streamed.policy.each + streamed.critic.each, at_once.policy.each + at_once.critic.each, strict=True
    ):
        assert_same(ours, theirs, 1e-5)
    for name, value in at_once.stats.metrics.items():
        if name != "perf/micro_batches":
            assert streamed.stats.metrics[name] == pytest.approx(value, rel=1e-4, abs=1e-6), name
            assert describe(name) is not None, name


@pytest.mark.parametrize(("gamma", "gae_lambda"), [(1.0, 1.0), (0.9, 0.7), (1.0, 0.0)])
def test_advantages_are_the_formula_s(gamma, gae_lambda):
    rng = np.random.default_rng(1)
    for num in (1, 2, 30):
        rewards, values = rng.normal(size=(2, num))
        for ours, theirs in zip(
            gae.estimate(rewards, values, gamma, gae_lambda),
            formulas.gae(rewards, values, gamma, gae_lambda),
            strict=True,
        ):
            np.testing.assert_allclose(ours, theirs, rtol=1e-9, atol=1e-12)


def test_without_discount_and_with_lambda_one_an_advantage_is_what_came_less_the_value():
    rewards, values = np.array([0.0, 0.0, 2.0]), np.array([0.5, 1.0, 3.0])
    gains, returns = gae.estimate(rewards, values, 1.0, 1.0)
    assert gains.tolist() == [1.5, 1.0, -1.0]
    assert returns.tolist() == [2.0, 2.0, 2.0]


@pytest.mark.parametrize("clip", [0.0, 0.2])
def test_the_loss_of_values_and_its_gradient_are_the_formula_s(clip):
    rng = np.random.default_rng(2)
    values, old, returns = rng.normal(0, 0.5, (3, 300))
    mine = torch.from_numpy(values).requires_grad_()
    ours = value_losses(mine, torch.from_numpy(old), torch.from_numpy(returns), clip)
    ours.losses.sum().backward()
    loss, slope = formulas.value_loss(values, old, returns, clip)
    np.testing.assert_allclose(ours.losses.detach().numpy(), loss, rtol=1e-9)
    assert mine.grad is not None
    np.testing.assert_allclose(mine.grad.numpy(), slope, rtol=1e-9, atol=1e-12)
    assert bool(ours.clipped.any()) is (clip > 0)


def test_explained_variance_is_one_for_a_seer_and_zero_for_who_says_the_mean():
    returns = [np.array([1.0, 3.0], np.float32), np.array([5.0], np.float32)]
    assert explained_variance(returns, returns) == 1.0
    assert explained_variance([np.full(2, 3.0, np.float32), np.full(1, 3.0, np.float32)], returns) == 0.0
    assert explained_variance([], []) == 0.0
    assert explained_variance(returns[1:], returns[1:]) == 0.0


def test_a_new_critic_says_nothing_and_learns_what_answers_are_worth(world):
    policy = Policy.load(str(world.folder))
    critic = Critic(Policy.load(str(world.critic_folder)), OptimizerConfig(lr=3e-3), 40)
    optimizer = Recording(policy.parameters(), OptimizerConfig(lr=1e-30), 40)
    config = AlgorithmConfig(advantage="gae")
    steps = StepAccumulator(policy, optimizer, config, max_tokens=500, max_new_tokens=CAP, critic=critic)
    metrics: list[dict[str, float]] = []
    for step in range(40):
        steps.begin(step)
        steps.add(world.groups)
        metrics.append(steps.finish().metrics)
    assert metrics[0]["critic/value_mean"] == 0.0
    assert metrics[-1]["critic/vf_loss"] < 0.2 * metrics[0]["critic/vf_loss"]
    assert metrics[-1]["critic/explained_variance"] > 0.5


def test_a_critic_shares_nothing_with_the_policy_and_leaves_no_trace_of_an_aborted_step(world):
    policy = Policy.load(str(world.folder))
    critic = Critic(Policy.load(str(world.folder)), OptimizerConfig(), 1)
    places = {one.data_ptr() for one in policy.parameters().values()}
    assert places.isdisjoint(one.data_ptr() for one in critic.parameters().values())
    assert not [name for name in critic.parameters() if "lm_head" in name]
    optimizer = Recording(policy.parameters(), OptimizerConfig(), 1)
    steps = StepAccumulator(
        policy, optimizer, AlgorithmConfig(advantage="gae"), max_tokens=500, max_new_tokens=CAP, critic=critic
    )
    steps.begin(0)
    steps.add(world.groups)
    steps.abort()
    steps.begin(0)
    assert steps.finish().metrics["actor/skipped_updates"]
    assert not critic.optimizer.gradients()


def test_a_recipe_s_critic_has_its_own_model_and_learning_rate(world):
    tree = {
        "name": "small",
        "model": {"path": str(world.folder), "device": "cpu", "dtype": "float32"},
        "data": {"source": "arithmetic"},
    }

    def critic_of(*settings: str) -> Critic | None:
        return load_critic(build(apply_overrides(tree, settings), Recipe))

    assert critic_of() is None
    critic = critic_of(
        "algorithm.advantage=gae", f"algorithm.critic.path={world.critic_folder}", "algorithm.critic.lr=0.5"
    )
    assert critic is not None
    theirs = Policy.load(str(world.critic_folder)).model.model.norm.weight
    assert torch.equal(critic.parameters()["norm.weight"], theirs)
    (group, _) = critic.optimizer._adamw.param_groups
    assert group["lr"] == 0.5
    with pytest.raises(UserError, match=r"nowhere: no config.json there"):
        critic_of("algorithm.advantage=gae", "algorithm.critic.path=nowhere")


def test_a_critic_goes_on_from_its_optimizer_s_state_alone(world):
    critics = [RecordingCritic(world.critic_folder, 1e-2), Critic(Policy.load(str(world.folder)), OptimizerConfig(), 1)]
    policy = Policy.load(str(world.folder))
    optimizer = Recording(policy.parameters(), OptimizerConfig(lr=1e-30), 1)
    config = AlgorithmConfig(advantage="gae")
    steps = StepAccumulator(policy, optimizer, config, max_tokens=500, max_new_tokens=CAP, critic=critics[0])
    steps.begin(0)
    steps.add(world.groups)
    assert not steps.finish().metrics["actor/skipped_updates"]
    critics[1].optimizer.load_state_dict(critics[0].optimizer.state_dict())
    (pack,) = make_packs(world.groups[0], 10_000)
    ours, theirs = (one.values_only(pack) for one in critics)
    assert ours.abs().max() > 0
    assert torch.equal(ours, theirs)


def test_a_critic_is_there_if_and_only_if_it_is_asked(world):
    policy = Policy.load(str(world.folder))
    optimizer = Recording(policy.parameters(), OptimizerConfig(), 1)
    critic = Critic(Policy.load(str(world.folder)), OptimizerConfig(), 1)
    for advantage, given in (("gae", None), ("grpo", critic)):
        with pytest.raises(ValueError, match="a critic is for advantage"):
            StepAccumulator(
                policy, optimizer, AlgorithmConfig(advantage=advantage), max_tokens=9, max_new_tokens=CAP, critic=given
            )
