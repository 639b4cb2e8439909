"""Text to tokens, and tokens to text while they come, with the `tokenizer.json` of a model's directory.

Rules kept here: a text that is longer than any prompt can be is refused before it is tokenized, which takes seconds a
megabyte. Text that was shown is never taken back: half a character, and text that may become a stop string, wait. All
text that was shown is, together, the tokenizer's decoding of the whole answer.
"""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from polyrl.config.model_dir import read_facts
from polyrl.data.text_parts import load_text_parts
from polyrl.manager.serving.requests import AskError, wrong

if TYPE_CHECKING:
    from polyrl.data.chat_template import ChatTemplate

NOT_A_CHARACTER = "\ufffd"
_NUM_THREADS = 2
_BYTES_PER_TOKEN = 16
"""More than the average of a prompt in any language."""
_LONG_CONTEXT = 131072
"""The context of a model that does not say how long it is."""
_LONGEST_WINDOW = 64
"""Tokens in a row without a whole character, before they are taken for none."""


class TokenDecoder(Protocol):
    """The part of a model that a `Reader` needs."""

    end_ids: frozenset[int]

    def decode(self, tokens: Sequence[int]) -> str: ...


class TextModel:
    """A model's tokenizer, chat template and end tokens."""

    def __init__(
        self,
        tokenizer: Any,
        *,
        template: "ChatTemplate | None",
        end_ids: frozenset[int],
        max_context: int | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._max_context = _LONG_CONTEXT if max_context is None else max_context
        self._template = template
        self.end_ids = end_ids
        self._threads = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="tokenizer")

    async def tokens(self, text: str) -> list[int]:
        return await self._in_thread(lambda: self._encode(text, special=True))

    async def chat_tokens(self, messages: list[dict[str, Any]], options: dict[str, Any]) -> list[int]:
        if self._template is None:
            raise AskError(400, "this model has no chat template; ask at /v1/completions")
        from polyrl.manager.serving.chats import render_chat

        template = self._template
        return await self._in_thread(lambda: self._encode(render_chat(template, messages, options), special=False))

    async def _in_thread(self, encode: Callable[[], list[int]]) -> list[int]:
        """Encode in a thread: a long text takes seconds. The threads are our own: the loop's are the journal's."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, encode)

    def _encode(self, text: str, *, special: bool) -> list[int]:
        """Encode as a batch of one: `encode` holds the interpreter's lock until it is done, a batch does not."""
        most = self._max_context * _BYTES_PER_TOKEN
        num_bytes = len(text) if len(text) > most else len(text.encode(errors="replace"))
        if num_bytes > most:
            message = (
                f"a text of {num_bytes} bytes; at most {most} are read, for a context of {self._max_context} tokens"
            )
            raise AskError(400, message, param="prompt", code="context_length_exceeded")
        return self._tokenizer.encode_batch_fast([text], add_special_tokens=special)[0].ids

    def decode(self, tokens: Sequence[int]) -> str:
        return self._tokenizer.decode(list(tokens), skip_special_tokens=True)

    def show(self, token: int) -> str:
        """Return one token's text, be it special or not."""
        return self._tokenizer.decode([token], skip_special_tokens=False)


class Served(NamedTuple):
    """A model's directory, as far as the manager needs it."""

    name: str
    text: TextModel
    max_context: int | None


def load(folder: Path) -> Served:
    """Load a model's directory. Raises UserError for one that cannot be served in text."""
    tokenizer, template = load_text_parts(folder)
    facts = read_facts(folder)
    text = TextModel(tokenizer, template=template, end_ids=facts.known_end_ids, max_context=facts.max_context)
    return Served(facts.name, text, facts.max_context)


class Reader:
    """Reads one answer as it comes. Without a model there is no text, and tokens are only counted."""

    def __init__(self, model: TokenDecoder | None, stops: Sequence[str]) -> None:
        if stops and model is None:
            raise wrong("stop", "this manager has no tokenizer, so there is no text; give stop_token_ids")
        self._model = model
        self._stops = stops
        self._text = ""
        self._num_shown = 0
        """Characters before any stop string, and before text that may become one."""
        self.num_tokens = 0
        """Tokens of the answer: all, or up to the one that completed a stop string."""
        self.is_stopped = False
        self._ids: list[int] = []
        self._begin = 0
        """Where the window that is decoded begins: one whole character back, so that a tokenizer that writes a word's
        space before the word sees what stands in front of it."""
        self._whole = 0
        """The token after the last whole character."""
        self._num_known = 0
        """Characters of the window that are in `_text`."""

    @property
    def text(self) -> str:
        """The text that may be shown."""
        return self._text[: self._num_shown]

    def read(self, tokens: Sequence[int]) -> None:
        if self._model is None:
            self.num_tokens += len(tokens)
            return
        for token in tokens:
            if self.is_stopped:
                return
            self.num_tokens += 1
            if token not in self._model.end_ids:
                self._ids.append(token)
                self._decode(self._model, at_end=False)
                self._look_for_stops(at_end=False)

    def end(self) -> None:
        """End the answer: text that was held back is shown."""
        if self._model is not None and not self.is_stopped:
            self._decode(self._model, at_end=True)
            self._look_for_stops(at_end=True)

    def _decode(self, model: TokenDecoder, *, at_end: bool) -> None:
        window = model.decode(self._ids[self._begin :])
        sure = window if at_end else window.rstrip(NOT_A_CHARACTER)
        self._text += sure[self._num_known :]
        self._num_known = max(self._num_known, len(sure))
        is_whole = len(sure) == len(window) or len(self._ids) - self._whole > _LONGEST_WINDOW
        if is_whole and not at_end:
            num_next = len(model.decode(self._ids[self._whole :]))
            if num_next:  # a window that begins with nothing but special tokens has no beginning
                self._begin, self._num_known = self._whole, num_next
            self._whole = len(self._ids)

    def _look_for_stops(self, *, at_end: bool) -> None:
        """Look for stop strings behind the text that may be shown: none begins before."""
        found = [at for at in (self._text.find(stop, self._num_shown) for stop in self._stops) if at >= 0]
        if found:
            self.is_stopped = True
            self._text = self._text[: min(found)]
        held = 0 if found or at_end else max((self._num_open(stop) for stop in self._stops), default=0)
        self._num_shown = len(self._text) - held

    def _num_open(self, stop: str) -> int:
        """Return how many characters at the end of the text are the beginning of this stop string."""
        most = min(len(stop) - 1, len(self._text) - self._num_shown)
        return next((num for num in range(most, 0, -1) if self._text.endswith(stop[:num])), 0)
