"""The routes that OpenAI's clients know: models, completions, chat completions; answered whole, or as a stream.

Rules kept here: whatever is refused is answered in OpenAI's shape, before the stream begins if that can be; a stream
that cannot go on says so in an event, and ends.
"""

import asyncio
import contextlib
import secrets
import time
from collections.abc import Sequence

import msgspec
from aiohttp import web

from polyrl.errors import Refused
from polyrl.manager import asking
from polyrl.manager.asking import AskedGroup
from polyrl.manager.lobby import Lobby
from polyrl.manager.service import Service
from polyrl.manager.serving import replies
from polyrl.manager.serving.answers import Answers, OpenRequests
from polyrl.manager.serving.failures import AskError, wrong
from polyrl.manager.serving.requests import (
    ChatRequest,
    Choices,
    CompletionRequest,
    chat_choices,
    completion_choices,
    flat,
    prompts_of,
)
from polyrl.manager.serving.shapes import Chats, Completions, ReplyHead, ReplyShape, usage_of
from polyrl.manager.serving.texts import Reader, Served

_NAME_WITHOUT_MODEL = "polyrl"
_STREAM_HEADERS = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}
_DONE = b"data: [DONE]\n\n"
_HUNG_UP = 499
"""As nginx has it."""

_encode = msgspec.json.Encoder().encode


class Answerer:
    def __init__(self, service: Service, served: Served | None) -> None:
        self._service = service
        self._served = served
        self._model = None if served is None else served.text
        self._open = OpenRequests(service)
        self._created = int(time.time())
        default = _NAME_WITHOUT_MODEL if served is None else served.name
        self.name = service.settings.serve.model or default

    def close(self, why: str) -> None:
        """End every stream with a word."""
        self._open.close(why)

    def models(self) -> replies.ModelList:
        most = None if self._served is None else self._served.max_context
        return replies.ModelList(data=(replies.ModelCard(id=self.name, created=self._created, max_model_len=most),))

    async def complete(self, http: web.Request, request: CompletionRequest) -> web.StreamResponse:
        choices = completion_choices(request)
        self._check_model(request.model)
        prompts = [await self._tokens(one) for one in prompts_of(request.prompt)]
        head = await self._head("cmpl", request.model)
        return await self._answer(http, prompts, choices, Completions(head, choices, self._model))

    async def chat(self, http: web.Request, request: ChatRequest) -> web.StreamResponse:
        choices = chat_choices(request)
        self._check_model(request.model)
        if self._model is None:
            raise AskError(400, "this manager has no tokenizer: start it with --serve or --tokenizer", code="no_text")
        prompt = await self._model.chat_tokens(flat(request.messages), request.chat_template_kwargs or {})
        head = await self._head("chatcmpl", request.model)
        return await self._answer(http, [prompt], choices, Chats(head, choices, self._model))

    # What is asked

    def _check_model(self, name: str | None) -> None:
        if name is not None and name != self.name:
            message = f"there is no model {name!r} here; this is {self.name!r}"
            raise AskError(404, message, param="model", code="model_not_found")

    async def _tokens(self, prompt: str | list[int]) -> list[int]:
        if not isinstance(prompt, str):
            return prompt
        if self._model is None:
            raise wrong("prompt", "this manager has no tokenizer; give token ids, or start it with --tokenizer")
        return await self._model.tokens(prompt)

    async def _head(self, prefix: str, model: str | None) -> ReplyHead:
        version = await self._service.ask(_published)
        number = f"{prefix}-{secrets.token_hex(12)}"
        weights = f"version-{version}" if version >= 0 else "no-version"
        return ReplyHead(number, int(time.time()), model or self.name, weights)

    async def _wanted(self, prompts: Sequence[list[int]], choices: Choices) -> list[AskedGroup]:
        most = self._service.settings.serve.max_samples
        if len(prompts) * choices.num > most:
            raise wrong("n", f"{len(prompts) * choices.num} answers in one request; at most {most} are written at once")
        longest = await self._service.ask(_longest)
        if choices.max_tokens is not None and choices.max_tokens > longest:
            raise wrong("max_tokens", f"{choices.max_tokens} is more than {longest}, the longest answer of this run")
        return [self._one_wanted(prompt, choices, longest) for prompt in prompts]

    def _one_wanted(self, prompt: list[int], choices: Choices, longest: int) -> AskedGroup:
        if not prompt:
            raise wrong("prompt", "it has no tokens")
        context = None if self._served is None else self._served.max_context
        most = longest if context is None else min(longest, context - len(prompt))
        num = most if choices.max_tokens is None else choices.max_tokens
        if num > most or most < 1:
            message = f"{len(prompt)} tokens of a prompt and {num} of an answer; the model's context is {context}"
            raise AskError(400, message, param="prompt", code="context_length_exceeded")
        return AskedGroup(prompt, choices.num, num, choices.seed, choices.sampling)

    # How it is answered

    async def _answer(
        self, http: web.Request, prompts: Sequence[list[int]], choices: Choices, shape: ReplyShape
    ) -> web.StreamResponse:
        wanted = await self._wanted(prompts, choices)
        readers = [[Reader(self._model, choices.stops) for _ in range(choices.num)] for _ in prompts]
        try:
            async with self._open.answering(http, wanted, readers) as answers:
                if choices.is_streamed:
                    return await self._stream(http, answers, choices, shape)
                async for _ in answers.pieces():
                    pass
                return web.Response(body=_encode(shape.whole(answers.choices)), content_type="application/json")
        except ConnectionError:  # to hang up is no failure of ours, and nobody reads what is answered
            return web.Response(status=_HUNG_UP)

    async def _stream(
        self, http: web.Request, answers: Answers, choices: Choices, shape: ReplyShape
    ) -> web.StreamResponse:
        stream = _Events(http, self._service.settings.stream.send_timeout_s)
        begun: set[int] = set()
        try:
            async for pieces in answers.pieces():
                chunks: list[msgspec.Struct | None] = []
                for answer, piece in pieces:
                    if answer.index not in begun:
                        begun.add(answer.index)
                        chunks.append(shape.begin(answer))
                    chunks.append(shape.chunk(answer, piece))
                await stream.send(chunks)
            if choices.with_usage:
                await stream.send([shape.usage(usage_of(answers.choices))])
            await stream.end()
        except AskError as error:
            if not stream.has_begun:
                raise
            with contextlib.suppress(ConnectionError, TimeoutError):
                await stream.send([error.reply()])
                await stream.end()
        return stream.response


class _Events:
    """A stream of server-sent events. It begins with the first: until then, a request can be refused properly."""

    def __init__(self, http: web.Request, send_timeout_s: float) -> None:
        self._http = http
        self._send_timeout_s = send_timeout_s
        self.response = web.StreamResponse(headers=_STREAM_HEADERS)
        self.has_begun = False

    async def send(self, bodies: Sequence[msgspec.Struct | None]) -> None:
        """Raises TimeoutError for a client that takes nothing."""
        data = b"".join(b"data: " + _encode(body) + b"\n\n" for body in bodies if body is not None)
        if data:
            await self._write(data)

    async def end(self) -> None:
        await self._write(_DONE)

    async def _write(self, data: bytes) -> None:
        async with asyncio.timeout(self._send_timeout_s):
            if not self.has_begun:
                self.has_begun = True
                await self.response.prepare(self._http)
            await self.response.write(data)


def _published(lobby: Lobby) -> int:
    return -1 if lobby.run is None else lobby.run.desk.state.published


def _longest(lobby: Lobby) -> int:
    try:
        return asking.run_to_ask(lobby).desk.max_new_tokens
    except Refused as refused:
        raise AskError(503, str(refused), code=refused.kind) from refused
