"""Tiny random models of every family that the builtin engine runs, as Hugging Face directories."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

SHARED: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "eos_token_id": 1,
    "bos_token_id": 2,
    "pad_token_id": 0,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {"head_dim": 16},
    "mistral": {"sliding_window": 24, "head_dim": 16},
    "smollm3": {},
    "gemma": {"head_dim": 16},
    "gemma2": {"head_dim": 16, "sliding_window": 24, "query_pre_attn_scalar": 16},
    "gemma3_text": {"head_dim": 16, "sliding_window": 24, "query_pre_attn_scalar": 16},
    "qwen3_moe": {"head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
}


def save_tiny(family: str, folder: Path, *, seed: int = 0, **changes: Any) -> Path:
    """A model with random weights, large enough in spread that greedy answers differ from token to token."""
    torch.manual_seed(seed)
    config = CONFIG_MAPPING[family](**{**SHARED, **FAMILIES[family], **changes})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 0.08 if "embed" not in name else 0.5)
    model.save_pretrained(folder)
    return folder
