"""Messages to tokens, over the turns of an episode, so that every token stays as it was drawn.

    prompt = chat.prompt(messages, tools, options)      tokens for the next call
    chat.record(prompt, drawn, reply)                   the answer, as the harness is told it, for the next turn

If the messages go on from what this conversation was answered, the prompt is the old tokens, unchanged, and tokens of
what is new (a bridge). Any other messages are rendered whole: their prompt begins a new training sequence.

Rules kept here: a bridge is taken only if the model's template, given the text as it was sampled, writes the same text
and the same new tokens: so a prompt is never another one than the template's, but for how drawn text is cut into
tokens. A template that changes earlier answers (one that drops old thoughts) gets no bridge, unless the package
`renderers` knows the model and has one (known_families.py). Any text that the template adds after an answer, be its end
drawn or cut off, is new and never trained.
Left out: the shapes of requests and replies (front.py, bodies.py), and tool calls in text (tools.py).
"""

import hashlib
import json
import re
from array import array
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from polyrl.data.chat_template import ChatTemplate, TemplateRefused
from polyrl.hosts.episode import DrawnAnswer
from polyrl.hosts.known_families import KnownFamily
from polyrl.hosts.texts import ChatRefused, ModelText
from polyrl.hosts.tool_syntax import writes_answer
from polyrl.hosts.tools import whole_text

ChatMessages = list[dict[str, Any]]
ChatTools = list[dict[str, Any]]
Fingerprint = bytes

_MAX_REMEMBERED = 64
"""Answers of an episode that its messages may go on from; the newest ones."""
_MAX_TOKENS = 1 << 18
"""Tokens of them all, each counted once where one goes on from another. The newest answer is kept, however long."""
_NO_THOUGHT = re.compile(r"<think>\s*</think>\s*")


class _Remembered(NamedTuple):
    """An answer, and what came between the one before and it: a conversation's tokens are kept once."""

    before: "_Remembered | None"
    """The answer that its prompt goes on from."""
    given: "array[int]"
    """Tokens of its prompt from there on."""
    drawn: "array[int]"
    sampled: str
    """The text of the drawn tokens, without the one that ended them."""
    end: str
    """The text of that one; empty for an answer that was cut off, or had a stop string."""
    new: ChatMessages
    """Messages since the answer before."""

    @property
    def num_tokens(self) -> int:
        return len(self.given) + len(self.drawn)

    def chain(self) -> list["_Remembered"]:
        """Return the answers of the conversation, this one last."""
        found: list[_Remembered] = []
        at: _Remembered | None = self
        while at is not None:
            found.append(at)
            at = at.before
        return found[::-1]

    def tokens(self) -> list[int]:
        """Return the prompt, and what was drawn."""
        return [token for one in self.chain() for part in (one.given, one.drawn) for token in part]

    def messages(self) -> ChatMessages:
        """Return the conversation up to this answer and with it, as the template gets it."""
        return [message for one in self.chain() for message in (*one.new, one.answer)]

    @property
    def answer(self) -> dict[str, Any]:
        return {"role": "assistant", "content": self.sampled}


class ChatPrompt(NamedTuple):
    tokens: list[int]
    fingerprint: Fingerprint
    """Of the messages, with the tools and options."""
    new: ChatMessages
    """As the template gets them, from the answer on that this goes on from."""
    before: _Remembered | None = None
    """The answer that it goes on from, with that answer's tokens as they were drawn."""

    @property
    def is_bridged(self) -> bool:
        return self.before is not None


class Chat:
    """The conversations of one episode: as many branches as its harness makes."""

    def __init__(self, text: ModelText, family: KnownFamily | None = None) -> None:
        if text.template is None:
            raise ChatRefused("the policy's model has no chat template; use /v1/completions")
        self._text = text
        self._template: ChatTemplate = text.template
        self._family = family
        self._remembered: dict[Fingerprint, _Remembered] = {}

    def prompt(self, messages: ChatMessages, tools: ChatTools | None, options: Mapping[str, Any]) -> ChatPrompt:
        """Return the prompt for messages that were checked. Raises ChatRefused, and NoRoom."""
        if tools and not self._text.renders_tools():
            raise ChatRefused("tools: the model's chat template does not render tools; leave them out")
        settings = {name: value for name, value in options.items() if name not in ("messages", "tools", "documents")}
        prints = _fingerprints(messages, tools, settings)
        plain = [self._for_template(message) for message in messages]
        try:
            for place in reversed(range(1, len(messages) - 1)):
                before = self._remembered.get(prints[place])
                if before is not None and messages[place]["role"] == "assistant":
                    new = plain[place + 1 :]
                    tokens = self._bridge(before, new, tools, settings)
                    if tokens is not None:
                        return ChatPrompt(tokens, prints[-1], new, before)
                    break
            written = self._template.render(plain, settings, tools=tools)
        except TemplateRefused as error:
            raise ChatRefused(f"messages: the model's chat template refuses them: {error}") from error
        return ChatPrompt(self._text.encode_rendered(written), prints[-1], plain)

    def record(self, prompt: ChatPrompt, drawn: DrawnAnswer, reply: dict[str, Any]) -> None:
        """Remember an answer, as `reply` tells it to the harness."""
        content, before = self._text.content(drawn), prompt.before
        given = prompt.tokens if before is None else prompt.tokens[sum(one.num_tokens for one in before.chain()) :]
        key = _fingerprint(prompt.fingerprint, reply)
        self._remembered.pop(key, None)
        self._remembered[key] = _Remembered(
            before,
            array("i", given),
            array("i", drawn.tokens),
            self._text.decode(content, special=True),
            self._text.decode(drawn.tokens[len(content) :], special=True),
            prompt.new,
        )
        num_tokens = sum(one.num_tokens for one in self._remembered.values())
        while len(self._remembered) > _MAX_REMEMBERED or (num_tokens > _MAX_TOKENS and len(self._remembered) > 1):
            num_tokens -= self._remembered.pop(next(iter(self._remembered))).num_tokens

    def can_say_again(self, answer: dict[str, Any]) -> bool:
        """Return whether a later prompt may have this answer with its calls: a harness that edits its history says it
        again. Of a template that writes no calls that is not known."""
        return not self._text.writes_calls() or writes_answer(self._template, self._for_template(answer))

    def _for_template(self, message: dict[str, Any]) -> dict[str, Any]:
        """Return a message as chat templates expect it: text instead of null, and arguments of tool calls as objects,
        or as text where the template adds them to text.

        What others than the policy say has no special tokens, whatever they wrote.
        """
        content = message.get("content") or ""
        made = {name: value for name, value in message.items() if value is not None}
        made["content"] = whole_text(content) if message["role"] == "assistant" else self._text.as_text(content)
        calls = message.get("tool_calls")
        if calls and self._text.takes_arguments_as_text():
            made["tool_calls"] = calls
        elif calls:
            made["tool_calls"] = [{**one, "function": _with_object(one["function"])} for one in calls]
        else:
            made.pop("tool_calls", None)
        return made

    def _bridge(
        self, before: _Remembered, new: ChatMessages, tools: ChatTools | None, settings: dict[str, Any]
    ) -> list[int] | None:
        """Return the prompt that goes on from an answer; None where the template has another."""
        old = before.tokens()
        added = self._difference(before, new, tools, settings)
        if added is not None:
            return [*old, *added]
        if self._family is not None and not any(self._text.had_special(one["content"]) for one in new):
            num = len(old) - len(before.drawn)
            known = self._family.bridge(old[:num], old[num:], new, tools, settings)
            if known is not None and known[: len(old)] == old:
                return known
        return None

    def _difference(
        self, before: _Remembered, new: ChatMessages, tools: ChatTools | None, settings: dict[str, Any]
    ) -> list[int] | None:
        """Return the tokens that the template writes after an answer; None where it writes the answer differently, or
        refuses it: a tool call is plain text here, and some count those turns, or want a call before a result."""
        messages = before.messages()
        try:
            begun = self._template.render(messages[:-1], settings, tools=tools)
            given = self._template.render(messages[:-1], settings, tools=tools, with_answer_begun=False)
            whole = self._template.render([*messages, *new], settings, tools=tools)
        except TemplateRefused:
            return None
        tail = _after(whole, begun, given, before.sampled)
        if tail is None or not tail.startswith(before.end):
            return None
        return self._tokens_at_the_end(whole, before.end, tail[len(before.end) :])

    def _tokens_at_the_end(self, whole: str, end: str, tail: str) -> list[int] | None:
        """Return the tokens of `tail` as they are at the end of the whole text; None if they depend on what precedes.

        A tokenizer that writes a mark before the first word of a text must see the end token before it.
        """
        if not tail:
            return []
        tokens = self._text.encode_rendered(whole)
        candidates = [self._text.encode_rendered(tail)]
        if end:
            num_end = len(self._text.encode_rendered(end))
            candidates.append(self._text.encode_rendered(end + tail)[num_end:])
        return next((one for one in candidates if one and tokens[-len(one) :] == one), None)


def _after(whole: str, begun: str, given: str, sampled: str) -> str | None:
    """Return what the template writes after the sampled text; None where the whole text does not hold it unchanged.

    `begun` is the text up to where the answer began, `given` the same without the beginning of the answer. Templates
    may trim an answer, and may leave an empty thought out of earlier turns.
    """
    starts = [len(begun)] if whole.startswith(begun) else []
    opening = begun[len(given) :] if begun.startswith(given) else ""
    thought = _NO_THOUGHT.search(opening)
    if thought is not None and thought.end() == len(opening):
        without = begun[: len(given) + thought.start()]
        starts += [len(without)] if whole.startswith(without) else []
    text = sampled.strip()
    for start in starts:
        rest = whole[start:]
        bare = rest.lstrip()
        if text and bare.startswith(text):
            return _without_space(bare[len(text) :], sampled[len(sampled.rstrip()) :])
        if not text:
            return _without_space(rest, sampled)
    return None


def _without_space(tail: str, space: str) -> str:
    """Leave out the space that the answer ends with, where the template kept it."""
    return tail[len(space) :] if tail.startswith(space) else tail


def _with_object(function: dict[str, Any]) -> dict[str, Any]:
    read = _read_json(function.get("arguments"))
    return {**function, "arguments": read} if isinstance(read, dict) else function


def _read_json(text: object) -> object:
    if not isinstance(text, str):
        return text
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _in_order(arguments: object) -> object:
    """Return arguments written one way, whatever the order of their names; as they are, where they nest too deep."""
    try:
        return json.dumps(_read_json(arguments), sort_keys=True, default=str)
    except RecursionError:
        return arguments


def _fingerprints(
    messages: Sequence[dict[str, Any]], tools: ChatTools | None, settings: Mapping[str, Any]
) -> list[Fingerprint]:
    """Return a fingerprint of each beginning of the conversation."""
    found: list[Fingerprint] = []
    last = _digest(b"", [tools or None, dict(settings)])
    for message in messages:
        last = _fingerprint(last, message)
        found.append(last)
    return found


def _fingerprint(before: Fingerprint, message: Mapping[str, Any]) -> Fingerprint:
    """Fields that say nothing of the conversation (null ones, `refusal`, `annotations`) make no difference."""
    calls = [
        [one.get("id"), one["function"].get("name"), _in_order(one["function"].get("arguments"))]
        for one in message.get("tool_calls") or ()
    ]
    said = [message["role"], message.get("content") or "", calls, message.get("tool_call_id"), message.get("name")]
    return _digest(before, said)


def _digest(before: bytes, value: object) -> Fingerprint:
    written = json.dumps(value, sort_keys=True, ensure_ascii=True, default=str).encode()
    return hashlib.blake2b(before + written, digest_size=16).digest()
