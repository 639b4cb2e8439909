"""The builtin engine behind the contract (engines/engine.py): continuous batching over a model in this process.

The event loop owns samples, batch and cache book-keeping; a thread of its own runs the model, one step at a time. Jobs,
aborts and weights that arrive during a step are taken in between two steps.

Rules kept here: a job that cannot run is refused in a line, and the others go on. An abort frees its place before it
returns, except within a running step, which ends first. Weights change between two steps; running samples go on, with
their cache kept or computed anew, as `after_install` says. Asleep, it holds no cache and takes no step, so that the
devices can train; what it was given waits. A step that fails ends the engine: every sample ends in `engine_failed`, and
so does every later job.
"""

import asyncio
import logging
import math
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from polyrl.engines.builtin import bursts
from polyrl.engines.builtin.batching import Batching, Chunk, Member
from polyrl.engines.builtin.config import BuiltinConfig, choose_device, fit
from polyrl.engines.builtin.ending import Ending
from polyrl.engines.builtin.kv_cache import KvCache
from polyrl.engines.builtin.speculating import BURST_TOKENS, Speculation
from polyrl.engines.builtin.steps import Drawn, DrawRule, StepRunner, by_sample
from polyrl.engines.engine import (
    Capabilities,
    EngineError,
    EngineInfo,
    EngineStats,
    Job,
    Sink,
    Speculated,
    Weights,
    is_whole,
    why_no_tokens,
    why_not_begun,
)
from polyrl.engines.finishing import finish, finish_first
from polyrl.errors import one_line
from polyrl.ids import LeaseId, Version

if TYPE_CHECKING:
    from polyrl.engines.builtin.installing import ModelInstaller
    from polyrl.engines.builtin.models import Loaded

log = logging.getLogger("polyrl.engines.builtin")

_SEED_BITS = (1 << 63) - 1


class _Answer(NamedTuple):
    """The engine's record of a sample."""

    job: Job
    ending: Ending


class BuiltinEngine:
    """`loaded` shares a model that is there already, as a trainer's is; otherwise it is read from the directory."""

    def __init__(self, config: BuiltinConfig, loaded: "Loaded | None" = None) -> None:
        device = choose_device(config.device) if loaded is None else str(next(loaded.model.parameters()).device)
        self._config = config
        self._fit = fit(config, device)
        self._device = device
        self._loaded = loaded
        self._runner: StepRunner | None = None
        self._cache = KvCache(config.kv_tokens // config.block_tokens, config.block_tokens)
        self._batch = Batching(self._cache, config.slots, self._fit.chunk_tokens, self._fit.invariant_tokens)
        self._version = None if config.version is None else Version(config.version)
        self._speculation = Speculation.find(config, is_invariant=self._fit.invariant_tokens > 0)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="builtin-engine")
        self._sink: Sink | None = None
        self._given: dict[LeaseId, Job] = {}
        """Jobs that were not looked at yet."""
        self._task: asyncio.Task[None] | None = None
        self._work = asyncio.Event()
        self._awake = asyncio.Event()
        self._awake.set()
        self._between_steps = asyncio.Lock()
        self._installing = asyncio.Lock()
        self._num_coming = 0
        """The number of tasks that wait to run between two steps."""
        self._burst_ends = threading.Event()
        """Set to interrupt the burst that runs, or ran last."""
        self._tokenizer: Any = None
        self._trouble: str | None = None
        self._installer: ModelInstaller | None = None
        self.last_install_s = 0.0
        """How long samples stood still for the last install, and for the step before it to end."""
        self._is_closed = False

    # Life

    async def start(self, sink: Sink) -> EngineInfo:
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(self._thread, self._load)
        if self._is_closed:
            raise EngineError("the engine was closed before it had started")
        loaded = self._loaded
        assert loaded is not None
        self._sink = sink
        self._task = asyncio.create_task(self._run_for_ever(sink), name="builtin engine")
        return EngineInfo(
            engine="builtin",
            model=loaded.name,
            slots=self._config.slots,
            kv_tokens=self._cache.num_blocks * self._cache.block_tokens,
            capabilities=Capabilities(
                seeds_survive_moves=not (self._device.startswith("cuda") or loaded.has_experts),
                keeps_running_over_install=True,
                stop_strings=self._tokenizer is not None,
            ),
            version=self._version,
        )

    def _load(self) -> None:
        import torch

        from polyrl.engines.builtin import models
        from polyrl.engines.builtin.installing import ModelInstaller

        if self._loaded is None:  # whoever shares a model has chosen for the process
            torch.set_num_threads(self._config.threads)
            self._loaded = models.load(self._config.model, self._fit.dtype, self._device)
        self._tokenizer = models.find_tokenizer(self._config.model)
        self._installer = ModelInstaller(self._loaded, self._config.model, self._fit.dtype)
        self._runner = self._make_runner(self._loaded)

    def _make_runner(self, loaded: "Loaded") -> StepRunner:
        from polyrl.engines.builtin import runners

        return runners.make(loaded, self._config, self._cache, self._max_context, self._fit.invariant_tokens)

    async def close(self) -> None:
        """Close the engine. A load that is under way ends first; the event loop is not blocked meanwhile."""
        await finish_first(self._close())

    async def _close(self) -> None:
        was_closed, self._is_closed = self._is_closed, True
        self._burst_ends.set()
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        if not was_closed:
            await asyncio.get_running_loop().run_in_executor(self._thread, self._let_go)
        await asyncio.to_thread(self._thread.shutdown)

    def _let_go(self) -> None:
        try:
            if self._runner is not None:
                self._runner.close()
        except RuntimeError:  # torch's own: a device that failed once fails ever after
            log.warning("the device did not let go of the cache", exc_info=True)
        self._runner = None

    async def sleep(self) -> None:
        """Free the cache, and take no step until `wake`. The weights stay, unless `in_sleep` says otherwise."""
        await finish_first(self._sleep())

    async def _sleep(self) -> None:
        async with self._come_between():
            if self._runner is None or self._is_closed or not self._awake.is_set():
                return
            self._awake.clear()
            self._batch.recompute_all()
            await asyncio.get_running_loop().run_in_executor(self._thread, self._runner.sleep)

    async def wake(self) -> None:
        await finish_first(self._wake())

    async def _wake(self) -> None:
        async with self._between_steps:
            if self._runner is None or self._is_closed or self._awake.is_set():
                return
            await asyncio.get_running_loop().run_in_executor(self._thread, self._runner.wake)
            self._awake.set()

    # Jobs

    def generate(self, job: Job) -> None:
        if self._is_closed:
            return
        self._given[job.lease] = job
        asyncio.get_running_loop().call_soon(self._admit, job.lease)

    def _admit(self, lease: LeaseId) -> None:
        job = self._given.pop(lease, None)
        if job is None or self._is_closed or self._sink is None or self._loaded is None:
            return
        if self._trouble is not None:
            self._sink.ended(job.lease, "engine_failed", self._trouble)
            return
        if lease in self._batch:
            log.warning("lease %s was given twice; the first goes on", lease)  # an end would be the first one's too
            return
        why_not = self._why_not(job)
        if why_not:
            self._sink.ended(job.lease, "refused", why_not)
            return
        ending = self._ending(job)
        num_kept = None if job.goes_on else len(job.prompt)
        member = Member(job.lease, [*job.prompt, *job.so_far], self._longest(job), _Answer(job, ending), num_kept)
        if job.so_far and ending.is_over(job.so_far):
            self._sink.ended(job.lease, "stop")  # its end was made already, and not heard of
            return
        if is_whole(job, self._max_context):
            self._sink.ended(job.lease, "length")
            return
        self._batch.add(member)
        self._burst_ends.set()
        self._work.set()

    def _ending(self, job: Job) -> Ending:
        assert self._loaded is not None
        ids = frozenset(job.sampling.stop_ids)
        if not job.sampling.ignore_eos:
            ids |= self._loaded.end_ids
        if not job.sampling.stop:
            return Ending(len(job.prompt), ids)
        return Ending(len(job.prompt), ids, job.sampling.stop, self._tokenizer.decode)

    @property
    def _max_context(self) -> int:
        assert self._loaded is not None
        most = self._loaded.max_context
        return most if self._config.max_context is None else min(most, self._config.max_context)

    def _longest(self, job: Job) -> int:
        """Prompt and answer together."""
        return min(len(job.prompt) + job.max_tokens, self._max_context)

    def _why_not(self, job: Job) -> str:
        """Why the job is refused; empty when it is not."""
        assert self._loaded is not None
        if why := why_not_begun(job, self._version) or why_no_tokens(job, self._loaded.vocab):
            return why
        if job.sampling.stop and self._tokenizer is None:
            return f"stop strings need a tokenizer, and {self._config.model} has none that works; give stop ids"
        if is_whole(job, self._max_context):
            return ""
        if (num := len(job.prompt) + len(job.so_far)) >= self._max_context:
            return f"prompt and answer so far are {num} tokens, and the model's context is {self._max_context}"
        if not self._batch.fits(longest := self._longest(job)):
            return f"{longest} tokens do not fit into the cache of {self._cache.num_blocks * self._cache.block_tokens}"
        return ""

    async def abort(self, lease: LeaseId) -> None:
        self._given.pop(lease, None)
        await finish(self._remove(lease))

    async def _remove(self, lease: LeaseId) -> None:
        async with self._come_between():
            self._batch.remove(lease)

    async def forget_cache(self) -> None:
        """Make later samples use nothing computed so far: for measurements."""
        async with self._between_steps:
            self._cache.forget()

    @asynccontextmanager
    async def _come_between(self) -> AsyncIterator[None]:
        """Between two steps. No burst goes on, or begins, meanwhile."""
        self._num_coming += 1
        self._burst_ends.set()
        try:
            await self._between_steps.acquire()
        finally:
            self._num_coming -= 1
        try:
            yield
        finally:
            self._between_steps.release()

    # Weights

    async def install(self, weights: Weights) -> None:
        """Install weights. A cancelled caller does not stop it: weights already copied need their version noted."""
        await finish(self._install(weights))

    async def _install(self, weights: Weights) -> None:
        async with self._installing:  # what is staged is a difference to what is installed
            await self._install_next(weights)

    async def _install_next(self, weights: Weights) -> None:
        self._check_that_it_runs()
        installer, runner = self._installer, self._runner
        assert installer is not None and runner is not None
        staged = await asyncio.to_thread(installer.stage, weights)
        if staged is None and weights.version != self._version and not weights.in_place:
            raise EngineError(f"version {weights.version} has no known source")
        began = time.perf_counter()
        async with self._come_between():
            self._check_that_it_runs()
            write = weights.write if staged is None else staged.put
            try:
                await asyncio.get_running_loop().run_in_executor(self._thread, runner.change_weights, write)
            except Exception as error:  # torch's, the writer's: nobody knows what the weights are now
                self._fail(f"version {weights.version} was not written whole: {one_line(error)}")
                raise EngineError(self._trouble) from error
            self._version = weights.version
            installer.installed(weights)
            if self._config.after_install == "recompute":
                self._batch.recompute_all()
            else:
                self._cache.forget()
        self.last_install_s = time.perf_counter() - began

    def _check_that_it_runs(self) -> None:
        if self._runner is None or self._is_closed or self._trouble is not None:
            raise EngineError(self._trouble or "the engine does not run")

    # Steps

    def stats(self) -> EngineStats:
        batch, cache = self._batch, self._cache
        used = cache.num_used / cache.num_blocks
        return EngineStats(
            batch.num_running,
            batch.num_waiting,
            self._config.slots,
            used,
            batch.num_preemptions,
            down=self._trouble or "",
            num_outages=int(self._trouble is not None),
            num_prefilled=batch.num_prefilled,
            num_reused=batch.num_reused,
            speculated=Speculated() if self._speculation is None else self._speculation.counts,
        )

    def health(self) -> str | None:
        if self._is_closed:
            return "the engine is closed"
        if self._task is None:
            return "the engine has not started"
        return self._trouble

    async def _run_for_ever(self, sink: Sink) -> None:
        try:
            while True:
                await self._work.wait()
                await self._awake.wait()
                async with self._between_steps:
                    if not self._awake.is_set():
                        continue
                    chunks = self._batch.plan()
                    if not chunks:
                        self._work.clear()
                        continue
                    assert self._runner is not None
                    await self._run_step(self._runner, chunks, sink)
                await asyncio.sleep(0)
        except Exception as error:  # torch's, Triton's, our own: whatever it is, no sample may wait on
            log.exception("a step failed")
            self._fail(f"a step failed: {one_line(error)}")

    def _fail(self, why: str) -> None:
        """End the engine for good: all running samples and all later jobs fail with this reason."""
        assert self._sink is not None
        self._trouble = why
        for lease in self._batch.remove_all():
            self._sink.ended(lease, "engine_failed", why)

    async def _run_step(self, runner: StepRunner, chunks: list[Chunk], sink: Sink) -> None:
        """Run a step, or a burst of them."""
        loop = asyncio.get_running_loop()
        if self._batch.copies:
            await loop.run_in_executor(self._thread, runner.copy_blocks, self._batch.copies)
        wanted, num_steps = _wanted(chunks), bursts.num_steps(chunks, self._batch, shows_bursts=runner.shows_bursts)
        if not num_steps:
            drawn = await loop.run_in_executor(self._thread, runner.run, chunks, wanted)
            self._take_in(chunks, by_sample([drawn]), sink)
            return
        self._burst_ends = threading.Event()
        if self._num_coming:
            self._burst_ends.set()
        speculation = self._speculation
        if speculation is not None and speculation.should_begin(chunks):
            num_tokens = BURST_TOKENS if self._batch.reserve(BURST_TOKENS) else num_steps
            verify = partial(speculation.run, runner, chunks, wanted, num_tokens, self._burst_ends)
            self._take_in(chunks, await loop.run_in_executor(self._thread, verify), sink)
            return
        run_burst = partial(runner.run_burst, chunks, wanted, num_steps, self._burst_ends)
        if speculation is not None:
            run_burst = speculation.timed(chunks, run_burst)
        if runner.shows_bursts:
            await self._run_shown(run_burst, chunks, sink)
        else:
            self._take_in(chunks, by_sample(await loop.run_in_executor(self._thread, run_burst)), sink)

    async def _run_shown(self, run_burst: Callable[..., list[Drawn]], chunks: list[Chunk], sink: Sink) -> None:
        """Take a burst in as it comes."""
        loop = asyncio.get_running_loop()
        looks: asyncio.Queue[list[Drawn] | None] = asyncio.Queue()

        def look(drawn: list[Drawn]) -> None:
            loop.call_soon_threadsafe(looks.put_nowait, drawn)

        running = loop.run_in_executor(self._thread, run_burst, look)
        running.add_done_callback(lambda _: looks.put_nowait(None))
        while (drawn := await looks.get()) is not None:
            num_ended = self._take_in(chunks, by_sample(drawn), sink)
            if num_ended and (self._batch.num_waiting or not self._batch.num_running):
                self._burst_ends.set()
        self._take_in(chunks, by_sample(await running), sink)

    def _take_in(self, chunks: list[Chunk], drawn: Sequence[Drawn], sink: Sink) -> int:
        """Send each sample's new tokens, without those drawn after its end. Return how many samples ended."""
        assert self._version is not None
        num_ended = 0
        self._batch.computed(chunk._replace(start=chunk.member.num_computed) for chunk in chunks)
        for member, (tokens, logprobs) in zip((one.member for one in chunks if one.samples), drawn, strict=True):
            if not member.blocks:  # it ended earlier in this burst
                continue
            num, end = member.data.ending.find(member.tokens, tokens, member.max_total - len(member.tokens))
            if not math.isfinite(sum(logprobs[:num])):
                num_ended += 1
                self._batch.remove(member.lease)
                sink.ended(member.lease, "engine_failed", f"version {self._version} gives no numbers")
                continue
            self._batch.append(member, tokens[:num])
            if num > 1:  # all that were drawn in a burst, but the last
                self._batch.computed([Chunk(member, member.num_computed, num - 1, True)])
            sink.tokens(member.lease, tokens[:num], logprobs[:num], self._version)
            if end is not None:
                num_ended += 1
                self._batch.remove(member.lease)
                if self._speculation is not None:
                    self._speculation.ended(member)
                sink.ended(member.lease, end)
        return num_ended


def _wanted(chunks: list[Chunk]) -> list[DrawRule]:
    jobs = [(member, member.data.job) for member, _, _, samples in chunks if samples]
    return [DrawRule(job.sampling, job.seed & _SEED_BITS, len(one.tokens) - len(job.prompt)) for one, job in jobs]
