"""Models that the builtin engine does not run: values and gradients are those of one sample at a time, in float64."""

from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
import transformers as families_of
from safetensors import safe_open

from polyrl.config.recipe_files import load_recipe
from polyrl.errors import ConfigError, UserError
from polyrl.run.plan import fit
from polyrl.trainer import families
from polyrl.trainer.batch import TrainSample
from polyrl.trainer.model import Policy
from polyrl.trainer.packing import pack
from polyrl.trainer.publishing import Publishing
from polyrl.weights import tensors

_PLAIN = {
    "vocab_size": 96,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_WIDE = {**_PLAIN, "intermediate_size": 48, "max_position_embeddings": 64}
_ROPE = {**_WIDE, "num_key_value_heads": 2}
_OLD = {"vocab_size": 96, "n_layer": 2, "n_head": 4, "bos_token_id": 1, "eos_token_id": 2}
_EXPERTS = {**_ROPE, "num_experts_per_tok": 2}
_FEW = {"num_experts": 4, "moe_intermediate_size": 16, "head_dim": 8}
_LATENT = {
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "num_experts_per_tok": 2,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "num_key_value_heads": 4,
}
"""Attention over a latent vector, of which queries and keys have other widths than values."""
_LINEAR = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
}

CONFIGS: dict[str, tuple[dict[str, Any], str]] = {
    "GPT2": ({**_OLD, "n_embd": 32, "n_positions": 64}, "packed"),
    "GPTNeoX": (_WIDE, "packed"),
    "Phi": (_WIDE, "packed"),
    "Cohere": ({**_ROPE, "logit_scale": 0.25}, "packed"),
    "Granite": ({**_ROPE, "logits_scaling": 4.0}, "packed"),
    "Olmo2": (_ROPE, "packed"),
    "Olmoe": ({**_EXPERTS, "num_experts": 4}, "packed"),
    "Bloom": ({**_OLD, "hidden_size": 32}, "padded"),
    "Falcon": ({**_PLAIN, "alibi": False}, "padded"),
    "GPTJ": ({**_OLD, "n_embd": 32, "n_positions": 64, "rotary_dim": 4}, "padded"),
    "Starcoder2": ({**_ROPE, "sliding_window": 4}, "padded"),
    "OPT": ({**_PLAIN, "ffn_dim": 48, "word_embed_proj_dim": 32}, "packed"),
    "Qwen2Moe": ({**_EXPERTS, **_FEW, "shared_expert_intermediate_size": 16}, "packed"),
    "DeepseekV3": ({**_WIDE, **_LATENT}, "padded"),
    "GptOss": ({**_EXPERTS, "num_local_experts": 4, "head_dim": 8, "sliding_window": 4}, "padded"),
    "Qwen3Next": ({**_EXPERTS, **_FEW, **_LINEAR, "shared_expert_intermediate_size": 16}, "padded"),
    "Llama4Text": ({**_EXPERTS, "num_local_experts": 4, "head_dim": 8, "intermediate_size_mlp": 48}, "padded"),
    "RecurrentGemma": ({**_ROPE, "num_key_value_heads": 1, "lru_width": 32, "attention_window_size": 8}, "padded"),
    "Mamba": ({"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4}, "padded"),
}


def save(name: str, settings: dict[str, Any], folder: Path) -> str:
    torch.manual_seed(0)
    config = getattr(families_of, f"{name}Config")(**settings)
    model = families_of.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for one in model.parameters():  # a fresh model's layers change next to nothing, and its biases are zero
            one.add_(0.1 * torch.randn_like(one))
    model.save_pretrained(folder)
    return str(folder)


def samples() -> list[TrainSample]:
    made: list[TrainSample] = []
    random = np.random.default_rng(0)
    for num_prompt, num_answer in ((3, 9), (5, 2), (1, 20), (4, 5)):
        prompt, answer = (random.integers(3, 96, num).astype(np.int32) for num in (num_prompt, num_answer))
        made.append(TrainSample(prompt, answer, np.zeros(num_answer, np.float32), 0.0))
    return made


def reference(folder: str, temperature: float) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Log-probabilities by transformers alone, sample by sample in float64; the gradient of the sum of squares."""
    model: Any = families_of.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float64, experts_implementation="eager"
    ).eval()
    found: list[torch.Tensor] = []
    for one in samples():
        tokens = torch.from_numpy(np.concatenate([one.prompt, one.answer]).astype(np.int64))
        logits = model(input_ids=tokens[None], use_cache=False).logits[0] / temperature
        rows = torch.log_softmax(logits[len(one.prompt) - 1 : -1], -1)
        found.append(rows.gather(1, tokens[len(one.prompt) :, None])[:, 0])
    together = torch.cat(found).double()  # the logits of Mamba are float32, whatever its weights are
    together.square().sum().backward()
    return together.detach(), {name: one.grad for name, one in model.named_parameters() if one.grad is not None}


@pytest.mark.parametrize("name", CONFIGS)
def test_values_and_gradients_are_those_of_one_sample_at_a_time(name: str, tmp_path: Path) -> None:
    settings, rows = CONFIGS[name]
    folder = save(name, settings, tmp_path / "model")
    policy = Policy.load(folder, "float32", "cpu", gradient_checkpointing=True)
    assert policy.loaded.rows == rows

    found = policy.score(pack(samples(), range(4)), 0.7).logprobs
    found.square().sum().backward()

    wanted, gradients = reference(folder, 0.7)
    torch.testing.assert_close(found.detach().double(), wanted, rtol=2e-4, atol=2e-5)
    largest = max(float(one.abs().max()) for one in gradients.values())
    for key, one in policy.parameters().items():
        if key in gradients:
            assert one.grad is not None, key
            apart = float((one.grad.double() - gradients[key]).abs().max())
            assert apart < 2e-5 * largest, (key, apart, largest)


@pytest.mark.parametrize("name", ["GPT2", "Bloom", "Olmoe", "Qwen3Moe", "Mixtral"])
def test_tensors_have_the_names_of_the_files(name: str, tmp_path: Path) -> None:
    more = {
        "Qwen3Moe": {"num_experts": 4, "head_dim": 8, "moe_intermediate_size": 24},
        "Mixtral": {"num_local_experts": 4},
    }
    settings = {**_EXPERTS, **more[name]} if name in more else CONFIGS[name][0]
    folder = save(name, settings, tmp_path / "model")
    policy = Policy.load(folder)
    found = {
        its: tensor
        for key, one in policy.parameters().items()
        for its, tensor in families.in_files(policy.model, key, one.detach())
    }
    with safe_open(tmp_path / "model" / "model.safetensors", "pt") as file:
        wanted = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[key], wanted[key]) for key in wanted)


def test_a_model_whose_tokens_see_later_ones_is_refused(tmp_path: Path) -> None:
    folder = save("Bert", {**_WIDE, "is_decoder": False}, tmp_path / "model")
    with pytest.raises(UserError, match="BertLMHeadModel cannot be trained: its tokens see later ones"):
        Policy.load(folder)


def test_a_model_that_fails_while_it_is_tried_is_one_line(tmp_path: Path) -> None:
    folder = save("GPT2", {**CONFIGS["GPT2"][0], "n_positions": 4}, tmp_path / "model")
    with pytest.raises(UserError, match="GPT2LMHeadModel cannot be trained: it fails on a few tokens: IndexError"):
        Policy.load(folder)


@pytest.mark.parametrize(
    ("settings", "refused"),
    [
        ((), "the builtin engine does not run GPT2LMHeadModel"),
        (
            ("train.local_generation=false", "validation.at_start=false"),
            "the builtin engine does not run GPT2LMHeadModel",
        ),
        (("train.local_generation=false", "validation.at_start=false", "fleet.engine=vllm"), ""),
    ],
)
def test_only_a_served_engine_generates_with_another_family(
    settings: tuple[str, ...], refused: str, tmp_path: Path
) -> None:
    folder = save("GPT2", CONFIGS["GPT2"][0], tmp_path / "model")
    recipe = load_recipe(
        "arithmetic", ["train.mode=async", "validation.every_steps=0", f"model.path={folder}", *settings]
    )
    if refused:
        with pytest.raises(ConfigError, match=refused):
            fit(recipe)
    else:
        assert fit(recipe).train.local_generation is False


def test_a_version_holds_the_tensors_of_the_files(tmp_path: Path) -> None:
    folder = save("Olmoe", CONFIGS["Olmoe"][0], tmp_path / "model")
    policy = Policy.load(folder)
    publishing = Publishing(policy, cast("Any", None), None, as_in_files=True)
    layout = publishing._layout
    out = memoryview(bytearray(layout.num_bytes))
    publishing._fill(None, out)
    with safe_open(tmp_path / "model" / "model.safetensors", "pt") as file:
        wanted = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    assert {one.name for one in layout.tensors} == wanted.keys()
    for one in layout.tensors:
        assert torch.equal(tensors.entry_tensor(one, out), wanted[one.name]), one.name
