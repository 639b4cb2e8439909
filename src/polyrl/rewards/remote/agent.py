"""A reward worker's life: join, check that it can score, score what the trainer sends, come back after a break, leave.

    join -> connect -> RewardHello -> RewardRules in -> functions checked -> RewardReady -> jobs, results ... -> leave
     ^        ^                                                                |
     |        +------------------------ the connection broke ------------------+     jobs go on
     +--------------------------------- we were given up ----------------------+     jobs go on: the trainer knows us

Rules kept here: nothing inbound is needed. Jobs run in the processes of a RewardPool, as they do at the trainer. A job
that is sent again is the same job: it goes on, or its result is said again. Jobs of another trainer are dropped.
Results are kept for a while, not until they are acknowledged: a job whose result is gone is scored anew.
A worker that cannot run a function of the run leaves with one line that says why.
"""

import asyncio
import contextlib
import logging
import secrets
from collections import OrderedDict
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import psutil

from polyrl.errors import ConfigError, PolyrlError, UserError, one_line
from polyrl.not_data import NOT_DATA
from polyrl.rewards.facts import RunFacts
from polyrl.rewards.line import Surroundings
from polyrl.rewards.lookup import check_functions
from polyrl.rewards.pool import RewardPool
from polyrl.rewards.remote import travel
from polyrl.rewards.remote.travel import RewardTerms
from polyrl.rewards.reward import RewardFailed, RewardUnavailable
from polyrl.rewards.sandbox.walls import look_for_walls
from polyrl.telemetry.repeats import Repeats
from polyrl.wire import frames
from polyrl.wire import reward_frames as r
from polyrl.wire.control import RewardJoinReply, RewardJoinRequest
from polyrl.wire.dial import Dialer, Patience, SessionOver, stay_connected

log = logging.getLogger("polyrl.rewards")

_KEPT_RESULTS = 4096
_READ_CPU_EVERY_S = 10.0


class RewardWorkerOptions(NamedTuple):
    name: str
    places: int
    """Answers that are scored at once."""
    log: Path | None = None
    """The file for what functions print."""
    give_up_after_s: float = 600.0
    """A manager that cannot be reached for this long is given up."""
    name_patience_s: float = 30.0
    """How long another worker may hold our name: one that died is given up sooner."""
    drain_deadline_s: float = 25.0
    """After a signal, jobs may go on for so long; then they are handed back."""
    price_usd_per_hour: float = 0.0
    """For the ledger."""


class RewardWorkerOver(Exception):
    """The worker's life is over; the message says why. `ok`: it ended in order. `is_misfit`: this machine cannot serve
    the run, so that starting it again would not help."""

    def __init__(self, why: str, *, ok: bool, is_misfit: bool = False) -> None:
        super().__init__(why)
        self.ok, self.is_misfit = ok, is_misfit


class RewardAgent:
    """A reward worker. `run` lives its life; `drain` may be called from a signal handler."""

    def __init__(self, dialer: Dialer, options: RewardWorkerOptions) -> None:
        self._dialer, self._options = dialer, options
        self._secret = secrets.token_hex(16)
        """The secret by which the manager knows this process, over restarts of its own."""
        self._session: RewardJoinReply | None = None
        self._socket: aiohttp.ClientWebSocketResponse | None = None
        self._rules: r.RewardRules | None = None
        self._terms: RewardTerms | None = None
        self._pool: RewardPool | None = None
        self._jobs: dict[int, asyncio.Task[None]] = {}
        self._results: OrderedDict[int, bytes] = OrderedDict()
        self._num_scored = self._num_failed = 0
        self._cpu_s, self._cpu_read_at = 0.0, 0.0
        self._draining = ""
        self._over: asyncio.Future[RewardWorkerOver] | None = None
        self._following: tuple[int, asyncio.Task[None]] | None = None
        """The era whose settings are looked at, since that may take longer than a connection waits."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._patience = Patience(options.give_up_after_s)
        self._failures = Repeats()

    # Life

    async def run(self) -> RewardWorkerOver:
        """Live until the end, and return how it ended. All processes are gone then."""
        self._over = asyncio.get_running_loop().create_future()
        async with self._dialer:
            life = asyncio.create_task(self._live())
            try:
                await asyncio.wait((life, self._over), return_when=asyncio.FIRST_COMPLETED)
                return self._over.result() if self._over.done() else life.result()  # our own reason says more
            finally:
                life.cancel()
                await asyncio.wait((life,), timeout=2.0)
                await self._drop_jobs()

    def drain(self, reason: str) -> None:
        """Score what is there, then leave; after a while, or when asked twice, hand it back and leave."""
        if self._draining:
            self._keep(self._leave("asked twice to leave"))
            return
        self._draining = reason
        log.info("draining: %s; %d answers are scored to their end", reason, len(self._jobs))
        self._keep(self._drain(reason))

    async def _drain(self, reason: str) -> None:
        await self._send(frames.Leaving(reason))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._options.drain_deadline_s):
                while self._jobs:
                    await asyncio.wait(list(self._jobs.values()))
        await self._leave(reason)

    async def _leave(self, why: str) -> None:
        """Hand back what is not scored, and go."""
        held = list(self._jobs)
        if held:
            log.info("%d answers are handed back", len(held))
            for first in range(0, len(held), r.MAX_RETURNED):
                await self._send(r.JobsReturned(tuple(held[first : first + r.MAX_RETURNED])))
        self._cpu_read_at = -_READ_CPU_EVERY_S
        await self._send(await self._report())
        await self._send(frames.Goodbye(why))
        self._end(RewardWorkerOver(why, ok=True))

    def _end(self, over: RewardWorkerOver) -> None:
        if self._over is not None and not self._over.done():
            self._over.set_result(over)

    async def _live(self) -> RewardWorkerOver:
        async def connect() -> None:
            if self._session is None:
                await self._join()
            await self._stay_connected()

        try:
            why = await stay_connected(
                connect, self._forget_session, self._patience, self._options.name_patience_s, log
            )
            return RewardWorkerOver(why, ok=False)
        except RewardWorkerOver as over:
            return over
        except UserError as error:
            return RewardWorkerOver(str(error), ok=False, is_misfit=True)

    def _forget_session(self) -> None:
        self._session = None

    async def _join(self) -> None:
        options = self._options
        request = RewardJoinRequest(
            name=options.name,
            protocol=frames.PROTOCOL,
            secret=self._secret,
            places=options.places,
            price_usd_per_hour=options.price_usd_per_hour,
        )
        self._session = await self._dialer.post("/v1/reward-workers/join", request, RewardJoinReply)
        self._patience.renew()
        log.info("joined %s as %s", self._dialer.url, options.name)

    async def _stay_connected(self) -> None:
        assert self._session is not None
        self._socket = socket = await self._dialer.stream(
            "/v1/reward-worker", self._session.session, r.MAX_DISPATCHER_FRAME_BYTES
        )
        beat = asyncio.create_task(self._beat(self._session.heartbeat_interval_s))
        try:
            await self._send(r.RewardHello(self._draining))
            async for message in socket:
                if message.type is not aiohttp.WSMsgType.BINARY:
                    break
                await self._hear(_decode(self._dialer.url, message.data))
        except (aiohttp.ClientError, ConnectionError, OSError) as error:
            log.info("the connection to the manager broke: %s", error)
        finally:
            beat.cancel()
            self._socket = None
            await socket.close()

    async def _beat(self, interval_s: float) -> None:
        while True:
            await asyncio.sleep(interval_s)
            await self._send(await self._report())

    async def _report(self) -> r.RewardReport:
        now = asyncio.get_running_loop().time()
        if now - self._cpu_read_at >= _READ_CPU_EVERY_S:
            self._cpu_read_at = now
            self._cpu_s = max(self._cpu_s, await asyncio.to_thread(own_cpu_s))
        return r.RewardReport(len(self._jobs), self._num_scored, self._num_failed, self._cpu_s)

    async def _send(self, frame: r.FromRewardWorker) -> None:
        """Send a frame now. A frame that a break loses is asked for again."""
        if self._socket is None or self._socket.closed:
            return
        with contextlib.suppress(aiohttp.ClientError, ConnectionError, OSError):
            await self._socket.send_bytes(frames.encode(frame))

    def _keep(self, work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    # What the manager says

    async def _hear(self, frame: r.ToRewardWorker) -> None:
        match frame:
            case r.RewardRules():
                self._follow_soon(frame)
            case r.GiveJob():
                await self._begin(frame)
            case r.LeaveSoon():
                if not self._draining:
                    self.drain(frame.why)
            case frames.Release():
                if frame.rejoin and not self._draining:
                    raise SessionOver(frame.why)
                raise RewardWorkerOver(frame.why, ok=not frame.in_anger)

    def _follow_soon(self, rules: r.RewardRules) -> None:
        if self._following is not None and not self._following[1].done():
            if self._following[0] == rules.era:
                return
            self._following[1].cancel()
        self._following = rules.era, self._keep(self._follow(rules))

    async def _follow(self, rules: r.RewardRules) -> None:
        """Take over the trainer's settings, or leave where they ask for what is not here."""
        if self._rules is None or rules.era != self._rules.era:
            await self._drop_jobs()
            try:
                terms = travel.read_terms(rules.body)
                surroundings = self._surroundings(terms)
                if terms != self._terms:
                    await asyncio.to_thread(check_functions, terms.functions, surroundings)
            except ConfigError as error:
                why = f"cannot score this run here: {error}"
                self._end(RewardWorkerOver(why, ok=False, is_misfit=True))
                await self._send(frames.Goodbye(why, is_misfit=True))
                return
            except OSError as error:
                self._end(RewardWorkerOver(f"no process can be started: {one_line(error)}", ok=False))
                return
            self._terms, self._rules = terms, rules
            self._pool = RewardPool(self._options.places, terms.wall_s, surroundings=surroundings)
            functions = ", ".join(dict.fromkeys(one.function for one in terms.functions.values()))
            log.info("scoring with %s, %d answers at once", functions, self._options.places)
        await self._send(r.RewardReady(rules.era, self._options.places))

    def _surroundings(self, terms: RewardTerms) -> Surroundings:
        """Return how processes are started. Raises ConfigError without the sandbox that is wanted."""
        names = [one.function for one in terms.functions.values()]
        walls = look_for_walls(names, None) if terms.sandbox else None
        facts = RunFacts(timeout_s=terms.wall_s, processes=self._options.places)
        return Surroundings(
            self._options.log, terms.memory_bytes, terms.environment, walls=walls, facts=facts, start_s=terms.start_s
        )

    async def _drop_jobs(self) -> None:
        pool, self._pool, self._rules = self._pool, None, None
        for task in list(self._jobs.values()):
            task.cancel()
        self._jobs.clear()
        self._results.clear()
        if pool is not None:
            await pool.close()

    # Jobs

    async def _begin(self, given: r.GiveJob) -> None:
        if given.job in self._results:
            await self._send(r.JobDone(given.job, self._results[given.job]))
            return
        if given.job in self._jobs or self._rules is None or given.job >> r.ERA_BITS != self._rules.era:
            return
        assert self._pool is not None, "there are rules, so there is a pool"
        self._jobs[given.job] = self._keep(self._score(self._pool, given))

    async def _score(self, pool: RewardPool, given: r.GiveJob) -> None:
        try:
            result = travel.pack_reply(await pool.run(travel.read_call(given.body)))
            if len(result) > r.MAX_RESULT_BYTES:
                most = f"expected at most {r.MAX_RESULT_BYTES:,}, which a reward worker can send"
                raise RewardFailed(f"the rewards and their parts are {len(result):,} bytes; {most}")
            self._num_scored += 1
        except PolyrlError as error:
            result = self._fail(error)
        except Exception as error:
            log.exception("a bug of ours: an answer could not be scored")
            result = self._fail(RewardUnavailable(one_line(error)))
        self._results[given.job] = result
        del self._jobs[given.job]
        while len(self._results) > _KEPT_RESULTS:
            self._results.popitem(last=False)
        await self._send(r.JobDone(given.job, result))

    def _fail(self, error: PolyrlError) -> bytes:
        self._num_failed += 1
        if (often := self._failures.again(str(error))) is not None:
            log.warning("no reward: %s%s", error, often)
        return travel.pack_failure(error)


def own_cpu_s() -> float:
    """Return the CPU time of this process and of all that it started, also of those that have ended."""
    total = 0.0
    me = psutil.Process()
    for one in (me, *me.children(recursive=True)):
        with contextlib.suppress(psutil.Error):
            times = one.cpu_times()
            total += times.user + times.system + times.children_user + times.children_system
    return total


def _decode(url: str, data: bytes) -> r.ToRewardWorker:
    try:
        return r.decode_to_reward_worker(data)
    except NOT_DATA as error:
        raise UserError(f"{url}: what it sent is no frame of this PolyRL: {error}") from error
