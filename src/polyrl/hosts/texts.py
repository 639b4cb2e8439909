"""A model's tokenizer, chat template and end tokens, as far as a host needs them.

Rules kept here: a text that is longer than any prompt can be is refused before it is tokenized. Long texts are
tokenized in threads of our own: neither the host's loop nor an environment's threads wait for it. A special token that
the environment wrote out, such as `<|im_end|>` on a web page, is text: it ends no message, and begins none. Left out:
which tokens of a conversation stay as they were drawn (chats.py).
"""

import asyncio
import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from polyrl.config.model_dir import read_facts
from polyrl.data.text_parts import load_text_parts
from polyrl.errors import PolyrlError
from polyrl.hosts.episode import DrawnAnswer, NoRoom
from polyrl.hosts.tool_syntax import PROBES, ToolSyntax, find_syntax, takes_arguments_as_text, writes_calls
from polyrl.hosts.tools import whole_text

if TYPE_CHECKING:
    from polyrl.data.chat_template import ChatTemplate

Result = TypeVar("Result")

_NUM_THREADS = 2
_BYTES_PER_TOKEN = 16
"""More than the average of a prompt in any language."""
_LONG_CONTEXT = 131072
_BREAK = "\ud800"
"""Stands within a special token that is text: half of a character, which no text has that was made whole."""


class ChatRefused(PolyrlError):
    """Messages that cannot become a prompt. The message is one line."""


class ModelText:
    """Text to tokens and back. `template` is None for a model that knows no chats: its texts are put together."""

    def __init__(
        self,
        tokenizer: Any,
        *,
        template: "ChatTemplate | None" = None,
        end_ids: frozenset[int] = frozenset(),
        max_context: int | None = None,
        name: str = "policy",
    ) -> None:
        self._tokenizer = tokenizer
        self._threads = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="host-text")
        self._renders_tools: bool | None = None
        self._takes_text: bool | None = None
        self._writes_calls: bool | None = None
        self._syntaxes: list[ToolSyntax | None] = []
        self._special = _special_tokens(tokenizer)
        self._beginnings = _beginnings(self._special)
        self.template = template
        self.end_ids = end_ids
        self.max_context = max_context
        self.name = name

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        """Return the tokens, with those that the tokenizer puts around a text if `special`. Raises NoRoom.

        Halves of characters, as names of files can have them, are read as marks of what cannot be shown.
        """
        self._check_length(text)
        return self._ids(text, special=special)

    def as_text(self, said: str) -> str:
        """Return a message's text for a template, so that `encode_rendered` reads no special token in it. Raises
        NoRoom."""
        self._check_length(said)
        return self._beginnings.sub(rf"\g<0>{_BREAK}", whole_text(said))

    @staticmethod
    def had_special(said: str) -> bool:
        """Return whether `as_text` found a special token in it."""
        return _BREAK in said

    def encode_rendered(self, written: str) -> list[int]:
        """Return the tokens of what a template wrote. Raises NoRoom.

        Each part but the first is tokenized after a special token, as some tokenizers mark the first word of a text.
        """
        self._check_length(written)
        first, *parts = written.split(_BREAK)
        tokens = self._ids(first)
        if parts:
            before = self._special[0]
            num_before = len(self._ids(before))
            for part in parts:
                tokens += self._ids(before + part)[num_before:]
        return tokens

    def _check_length(self, text: str) -> None:
        context = _LONG_CONTEXT if self.max_context is None else self.max_context
        if len(text) > context * _BYTES_PER_TOKEN:
            raise NoRoom(f"a text of {len(text)} characters; the context is {context} tokens long")

    def _ids(self, text: str, *, special: bool = False) -> list[int]:
        return self._tokenizer.encode_batch_fast([whole_text(text)], add_special_tokens=special)[0].ids

    def decode(self, tokens: Sequence[int], *, special: bool = False) -> str:
        """Return the text, with that of special tokens if `special`."""
        return self._tokenizer.decode(list(tokens), skip_special_tokens=not special)

    def content(self, drawn: DrawnAnswer) -> list[int]:
        """Return the tokens of an answer without the one that ended it."""
        tokens = drawn.tokens
        return tokens[:-1] if drawn.finish == "stop" and tokens and tokens[-1] in self.end_ids else tokens

    def renders_tools(self) -> bool:
        """Return whether the chat template tells the model which tools there are."""
        from polyrl.data.chat_template import TemplateRefused

        if self._renders_tools is None and self.template is not None:
            try:
                shown = self.template.render([{"role": "user", "content": "hello"}], {}, tools=PROBES[:1])
            except TemplateRefused:
                shown = ""
            self._renders_tools = "polyrl_probe" in shown
        return self._renders_tools is True

    def takes_arguments_as_text(self) -> bool:
        """Return whether the chat template wants the arguments of calls as text, as DeepSeek's do."""
        if self._takes_text is None:
            self._takes_text = self.template is not None and takes_arguments_as_text(self.template)
        return self._takes_text

    def writes_calls(self) -> bool:
        """Return whether the chat template writes calls. How models write them whose templates do not is known, too."""
        if self._writes_calls is None:
            self._writes_calls = self.template is not None and writes_calls(self.template)
        return self._writes_calls

    def tool_syntax(self) -> ToolSyntax:
        """Return how the model writes tool calls. Raises ChatRefused where that cannot be told."""
        if not self._syntaxes:
            self._syntaxes.append(None if self.template is None else find_syntax(self.template))
        if self._syntaxes[0] is None:
            raise ChatRefused(
                "tools: the model's chat template writes calls in a way that cannot be read safely; leave them out"
            )
        return self._syntaxes[0]

    async def in_thread(self, work: Callable[[], Result]) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)


def _special_tokens(tokenizer: Any) -> list[str]:
    """Return the texts of special tokens. One of a single character cannot be broken, and stays one."""
    added = tokenizer.get_added_tokens_decoder().values()
    return [one.content for one in added if one.special and len(one.content) > 1]


def _beginnings(special: Sequence[str]) -> "re.Pattern[str]":
    """Return what finds the first character of each special token, also where they overlap."""
    return re.compile(f"(?={_one_of(special)}).", re.DOTALL)


def _one_of(texts: Sequence[str]) -> str:
    """Return a pattern that looks at each character once, however many texts there are; nothing matches none."""
    if "" in texts:
        return ""
    rests: dict[str, list[str]] = {}
    for text in texts:
        rests.setdefault(text[0], []).append(text[1:])
    return f"(?:{'|'.join(re.escape(first) + _one_of(rest) for first, rest in rests.items())})" if rests else "(?!)"


def load_text(folder: str | Path) -> ModelText:
    """Load a model directory's tokenizer and chat template. Raises UserError."""
    folder = Path(folder)
    tokenizer, template = load_text_parts(folder)
    facts = read_facts(folder)
    return ModelText(
        tokenizer,
        template=template,
        end_ids=facts.known_end_ids,
        max_context=facts.max_context,
        name=facts.name,
    )
