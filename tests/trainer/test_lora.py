"""LoRA: gradients against those of all weights; the base as a reference; what is published, saved and exported."""

from pathlib import Path

import peft
import pytest
import torch
from tests.builtin.tiny_models import save_tiny
from tests.trainer.small import CAP, Recording, draw_groups, save_small
from transformers import AutoModelForCausalLM

from polyrl.config import build
from polyrl.config.recipe import AlgorithmConfig, LoraSection, OptimizerConfig, Recipe
from polyrl.engines.builtin import models
from polyrl.errors import UserError
from polyrl.trainer import exporting, lora
from polyrl.trainer.model import Policy
from polyrl.trainer.optimizer import Optimizer
from polyrl.trainer.packing import make_packs
from polyrl.trainer.state import checkpoint
from polyrl.trainer.state.checkpoint import TrainerState
from polyrl.trainer.step import StepAccumulator

SMALL = LoraSection(rank=3, alpha=4.5)
PLAIN = AlgorithmConfig(max_mismatch=0)  # log-probabilities are drawn, not a model's


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_small(tmp_path_factory.mktemp("model"))


def start(folder, config=SMALL, dtype="float32", **settings):
    """Changes that are no longer zero, as if it had been trained for a while."""
    policy = lora.load(str(folder), dtype, "cpu", config, seed=7, **settings)
    torch.manual_seed(3)
    with torch.no_grad():
        for one in policy.parameters().values():
            one.normal_(0, 0.2)
    return policy


def accumulator(policy, optimizer, algorithm=PLAIN, reference=None):
    return StepAccumulator(policy, optimizer, algorithm, max_tokens=200, max_new_tokens=CAP, reference=reference)


def train(steps, first, last):
    for step in range(first, last):
        steps.begin(step)
        steps.add(draw_groups(step))
        assert not steps.finish().metrics["actor/skipped_updates"]


def gradient(policy, algorithm=PLAIN, reference=None):
    optimizer = Recording(policy.parameters(), OptimizerConfig(), 10)
    steps = accumulator(policy, optimizer, algorithm, reference)
    steps.begin(0)
    steps.add(draw_groups(1))
    steps.finish()
    return optimizer.last


def packs():
    return make_packs([one for group in draw_groups(5) for one in group], 200)


def scores(policy):
    return torch.cat([policy.score_only(one).logprobs for one in packs()])


def whole(policy, folder, tmp_path):
    """A plain policy of the same function."""
    policy.save_merged(tmp_path / "merged")
    return Policy.load(str(tmp_path / "merged"))


@pytest.mark.parametrize("settings", [{}, {"gradient_checkpointing": True}])
def test_gradients_of_changes_are_those_of_all_weights_by_the_chain_rule(folder, tmp_path, settings):
    policy = start(folder, **settings)
    parts = {name: one.detach().clone() for name, one in policy.parameters().items()}
    plain = gradient(whole(policy, folder, tmp_path))
    found = gradient(policy)
    assert len(found) == 2 * 2 * 7, "both parts of seven matrices in two layers"
    for layer in {name.partition(".lora_")[0] for name in found}:
        full, a, b = plain[f"{layer}.weight"], parts[f"{layer}.lora_A.weight"], parts[f"{layer}.lora_B.weight"]
        torch.testing.assert_close(found[f"{layer}.lora_A.weight"], 1.5 * b.T @ full, rtol=1e-3, atol=1e-5)
        torch.testing.assert_close(found[f"{layer}.lora_B.weight"], 1.5 * full @ a.T, rtol=1e-3, atol=1e-5)


def test_only_changes_are_trained_and_the_first_ones_are_nothing(folder):
    policy, base = lora.load(str(folder), "float32", "cpu", SMALL, seed=7), Policy.load(str(folder))
    assert torch.equal(scores(policy), scores(base))
    before = {name: one.detach().clone() for name, one in policy.parameters().items()}
    again = lora.load(str(folder), "float32", "cpu", SMALL, seed=7).parameters()
    assert all(torch.equal(one, again[name]) for name, one in before.items()), "the seed decides how they begin"
    train(accumulator(policy, Optimizer(policy.parameters(), OptimizerConfig(lr=0.01), 10)), 0, 3)
    assert not any(torch.equal(one, policy.parameters()[name]) for name, one in before.items())
    frozen = {name: one for name, one in policy.model.named_parameters() if "lora" not in name}
    for name, one in base.parameters().items():
        assert torch.equal(
            one, frozen[name.replace(".weight", ".base_layer.weight")] if "proj" in name else frozen[name]
        )


def test_the_reference_is_the_base_to_the_last_bit(folder):
    policy, base = start(folder), Policy.load(str(folder))
    assert torch.equal(
        torch.cat([policy.reference.score_only(one).logprobs for one in packs()]),
        torch.cat([base.score_only(one).logprobs for one in packs()]),
    )
    assert not torch.allclose(scores(policy), scores(base), atol=1e-3)


@pytest.mark.parametrize("mini_batches", [1, 2])
def test_kl_against_the_base_has_the_gradient_that_a_second_copy_gives(folder, mini_batches):
    algorithm = AlgorithmConfig(max_mismatch=0, kl="loss", kl_coef=0.5, mini_batches=mini_batches)
    policy = start(folder)
    ours = gradient(policy, algorithm, policy.reference)
    theirs = gradient(start(folder), algorithm, Policy.load(str(folder)).freeze())
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(one, theirs[name]) for name, one in ours.items())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_engine_has_sums_of_its_own_and_shares_everything_else(folder, dtype):
    policy = start(folder, LoraSection(rank=2, targets=("q_proj", "down_proj")), dtype=dtype)
    policy.merge()
    ours, theirs = dict(policy.model.named_parameters()), dict(policy.loaded.model.named_parameters())
    own = {name for name, one in theirs.items() if not any(one is other for other in ours.values())}
    assert own == {name for name in theirs if "q_proj" in name or "down_proj" in name}
    for name in own:
        layer = name.removesuffix(".weight")
        a, b = policy.parameters()[f"{layer}.lora_A.weight"], policy.parameters()[f"{layer}.lora_B.weight"]
        assert a.dtype == torch.float32
        base = ours[f"{layer}.base_layer.weight"].double()
        torch.testing.assert_close(theirs[name].double(), base + 2 * b.double() @ a.double(), rtol=2**-8, atol=1e-4)
    if dtype == "float32":
        engine = Policy(models.describe(policy.loaded.model, "engine"))
        torch.testing.assert_close(scores(engine), scores(policy), rtol=1e-4, atol=1e-4)


def test_what_is_published_is_the_sums_or_the_changes_alone(folder):
    merged, adapter = start(folder), start(folder, LoraSection(rank=3, alpha=4.5, publish="adapter"))
    assert merged.adapter is None
    assert merged.published().keys() == Policy.load(str(folder)).parameters().keys()
    assert adapter.published().keys() == adapter.parameters().keys()
    assert adapter.adapter is not None
    assert (adapter.adapter.scaling, adapter.adapter.dtype, adapter.published_dtype) == (1.5, "float32", "float32")


def test_dropout_is_drawn_while_training_alone_and_the_same_for_the_same_tokens(folder):
    config = LoraSection(rank=3, dropout=0.3)
    policy, without = start(folder, config), start(folder, LoraSection(rank=3))
    assert torch.equal(scores(policy), scores(without))
    first, second = gradient(start(folder, config)), gradient(start(folder, config))
    again = gradient(start(folder, config, gradient_checkpointing=True))
    plain = gradient(without)
    for name, one in first.items():
        assert torch.equal(one, second[name])
        torch.testing.assert_close(one, again[name])
        assert not torch.allclose(one, plain[name], rtol=1e-2)
    torch.manual_seed(1)
    expected = torch.rand(1)
    torch.manual_seed(1)
    policy.score(packs()[0])
    assert torch.equal(torch.rand(1), expected), "nobody else's draws depend on it"


@pytest.mark.parametrize(
    ("family", "targets", "message"),
    [
        ("qwen3", ("q_prj",), r"no layer of the model is called q_prj; did you mean q_proj or "),
        (
            "qwen3",
            ("zzz",),
            r"called zzz; expected some of q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, \.\.\.$",
        ),
        ("qwen3", ("q_proj", "lm_head"), "lm_head is the output head"),
        ("gemma", ("lm_head",), "lm_head is the output head"),
        ("qwen3", ("embed_tokens",), "embed_tokens is a Embedding, not a plain matrix"),
        ("qwen3_moe", ("experts",), "experts is a Qwen3MoeExperts, not a plain matrix"),
        ("qwen3_moe", "all-linear", "holds experts, which are no single matrix .* name the layers: q_proj, k_proj"),
    ],
)
def test_targets_that_cannot_be_changed_are_refused_in_a_line(tmp_path, family, targets, message):
    model = AutoModelForCausalLM.from_pretrained(save_tiny(family, tmp_path))
    with pytest.raises(UserError, match=message) as caught:
        lora.find_targets(model, targets)
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith("lora.targets: ")


@pytest.mark.parametrize("family", ["qwen2", "gemma3_text", "mixtral"])
def test_biases_tied_embeddings_and_attention_beside_experts_are_no_hindrance(tmp_path, family):
    """Qwen2 has biases; Gemma's head is its embedding; Mixtral's attention is plain."""
    folder = save_tiny(family, tmp_path / "model", vocab_size=64)
    policy = start(folder, LoraSection(rank=2, targets=("q_proj", "o_proj")))
    torch.testing.assert_close(scores(whole(policy, folder, tmp_path)), scores(policy), rtol=1e-3, atol=1e-3)


def test_a_run_goes_on_as_if_it_had_not_stopped_and_saves_changes_alone(folder):
    def begin():
        policy = lora.load(str(folder), "float32", "cpu", LoraSection(rank=3, dropout=0.2), seed=7)
        optimizer = Optimizer(policy.parameters(), OptimizerConfig(lr=0.01), 10)
        return policy, optimizer, accumulator(policy, optimizer)

    policy, optimizer, steps = begin()
    train(steps, 0, 2)
    saved = {key: value.clone() for key, value in optimizer.state_dict().items()}
    assert all(".lora_" in key for key in saved)
    train(steps, 2, 4)
    again, its_optimizer, its_steps = begin()
    its_optimizer.load_state_dict(saved)
    train(its_steps, 2, 4)
    assert all(torch.equal(one, again.parameters()[name]) for name, one in policy.parameters().items())


# Checkpoints and exports


def recipe(folder: Path, **lora_section) -> Recipe:
    tree = {
        "name": "x",
        "model": {"path": str(folder), "dtype": "float32"},
        "data": {"source": "arithmetic"},
        "lora": lora_section,
    }
    return build(tree, Recipe, source="test")


def save(policy, run_dir: Path) -> Path:
    state = TrainerState(
        next_step=1,
        fingerprint=checkpoint.fingerprint(policy.parameters()),
        base=policy.base_fingerprint,
    )
    return checkpoint.save(run_dir, state, {f"policy/master/{name}": one for name, one in policy.parameters().items()})


@torch.no_grad()
def with_changes(model, policy):
    for name, b in policy.parameters().items():
        if name.endswith(".lora_B.weight"):
            a = policy.parameters()[name.replace("lora_B", "lora_A")]
            model.get_parameter(name.replace(".lora_B", "")).add_(1.5 * b @ a)
    return model


def logits(model) -> torch.Tensor:
    return model(torch.arange(3, 40).unsqueeze(0)).logits


@pytest.mark.parametrize("adapter", [False, True])
def test_exports_have_the_logits_of_what_was_trained(folder, tmp_path, adapter):
    policy = start(folder, LoraSection(rank=3, alpha=4.5, dropout=0.1))
    exporting.export(
        save(policy, tmp_path), recipe(folder, rank=3, alpha=4.5, dropout=0.1), tmp_path / "out", adapter=adapter
    )
    if adapter:
        base = AutoModelForCausalLM.from_pretrained(folder)
        model = peft.PeftModel.from_pretrained(base, str(tmp_path / "out"))
    else:
        model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    expected = logits(with_changes(AutoModelForCausalLM.from_pretrained(folder), policy))
    torch.testing.assert_close(logits(model.eval()), expected, rtol=1e-4, atol=1e-4)
    base_logits = logits(AutoModelForCausalLM.from_pretrained(folder))
    assert not torch.allclose(base_logits, expected, atol=1e-2)


def test_changes_are_refused_for_another_base(folder, tmp_path):
    """Of the same shape: only the numbers say so."""
    other = save_small(tmp_path / "other", seed=1)
    saved = save(start(folder), tmp_path)
    with pytest.raises(UserError, match=r"holds changes to another model than .*other: its weights are not the same"):
        exporting.export(saved, recipe(other, rank=3, alpha=4.5), tmp_path / "out")
    with pytest.raises(UserError, match=r"another model .* names or shapes"):
        exporting.export(saved, recipe(folder, rank=4), tmp_path / "out")
    with pytest.raises(UserError, match=r"--adapter: .* trains all weights"):
        exporting.export(saved, recipe(folder), tmp_path / "out", adapter=True)


def test_a_recipe_with_keys_of_lora_and_no_rank_is_refused(folder):
    with pytest.raises(UserError, match=r"lora.rank: is 0, which is no LoRA"):
        recipe(folder, publish="adapter")
    with pytest.raises(UserError, match=r"lora.targets: "):
        recipe(folder, rank=2, targets="q_proj")
    assert recipe(folder, rank=2, targets=["q_proj"]).lora.targets == ("q_proj",)
