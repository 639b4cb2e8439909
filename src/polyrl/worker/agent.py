"""A worker's life: knock, start the engine, join, stream, come back after a break, drain, leave.

    knock -> start engine -> join -> connect -> Hello/Welcome -> orders in, tokens out ... -> drained -> goodbye
                              ^        ^                              |
                              |        +------ the connection broke --+        leases go on meanwhile
                              +--------------- we were given up ------+        leases are over

A local worker shares the trainer's devices: told its duty, it gives them over, or takes them back. It fetches no
weights; the trainer, which changes the shared ones, tells its engine so.

Rules kept here: nothing inbound is needed. The engine goes on while the connection is broken; its tokens are kept
and sent by offset afterwards. A signal means: hand everything over at its current token, then leave, within a deadline.
"""

import asyncio
import contextlib
import logging
import math
import re
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import aiohttp
from msgspec import structs

from polyrl.disk import write_whole
from polyrl.engines.engine import Engine, EngineEnd, EngineError, EngineInfo, Job
from polyrl.engines.finishing import finish
from polyrl.errors import UserError, one_line
from polyrl.ids import LeaseId, SampleId, Version
from polyrl.not_data import NOT_DATA
from polyrl.telemetry.repeats import Repeats
from polyrl.wire import columns, frames
from polyrl.wire.control import JoinReply, JoinRequest, NameReply
from polyrl.wire.dial import Dialer, NameTaken, NotKnown, Patience, SessionOver, Unreachable, pauses
from polyrl.wire.imposed import length_of
from polyrl.worker.installing import Installer
from polyrl.worker.streams import LeaseBook

if TYPE_CHECKING:
    from polyrl.weights.peer import WeightPeer

log = logging.getLogger("polyrl.worker")

_ENDS_TOGETHER_S = 0.005
"""After a report of answers that ended, others wait for so long and are reported in one frame. The first is sent at
once: it is waited for, and its slot is free."""
_WELCOME_S = 10.0
"""A manager that has taken a connection answers within this time."""


class WorkerOptions(NamedTuple):
    name: str
    spot: bool = False
    price_usd_per_hour: float = 0.0
    num_devices: int = 1
    planned: bool = False
    """The run plans how wide its engine is."""
    drain_deadline_s: float = 25.0
    """After a signal, everything is handed over within this time, or we leave without."""
    give_up_after_s: float = 600.0
    """A manager that cannot be reached for this long is given up."""
    name_patience_s: float = 30.0
    """How long another worker may hold our name: one that died without a goodbye is given up sooner."""
    session_file: Path | None = None
    """The file with the session, so that a process started in our place gets our name at once."""
    pull_deadline_s: float = 840.0
    """A version that has not come by then has failed."""
    relays: bool = True
    """Others may fetch weights from here."""
    region: str = ""
    """Its name, if it is far from the trainer: weights come from workers of the same region where they can."""
    is_local: bool = False
    """It shares the trainer's devices and weights."""


PeerOf = Callable[[bytes], "WeightPeer"]
"""From the run's key to a peer that fetches, holds and relays weights."""
SetDuty = Callable[[frames.Duty], Awaitable[None]]
"""Gives a local worker's devices over to training, or takes them back."""


class Left(Exception):
    """The worker's life is over; the message says why. `ok`: as it should be.

    `is_misfit`: this worker, as it was started, can never take part in that run, and starting it again changes nothing.
    """

    def __init__(self, why: str, *, ok: bool, is_misfit: bool = False) -> None:
        super().__init__(why)
        self.ok, self.is_misfit = ok, is_misfit


class WorkerAgent:
    """A worker. `run` lives its life; `drain` may be called from a signal handler.

    Without `peer_of` versions are only numbers. A local worker has `set_duty`.
    """

    def __init__(
        self,
        engine: Engine,
        dialer: Dialer,
        options: WorkerOptions,
        *,
        peer_of: PeerOf | None = None,
        set_duty: SetDuty | None = None,
    ) -> None:
        self._engine = engine
        self._dialer = dialer
        self._options = options
        self._peer_of, self._set_duty = peer_of, set_duty
        self._installer = Installer(engine, options.pull_deadline_s, self._tell_of_install, self._does_not_fit)
        self._changing_duty: asyncio.Task[None] | None = None
        self._duty: frames.Duty | None = None
        """The last duty that it was given."""
        self._imposed: dict[LeaseId, int] = {}
        """Leases whose answers have an imposed length."""
        self._book = LeaseBook()
        self._failing: dict[LeaseId, asyncio.Task[None]] = {}
        """Leases that we ended, until their engine has let go of them."""
        self._has_ends = asyncio.Event()
        """Set when an answer has ended: its end is sent early."""
        self._info: EngineInfo | None = None
        self._announced: Version | None = None
        """The version that was reported to the manager on this connection."""
        self._down = ""
        """Why the engine was down when we last looked."""
        self._num_outages = 0
        self._session: JoinReply | None = None
        self._session_before = "" if options.session_file is None else _read_session(options.session_file)
        """The earlier session, which proves that our name is ours."""
        self._socket: aiohttp.ClientWebSocketResponse | None = None
        self._welcomed = False
        self._draining = ""
        self._goes_at: float | None = None
        """When the machine goes, if notice was given; None while draining: it hands over at once."""
        self._saying: asyncio.Task[None] | None = None
        """That we leave."""
        self._left: asyncio.Future[Left] | None = None
        self._patience = Patience(options.give_up_after_s)
        """With a manager that cannot be reached, since the last good connection ended."""
        self._waits = pauses()
        self._began_at = time.monotonic()
        self._rate = Rate()
        self._failures = Repeats()

    # The sink: what the engine says

    def tokens(self, lease: LeaseId, tokens: Sequence[int], logprobs: Sequence[float], version: Version) -> None:
        self._installer.version = version  # an install may be told by its first token before it is told by its end
        if not min(logprobs, default=0.0) >= columns.MIN_LOGPROB or not math.isfinite(sum(logprobs)):
            # By weights that diverged. A worker that sent it on would be refused as a liar.
            self._fail(lease, f"version {version} gives no numbers")
            return
        self._book.add(lease, tokens, logprobs, version)

    def ended(self, lease: LeaseId, reason: EngineEnd, detail: str = "") -> None:
        if reason in ("engine_failed", "refused"):
            often = self._failures.again(f"{reason}: {detail}")
            if often is not None:
                log.warning("lease %d: %s: %s%s", lease, reason, detail, often)
        if self._imposed.pop(lease, None) is not None and reason == "length":
            reason = "stop"  # where it was told to stop
        self._book.end(lease, reason, detail)
        self._has_ends.set()

    def _fail(self, lease: LeaseId, why: str) -> None:
        """End a lease that its engine believes to go on."""
        if lease not in self._failing:
            self.ended(lease, "engine_failed", why)
            self._failing[lease] = task = asyncio.get_running_loop().create_task(self._abort(lease))
            task.add_done_callback(lambda _: self._failing.pop(lease, None))

    # Life

    async def run(self) -> Left:
        """Returns how it ended; the engine is closed."""
        self._left = asyncio.get_running_loop().create_future()
        async with self._dialer:
            starting = asyncio.create_task(self._start())
            life: asyncio.Task[Left] | None = None
            try:
                await asyncio.wait((starting, self._left), return_when=asyncio.FIRST_COMPLETED)
                if not starting.done():
                    return self._left.result()
                self._info = starting.result()
                self._installer.version = self._info.version
                log.info("engine %s is ready: %s, %d slots", self._info.engine, self._info.model, self._info.slots)
                life = asyncio.create_task(self._live())
                done, _ = await asyncio.wait((life, self._left), return_when=asyncio.FIRST_COMPLETED)
                if life not in done:
                    await self._say_goodbye(str(self._left.result()), is_misfit=self._left.result().is_misfit)
                    life.cancel()
                    await asyncio.wait((life,), timeout=2.0)
                    return self._left.result()
                return life.result()
            except EngineError as error:
                return Left(str(error), ok=False)
            except Left as left:
                return left
            finally:
                for task in (starting, life, self._changing_duty, self._saying, *self._failing.values()):
                    if task is not None:
                        task.cancel()
                self._installer.cancel()
                await self._engine.close()
                await self._installer.close()

    async def _start(self) -> EngineInfo:
        """Ask whether the name is free before a model is loaded; a manager that is not up yet may come up meanwhile."""
        try:
            await self._dialer.knock()
            if not self._options.is_local:  # that one takes its name from anybody
                with contextlib.suppress(NotKnown):  # an older manager; whoever joins hears of a name that is taken
                    await self._wait_for_name()
        except Unreachable as error:
            log.info("%s; starting the engine meanwhile", error)
        except UserError as error:
            raise Left(str(error), ok=False, is_misfit=True) from error
        return await self._engine.start(self)

    async def _wait_for_name(self) -> None:
        """Wait until our name is free. Raises UserError if another live worker has it: it was heard of while we waited.

        A worker that comes back is not refused: its dead process is missed by then, and one that leaves makes way.
        """
        waits, until = pauses(), math.inf
        while True:
            asked_at = time.monotonic()
            path = f"/v1/workers/{self._options.name}"
            found = await self._dialer.get(path, NameReply, self._session_before)
            if not found.refusal:
                return
            if asked_at > until:
                raise UserError(f"{self._dialer.url}: {found.refusal}")
            if until == math.inf:
                log.info("%s: %s; trying again", self._dialer.url, found.refusal)
                until = time.monotonic() + max(self._options.name_patience_s, found.missed_in_s)
            await asyncio.sleep(next(waits))

    def drain(self, reason: str, notice_s: float = 0.0) -> None:
        """Hand everything over and leave: shortly before the machine goes in `notice_s` seconds, or at once.

        A worker that was given notice and is asked again hands over at once; one that hands over leaves.
        """
        if self._draining and self._goes_at is None:
            self._leave("asked twice to leave", ok=False)
            return
        if self._draining or not notice_s > 0:
            notice_s, self._goes_at = 0.0, None
            log.info("draining: %s", reason)
        else:
            self._goes_at = time.monotonic() + notice_s
            log.info("%s: the machine goes in %.0f s", reason, notice_s)
        self._draining = reason
        asyncio.get_running_loop().call_later(
            max(notice_s, self._options.drain_deadline_s),
            lambda: self._leave("the drain deadline has passed", ok=False),
        )
        if self._has_nothing_to_hand_over and self._socket is None:  # nobody is there, and nothing is lost
            self._leave(reason, ok=True)
        else:
            self._saying = asyncio.get_running_loop().create_task(self._send(frames.Leaving(reason, notice_s)))

    @property
    def _has_nothing_to_hand_over(self) -> bool:
        """Ends that were not acknowledged count: they are in the book."""
        return self._session is None or not len(self._book)

    def _leave(self, why: str, *, ok: bool, is_misfit: bool = False) -> None:
        if self._left is not None and not self._left.done():
            self._left.set_result(Left(why, ok=ok, is_misfit=is_misfit))

    def _does_not_fit(self, why: str) -> None:
        self._leave(f"it cannot serve this run: {why}", ok=False, is_misfit=True)

    async def _live(self) -> Left:
        """Join and stay connected until there is a reason to leave, and return it.

        The engine is asked after every break: if it failed, that is the reason given for leaving.
        """
        self._patience.renew()
        while True:
            left = await self._live_until_break()
            sick = self._engine.health()
            if sick is not None:
                return Left(f"the engine cannot go on: {sick}", ok=False)
            if left is not None:
                return left
            await asyncio.sleep(next(self._waits))

    async def _live_until_break(self) -> Left | None:
        """Join and stay connected. Return why the worker leaves; None: dial again."""
        try:
            if self._session is None:
                await self._join()
            await self._stay_connected()
        except SessionOver:
            log.warning("the manager has given us up; joining again")
            await self._start_over()
        except Unreachable as error:
            is_over, away_s = self._patience.is_over(error), self._patience.away_s
            if isinstance(error, NameTaken) and away_s > self._options.name_patience_s:
                return Left(str(error), ok=False)
            if is_over:
                return Left(f"{error}; given up after {away_s:.0f} s", ok=False)
            log.info("%s; trying again", error)
        except Left as left:
            return left
        except UserError as error:
            return Left(str(error), ok=False, is_misfit=True)
        hands_over = bool(self._draining) and self._goes_at is None
        return Left(self._draining, ok=True) if hands_over and self._has_nothing_to_hand_over else None

    async def _join(self) -> None:
        assert self._info is not None
        request = JoinRequest(
            name=self._options.name,
            protocol=frames.PROTOCOL,
            engine=self._info.engine,
            model=self._info.model[:256],
            slots=self._info.slots,
            spot=self._options.spot,
            num_devices=self._options.num_devices,
            planned=self._options.planned,
            price_usd_per_hour=self._options.price_usd_per_hour,
            kv_tokens=self._info.kv_tokens,
            version=self._installer.version,
            starting_s=min(1e6, time.monotonic() - self._began_at),
            relays=self._peer_of is not None and self._options.relays,
            region=self._options.region,
            local=self._options.is_local,
        )
        self._session = await self._dialer.post("/v1/join", request, JoinReply, self._session_before)
        self._session_before = self._session.session
        if self._options.session_file is not None:
            _write_session(self._options.session_file, self._session_before)
        if self._installer.peer is None and self._peer_of is not None:
            self._installer.peer = await asyncio.to_thread(self._peer_of, bytes.fromhex(self._session.weights_key))
        self._began_at = time.monotonic()
        log.info("joined %s as %s", self._dialer.url, self._options.name)

    async def _start_over(self) -> None:
        """Drop the session and all leases: we were given up, and other workers have the samples now."""
        self._session = None
        await self._stop(self._book.clear())

    # A connection

    @property
    def _runs(self) -> int:
        """The version, as frames say it."""
        return -1 if self._installer.version is None else self._installer.version

    async def _stay_connected(self) -> None:
        assert self._session is not None
        self._socket = await self._dialer.stream("/v1/worker", self._session.session, frames.MAX_TRAINER_FRAME_BYTES)
        self._welcomed = False
        self._look_at_engine()
        self._announced = self._installer.version
        peer, digest = self._installer.peer, self._installer.digest
        relayed = peer.addresses if peer is not None and self._options.relays else ()
        left_s = 0.0 if self._goes_at is None else max(0.0, self._goes_at - time.monotonic())
        held = self._book.hello()
        await self._send(frames.Hello(self._runs, held, self._draining, digest, relayed, self._down, left_s))
        regular = (self._receive(), self._flush_often(), self._report_often(), self._expect_welcome())
        tasks = [asyncio.create_task(one) for one in regular]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            results = await asyncio.gather(*tasks, return_exceptions=True)
            with contextlib.suppress(aiohttp.ClientError, OSError, RuntimeError):  # the last: it is closed already
                async with asyncio.timeout(2.0):
                    await self._socket.close()
            self._socket = None
            if self._welcomed:
                self._waits = pauses()
                self._patience.renew()
        for result in results:
            if isinstance(result, Exception):
                raise result

    async def _expect_welcome(self) -> None:
        await asyncio.sleep(_WELCOME_S)
        if not self._welcomed:
            raise Unreachable("the manager does not answer")
        await asyncio.Event().wait()

    async def _send(self, frame: frames.FromWorker) -> None:
        """Send, or do nothing while there is no connection: Hello says it all again."""
        if self._socket is None or self._socket.closed:
            return
        with contextlib.suppress(aiohttp.ClientError, ConnectionError, OSError):
            await self._socket.send_bytes(frames.encode(frame))

    async def _receive(self) -> None:
        assert self._socket is not None
        async for message in self._socket:
            if message.type is not aiohttp.WSMsgType.BINARY:
                break
            try:
                frame = frames.decode_to_worker(message.data)
            except NOT_DATA as error:
                raise UserError(f"{self._dialer.url}: what it sent is no frame of this PolyRL: {error}") from error
            await self._hear(frame)
        raise Unreachable("the connection to the manager broke")

    async def _hear(self, frame: frames.ToWorker) -> None:
        match frame:
            case frames.Ack():
                self._book.acknowledge(frame.seq)
            case frames.Orders():
                for order in frame.orders:
                    self._generate(order)
            case frames.Stop():
                aborted = [lease for lease in map(LeaseId, frame.aborts) if self._book.drop(lease)]
                await self._stop(aborted, map(LeaseId, frame.hand_overs))
            case frames.PullOrder():
                self._installer.start(frame)
            case frames.ChangeDuty():
                self._start_duty(frame.duty)
            case frames.Welcome():
                await self._stop(self._book.welcome(frame.held))
                self._welcomed = True
            case frames.Release():
                await self._released(frame)

    def _generate(self, order: frames.Order) -> None:
        lease = LeaseId(order.lease)
        if lease in self._book:
            return
        so_far = columns.unpack_tokens(order.so_far)
        self._book.open(lease, order.num_before + len(so_far))
        prompt = columns.unpack_tokens(order.prompt)
        max_tokens, sampling = order.max_tokens, order.sampling
        if sampling.imposed is not None:
            wanted = length_of(SampleId(order.sample), sampling.imposed, max_tokens)
            if wanted <= len(so_far):  # its end was made already, and not heard of
                self._book.end(lease, "stop")
                return
            if wanted < max_tokens:
                self._imposed[lease] = max_tokens = wanted
            sampling = structs.replace(sampling, ignore_eos=True, stop=(), stop_ids=(), imposed=None)
        self._engine.generate(
            Job(lease, SampleId(order.sample), prompt, so_far, max_tokens, order.seed, sampling, order.goes_on)
        )

    async def _stop(self, aborted: Iterable[LeaseId], handed_over: Iterable[LeaseId] = ()) -> None:
        """Stop leases, even if the connection breaks meanwhile: leases that left the book are never asked for again."""
        await finish(asyncio.gather(*map(self._abort, aborted), *map(self._hand_over, handed_over)))

    async def _abort(self, lease: LeaseId) -> None:
        await self._engine.abort(lease)
        self._imposed.pop(lease, None)

    async def _hand_over(self, lease: LeaseId) -> None:
        await self._abort(lease)
        self._book.end(lease, "handed_over")

    def _start_duty(self, duty: frames.Duty) -> None:
        """Have the devices do this, after a change under way. Told again, as after a break, it answers again."""
        before = self._changing_duty
        self._duty = duty
        self._changing_duty = asyncio.create_task(self._change_duty(duty, before))

    async def _change_duty(self, duty: frames.Duty, before: asyncio.Task[None] | None) -> None:
        if before is not None:
            await asyncio.wait((before,))
        if self._set_duty is None or duty != self._duty:
            return
        try:
            await self._set_duty(duty)
        except Exception as error:  # whatever a device says when its memory is gone: the manager would wait for minutes
            log.exception("the devices do not turn to %s", duty)
            self._leave(f"its devices do not turn to {duty}: {one_line(error)}", ok=False)
            return
        await self._send(frames.OnDuty(duty))

    async def _tell_of_install(self, frame: frames.Installed | frames.InstallFailed) -> None:
        if isinstance(frame, frames.Installed):
            self._announced = Version(frame.version)
        await self._send(frame)

    async def _released(self, frame: frames.Release) -> None:
        if frame.rejoin and (not self._draining or self._goes_at is not None):
            raise SessionOver(frame.why)
        if self._draining or not frame.in_anger:
            await self._flush()
            await self._send(frames.Goodbye(self._draining or frame.why))
            raise Left(self._draining or frame.why, ok=True)
        raise Left(frame.why, ok=False)

    async def _say_goodbye(self, why: str, *, is_misfit: bool = False) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(2.0):
                await self._flush()
                await self._send(frames.Goodbye(why[:2000], is_misfit))

    # Regularly

    async def _flush_often(self) -> None:
        assert self._session is not None
        ends_from = 0.0
        while True:
            wait_s = until_next(self._session.flush_interval_s, self._session.flush_phase_s, time.time())
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self._has_ends.wait()
                    await asyncio.sleep(ends_from - time.monotonic())
            if self._has_ends.is_set():
                ends_from = time.monotonic() + _ENDS_TOGETHER_S
            self._has_ends.clear()
            await self._flush()

    async def _flush(self) -> None:
        while self._welcomed and (frame := self._book.take_frame()) is not None:
            await self._announce()
            await self._send(frame)

    async def _announce(self) -> None:
        """Tell of a version before any token of it, and of an outage before the ends that it brings."""
        was_down, num_outages = bool(self._down), self._num_outages
        self._look_at_engine()
        if self._num_outages > num_outages and not was_down:
            await self._send(frames.Down(self._down or "it was down for a moment"))
        if (self._num_outages > num_outages or was_down) and not self._down:
            await self._send(frames.Back(self._runs))
        version = self._installer.version
        if version is not None and version != self._announced:
            self._announced = version
            await self._send(frames.Installed(version, self._installer.digest))

    def _look_at_engine(self) -> None:
        """Note outages. After one, the engine runs the version that it ran at its start."""
        stats = self._engine.stats()
        self._down = stats.down[:2000]
        if stats.num_outages > self._num_outages and self._info is not None:
            self._num_outages = stats.num_outages
            self._installer.restarted(self._info.version)
            self._announced = self._info.version

    async def _report_often(self) -> None:
        assert self._session is not None
        while True:
            sick = self._engine.health()
            if sick is not None:
                await self._say_goodbye(sick)
                return
            if self._welcomed:
                await self._announce()
            stats = self._engine.stats()
            rate = self._rate.update(self._book.num_tokens, time.monotonic())
            kv_used = min(1.0, max(0.0, stats.kv_used))
            load = (stats.num_running, stats.num_waiting, kv_used, stats.num_preemptions, rate)
            await self._send(frames.Report(*load, *stats.speculated))
            await asyncio.sleep(self._session.heartbeat_interval_s)


def _read_session(path: Path) -> str:
    """Empty if there is none yet. Raises UserError."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace").strip()
    except FileNotFoundError:
        return ""
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror or error}") from error
    if not re.fullmatch("[0-9a-f]{0,64}", text):
        raise UserError(f"{path}: is no session of a worker; expected what a worker wrote there, or no file")
    return text


def _write_session(path: Path, session: str) -> None:
    try:
        write_whole(path, f"{session}\n".encode(), 0o600)
    except OSError as error:
        raise UserError(f"{path}: cannot be written: {error.strerror or error}") from error


def until_next(interval_s: float, phase_s: float, now: float) -> float:
    """Return the seconds until the clock is at a multiple of the interval, and the phase more."""
    return interval_s - (now - phase_s) % interval_s


class Rate:
    """Tokens a second since the last look."""

    def __init__(self) -> None:
        self._num, self._at = 0, 0.0

    def update(self, num: int, now: float) -> float:
        span, gained = now - self._at, num - self._num
        self._num, self._at = num, now
        return max(0.0, gained / span) if span > 0.0 else 0.0
