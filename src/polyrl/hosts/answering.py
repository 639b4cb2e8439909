"""From a request at the front to a call of the policy, and back, for one episode.

Rules kept here: an answer is checked before the harness gets it: as many log-probabilities as tokens, all finite.
Messages are rendered, answered and remembered one request at a time, so that a conversation has one history.
"""

import asyncio
import logging
import math
from array import array
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from polyrl.hosts import bodies, replies
from polyrl.hosts.bodies import ChatBody, CompletionBody, FrontRefusal, GenerateBody, Limiter
from polyrl.hosts.episode import CallLimits, DrawnAnswer, Episode, EpisodeFailed
from polyrl.hosts.known_families import KnownFamily
from polyrl.hosts.replies import CallReply
from polyrl.hosts.texts import ChatRefused, ModelText
from polyrl.hosts.tool_syntax import ToolSyntax, read_calls
from polyrl.hosts.tools import before_stop

if TYPE_CHECKING:
    from polyrl.hosts.chats import Chat

log = logging.getLogger(__name__)

_MAX_TEXTS = 64
"""Completions of an episode that the next prompt may go on from; the newest ones."""
_MAX_TOKENS = 1 << 18
"""Tokens of them all. The newest one is kept, however long."""


class Answering:
    """Answers the requests of one episode."""

    def __init__(
        self,
        episode: Episode,
        text: ModelText | None,
        family: KnownFamily | None,
        limiter: Limiter,
        model: str,
        chat_options: Mapping[str, Any],
    ) -> None:
        self._episode = episode
        self._text = text
        self._family = family
        self._limiter = limiter
        self._model = model
        self._chat_options = chat_options
        self._chat: Chat | None = None
        self._completed: dict[str, array[int]] = {}
        """Prompt and answer of each completion that was cut off or had a stop string, and their tokens."""
        self._one_by_one = asyncio.Lock()
        self._session = ""
        self.callers: list[str] = []
        """The session of each call that was answered; empty for one by the episode's base URL."""

    async def answer(self, path: str, raw: bytes, session: str = "") -> tuple[bytes, bool]:
        """Return the body of the reply, and whether it is a stream of events. Raises FrontRefusal, NoRoom,
        EpisodeFailed."""
        async with self._one_by_one:
            self._session = session
            try:
                match path:
                    case "/inference/v1/generate":
                        return await self._generate(bodies.read_body(raw, GenerateBody)), False
                    case "/v1/completions":
                        return await self._complete(bodies.read_body(raw, CompletionBody))
                    case _:
                        return await self._converse(bodies.read_body(raw, ChatBody))
            except ChatRefused as error:
                raise FrontRefusal(str(error)) from error

    async def _generate(self, body: GenerateBody) -> bytes:
        limits = self._limiter.limits(body.sampling_params)
        return replies.generate_body(await self._call(body.token_ids, limits))

    async def _complete(self, body: CompletionBody) -> tuple[bytes, bool]:
        bodies.refuse_what_completions_lack(body)
        limits = self._limiter.limits(body)
        given, model = bodies.checked_prompt(body.prompt), self._need_text()
        prompt = await model.in_thread(lambda: self._tokens_of(model, given)) if isinstance(given, str) else given
        if not prompt:
            raise FrontRefusal("prompt: it has no tokens", param="prompt")
        drawn = await self._call(prompt, limits)
        if isinstance(given, str):
            self._remember(model, given, prompt, drawn)
        text = before_stop(model.decode(model.content(drawn)), limits.stop)
        logprobs = body.logprobs not in (None, False)
        reply = self._reply(prompt, drawn, with_logprobs=logprobs, with_token_ids=body.return_token_ids is True)
        if body.stream:
            return replies.text_stream(reply, text, with_usage=_wants_usage(body.stream_options)), True
        return replies.text_body(reply, text), False

    async def _converse(self, body: ChatBody) -> tuple[bytes, bool]:
        bodies.refuse_what_chats_lack(body)
        limits = self._limiter.limits(body, body.max_completion_tokens)
        messages = bodies.checked_messages(body.messages)
        tools = bodies.checked_tools(body.tools or []) if body.tool_choice != "none" else []
        model = self._need_text()
        if self._chat is None:
            from polyrl.hosts.chats import Chat

            self._chat = Chat(model, self._family)
        chat, options = self._chat, {**self._chat_options, **(body.chat_template_kwargs or {})}
        prompt = await model.in_thread(lambda: chat.prompt(messages, tools or None, options))
        syntax = model.tool_syntax() if tools else None
        drawn = await self._call(prompt.tokens, limits)
        message = self._message(chat, drawn, limits, tools, syntax, only_one=body.parallel_tool_calls is False)
        chat.record(prompt, drawn, message)
        ids, logprobs = body.return_token_ids is True, body.logprobs is True
        reply = self._reply(prompt.tokens, drawn, with_logprobs=logprobs, with_token_ids=ids)
        if body.stream:
            return replies.chat_stream(reply, message, with_usage=_wants_usage(body.stream_options)), True
        return replies.chat_body(reply, message), False

    def _message(
        self,
        chat: "Chat",
        drawn: DrawnAnswer,
        limits: CallLimits,
        tools: list[dict[str, object]],
        syntax: ToolSyntax | None,
        *,
        only_one: bool,
    ) -> dict[str, object]:
        model = self._need_text()
        tokens = model.content(drawn)
        plain = before_stop(model.decode(tokens), limits.stop)
        if syntax is None:
            return replies.message_of(plain, [])
        found = read_calls(before_stop(model.decode(tokens, special=True), limits.stop), syntax, tools)
        calls = found.calls[:1] if only_one else found.calls
        for told in (calls, calls[:1]):
            message = replies.message_of(found.content, told)
            if told and chat.can_say_again(message):
                return message
        return replies.message_of(plain, [])

    # Tokens

    async def _call(self, prompt: list[int], limits: CallLimits) -> DrawnAnswer:
        drawn = await self._episode.call(prompt, limits)
        self.callers.append(self._session)
        if len(drawn.tokens) != len(drawn.logprobs) or not all(map(math.isfinite, drawn.logprobs)):
            raise EpisodeFailed("an answer whose log-probabilities are not finite numbers, one a token")
        return drawn

    def _need_text(self) -> ModelText:
        if self._text is None:
            raise FrontRefusal("this host has no tokenizer, so there is no text; use /inference/v1/generate")
        return self._text

    def _tokens_of(self, model: ModelText, text: str) -> list[int]:
        """Return the tokens of a completion's prompt. Where it goes on from an answer, that answer's stay as drawn."""
        before = [one for one in self._completed if text.startswith(one)]
        if not before:
            return model.encode(text, special=True)
        longest = max(before, key=len)
        rest = text[len(longest) :]
        return [*self._completed[longest], *(model.encode(rest) if rest else ())]

    def _remember(self, model: ModelText, given: str, prompt: list[int], drawn: DrawnAnswer) -> None:
        if len(model.content(drawn)) < len(drawn.tokens):
            return  # the end token is no part of the text, so a text that goes on is another text
        self._completed[given + model.decode(drawn.tokens, special=True)] = array("i", [*prompt, *drawn.tokens])
        num_tokens = sum(map(len, self._completed.values()))
        while len(self._completed) > _MAX_TEXTS or (num_tokens > _MAX_TOKENS and len(self._completed) > 1):
            num_tokens -= len(self._completed.pop(next(iter(self._completed))))

    def _reply(self, prompt: list[int], drawn: DrawnAnswer, *, with_logprobs: bool, with_token_ids: bool) -> CallReply:
        model = self._text
        pieces = [model.decode([one], special=True) for one in drawn.tokens] if with_logprobs and model else []
        return CallReply(self._model, prompt, drawn, pieces, with_logprobs, with_token_ids)


def _wants_usage(options: dict[str, object] | None) -> bool:
    return options is not None and options.get("include_usage") is True
