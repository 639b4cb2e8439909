"""Answering OpenAI's clients: a request becomes questions, whose tokens are read as they come, whole or as a stream.

    async with open.answering(request, wanted, ...) as answers:   asked; withdrawn when the block is left, however
        async for pieces in answers.pieces():                     what has come since the last look, a piece a choice

Rules kept here: a client that hangs up frees its places at once. Every wait has a deadline. A choice that has its stop
string ends there, whatever its worker still generates. Refusals have OpenAI's shape, and a status where the stream has
not begun; a stream that cannot go on says so in an event, and ends.
"""

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

import msgspec
from aiohttp import web

from polyrl.errors import Refused
from polyrl.ids import sample_id
from polyrl.manager import asking
from polyrl.manager.asking import AskedGroup, Question
from polyrl.manager.lobby import Lobby
from polyrl.manager.service import Service
from polyrl.manager.serving.replies import (
    Chats,
    ChoiceInProgress,
    ChoicePiece,
    Completions,
    ModelCard,
    ModelList,
    ReplyHead,
    ReplyShape,
    usage_of,
)
from polyrl.manager.serving.requests import (
    AskError,
    ChatRequest,
    Choices,
    CompletionRequest,
    chat_choices,
    completion_choices,
    flat,
    prompts_of,
    wrong,
)
from polyrl.manager.serving.texts import Reader, Served

_NAME_WITHOUT_MODEL = "polyrl"
_STREAM_HEADERS = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}
_DONE = b"data: [DONE]\n\n"
_HUNG_UP = 499
"""nginx's status for a client that hung up."""

_encode = msgspec.json.Encoder().encode

Pieces = list[tuple[ChoiceInProgress, ChoicePiece]]


class Answers:
    """All choices of a request. `wake` says that more may have come, or that the client is gone."""

    def __init__(self, service: Service, is_gone: Callable[[], bool]) -> None:
        self._service = service
        self._is_gone = is_gone
        self._changed = asyncio.Event()
        self._closing = ""
        self._is_left = False
        self._questions: list[Question] = []
        self.choices: list[ChoiceInProgress] = []

    def wake(self) -> None:
        self._changed.set()

    def look_for_the_client(self) -> None:
        if self._is_gone():
            self.wake()

    def close(self, why: str) -> None:
        self._closing = why
        self.wake()

    async def ask(self, wanted: Sequence[AskedGroup], readers: Sequence[Sequence[Reader]]) -> None:
        def act(lobby: Lobby) -> None:
            if not self._is_left:
                self._questions = asking.ask(lobby, list(wanted), self.wake)

        try:
            await self._service.call(act)
        except Refused as refused:
            raise AskError(429 if refused.kind == "asked" else 503, str(refused), code=refused.kind) from refused
        for one, question, of_prompt in zip(wanted, self._questions, readers, strict=True):
            for number, reader in enumerate(of_prompt):
                sample = sample_id(question.group, number)
                tokens = question.tokens[number]
                self.choices.append(ChoiceInProgress(len(self.choices), one.prompt, sample, tokens, reader))

    def leave(self) -> None:
        self._is_left = True
        groups = [one.group for one in self._questions if one.closed is None]
        if groups:
            why = self._closing or "the client is gone"
            self._service.post(lambda lobby: [asking.withdraw(lobby, one, why) for one in groups])

    async def pieces(self) -> AsyncIterator[Pieces]:
        """Yield what comes until every choice has ended. Raises AskError; ConnectionResetError when the client left."""
        timeout_s = self._service.settings.serve.token_timeout_s
        while True:
            found = [(one, piece) for one in self.choices if (piece := one.more()) is not None]
            for answer, _ in found:
                if answer.reader.is_stopped:
                    self._stop(answer)
            if found:
                yield found
            if all(one.finish is not None for one in self.choices):
                return
            self._check()
            try:
                async with asyncio.timeout(timeout_s):
                    await self._changed.wait()
            except TimeoutError as error:
                raise AskError(503, f"no worker brought a token for {timeout_s:g} s", code="no_worker") from error
            self._changed.clear()

    def _stop(self, answer: ChoiceInProgress) -> None:
        self._service.post(lambda lobby: asking.stop(lobby, answer.sample, answer.tokens))

    def _check(self) -> None:
        if self._is_gone():
            raise ConnectionResetError("the client hung up")
        if self._closing:
            raise AskError(503, self._closing, code="closing")
        for question in self._questions:
            closed = question.closed
            if closed is not None and not closed.answered:
                if question.is_refused:
                    raise AskError(400, question.detail or closed.why, code="refused")
                raise AskError(500, f"{closed.why}: {question.detail}" if question.detail else closed.why)


class OpenRequests:
    """The requests that are being answered, and a timer that looks whether their clients are still there."""

    _LOOK_EVERY_S = 0.1

    def __init__(self, service: Service) -> None:
        self._service = service
        self._answers: set[Answers] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._closing = ""

    @asynccontextmanager
    async def answering(
        self, request: web.Request, wanted: Sequence[AskedGroup], readers: Sequence[Sequence[Reader]]
    ) -> AsyncIterator[Answers]:
        if self._closing:
            raise AskError(503, self._closing, code="closing")
        answers = Answers(self._service, lambda: request.transport is None or request.transport.is_closing())
        self._answers.add(answers)
        self._look()
        try:
            await answers.ask(wanted, readers)
            yield answers
        finally:
            self._answers.discard(answers)
            answers.leave()

    def close(self, why: str) -> None:
        self._closing = why
        for answers in self._answers:
            answers.close(why)

    def _look(self) -> None:
        """Look after all clients: one that hung up says nothing, and a wait for tokens would not notice."""
        for answers in self._answers:
            answers.look_for_the_client()
        if self._timer is None and self._answers:
            self._timer = asyncio.get_running_loop().call_later(self._LOOK_EVERY_S, self._look_again)

    def _look_again(self) -> None:
        self._timer = None
        self._look()


class Answerer:
    """Answers models, completions and chats."""

    def __init__(self, service: Service, served: Served | None) -> None:
        self._service = service
        self._served = served
        self._model = None if served is None else served.text
        self._open = OpenRequests(service)
        self._created = int(time.time())
        default = _NAME_WITHOUT_MODEL if served is None else served.name
        self.name = service.settings.serve.model or default

    def close(self, why: str) -> None:
        """End every stream, and say why."""
        self._open.close(why)

    def models(self) -> ModelList:
        most = None if self._served is None else self._served.max_context
        return ModelList(data=(ModelCard(id=self.name, created=self._created, max_model_len=most),))

    async def complete(self, http: web.Request, request: CompletionRequest) -> web.StreamResponse:
        choices = completion_choices(request)
        self._check_model(request.model)
        longest = None if self._served is None else self._served.max_context
        given = prompts_of(request.prompt, longest)
        self._check_amount(len(given), choices)
        prompts = [await self._tokens(one) for one in given]
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

    def _check_amount(self, num_prompts: int, choices: Choices) -> None:
        num, most = num_prompts * choices.num, self._service.settings.serve.max_samples
        if num > most:
            raise wrong("n", f"{num} answers in one request; at most {most} are written at once")

    async def _tokens(self, prompt: str | list[int]) -> list[int]:
        if not isinstance(prompt, str):
            return prompt
        if self._model is None:
            raise wrong("prompt", "this manager has no tokenizer; give token ids, or start it with --tokenizer")
        return await self._model.tokens(prompt)

    async def _head(self, prefix: str, model: str | None) -> ReplyHead:
        version = await self._service.call(_published)
        number = f"{prefix}-{secrets.token_hex(12)}"
        weights = f"version-{version}" if version >= 0 else "no-version"
        return ReplyHead(number, int(time.time()), model or self.name, weights)

    async def _wanted(self, prompts: Sequence[list[int]], choices: Choices) -> list[AskedGroup]:
        self._check_amount(len(prompts), choices)
        longest = await self._service.call(_longest)
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
        except ConnectionError:  # the client hung up: no failure of ours, and nobody reads the answer
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
    """A stream of server-sent events. It begins with the first event: until then a request can be refused by status."""

    def __init__(self, http: web.Request, send_timeout_s: float) -> None:
        self._http = http
        self._send_timeout_s = send_timeout_s
        self.response = web.StreamResponse(headers=_STREAM_HEADERS)
        self.has_begun = False

    async def send(self, bodies: Sequence[msgspec.Struct | None]) -> None:
        """Send events. Raises TimeoutError for a client that reads nothing."""
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
