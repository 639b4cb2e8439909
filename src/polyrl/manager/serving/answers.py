"""One request while it is answered: its choices are read as their tokens come, and all of it is over when it is left.

    async with open.answering(request, wanted, ...) as answers:   asked; withdrawn when the block is left, however
        async for pieces in answers.pieces():                     what has come since the last look, a piece a choice

Rules kept here: a client that hangs up frees its places at once. Nothing is waited for without a deadline. A choice
that has its stop string ends there, whatever its worker still writes.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import NamedTuple

from aiohttp import web

from polyrl.errors import Refused
from polyrl.ids import SampleId, sample_id
from polyrl.manager import asking
from polyrl.manager.asking import AskedGroup, Question
from polyrl.manager.lobby import Lobby
from polyrl.manager.payload import SampleTokens
from polyrl.manager.service import Service
from polyrl.manager.serving.failures import AskError
from polyrl.manager.serving.replies import FinishReason
from polyrl.manager.serving.texts import Reader
from polyrl.wire import columns
from polyrl.wire.columns import CELL_BYTES


class ChoicePiece(NamedTuple):
    """What has come of a choice."""

    text: str
    tokens: list[int]
    logprobs: list[float]


class ChoiceInProgress:
    """One choice of a request."""

    def __init__(self, index: int, prompt: list[int], sample: SampleId, text: SampleTokens, reader: Reader) -> None:
        self.index = index
        self.prompt = prompt
        self.sample = sample
        self.text = text
        self.reader = reader
        self.finish: FinishReason | None = None
        self.piece = ChoicePiece("", [], [])
        """All of it, so far."""
        self.num_characters = 0
        """Of the tokens whose log-probabilities were told."""

    def more(self) -> ChoicePiece | None:
        """What has come since the last time; None when that is nothing."""
        if self.finish is not None:
            return None
        reader, num_shown = self.reader, len(self.reader.text)
        first = reader.num_tokens
        cells = columns.view_cells(bytes(self.text.cells[first * CELL_BYTES :]))
        reader.read(cells["token"].tolist())
        if self.text.finish and not reader.is_stopped:
            reader.end()
        if reader.is_stopped or self.text.finish:
            self.finish = "length" if self.text.finish == "length" and not reader.is_stopped else "stop"
        num = reader.num_tokens - first
        if not num and self.finish is None:
            return None
        piece = ChoicePiece(reader.text[num_shown:], cells["token"][:num].tolist(), cells["logprob"][:num].tolist())
        before = self.piece
        before.tokens.extend(piece.tokens)
        before.logprobs.extend(piece.logprobs)
        self.piece = before._replace(text=reader.text)
        return piece


Pieces = list[tuple[ChoiceInProgress, ChoicePiece]]


class Answers:
    """All choices of a request. `wake` says that there may be more, or that nobody listens any longer."""

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
            await self._service.ask(act)
        except Refused as refused:
            raise AskError(429 if refused.kind == "asked" else 503, str(refused), code=refused.kind) from refused
        for one, question, of_prompt in zip(wanted, self._questions, readers, strict=True):
            for number, reader in enumerate(of_prompt):
                sample = sample_id(question.group, number)
                text = question.texts[number]
                self.choices.append(ChoiceInProgress(len(self.choices), one.prompt, sample, text, reader))

    def leave(self) -> None:
        self._is_left = True
        groups = [one.group for one in self._questions if one.closed is None]
        if groups:
            why = self._closing or "whoever asked is gone"
            self._service.post(lambda lobby: [asking.withdraw(lobby, one, why) for one in groups])

    async def pieces(self) -> AsyncIterator[Pieces]:
        """Until every choice has ended. Raises AskError, or ConnectionResetError when the client hung up."""
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
        self._service.post(lambda lobby: asking.stop(lobby, answer.sample, answer.text))

    def _check(self) -> None:
        if self._is_gone():
            raise ConnectionResetError("whoever asked hung up")
        if self._closing:
            raise AskError(503, self._closing, code="closing")
        for question in self._questions:
            closed = question.closed
            if closed is not None and not closed.answered:
                if question.is_refused:
                    raise AskError(400, question.detail or closed.why, code="refused")
                raise AskError(500, f"{closed.why}: {question.detail}" if question.detail else closed.why)


class OpenRequests:
    """The requests that are being answered, and who sees to it that their clients are still there."""

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
        """One timer for all: a client that hung up says nothing, and whoever waits for tokens would not notice."""
        for answers in self._answers:
            answers.look_for_the_client()
        if self._timer is None and self._answers:
            self._timer = asyncio.get_running_loop().call_later(self._LOOK_EVERY_S, self._look_again)

    def _look_again(self) -> None:
        self._timer = None
        self._look()
