"""Tiny random models of every family that the builtin engine runs, as Hugging Face directories."""

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.utils import logging as transformers_logging

torch.set_num_threads(1)
transformers_logging.disable_progress_bar()

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
    "gemma2": {
        "head_dim": 16,
        "sliding_window": 24,
        "query_pre_attn_scalar": 16,
        "attn_logit_softcapping": 5.0,
    },
    "gemma3_text": {"head_dim": 16, "sliding_window": 24, "query_pre_attn_scalar": 16},
    "qwen3_moe": {"head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
}


def save_tiny(
    family: str, folder: Path, *, seed: int = 0, max_shard_size: str = "1GB", tokenizer: bool = False, **changes: Any
) -> Path:
    """A model with random weights whose greedy answers wander: the layers outweigh the embedding of the last token.

    Where the embedding is the output layer too, it must be small, else the last token is repeated for ever.
    """
    torch.manual_seed(seed)
    config = CONFIG_MAPPING[family](**{**SHARED, **FAMILIES[family], **changes})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                is_embedding = "embed" in name
                parameter.normal_(0.0, 0.25 if not is_embedding else 0.03 if config.tie_word_embeddings else 0.5)
        if config.tie_word_embeddings:
            model.model.norm.weight.fill_(8.0)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    if tokenizer:
        save_letters(folder, config.vocab_size)
    return folder


def letters_of(tokens: list[int]) -> str:
    """What the tokenizer of `save_letters` makes of an answer."""
    return "".join(_letter(token) for token in tokens)


def _letter(token: int) -> str:
    return chr(0x4E00 + token)


def save_letters(folder: Path, vocab: int, **settings: Any) -> None:
    """A tokenizer whose tokens are letters, each one's text its own: what is decoded is plain to see."""
    letters = Tokenizer(models.BPE({_letter(token): token for token in range(vocab)}, []))
    letters.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(tokenizer_object=letters, **settings).save_pretrained(folder)
