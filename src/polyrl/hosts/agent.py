"""A host's life: start the environment, join, play the episodes that the manager gives, come back after a break, leave.

    join -> connect -> HostHello/HostWelcome -> Play in; calls out, answers in; ends out ... -> drained -> goodbye
     ^        ^                                            |
     |        +-------------- the connection broke --------+     episodes go on; their open calls are said again
     +----------------------- we were given up ------------+     episodes are over

Rules kept here: nothing inbound is needed. A call stays open while the manager is away, however long that takes, and so
does the request of the environment that made it. The end of an episode is said until the manager has it on file. An
exception of an environment is the failure of its episode, and of no other.
"""

import asyncio
import contextlib
import logging
import math
import threading
import time
from collections.abc import Coroutine
from typing import Any, NamedTuple, TypeVar

import aiohttp
from msgspec import structs

from polyrl.errors import UserError, one_line
from polyrl.hosts.beside import LoopWatch, run_in
from polyrl.hosts.episode import (
    MAX_WHY,
    EpisodeEnd,
    EpisodeFailed,
    PlayedEnvironment,
    checked_parts,
    checked_untrained,
    finite,
)
from polyrl.hosts.pace import CallPace
from polyrl.hosts.played import PlayedEpisode
from polyrl.not_data import NOT_DATA
from polyrl.telemetry.repeats import Repeats
from polyrl.wire import frames, host_frames
from polyrl.wire.control import HostJoinReply, HostJoinRequest
from polyrl.wire.dial import Dialer, Patience, SessionOver, Unreachable, stay_connected
from polyrl.wire.host_frames import HeldEpisode

log = logging.getLogger("polyrl.hosts")

Result = TypeVar("Result")

_WELCOME_S = 10.0


class HostOptions(NamedTuple):
    name: str
    environment: str = ""
    """The environment's name in the run; empty: its own name."""
    slots: int = 16
    """Episodes that are played at once."""
    price_usd_per_hour: float = 0.0
    give_up_after_s: float = 600.0
    """A manager that cannot be reached for this long is given up."""
    name_patience_s: float = 30.0
    """How long another host may hold our name: one that died is given up sooner."""
    drain_deadline_s: float = 600.0
    """After a signal, episodes may go on for so long."""
    stuck_limit_s: float = 60.0
    """An environment that blocks its loop for so long, or for half of the run's `turn_timeout_s`, ends the process."""


class HostOver(Exception):
    """The host's life is over; the message says why. `ok`: as it should be."""

    def __init__(self, why: str, *, ok: bool) -> None:
        super().__init__(why)
        self.ok = ok


class HostAgent:
    """A host. `run` lives its life, in any loop; `drain` may be called from any thread."""

    def __init__(
        self,
        environment: PlayedEnvironment,
        dialer: Dialer,
        options: HostOptions,
        loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        """`loop` is the environment's, in the thread that makes this; None: the one that `run` is called in."""
        self._environment_loop, self._thread = loop, threading.get_ident()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._turn_timeout_s = math.inf
        self._environment, self._dialer, self._options = environment, dialer, options
        self._playing: dict[HeldEpisode, tuple[PlayedEpisode, asyncio.Task[None]]] = {}
        self._ended: dict[HeldEpisode, host_frames.EndEpisode] = {}
        """Ends that are not on file yet."""
        self._session: HostJoinReply | None = None
        self._session_before = ""
        self._socket: aiohttp.ClientWebSocketResponse | None = None
        self._welcomed = False
        self._draining = ""
        self._over: asyncio.Future[HostOver] | None = None
        self._sending: set[asyncio.Task[None]] = set()
        self._patience = Patience(options.give_up_after_s)
        self._failures = Repeats()
        self._pace = CallPace()
        self._is_stuck = False
        self._worn_out = ""

    # Life

    async def run(self) -> HostOver:
        """Returns how it ended; the environment is closed."""
        self._loop = asyncio.get_running_loop()
        self._over = self._loop.create_future()
        await self._in_environments_loop(self._environment.start())
        async with self._dialer:
            life = asyncio.create_task(self._live())
            watch = asyncio.create_task(self._watch())
            try:
                done, _ = await asyncio.wait((life, self._over), return_when=asyncio.FIRST_COMPLETED)
                return life.result() if life in done else self._over.result()
            finally:
                life.cancel()
                watch.cancel()
                self._stop_all()
                await asyncio.wait((life,), timeout=2.0)
                if not self._is_stuck:
                    await self._in_environments_loop(self._environment.close())

    async def in_own_loop(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Run what speaks with the manager, for code of the environment."""
        assert self._loop is not None
        return await run_in(self._loop, work)

    async def _in_environments_loop(self, work: Coroutine[Any, Any, Result]) -> Result:
        return await work if self._environment_loop is None else await run_in(self._environment_loop, work)

    async def _watch(self) -> None:
        """Leave when the environment's loop stands still: all episodes in it do."""
        if self._environment_loop is None:
            return
        name = self._options.environment or self._environment.name
        watch = LoopWatch(self._environment_loop, self._thread)

        def warn(stuck_s: float, place: str) -> None:
            log.warning(
                "environment %s blocks its %d episodes for %.0f s, at %s: async code must await, plain code may wait",
                name, len(self._playing), stuck_s, place,
            )  # fmt: skip

        stuck_s, place = await watch.until_stuck(self._stuck_limit_s, warn)
        self._is_stuck = True
        await self.send(frames.Goodbye(f"environment {name} hangs"))
        self._leave(f"environment {name} blocks its episodes for {stuck_s:.0f} s, at {place}", ok=False)

    def _stuck_limit_s(self) -> float:
        return min(self._options.stuck_limit_s, self._turn_timeout_s / 2)

    @property
    def is_stuck(self) -> bool:
        """Whether it left because its environment hangs: its process cannot end by itself then."""
        return self._is_stuck

    def drain(self, reason: str) -> None:
        """Play the episodes that are there to their end, then leave; asked twice, leave at once."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._drain, reason)

    def _drain(self, reason: str) -> None:
        if self._draining:
            self._leave("asked twice to leave", ok=False)
            return
        self._draining = reason
        log.info("draining: %s; %d episodes are played to their end", reason, len(self._playing))
        loop = asyncio.get_running_loop()
        loop.call_later(self._options.drain_deadline_s, lambda: self._leave("the drain deadline has passed", ok=False))
        if not self._playing and self._socket is None:
            self._leave(reason, ok=True)
        else:
            self._send_soon(frames.Leaving(reason))

    def _drain_if_worn_out(self) -> None:
        """Leave for another process before this one makes every episode slow."""
        why = "" if self._draining else self._environment.worn_out
        if why:
            log.warning("%s: this host takes no more episodes, and leaves when those that are here have ended", why)
            self._worn_out = why
            self._drain(why)

    def _leave(self, why: str, *, ok: bool) -> None:
        if self._over is not None and not self._over.done():
            self._over.set_result(HostOver(why, ok=ok))

    async def _live(self) -> HostOver:
        async def connect() -> None:
            if self._session is None:
                await self._join()
            await self._stay_connected()

        try:
            why = await stay_connected(
                connect, self._forget_session, self._patience, self._options.name_patience_s, log
            )
            return HostOver(why, ok=False)
        except HostOver as over:
            return over
        except UserError as error:
            return HostOver(str(error), ok=False)

    def _forget_session(self) -> None:
        self._session = None
        self._stop_all()

    async def _join(self) -> None:
        options, most = self._options, self._environment.max_at_once
        request = HostJoinRequest(
            name=options.name,
            protocol=frames.PROTOCOL,
            environment=options.environment or self._environment.name,
            slots=options.slots if most is None else min(options.slots, most),
            price_usd_per_hour=options.price_usd_per_hour,
        )
        self._session = await self._dialer.post("/v1/hosts/join", request, HostJoinReply, self._session_before)
        self._session_before = self._session.session
        self._patience.renew()
        log.info("joined %s as %s", self._dialer.url, self._session.host)

    async def _stay_connected(self) -> None:
        assert self._session is not None
        path, session = "/v1/host", self._session.session
        self._socket = socket = await self._dialer.stream(path, session, frames.MAX_TRAINER_FRAME_BYTES)
        beat = asyncio.create_task(self._beat(socket, self._session.heartbeat_interval_s))
        try:
            held = (*self._playing, *(one for one in self._ended if one not in self._playing))
            await socket.send_bytes(frames.encode(host_frames.HostHello(held, self._draining)))
            async with asyncio.timeout(_WELCOME_S):
                await self._welcome(socket)
            async for message in socket:
                if message.type is not aiohttp.WSMsgType.BINARY:
                    break
                await self._hear(_decode(self._dialer.url, message.data))
        except TimeoutError as error:
            raise Unreachable(f"{self._dialer.url}: no welcome within {_WELCOME_S:g} s") from error
        except (aiohttp.ClientError, ConnectionError, OSError) as error:
            log.info("the connection to the manager broke: %s", error)
        finally:
            beat.cancel()
            self._welcomed, self._socket = False, None
            await socket.close()

    async def _welcome(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        """Drop what is over, and say again what is open."""
        message = await socket.receive()
        if message.type is not aiohttp.WSMsgType.BINARY:
            raise Unreachable(f"{self._dialer.url}: it closed the connection")
        frame = _decode(self._dialer.url, message.data)
        if not isinstance(frame, host_frames.HostWelcome):
            await self._hear(frame)
            return
        wanted = frozenset(frame.held)
        for key in [one for one in (*self._playing, *self._ended) if one not in wanted]:
            self._forget(key)
        self._welcomed = True
        self._patience.renew()
        for episode, _ in list(self._playing.values()):
            if episode.open_call is not None:
                await self.send(episode.open_call)
        for ended in list(self._ended.values()):
            await self.send(ended)

    async def _beat(self, socket: aiohttp.ClientWebSocketResponse, interval_s: float) -> None:
        with contextlib.suppress(aiohttp.ClientError, ConnectionError, OSError):
            while True:
                await asyncio.sleep(interval_s)
                self._drain_if_worn_out()
                if self._welcomed:
                    await socket.send_bytes(frames.encode(host_frames.HostReport(len(self._playing))))

    async def wait_for_pace(self) -> None:
        """Wait until another call is no flood."""
        wait_s = self._pace.wait_s(time.monotonic(), len(self._playing))
        if wait_s > 0.0:
            await asyncio.sleep(wait_s)

    async def send(self, frame: host_frames.FromHost) -> None:
        """Send a frame now; without a connection, the next one begins with all that is open."""
        if self._socket is None or self._socket.closed or not self._welcomed:
            return
        with contextlib.suppress(aiohttp.ClientError, ConnectionError, OSError):
            await self._socket.send_bytes(frames.encode(frame))

    def _send_soon(self, frame: host_frames.FromHost) -> None:
        task = asyncio.get_running_loop().create_task(self.send(frame))
        self._sending.add(task)
        task.add_done_callback(self._sending.discard)

    # Episodes

    async def _hear(self, frame: host_frames.ToHost) -> None:
        match frame:
            case host_frames.Play():
                self._turn_timeout_s = frame.turn_timeout_s
                for order in frame.episodes:
                    self._begin(order, frame)
            case host_frames.CallAnswer():
                found = self._playing.get(HeldEpisode(frame.sample, frame.attempt))
                if found is not None:
                    found[0].answered(frame)
            case host_frames.StopPlaying():
                for key in frame.episodes:
                    self._forget(key)
            case frames.Release():
                await self._released(frame)
            case host_frames.HostWelcome():
                pass

    async def _released(self, release: frames.Release) -> None:
        if release.rejoin and not self._draining:
            raise SessionOver(release.why)
        await self.send(frames.Goodbye(release.why))
        raise HostOver(self._worn_out or release.why, ok=not release.in_anger and not self._worn_out)

    def _begin(self, order: host_frames.EpisodeOrder, play: host_frames.Play) -> None:
        key = HeldEpisode(order.sample, order.attempt)
        if key in self._playing or key in self._ended:
            return  # said twice
        try:
            episode = PlayedEpisode(self, order, play)
        except NOT_DATA as error:
            self._end(key, _failed(key, 0, f"its task is not a row of JSON: {error}"))
            return
        self._playing[key] = episode, asyncio.create_task(self._play(episode))

    async def _play(self, episode: PlayedEpisode) -> None:
        key, began = episode.key, time.monotonic()
        try:
            end = await self._in_environments_loop(self._environment.play(episode))
            frame = host_frames.EndEpisode(
                *(key.sample, key.attempt, "scored", episode.num_calls, finite(end.reward, "the reward")),
                _with_turns(structs.replace(end, parts=checked_parts(end.parts))),
                end.why[:MAX_WHY],
                checked_untrained(end.untrained),
            )
        except EpisodeFailed as error:
            frame = _failed(key, episode.num_calls, str(error))
        except Exception as error:  # noqa: BLE001  whatever an environment raises is the failure of its episode
            frame = _failed(key, episode.num_calls, one_line(error))
        if frame.outcome == "failed" and (often := self._failures.again(frame.why)) is not None:
            log.warning(
                "episode %s failed after %.1f s: %s%s", episode.name, time.monotonic() - began, frame.why, often
            )
        self._end(key, frame)

    def _end(self, key: HeldEpisode, frame: host_frames.EndEpisode) -> None:
        self._playing.pop(key, None)
        self._ended[key] = frame
        self._send_soon(frame)

    def _forget(self, key: HeldEpisode) -> None:
        self._ended.pop(key, None)
        found = self._playing.pop(key, None)
        if found is not None:
            found[1].cancel()

    def _stop_all(self) -> None:
        for key in (*self._playing, *self._ended):
            self._forget(key)


def _failed(key: HeldEpisode, num_calls: int, why: str) -> host_frames.EndEpisode:
    return host_frames.EndEpisode(key.sample, key.attempt, "failed", num_calls, why=why[:1000])


def _with_turns(end: EpisodeEnd) -> dict[str, float]:
    if not end.num_turns or "turns" in end.parts:
        return end.parts
    return {**end.parts, "turns": finite(end.num_turns, "the number of turns")}


def _decode(url: str, data: bytes) -> host_frames.ToHost:
    try:
        return host_frames.decode_to_host(data)
    except NOT_DATA as error:
        raise UserError(f"{url}: what it sent is no frame of this PolyRL: {error}") from error
