"""A model's configuration, checked before any weight is read: settings that cannot run are refused by name."""

import json
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, GenerationConfig
from transformers.activations import ACT2FN

from polyrl.config import model_dir
from polyrl.engines.builtin.quiet import quiet
from polyrl.engines.engine import EngineError
from polyrl.errors import ConfigError, one_line

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
_AT_LEAST_1 = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
    "query_pre_attn_scalar",
    "decoder_sparse_step",
    "num_experts_per_tok",
)
"""Keys of config.json."""
FIXED_ROTATIONS = ("default", "linear", "llama3", "yarn")
"""Kinds of positions whose angles depend on the position alone."""
_ROPE_TYPES = (*FIXED_ROTATIONS, "dynamic")
"""Within the model's context these turn a position by one angle, whatever other samples are in the step. longrope does
not: its angles follow from the longest sample."""

_INDEX = "model.safetensors.index.json"
_COMPUTED_BY = (
    "model_type",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "rms_norm_eps",
    "layer_types",
    "sliding_window",
    "no_rope_layers",
    "query_pre_attn_scalar",
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "num_experts_per_tok",
    "norm_topk_prob",
)
"""Keys of a config that say what a model computes, beside its weights, their names and their shapes. There are many
others, and each library that saves a model adds some."""
_ROPE_ALIASES = ("type", "partial_rotary_factor")
"""Older files' name of rope_type; and a factor that is 1, since others are refused."""
_LAYER_TYPES = ("full_attention", "sliding_attention")


def load_config(folder: str, *, any_family: bool = False) -> Any:
    """Load a model's configuration. `any_family`: for a trainer, which runs more than the engine does. Raises
    EngineError."""
    _check_config(folder, read_object(folder, "config.json"), any_family=any_family)
    _check_generation_config(folder)
    with quiet():
        try:
            config = AutoConfig.from_pretrained(folder, local_files_only=True)
        except Exception as error:  # transformers has no type of its own for what it cannot load
            raise EngineError(f"{folder}: its config.json cannot be used: {one_line(error)}") from error
    if not any_family:
        _check_attention(folder, config)
    return config


def _check_config(folder: str, config: dict[str, Any], *, any_family: bool) -> None:
    """Say in our own words what is wrong, where it can be seen before transformers looks."""
    names = config.get("architectures")
    name: Any = names[0] if isinstance(names, list) and names else "a model without a named architecture"
    if not (isinstance(names, list) and names and isinstance(name, str)) or (
        name not in ARCHITECTURES and not any_family
    ):
        known = ", ".join(sorted(one.removesuffix("ForCausalLM") for one in ARCHITECTURES))
        raise EngineError(f"{folder}: {name} is not supported; supported are {known}")
    if config.get("quantization_config") is not None:
        raise EngineError(f"{folder}: quantised weights are not supported")
    for key in _AT_LEAST_1:
        if isinstance(number := config.get(key), int) and number < 1:
            raise EngineError(f"{folder}: config.json: {key}: got {number}, expected at least 1")
    for key in ("hidden_act", "hidden_activation"):
        act = config.get(key)
        if act is not None and not (isinstance(act, str) and act in ACT2FN):
            raise EngineError(f"{folder}: config.json: {key}: got {json.dumps(act)}, expected one such as silu")
    pad, vocab = config.get("pad_token_id"), config.get("vocab_size")
    if isinstance(pad, int) and isinstance(vocab, int) and pad >= vocab:
        raise EngineError(f"{folder}: config.json: pad_token_id: got {pad}, expected less than vocab_size, {vocab}")
    for key in ("dtype", "torch_dtype"):
        dtype = config.get(key)
        if dtype is not None and not isinstance(getattr(torch, str(dtype), None), torch.dtype):
            raise EngineError(f"{folder}: config.json: {key}: got {json.dumps(dtype)}, expected one such as float32")


def _check_generation_config(folder: str) -> None:
    """transformers passes over a file that it cannot read, and with it over the tokens that end an answer."""
    name = "generation_config.json"
    if not (Path(folder) / name).is_file():
        return
    ends = read_object(folder, name).get("eos_token_id")
    if ends is not None and any(type(one) is not int for one in (ends if isinstance(ends, list) else [ends])):
        raise EngineError(
            f"{folder}: {name}: eos_token_id: got {json.dumps(ends)}, expected an integer or a list of integers"
        )
    with quiet():
        try:
            GenerationConfig.from_pretrained(folder, local_files_only=True)
        except Exception as error:  # as in `load_config`
            raise EngineError(f"{folder}: its {name} cannot be used: {one_line(error)}") from error


def rope_kinds(config: Any) -> set[str]:
    return {str(one.get("rope_type", "default")) for one in _ropes(config)}


def _ropes(config: Any) -> list[dict[str, Any]]:
    """Return the RoPE parameters; some families have one set for each type of layer."""
    rope: dict[str, Any] = getattr(config, "rope_parameters", None) or {}
    return [one for one in (rope, *rope.values()) if isinstance(one, dict)]


def _check_attention(folder: str, config: Any) -> None:
    for kind in sorted(rope_kinds(config) - set(_ROPE_TYPES)):
        raise EngineError(
            f"{folder}: config.json: rope_type {kind} is not supported; supported are {', '.join(_ROPE_TYPES)}"
        )
    if getattr(config, "use_bidirectional_attention", None) or not getattr(config, "is_causal", True):
        raise EngineError(
            f"{folder}: its attention to later tokens is not supported (use_bidirectional_attention, is_causal)"
        )
    for one in (config.to_dict(), *_ropes(config)):
        if (part := one.get("partial_rotary_factor")) not in (None, 1):
            raise EngineError(f"{folder}: config.json: partial_rotary_factor: got {part}, expected none")
    window = getattr(config, "sliding_window", None)
    if window is not None and (type(window) is not int or window < 1):
        raise EngineError(
            f"{folder}: config.json: sliding_window: got {json.dumps(window)}, expected an integer from 1 on"
        )
    kinds = getattr(config, "layer_types", None) or ()
    for kind in kinds:
        if kind not in _LAYER_TYPES:
            raise EngineError(
                f"{folder}: config.json: layer_types: {kind} is not supported; supported are {', '.join(_LAYER_TYPES)}"
            )
    if "sliding_attention" in kinds and window is None:
        raise EngineError(f"{folder}: config.json: sliding_window: expected an integer, as layer_types has them")


def files_of_weights(folder: str) -> list[str]:
    """Return the files that transformers loads. Raises EngineError for an index that does not name them."""
    if (Path(folder) / "model.safetensors").is_file():
        return ["model.safetensors"]
    if not (Path(folder) / _INDEX).is_file():
        return []
    index = read_object(folder, _INDEX)
    files = index.get("weight_map")
    if not isinstance(files, dict) or not files or not all(isinstance(one, str) for one in files.values()):
        raise EngineError(f"{folder}: {_INDEX}: weight_map: expected the name of a file for each tensor")
    if not isinstance(index.get("metadata"), dict):
        raise EngineError(f"{folder}: {_INDEX}: metadata: expected an object")
    return sorted(set(files.values()))


def read_object(folder: str, name: str) -> dict[str, Any]:
    try:
        return model_dir.read_object(folder, name)
    except ConfigError as error:
        raise EngineError(str(error)) from error


def slides(config: Any) -> bool:
    """Return whether a layer has a sliding window."""
    kinds = getattr(config, "layer_types", None)
    return "sliding_attention" in kinds if kinds else getattr(config, "sliding_window", None) is not None


def why_another(ours: Any, theirs: Any) -> str:
    """Return which setting makes a model compute something else with the same weights; empty when none does."""
    for key in _COMPUTED_BY:
        one, other = getattr(ours, key, None), getattr(theirs, key, None)
        if one != other:
            return f"{key}: got {other}, expected {one}"
    one, other = _plain_rope(ours.rope_parameters), _plain_rope(theirs.rope_parameters)
    return "" if one == other else f"rope_parameters: got {other}, expected {one}"


def _plain_rope(value: Any) -> Any:
    """Return the rope settings without duplicates; some families have one for each type of layer."""
    if not isinstance(value, dict):
        return value
    return {key: _plain_rope(one) for key, one in value.items() if key not in _ROPE_ALIASES}
