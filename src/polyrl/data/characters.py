"""The arithmetic task's tokenizer: one token per character, saved in Hugging Face's format.

Rules kept here: token ids never change, so that a model made today can read tomorrow's prompts. A character outside of
the alphabet becomes the unknown token.
Left out: all other tokenizers, which transformers reads (data/tokens.py).
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

PAD, END, UNKNOWN = "<pad>", "<end>", "<unknown>"
PAD_ID, END_ID, UNKNOWN_ID = 0, 1, 2
ALPHABET = "0123456789=abcdefghijklmnopqrstuvwxyz"
VOCABULARY = (PAD, END, UNKNOWN, *ALPHABET)

_ID_OF = {token: index for index, token in enumerate(VOCABULARY)}


def encode(text: str) -> list[int]:
    return [_ID_OF.get(character, UNKNOWN_ID) for character in text]


def decode(tokens: list[int]) -> str:
    """Return the text, without special tokens."""
    return "".join(VOCABULARY[token] for token in tokens if UNKNOWN_ID < token < len(VOCABULARY))


def save_tokenizer(folder: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json. transformers' AutoTokenizer reads them."""
    save_words(folder, VOCABULARY, {"String": ""})


def save_words(folder: Path, vocabulary: Sequence[str], between: dict[str, str]) -> None:
    """Write a tokenizer of whole words. It begins with the marks above; `between` is the pattern that parts a text, as
    {"String": ...} or {"Regex": ...}, and what it finds is a word too."""
    _write(folder / "tokenizer.json", _tokenizer(vocabulary, between))
    special = {"pad_token": PAD, "eos_token": END, "unk_token": UNKNOWN}
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **special}
    _write(folder / "tokenizer_config.json", settings)


def _tokenizer(vocabulary: Sequence[str], between: dict[str, str]) -> dict[str, Any]:
    """Return the tokenizer in the tokenizers library's format: split into words, look each one up, join."""
    id_of = {token: index for index, token in enumerate(vocabulary)}
    marks = [
        {
            "id": id_of[mark],
            "content": mark,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
        for mark in (PAD, END, UNKNOWN)
    ]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": marks,
        "normalizer": None,
        "pre_tokenizer": {"type": "Split", "pattern": between, "behavior": "Isolated", "invert": False},
        "post_processor": None,
        "decoder": {"type": "Fuse"},
        "model": {"type": "WordLevel", "vocab": id_of, "unk_token": UNKNOWN},
    }


def _write(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
