"""What a Hugging Face directory says of its model, read without any library of models."""

from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from polyrl.engines.engine import EngineError

_CONTEXT_KEYS = ("max_position_embeddings", "n_positions", "max_sequence_length", "seq_length")

_UNKNOWN_KV_NUMBERS = 32_768
"""32 layers of 8 heads of 64."""


class ModelFacts(NamedTuple):
    name: str
    vocab: int
    max_context: int | None
    end_ids: frozenset[int]
    kv_numbers: int
    """That a token takes in the cache of plain attention; more than some models need."""


def read(folder: str) -> ModelFacts:
    """Raises EngineError for what is no model directory."""
    config = _load(Path(folder) / "config.json", needed=True)
    text = config.get("text_config")
    config = {**config, **text} if isinstance(text, dict) else config
    vocab = config.get("vocab_size")
    if not isinstance(vocab, int) or vocab < 1:
        raise EngineError(f"{folder}/config.json: vocab_size is {vocab!r}; expected the number of token ids")
    contexts = [config[key] for key in _CONTEXT_KEYS if isinstance(config.get(key), int)]
    generation = _load(Path(folder) / "generation_config.json", needed=False)
    ends = generation.get("eos_token_id")
    ends = config.get("eos_token_id") if ends is None else ends
    end_ids = frozenset([ends] if isinstance(ends, int) else ends if isinstance(ends, list) else ())
    name = Path(folder).resolve().name
    return ModelFacts(name, vocab, contexts[0] if contexts else None, end_ids, _kv_numbers(config))


def _kv_numbers(config: dict[str, Any]) -> int:
    try:
        heads = int(config["num_attention_heads"])
        kv_heads = int(config.get("num_key_value_heads") or heads)
        head_dim = int(config.get("head_dim") or config["hidden_size"] // heads)
        return 2 * int(config["num_hidden_layers"]) * kv_heads * head_dim
    except (KeyError, TypeError, ValueError):
        return _UNKNOWN_KV_NUMBERS


def _load(path: Path, *, needed: bool) -> dict[str, Any]:
    try:
        loaded = msgspec.json.decode(path.read_bytes())
    except FileNotFoundError as error:
        if not needed:
            return {}
        raise EngineError(f"{path} is not there; expected a Hugging Face model directory") from error
    except (OSError, msgspec.DecodeError) as error:
        raise EngineError(f"{path} cannot be read: {error}") from error
    if not isinstance(loaded, dict):
        raise EngineError(f"{path}: expected an object")
    return loaded
