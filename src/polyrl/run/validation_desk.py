"""Episodes of tasks that are not trained on: the trainer in the manager's place, for one host of its own.

    host process --POST /v1/hosts/join, WebSocket /v1/host (loopback, the run's host token)--> calls --> the engine

The fleet takes no part: validation has the weights of one version, which only the trainer's own engine is sure to have.

Rules kept here: an episode that fails is begun again, `max_attempts` times in all, and then has no reward: it is left
out, and is never a zero. An episode that is over time is scored with `timeout_reward` if the policy has answered it.
Episodes of a host that died begin again from their start: nothing of validation is journalled.
"""

import asyncio
import hmac
import logging
import secrets
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple

import msgspec
from aiohttp import WSMsgType, web

from polyrl.engines.engine import EngineError
from polyrl.manager.calls import OPEN, CallRecord, grown_prompt
from polyrl.not_data import NOT_DATA
from polyrl.run.conversations import calls_of
from polyrl.run.task_contract import Answered
from polyrl.scheduling.core.parameters import EnvironmentRules
from polyrl.scheduling.rules.order import mix64
from polyrl.trainer.local_engine import LocalAnswer
from polyrl.wire import columns, frames, host_frames
from polyrl.wire.columns import CELL_BYTES
from polyrl.wire.control import SESSION_HEADER, AnswerRules, HostJoinReply
from polyrl.wire.host_frames import HeldEpisode

log = logging.getLogger("polyrl.train")

_LOOK_EVERY_S = 0.25
_HEARTBEAT_S = 1.0
_NO_HOST_S = 300.0
"""An episode that no host has begun by then has no reward."""
_MAX_LIVES = 20
"""Beginnings of an episode, those whose host died included, after which a failure is its last."""
_LEAST_NUMBER = 1 << 40
"""Episodes of validation have numbers of their own."""


class HeldOutTask(NamedTuple):
    """One episode of a task that is not trained on."""

    number: int
    seed: int
    """Of the task's world: the same for all episodes of the task."""
    draw_seed: int
    """Of the policy's draws."""
    row: bytes = b""


class EpisodeLimits(NamedTuple):
    rules: EnvironmentRules
    answers: AnswerRules
    max_new_tokens: int
    """Drawn tokens of an episode."""
    slots: int


CallAnswerer = Callable[[Sequence[int], int, host_frames.MakeCall, int], Awaitable[LocalAnswer]]
"""Answers a prompt with so many tokens at most; the call says where to stop, the number is a seed."""


class _Playing:
    """A task while it is played."""

    def __init__(self, number: int, task: HeldOutTask) -> None:
        self.number, self.task = number, task
        self.attempt = 1
        self.num_failures = 0
        self.ended: asyncio.Future[Answered | None] = asyncio.get_running_loop().create_future()
        self.asked_at = time.monotonic()
        self.calls: list[CallRecord] = []
        self.cells = bytearray()
        self.begun_at: float | None = None
        self.moved_at = 0.0
        """Since when its environment has the move."""

    @property
    def key(self) -> HeldEpisode:
        return HeldEpisode(self.number, self.attempt)

    @property
    def is_answered(self) -> bool:
        return bool(self.calls) and self.calls[0].end > 0

    def begin(self) -> None:
        """Begin, or begin again: what is under way of the attempt before is late."""
        self.attempt += self.begun_at is not None
        self.begun_at = self.moved_at = time.monotonic()
        self.calls, self.cells = [], bytearray()

    def end(self, reward: float, parts: dict[str, float]) -> None:
        """End with all calls that were answered, and the reward that the environment gave."""
        answered = [one for one in self.calls if one.end != OPEN]
        tokens: list[int] = columns.view_cells(bytes(self.cells))["token"].tolist()
        calls = calls_of(self.calls, self.cells)
        self._end(Answered(tokens, answered[-1].finish, calls, frames.EnvironmentReward(reward, parts)))

    def give_up(self) -> None:
        self._end(None)

    def _end(self, what: Answered | None) -> None:
        if not self.ended.done():
            self.ended.set_result(what)


class ValidationDesk:
    """Plays tasks through one host. `start` opens its port."""

    def __init__(self, name: str, token: str, limits: EpisodeLimits, answer: CallAnswerer) -> None:
        self.name, self._token, self._limits, self._answer = name, token.encode(), limits, answer
        self._session = ""
        self._socket: web.WebSocketResponse | None = None
        self._heard_at = 0.0
        self._playing: dict[int, _Playing] = {}
        self._next_number = _LEAST_NUMBER
        self._answering: set[asyncio.Task[None]] = set()
        self._runner: web.AppRunner | None = None
        self._failures: Counter[str] = Counter()
        self.url = ""

    async def start(self) -> None:
        app = web.Application()
        app.router.add_post("/v1/hosts/join", self._join)
        app.router.add_get("/v1/host", self._stream)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def close(self) -> None:
        for task in self._answering:
            task.cancel()
        if self._socket is not None:
            await self._socket.close()
        if self._runner is not None:
            await self._runner.cleanup()

    @property
    def is_heard(self) -> bool:
        """Whether its host is connected, and says so."""
        silent_s = time.monotonic() - self._heard_at
        return self._socket is not None and silent_s < self._limits.rules.host_timeout_s

    def take_failures(self) -> Counter[str]:
        """Return why episodes have no reward, since the last call."""
        taken, self._failures = self._failures, Counter()
        return taken

    # Tasks

    async def play(self, tasks: Sequence[HeldOutTask]) -> list[Answered | None]:
        """Return each task's episode, with its environment's reward; None where there is none."""
        places = asyncio.Semaphore(self._limits.slots)

        async def play_one(task: HeldOutTask) -> Answered | None:
            async with places:
                return await self._play_one(task)

        return list(await asyncio.gather(*map(play_one, tasks)))

    async def _play_one(self, task: HeldOutTask) -> Answered | None:
        playing = _Playing(self._next_number, task)
        self._next_number += 1
        self._playing[playing.number] = playing
        try:
            await self._give(playing)
            while not playing.ended.done():
                await asyncio.wait((playing.ended,), timeout=_LOOK_EVERY_S)
                await self._look_at_the_time(playing)
            return playing.ended.result()
        finally:
            del self._playing[playing.number]
            await self._say(host_frames.StopPlaying((playing.key,)))

    async def _give(self, playing: _Playing) -> None:
        """Have the host begin a task, if it is there; otherwise it is told when it is."""
        if self._socket is None:
            return
        playing.begin()
        limits, task = self._limits, playing.task
        order = host_frames.EpisodeOrder(playing.number, playing.attempt, task.number, task.seed, task.row)
        context, vocab = limits.answers.max_context, limits.answers.vocab
        turn_s = limits.rules.turn_timeout_s
        await self._say(host_frames.Play((order,), context, limits.max_new_tokens, vocab, turn_s))

    async def _look_at_the_time(self, playing: _Playing) -> None:
        rules, now = self._limits.rules, time.monotonic()
        if playing.begun_at is None:
            if now - playing.asked_at > _NO_HOST_S:
                self._failures["no host was there to play it"] += 1
                playing.give_up()
            return
        has_move = not playing.calls or playing.calls[-1].end != OPEN
        if now - playing.begun_at <= rules.episode_timeout_s and not (
            has_move and now - playing.moved_at > rules.turn_timeout_s
        ):
            return
        if playing.is_answered:
            playing.end(rules.timeout_reward, {})
        else:
            await self._failed(playing, "it took too long, and had no answer")

    async def _failed(self, playing: _Playing, why: str) -> None:
        playing.num_failures += 1
        if playing.num_failures >= self._limits.rules.max_attempts or playing.attempt > _MAX_LIVES:
            self._failures[why] += 1
            playing.give_up()
            return
        await self._say(host_frames.StopPlaying((playing.key,)))
        await self._give(playing)

    # The host

    async def _join(self, request: web.Request) -> web.Response:
        given = request.headers.get("Authorization", "").removeprefix("Bearer ").encode(errors="replace")
        if not hmac.compare_digest(given, self._token):
            return web.json_response({"error": "expected the run's host token"}, status=401)
        self._session = secrets.token_hex(16)
        reply = HostJoinReply(host=self.name, session=self._session, heartbeat_interval_s=_HEARTBEAT_S)
        return web.Response(body=msgspec.json.encode(reply), content_type="application/json")

    async def _stream(self, request: web.Request) -> web.StreamResponse:
        session = request.headers.get(SESSION_HEADER, "").encode(errors="replace")
        if not self._session or not hmac.compare_digest(session, self._session.encode()):
            return web.json_response({"error": "that session is over"}, status=410)
        socket = web.WebSocketResponse(max_msg_size=host_frames.MAX_HOST_FRAME_BYTES, compress=False)
        await socket.prepare(request)
        try:
            async for message in socket:
                if message.type is not WSMsgType.BINARY:
                    break
                self._heard_at = time.monotonic()
                await self._hear(socket, host_frames.decode_from_host(message.data))
        except NOT_DATA as error:
            log.warning("host %s is cut off: not a frame: %s", self.name, error)
        finally:
            if self._socket is socket:
                self._socket = None
        return socket

    async def _hear(self, socket: web.WebSocketResponse, frame: host_frames.FromHost) -> None:
        match frame:
            case host_frames.HostHello():
                await self._hello(socket, frame)
            case host_frames.MakeCall() | host_frames.EndEpisode():
                playing = self._playing.get(frame.sample)
                if playing is None or playing.attempt != frame.attempt or playing.begun_at is None:
                    await self._say(host_frames.StopPlaying((HeldEpisode(frame.sample, frame.attempt),)))
                elif isinstance(frame, host_frames.MakeCall):
                    await self._call(playing, frame)
                else:
                    await self._ended(playing, frame)
            case frames.Leaving():
                await self._say(frames.Release("validation needs it no more"))
            case host_frames.HostReport() | frames.Goodbye():
                pass

    async def _hello(self, socket: web.WebSocketResponse, hello: host_frames.HostHello) -> None:
        self._socket = socket
        held = {one.sample: one for one in hello.held}
        kept = [one for one in self._playing.values() if one.begun_at is not None and held.get(one.number) == one.key]
        await self._say(host_frames.HostWelcome(tuple(one.key for one in kept)))
        for playing in list(self._playing.values()):
            if playing not in kept:
                await self._give(playing)

    async def _ended(self, playing: _Playing, frame: host_frames.EndEpisode) -> None:
        if frame.outcome == "failed" or not playing.is_answered:
            await self._failed(playing, frame.why or "it ended before the policy was asked")
        else:
            playing.end(frame.reward, dict(frame.parts))

    async def _say(self, frame: host_frames.ToHost) -> None:
        if self._socket is not None and not self._socket.closed:
            try:
                await self._socket.send_bytes(frames.encode(frame))
            except (ConnectionError, OSError):
                self._socket = None

    # Calls

    async def _call(self, playing: _Playing, frame: host_frames.MakeCall) -> None:
        calls = playing.calls
        if frame.number < len(calls):
            if calls[frame.number].end != OPEN:
                await self._tell(playing, frame.number)
            return
        try:
            prompt = self._prompt(playing, frame)
        except ValueError as error:
            await self._failed(playing, str(error))
            return
        start, num_prompt = len(playing.cells) // CELL_BYTES, len(prompt) // columns.TOKEN_IDS.itemsize
        room = min(self._limits.max_new_tokens - start, self._limits.answers.max_context - num_prompt)
        if room <= 0:
            why = "the context is full, or the tokens of the episode are drawn"
            await self._say(host_frames.CallAnswer(playing.number, playing.attempt, frame.number, b"", "", why))
            return
        most = min(room, frame.max_tokens) if frame.max_tokens else room
        calls.append(CallRecord(frame.base, frame.kept, frame.tokens, start, most))
        calls[-1].prompt = prompt
        task = asyncio.create_task(self._answer_call(playing, playing.attempt, frame, prompt, most))
        self._answering.add(task)
        task.add_done_callback(self._answering.discard)

    def _prompt(self, playing: _Playing, frame: host_frames.MakeCall) -> bytes:
        """Return a new call's whole prompt. Raises ValueError for one that no engine may get."""
        calls = playing.calls
        if frame.number > len(calls) or (calls and calls[-1].end == OPEN) or frame.base >= frame.number:
            raise ValueError(f"call {frame.number} before the one before it was answered")
        if len(frame.tokens) % columns.TOKEN_IDS.itemsize:
            raise ValueError("tokens that end inside a number")
        if frame.tokens and (why := columns.why_no_ids(columns.view_tokens(frame.tokens), self._limits.answers.vocab)):
            raise ValueError(why)
        prompt = grown_prompt(calls, playing.cells, frame.base, frame.kept, frame.tokens)
        if not prompt:
            raise ValueError("a call without a prompt")
        return prompt

    async def _answer_call(
        self, playing: _Playing, attempt: int, frame: host_frames.MakeCall, prompt: bytes, most: int
    ) -> None:
        seed = mix64(playing.task.draw_seed, frame.number) >> 1
        try:
            answer = await self._answer(columns.view_tokens(prompt).tolist(), most, frame, seed)
        except EngineError as error:
            if not playing.ended.done():
                playing.ended.set_exception(error)
            return
        if playing.attempt != attempt or frame.number >= len(playing.calls):
            return
        if not answer.is_whole:
            await self._failed(playing, f"no answer: {answer.finish}")
            return
        playing.cells += columns.pack_cells(answer.tokens, answer.logprobs)
        playing.calls[frame.number].close(len(playing.cells) // CELL_BYTES, answer.finish)
        playing.moved_at = time.monotonic()
        await self._tell(playing, frame.number)

    async def _tell(self, playing: _Playing, number: int) -> None:
        record = playing.calls[number]
        cells = bytes(playing.cells[record.start * CELL_BYTES : record.end * CELL_BYTES])
        await self._say(host_frames.CallAnswer(playing.number, playing.attempt, number, cells, record.finish))
