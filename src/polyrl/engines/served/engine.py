"""A server of another project behind the contract (engines/engine.py): one stream of tokens for each sample.

Rules kept here, beside those of engine.py: nothing that could harm a server is sent to it, so token ids are checked on
this side. A sample is told to have failed only after `stats().down` says that the server is down, or when the server is
well and this one stream failed. Every token carries the version that the server ran when it wrote it: between the
last token of one version and the first of the next, the server stands still and all that it wrote is heard. The
versions that the server itself reports at the end of an answer are compared, and a difference is logged.

Streams are read all together, every so often, and each when its last token is here: one task reads for all.
"""

import asyncio
import logging
import time
import uuid
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from polyrl.engines.engine import (
    Capabilities,
    EngineError,
    EngineInfo,
    EngineStats,
    Job,
    Sink,
    Weights,
    is_whole,
)
from polyrl.engines.finishing import finish
from polyrl.engines.served.answers import ENDS, AnswerEnd, ServedAnswer, joined, request_of, why_refused
from polyrl.engines.served.http import Http, Pause
from polyrl.engines.served.keeper import Keeper
from polyrl.engines.served.server import (
    NAMES,
    AnswerPart,
    Facts,
    JobRefused,
    LabelSpan,
    ServedConfig,
    Server,
    ServerBroken,
    ServerKind,
)
from polyrl.errors import one_line
from polyrl.ids import LeaseId, Version

log = logging.getLogger("polyrl.engines.served")

_QUIET_S = 0.02
"""Nothing came for so long from a server that stands still: all that it wrote is heard."""
_QUIET_AT_MOST_S = 2.0
_INSTALL_S = 10.0
"""The longest wait for an install when a worker leaves a server that is not its own."""
_ABORT_S = 5.0
_ABORT_AGAIN_S = 0.1


class ServedEngine:
    """`pause_s`: how long after its death a server is started again. It grows while that is of no use."""

    def __init__(self, kind: ServerKind, config: ServedConfig, *, pause_s: float = 0.5) -> None:
        self._kind: ServerKind = kind
        self._config = config
        self._keeper = Keeper(NAMES[kind], self._make, config, self._went_down, self._quiet_s, pause_s)
        self._own = uuid.uuid4().hex[:8]
        """Several workers may share a server that runs already."""
        self._facts: Facts | None = None
        self._sink: Sink | None = None
        self._version = self._base
        self._answers: dict[LeaseId, ServedAnswer] = {}
        self._installing = asyncio.Lock()
        self._heard_at = 0.0
        self._pause = Pause()
        self._stands_still = False
        """While weights are put in: it writes nothing then, and should not."""
        self._hearing: asyncio.Task[None] | None = None
        self._is_closed = False
        self.num_misstamped = 0
        """Answers for which the server reports other versions than we did."""
        self.last_install_s = 0.0
        """How long the server stood still for the last install."""

    @property
    def log_file(self) -> Path | None:
        """The log of our server."""
        return self._keeper.log_file

    @property
    def is_attached(self) -> bool:
        """Whether the server was started outside this worker, and goes on afterwards."""
        return not self._keeper.is_ours

    @property
    def server(self) -> Server | None:
        """The one that is up."""
        return self._keeper.server

    @property
    def pid(self) -> int | None:
        """The process id of our server, while there is one."""
        return self._keeper.pid

    @property
    def _base(self) -> Version | None:
        """The version in the directory, which a server runs when it has just started."""
        return None if self._config.version is None else Version(self._config.version)

    def _version_of(self, label: str) -> Version | None:
        return Version(int(label)) if label.isdecimal() else self._base

    def _version_at_start(self, label: str) -> Version | None:
        """Return the version that the server starts with; none for one that others installed in it, which may be of any
        run."""
        version = self._version_of(label)
        if self.is_attached and version != self._base:
            log.warning(
                "the server runs a version %s of another client: it gets one of this run before it writes",
                label,
            )
            return None
        return version

    def _make(self, http: Http) -> Server:
        if self._kind == "vllm":
            from polyrl.engines.served.vllm import VllmServer

            return VllmServer(http, self._config)
        from polyrl.engines.served.sglang import SglangServer

        return SglangServer(http, self._config)

    # Life

    async def start(self, sink: Sink) -> EngineInfo:
        self._sink = sink
        facts = self._facts = await self._keeper.start()
        self._version = self._version_at_start(facts.label)
        if not self._keeper.is_ours and self._keeper.server is not None:
            await self._wake(self._keeper.server)
        if self._is_closed:
            await self._keeper.close()
            raise EngineError("the engine was closed before it had started")
        return EngineInfo(
            engine=self._kind,
            model=facts.model,
            slots=facts.slots,
            kv_tokens=facts.kv_tokens,
            capabilities=Capabilities(seeds_survive_moves=False, keeps_running_over_install=True, stop_strings=False),
            version=self._version,
        )

    async def _wake(self, server: Server) -> None:
        """Resume a server. A paused one was left by a worker that died in an install: its weights may mix two versions,
        so its label is not trusted."""
        if await server.loading.is_paused():
            log.warning("the server was left in the middle of an install: it is given a version before it writes")
            self._version = None
        await server.loading.resume()

    async def close(self) -> None:
        self._is_closed = True
        answers, self._answers = list(self._answers.values()), {}
        for answer in answers:
            answer.is_silent = True
        tasks = [task for task in (self._hearing, *(answer.task for answer in answers)) if task is not None]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        if not self._keeper.is_ours:  # it goes on without us, and must not be left standing still
            with suppress(TimeoutError):
                async with asyncio.timeout(_INSTALL_S), self._installing:
                    pass
        await self._keeper.close()

    def health(self) -> str | None:
        if self._is_closed:
            return "the engine is closed"
        if self._facts is None:
            return "the engine has not started"
        return self._keeper.trouble

    def stats(self) -> EngineStats:
        """Return the server's figures, which are a moment old, corrected by what is known here."""
        load, num = self._keeper.load, len(self._answers)
        slots = 0 if self._facts is None else self._facts.slots
        num_waiting = max(min(load.num_waiting, num), num - slots)
        return EngineStats(
            num - num_waiting,
            num_waiting,
            slots,
            min(1.0, max(0.0, load.kv_used)),
            load.num_preemptions,
            down=self._keeper.down,
            num_outages=self._keeper.num_outages,
        )

    def _went_down(self) -> None:
        """Take in that the server ended, and its weights with it. A stream that is left to itself may wait for ever."""
        self._version = self._base
        for answer in self._answers.values():
            if answer.server is not None and answer.task is not None:
                answer.task.cancel()

    # Samples

    def generate(self, job: Job) -> None:
        if self._is_closed or job.lease in self._answers:
            return
        if not self._answers:
            self._heard_at = time.monotonic()  # from now on there is something to hear
        answer = self._answers[job.lease] = ServedAnswer(job, f"{self._own}-{job.lease}")
        answer.task = asyncio.create_task(self._run(answer))
        if self._hearing is None or self._hearing.done():
            self._hearing = asyncio.create_task(self._hear_often())

    async def _run(self, answer: ServedAnswer) -> None:
        try:
            end = await self._write(answer)
        except asyncio.CancelledError:
            if answer.is_silent or not self._keeper.down:
                raise
            end = AnswerEnd("engine_failed", self._keeper.down)
        except Exception as error:  # whoever waits for this sample would wait for ever
            log.exception("lease %d", answer.job.lease)
            end = AnswerEnd("engine_failed", one_line(error))
        if answer.is_silent or self._sink is None:
            return
        self._answers.pop(answer.job.lease, None)
        self._sink.ended(answer.job.lease, end.reason, end.detail)

    async def _write(self, answer: ServedAnswer) -> AnswerEnd:
        job, server, facts = answer.job, self._keeper.server, self._facts
        if server is None or facts is None:
            return AnswerEnd("engine_failed", self._keeper.down or "the engine has not started")
        why_not = why_refused(job, facts, server, self._version)
        if why_not:
            return AnswerEnd("refused", why_not)
        answer.ends = frozenset(job.sampling.stop_ids) | (frozenset() if job.sampling.ignore_eos else facts.end_ids)
        if job.so_far and job.so_far[-1] in answer.ends:
            return AnswerEnd("stop")  # its end was made already, and not heard of
        if is_whole(job, facts.max_context):
            return AnswerEnd("length")
        answer.server = server
        try:
            async with server.stream(answer.request, request_of(answer, facts)) as answer.events:
                answer.events.on_end(lambda: self._hear(answer))
                end = await answer.end
                if isinstance(end, Exception):
                    raise end
                if end.goes_on:
                    with suppress(EngineError):
                        await server.abort(answer.request)
                return end
        except JobRefused as error:
            return AnswerEnd("refused", f"the server: {error}")
        except EngineError as error:
            alive = await self._keeper.is_alive(server)
            return AnswerEnd("engine_failed", str(error) if alive else self._keeper.down)

    def _quiet_s(self) -> float:
        """Return for how long the server has written nothing, although there was something to write."""
        return 0.0 if not self._answers or self._stands_still else time.monotonic() - self._heard_at

    async def _hear_often(self) -> None:
        while self._answers:
            await self._pause.take(0 if self._stands_still else len(self._answers))
            self._hear_now()

    def _hear_now(self) -> None:
        for answer in self._answers.values():
            self._hear(answer)

    def _hear(self, answer: ServedAnswer) -> None:
        """Take all that has come of it."""
        if answer.events is None or answer.end.done():
            return
        try:
            parts = answer.events.read()
            if not parts:
                return
            end = self._take(answer, joined(parts))
            if end is not None:
                answer.end.set_result(end)
        except Exception as error:  # noqa: BLE001  it is raised in the answer's task, and harms no other
            answer.end.set_result(error)

    def _take(self, answer: ServedAnswer, part: AnswerPart) -> AnswerEnd | None:
        """Pass new tokens on. Return how the answer ended, or None if it goes on."""
        self._heard_at = time.monotonic()
        if answer.server is not self._keeper.server:
            raise EngineError("it comes from a server that is down")  # of which version, nobody can say any more
        end = ENDS[part.end]
        if answer.is_silent or not part.tokens or self._sink is None or self._version is None:
            return end
        tokens, logprobs = part.tokens, part.logprobs
        if not answer.ends.isdisjoint(tokens):
            num = next(at for at, token in enumerate(tokens, 1) if token in answer.ends)
            tokens, logprobs, end = tokens[:num], logprobs[:num], AnswerEnd("stop", goes_on=not part.end)
        if not answer.runs or answer.runs[-1][1] != self._version:
            answer.runs.append((answer.num_tokens, self._version))
        answer.num_tokens += len(tokens)
        self._keeper.wrote = True
        self._sink.tokens(answer.job.lease, tokens, logprobs, self._version)
        if part.spans:
            self._compare(answer, part.spans)
        return end

    def _compare(self, answer: ServedAnswer, spans: Sequence[LabelSpan]) -> None:
        """Hold what the server says against the stamps that we gave."""
        said: list[tuple[int, Version | None]] = []
        for span in spans:
            version = self._version_of(span.label)
            if span.end > span.start and (not said or said[-1][1] != version):
                said.append((span.start, version))
        if said and said != answer.runs:
            self.num_misstamped += 1
            log.error("lease %d: told as written by %s; the server says %s", answer.job.lease, answer.runs, said)

    async def abort(self, lease: LeaseId) -> None:
        answer = self._answers.get(lease)
        if answer is None or answer.task is None:
            return
        self._hear(answer)
        answer.is_silent = True
        await finish(self._free(answer, answer.task))

    async def _free(self, answer: ServedAnswer, task: asyncio.Task[None]) -> None:
        """Free a sample's slot once the server has let go of it; until then it counts as running."""
        await self._until_over(answer, task)
        task.cancel()
        await asyncio.wait([task])
        self._answers.pop(answer.job.lease, None)

    async def _until_over(self, answer: ServedAnswer, task: asyncio.Task[None]) -> None:
        """Returns when the server has let go of it. A request that is on its way is not known to it yet."""
        until = time.monotonic() + _ABORT_S
        while answer.server is not None and answer.server is self._keeper.server and time.monotonic() < until:
            try:
                await answer.server.abort(answer.request)
            except EngineError:
                return
            await asyncio.wait([task], timeout=_ABORT_AGAIN_S)
            if task.done():
                return

    # Weights

    async def install(self, weights: Weights) -> None:
        """Cancelling the wait does not cancel the install: the version of weights in place is always recorded."""
        await finish(self._install(weights))

    async def _install(self, weights: Weights) -> None:
        async with self._installing:
            server = self._keeper.server
            if server is None or self._is_closed:
                raise EngineError(self._keeper.down or "the engine does not run")
            if weights.copy is None and weights.folder is None:
                if weights.version == self._version:
                    return
                if weights.version != self._base:
                    raise EngineError(f"version {weights.version} has no known source")
                weights = Weights(weights.version, folder=self._config.model)
            staged = await server.loading.stage(weights)
            if self._is_closed:
                raise EngineError("the engine was closed before the weights were in place")
            await self._put(server, staged, weights.version)

    async def _put(self, server: Server, staged: Any, version: Version) -> None:
        """Put the staged weights in. A server with unknown weights is not resumed: its tokens could not be stamped."""
        began = time.monotonic()
        self._stands_still = True
        try:
            try:
                await server.loading.pause()
                await asyncio.gather(server.loading.put(staged), self._hear_all())
            except ServerBroken:
                raise
            except BaseException:
                await self._resume(server)
                raise
            if self._keeper.server is not server:
                raise EngineError(f"the server {self._keeper.down}")
            self._hear_now()
            self._version = version
            await self._resume(server)
        except ServerBroken as error:
            self._keeper.give_up(server, f"cannot be trusted any more: {error}")
            if not self._keeper.is_ours:
                await self._keeper.given_up()
            raise
        finally:
            self._stands_still, self._heard_at = False, time.monotonic()
        self.last_install_s = time.monotonic() - began
        log.info("version %d is installed; the server stood still for %.3f s", version, self.last_install_s)

    async def _resume(self, server: Server) -> None:
        try:
            await server.loading.resume()
        except EngineError as error:
            raise ServerBroken(f"it does not go on after a pause: {error}") from error

    async def _hear_all(self) -> None:
        """Hear the last tokens of a server that stands still: they are still on their way through its processes."""
        until = time.monotonic() + _QUIET_AT_MOST_S
        self._heard_at = time.monotonic()
        while self._answers and time.monotonic() < min(until, self._heard_at + _QUIET_S):
            self._hear_now()
            await asyncio.sleep(_QUIET_S / 4)
