"""Which models run, and loading one from a Hugging Face directory. What does not is refused by name."""

import json
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from polyrl.engines.builtin import attention
from polyrl.engines.engine import EngineError

ARCHITECTURES = frozenset(
    {
        "LlamaForCausalLM",
        "MistralForCausalLM",
        "Qwen2ForCausalLM",
        "Qwen3ForCausalLM",
        "SmolLM3ForCausalLM",
        "GemmaForCausalLM",
        "Gemma2ForCausalLM",
        "Gemma3ForCausalLM",
        "Qwen3MoeForCausalLM",
        "MixtralForCausalLM",
    }
)
"""Standard decoders: their attention goes through transformers' interface, with nothing else that keeps state."""

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class Loaded(NamedTuple):
    model: Any
    name: str
    vocab: int
    max_context: int
    num_layers: int
    num_kv_heads: int
    head_dim: int
    end_ids: frozenset[int]


def load(folder: str, dtype: str, device: str) -> Loaded:
    """Raises EngineError, in a line that names the directory."""
    path = Path(folder)
    if not (path / "config.json").is_file():
        raise EngineError(f"{folder}: no config.json there; expected a Hugging Face model directory")
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, KeyError, json.JSONDecodeError) as error:
        raise EngineError(f"{folder}: its config.json cannot be read: {_first_line(error)}") from error
    check_architecture(folder, config)
    attention.register()
    try:
        model, report = AutoModelForCausalLM.from_pretrained(
            folder,
            local_files_only=True,
            dtype=DTYPES[dtype],
            attn_implementation=attention.NAME,
            output_loading_info=True,
        )
    except (OSError, ValueError, RuntimeError, KeyError) as error:
        raise EngineError(f"{folder}: its weights cannot be loaded: {_first_line(error)}") from error
    _check_tensors(folder, report)
    return describe(model.to(device).eval(), folder)


def check_architecture(folder: str, config: Any) -> None:
    names = getattr(config, "architectures", None) or ["none"]
    if names[0] not in ARCHITECTURES:
        known = ", ".join(sorted(name.removesuffix("ForCausalLM") for name in ARCHITECTURES))
        raise EngineError(f"{folder}: {names[0]} is not supported; supported are {known}")


def _check_tensors(folder: str, report: dict[str, Any]) -> None:
    for what in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        found = sorted(map(str, report.get(what) or ()))
        if found:
            some = ", ".join(found[:3])
            raise EngineError(f"{folder}: {what.replace('_', ' ')} in its weights: {some}; {len(found)} in all")


def describe(model: Any, name: str) -> Loaded:
    """What the engine must know of a model that is there already: a trainer's, for example."""
    config = model.config.get_text_config()
    attention.register()
    if config._attn_implementation != attention.NAME:
        model.set_attn_implementation(attention.NAME)
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    ends = model.generation_config.eos_token_id if model.generation_config is not None else None
    ends = config.eos_token_id if ends is None else ends
    end_ids = frozenset(() if ends is None else [ends] if isinstance(ends, int) else ends)
    return Loaded(
        model=model,
        name=name,
        vocab=config.vocab_size,
        max_context=config.max_position_embeddings,
        num_layers=config.num_hidden_layers,
        num_kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=head_dim,
        end_ids=end_ids,
    )


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
