"""Text to tokens and back, with the tokenizer in a model's directory.

Rules kept here: nothing is downloaded. A chat is written with the tokenizer's own template, up to where the answer
begins; plain text gets the tokenizer's usual special tokens. An answer is decoded without the token that ends it.
"""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from polyrl.config.model_dir import read_facts, read_or_nothing
from polyrl.config.places import check_model_dir
from polyrl.data.prompts import Messages
from polyrl.data.rows import DataError
from polyrl.errors import ConfigError

TokenIds = np.ndarray[tuple[int], np.dtype[np.int32]]

TOKENIZER_FILES = ("tokenizer", "special_tokens", "vocab", "merges", "added_tokens", "chat_template")
"""The prefixes of the names of all files that determine the tokens of a text."""
_KEY = "model.path"
_NOTHING: Mapping[str, Any] = {}


class ModelTokenizer:
    def __init__(self, folder: str) -> None:
        """Load the tokenizer. Raises ConfigError for a directory without a usable tokenizer."""
        self._folder = folder
        self._tokenizer = _load(folder)
        self._tokenizer("")  # resets truncation and padding, once: no other thread may use the tokenizer meanwhile
        self._decode = _decoder(self._tokenizer)
        facts, own_end = read_facts(folder), self._tokenizer.eos_token_id
        self._end_ids = facts.known_end_ids | (frozenset() if own_end is None else {own_end})
        self._vocabulary = facts.vocab
        self.max_context: int | None = facts.max_context
        """The model's context length, from its config.json."""

    def written(self, prompt: str | Messages, chat: Mapping[str, Any] = _NOTHING) -> str:
        """Return the prompt as the model sees it. `chat` holds further arguments of the chat template."""
        if isinstance(prompt, str):
            return prompt
        if not self._tokenizer.chat_template:
            raise ConfigError(f"{_KEY}: {self._folder}: its tokenizer has no chat template; expected one, for messages")
        try:
            return self._tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=False, **chat)
        except Exception as error:  # a template is a program, and raises errors of its own for roles that it refuses
            raise DataError(f"{self._folder}: its chat template refuses the messages: {_line(error)}") from error

    def tokens(self, prompts: Sequence[str | Messages], chat: Mapping[str, Any] = _NOTHING) -> list[TokenIds]:
        """Tokenize many prompts at once, which is faster than one by one."""
        texts = [self.written(prompt, chat) for prompt in prompts]
        plain = [place for place, prompt in enumerate(prompts) if isinstance(prompt, str)]
        chats = [place for place, prompt in enumerate(prompts) if not isinstance(prompt, str)]
        found: dict[int, TokenIds] = {}
        for places, special in ((plain, True), (chats, False)):
            if places:
                lists = self._tokenizer([texts[place] for place in places], add_special_tokens=special)["input_ids"]
                found |= {place: np.array(ids, dtype=np.int32) for place, ids in zip(places, lists, strict=True)}
        self._check(found.values())
        return [found[place] for place in range(len(prompts))]

    def _check(self, found: Iterable[TokenIds]) -> None:
        """Raise ConfigError for a token outside of the model's vocabulary.

        Some tokenizers know tokens that their model lacks, so only tokens that occur in the data matter.
        """
        largest = max((int(one.max()) for one in found if len(one)), default=0)
        if self._vocabulary is not None and largest >= self._vocabulary:
            raise ConfigError(
                f"{_KEY}: {self._folder}: its tokenizer does not match the model: it writes token {largest}, and "
                f"config.json has vocab_size {self._vocabulary}"
            )

    @property
    def chat_template(self) -> str:
        """The chat template, or the first of several; empty if there is none."""
        found = self._tokenizer.chat_template or ""
        return found if isinstance(found, str) else next(iter(found.values()), "")

    def written_out(self, tokens: Sequence[int]) -> str:
        """Decode tokens, with special ones written out."""
        return self._decode(list(tokens))

    def text(self, answer: Sequence[int]) -> str:
        """Decode an answer, without the tokens that end it."""
        return self._decode(_without_end(answer, self._end_ids))


def answer_decoder(folder: str) -> Callable[[Sequence[int]], str]:
    """Return what `ModelTokenizer.text` is, for code that only reads: where tokenizer.json says it all, nothing imports
    transformers, which takes seconds. Raises ConfigError for a directory without a usable tokenizer."""
    check_tokenizer(folder)
    said = read_or_nothing(folder, "tokenizer_config.json")
    backend = _backend(folder, said)
    if backend is None:
        return ModelTokenizer(folder).text
    end = said.get("eos_token", read_or_nothing(folder, "special_tokens_map.json").get("eos_token"))
    own_end = backend.token_to_id(str(end.get("content")) if isinstance(end, dict) else str(end))
    end_ids = read_facts(folder).known_end_ids | (frozenset() if own_end is None else {own_end})
    return lambda answer: backend.decode(_without_end(answer, end_ids), skip_special_tokens=False)


def _backend(folder: str, said: Mapping[str, Any]) -> Any:
    """Return what tokenizer.json describes; None where it cannot be read, or lacks tokens that are added elsewhere."""
    from tokenizers import Tokenizer

    try:
        found = Tokenizer.from_file(str(Path(folder) / "tokenizer.json"))
        added = [found.id_to_token(int(number)) for number in said.get("added_tokens_decoder", {})]
    except Exception:  # noqa: BLE001  tokenizers raises Exception itself; transformers says what is wrong, or can read it
        return None
    return None if None in added else found


def _without_end(answer: Sequence[int], end_ids: frozenset[int]) -> list[int]:
    num = len(answer)
    while num and answer[num - 1] in end_ids:
        num -= 1
    return list(answer[:num])


def check_same_tokens(path: str, other: str, key: str) -> None:
    """Check that `other`, which the setting `key` names, has every token of the model in `path` under the same id.

    If it has no tokenizer, only the sizes of the vocabularies are compared. Raises ConfigError.
    """
    check_model_dir(other, key)
    ours: dict[str, int] = _load(path).get_vocab()
    if _has_tokenizer(other):
        theirs: dict[str, int] = _load(other, key).get_vocab()
        for token, number in sorted(ours.items(), key=lambda item: item[1]):
            if theirs.get(token) != number:
                known = f"{theirs[token]} there" if token in theirs else "not known there"
                raise ConfigError(
                    f"{key}: {other}: its tokenizer is another than that of {_KEY}, {path}: {token!r} is token "
                    f"{number} here, and {known}; expected a model with the same tokens"
                )
    here, there = (read_facts(one).vocab for one in (path, other))
    if here is not None and there is not None and there < (least := min(here, max(ours.values(), default=0) + 1)):
        raise ConfigError(
            f"{key}: {other}: has {there:,} tokens (vocab_size), and {_KEY}, {path}, uses {least:,}; expected a model "
            "with the same tokens"
        )


def _has_tokenizer(folder: str) -> bool:
    return any((Path(folder) / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "vocab.json"))


def check_tokenizer(folder: str, key: str = _KEY) -> None:
    """Check that a model's directory has a tokenizer, without loading it. Raises ConfigError."""
    check_model_dir(folder, key)
    if not _has_tokenizer(folder):
        raise ConfigError(f"{key}: {folder}: no tokenizer there; expected tokenizer.json beside the weights")


def _load(folder: str, key: str = _KEY) -> Any:
    check_tokenizer(folder, key)
    from transformers import AutoTokenizer
    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_error()
    logging.getLogger("transformers").setLevel(logging.ERROR)
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # transformers raises many kinds of errors here
        raise ConfigError(f"{key}: {folder}: its tokenizer cannot be used: {_line(error)}") from error


def _decoder(tokenizer: Any) -> Callable[[list[int]], str]:
    """Return a function from tokens to text.

    It calls the backend directly: transformers' wrapper looks at every token in Python, which takes several times as
    long as the decoding.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return lambda tokens: tokenizer.decode(tokens, clean_up_tokenization_spaces=False)
    return lambda tokens: backend.decode(tokens, skip_special_tokens=False)


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300]
