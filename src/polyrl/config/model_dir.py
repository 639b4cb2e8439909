"""The one reader of a Hugging Face directory's JSON files, without any library of models.

Rules kept here: `read_facts` passes over files that are missing or damaged unless it is strict: the code that loads the
model reports them. The tokens that end an answer are those of generation_config.json, or else of config.json. Settings
of a model for text and images are those of its `text_config`.
"""

import json
from pathlib import Path
from typing import Any, NamedTuple

from polyrl.errors import ConfigError, one_line

_CONTEXT_KEYS = ("max_position_embeddings", "n_positions", "max_sequence_length", "seq_length")
_UNKNOWN_KV_NUMBERS = 32_768
"""The KV numbers per token of an unknown model: 32 layers of 8 heads of 64, keys and values."""


class ModelFacts(NamedTuple):
    name: str
    config: dict[str, Any]
    """The content of config.json; the keys of its `text_config` replace its own."""
    vocab: int | None
    max_context: int | None
    end_ids: frozenset[int]
    """Tokens that end an answer."""
    known_end_ids: frozenset[int]
    """Tokens that either file calls an end of text: none is part of an answer's text."""

    @property
    def kv_numbers(self) -> int:
        """Numbers that a token takes in the cache of plain attention; some models need fewer."""
        try:
            heads = int(self.config["num_attention_heads"])
            kv_heads = int(self.config.get("num_key_value_heads") or heads)
            head_dim = int(self.config.get("head_dim") or self.config["hidden_size"] // heads)
            return 2 * int(self.config["num_hidden_layers"]) * kv_heads * head_dim
        except (KeyError, TypeError, ValueError, ArithmeticError):
            return _UNKNOWN_KV_NUMBERS


def read_facts(folder: str | Path, *, strict: bool = False) -> ModelFacts:
    """Read a model's facts. `strict`: raise ConfigError for a file that cannot be read, and for a model without a
    vocabulary size."""
    said = read_object(folder, "config.json") if strict else read_or_nothing(folder, "config.json")
    has_generation = (Path(folder) / "generation_config.json").is_file()
    read = read_object if strict and has_generation else read_or_nothing
    generation = read(folder, "generation_config.json")
    text = said.get("text_config")
    config = {**said, **text} if isinstance(text, dict) else said
    vocab = _integer(config.get("vocab_size"))
    if strict and (vocab is None or vocab < 1):
        raise ConfigError(f"{folder}: config.json: vocab_size: got {vocab!r}, expected the number of token ids")
    contexts = [config[key] for key in _CONTEXT_KEYS if _integer(config.get(key)) is not None]
    of_generation, of_config = (token_ids(one.get("eos_token_id")) for one in (generation, config))
    ends = of_config if generation.get("eos_token_id") is None else of_generation
    known = of_generation | of_config | token_ids(said.get("eos_token_id"))
    return ModelFacts(Path(folder).resolve().name, config, vocab, contexts[0] if contexts else None, ends, known)


def read_object(folder: str | Path, name: str) -> dict[str, Any]:
    """Raises ConfigError."""
    try:
        value = json.loads((Path(folder) / name).read_bytes())
    except FileNotFoundError as error:
        raise ConfigError(f"{folder}: no {name} there; expected a Hugging Face model directory") from error
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{folder}: its {name} cannot be read: {one_line(error)}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{folder}: its {name} holds no object")
    return value


def read_or_nothing(folder: str | Path, name: str) -> dict[str, Any]:
    try:
        return read_object(folder, name)
    except ConfigError:
        return {}


def _integer(value: Any) -> int | None:
    return value if isinstance(value, int) else None


def token_ids(said: Any) -> frozenset[int]:
    """Return the ids of a setting that holds one, a list of them or nothing, as `eos_token_id` does."""
    return frozenset(one for one in (said if isinstance(said, list) else [said]) if isinstance(one, int))
