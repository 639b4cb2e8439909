"""An engine with no model: it writes made-up tokens at a believable pace, in real time, on a clock that can run faster.

For trying a whole fleet on one machine, and for tests. `EmulatedEngine` is the asyncio shell; which samples run, which
wait and how far each is comes from the simulator's own model of an engine (engines/lockstep.py).

Rules it keeps, beside those of engine.py and of the model:
- Nothing is remembered: where an answer ends, and each token and log-probability, are functions of the job's seed and
  the position (the end also of the prompt). A sample that moves goes on with the same tokens, whatever the version.
- A decode step takes 1 / tokens_per_s, step_per_sample_s more for every further sample, and
  step_per_context_token_s more for every token of context. A prompt that a running sample has is not prefilled again.
- A task wakes every `TICK_S` of real time while there is work, and reports the tokens since. A change inside a tick
  counts from its own moment, so a fast clock costs no accuracy. The sink is never called inside `generate`.

It leaves out: what tokens mean, temperature and truncation, and the pause of an install.
"""

import asyncio
import time
from itertools import accumulate
from math import inf
from pathlib import Path
from typing import Any

import numpy as np

from polyrl.engines.emulated.text import (
    EOS,
    LARGEST_TOKEN,
    TOKEN_STREAM,
    EmulatedConfig,
    EmulatedEnd,
    draw,
    ending_of,
    read_lengths,
)
from polyrl.engines.engine import (
    Capabilities,
    EngineError,
    EngineInfo,
    EngineStats,
    Job,
    Sink,
    Weights,
    is_whole,
    why_no_tokens,
    why_not_begun,
)
from polyrl.engines.lockstep import EngineModel, EngineTimes
from polyrl.errors import ConfigError
from polyrl.ids import LeaseId, Seconds, Version
from polyrl.scheduling.rules.order import mix64

_LONGEST_LOOK_S = 0.5
"""A longer time between two looks at the clock means that the process was stopped."""
TICK_S = 0.02


class _Sample:
    """A job that was taken: where it ends, the key of its tokens, and how many of them were sent."""

    __slots__ = ("ending", "key", "lease", "told")

    def __init__(self, job: Job, ending: EmulatedEnd) -> None:
        self.lease = job.lease
        self.ending = ending
        self.key = mix64(job.seed, TOKEN_STREAM)
        self.told = len(job.so_far)


class EmulatedEngine:
    """Raises ConfigError for a trace that cannot be read."""

    def __init__(self, config: EmulatedConfig) -> None:
        self._config = config
        self._recorded = read_lengths(config.trace) if config.trace else []
        self._model = _model_of(config)
        self._samples: dict[int, _Sample] = {}
        self._version = None if config.version is None else Version(config.version)
        self._refused: dict[LeaseId, str] = {}
        self._num_jobs = 0
        self._clock = 0.0
        self._looked_at = time.monotonic()
        self._tally = _open_tally(config.tally) if config.tally else None
        self._has_work = asyncio.Event()
        self._sink: Sink | None = None
        self._teller: asyncio.Task[None] | None = None
        self._is_closed = False

    async def start(self, sink: Sink) -> EngineInfo:
        await self._sleep(self._config.start_s)
        if self._is_closed:
            raise EngineError("the emulated engine was closed before it had started")
        self._sink = sink
        self._teller = asyncio.create_task(self._tell_for_ever(sink), name="emulated engine")
        return EngineInfo(
            engine="emulated",
            model="none",
            slots=self._config.slots,
            kv_tokens=self._config.kv_tokens,
            capabilities=Capabilities(seeds_survive_moves=True, keeps_running_over_install=True, stop_strings=False),
            version=self._version,
        )

    def generate(self, job: Job) -> None:
        if self._is_closed or job.lease in self._samples:
            return  # nobody listens any more; or it was said twice
        why_not = self._why_not(job)
        if why_not:
            self._refused[job.lease] = why_not
        else:
            self._begin(job)
        self._has_work.set()

    async def abort(self, lease: LeaseId) -> None:
        self._refused.pop(lease, None)
        self._samples.pop(lease, None)
        self._model.stop(lease, self._now())

    async def install(self, weights: Weights) -> None:
        await self._sleep(self._config.install_s)
        trouble = self.health()
        if self._sink is None or trouble is not None:
            raise EngineError(f"version {weights.version} cannot be installed: {trouble}")
        self._tell(self._sink)  # up to here the old version wrote
        self._version = weights.version

    def stats(self) -> EngineStats:
        model, capacity = self._model, self._config.kv_tokens
        context = model.kv_used(self._now())
        kv_used = min(1.0, context / capacity) if capacity else 0.0
        return EngineStats(model.num_running, model.num_waiting, self._config.slots, kv_used, model.num_preemptions)

    def health(self) -> str | None:
        if self._is_closed:
            return "the emulated engine is closed"
        if self._teller is None:
            return "the emulated engine has not started"
        if not self._teller.done():
            return None
        trouble = "it was cancelled" if self._teller.cancelled() else repr(self._teller.exception())
        return f"the emulated engine stopped telling: {trouble}"

    async def close(self) -> None:
        self._is_closed = True
        self._model, self._samples, self._refused = _model_of(self._config), {}, {}
        if self._teller is not None:
            self._teller.cancel()
            await asyncio.wait([self._teller])

    def _now(self) -> Seconds:
        """Return the engine's clock. It stands while the process is stopped, as a real engine would."""
        at = time.monotonic()
        self._clock += min(at - self._looked_at, _LONGEST_LOOK_S) * self._config.speedup
        self._looked_at = at
        return self._clock

    async def _sleep(self, seconds: Seconds) -> None:
        await asyncio.sleep(seconds / self._config.speedup)

    def _why_not(self, job: Job) -> str:
        """Why the job is refused; empty when it is not."""
        if why := why_not_begun(job, self._version):
            return why
        if job.sampling.stop:
            return "stop strings are not supported: there is no text; give stop ids"
        if why := why_no_tokens(job, LARGEST_TOKEN + 1):
            return why
        context, capacity = len(job.prompt) + len(job.so_far), self._config.kv_tokens
        if capacity and context >= capacity and not is_whole(job):
            return f"prompt and answer so far are {context} tokens, and the cache holds {capacity}"
        return ""

    def _begin(self, job: Job) -> None:
        so_far = len(job.so_far)
        ending = ending_of(job, self._config, self._recorded)
        self._num_jobs += 1
        if self._config.fail_every and self._num_jobs % self._config.fail_every == 0:
            ending = EmulatedEnd((so_far + ending.num_tokens) // 2, "engine_failed", False)
        self._samples[job.lease] = _Sample(job, ending)
        self._model.start(
            job.lease,
            self._now(),
            prompt_tokens=len(job.prompt),
            from_token=so_far,
            total_tokens=ending.num_tokens,
            prefix=hash(tuple(job.prompt)),
        )

    async def _tell_for_ever(self, sink: Sink) -> None:
        while True:
            await self._has_work.wait()
            self._tell(sink)
            if not self._samples and not self._refused:
                self._has_work.clear()
            else:
                await asyncio.sleep(TICK_S)

    def _tell(self, sink: Sink) -> None:
        refused, self._refused = self._refused, {}
        for lease, why in refused.items():
            sink.ended(lease, "refused", why)
        now = self._now()
        finished = [(lease, tokens) for lease, tokens, _ in self._model.advance(now)]
        reached = [*zip(*self._model.progress(now), strict=True), *finished]
        known = ((self._samples.get(lease), tokens) for lease, tokens in reached)
        grown = [(sample, tokens) for sample, tokens in known if sample is not None and tokens > sample.told]
        if grown:
            self._tell_tokens(sink, grown)
        for sample in [self._samples.pop(lease) for lease, _ in finished if lease in self._samples]:
            detail = "as fail_every asks" if sample.ending.reason == "engine_failed" else ""
            sink.ended(sample.lease, sample.ending.reason, detail)

    def _tell_tokens(self, sink: Sink, grown: list[tuple[_Sample, int]]) -> None:
        version = self._version
        assert version is not None, "a sample runs and no weights are installed"
        starts = [sample.told for sample, _ in grown]
        counts = [num_tokens - sample.told for sample, num_tokens in grown]
        drawn = draw([sample.key for sample, _ in grown], starts, counts, self._config.vocab)
        tokens, logprobs = drawn[0].tolist(), drawn[1].tolist()
        if self._tally is not None:
            self._tally[0] += len(tokens)
        for (sample, num_tokens), count, end in zip(grown, counts, accumulate(counts), strict=True):
            if sample.ending.has_eos and num_tokens == sample.ending.num_tokens:
                tokens[end - 1] = EOS
            sample.told = num_tokens
            sink.tokens(sample.lease, tokens[end - count : end], logprobs[end - count : end], version)


def _model_of(config: EmulatedConfig) -> EngineModel:
    per_sample = config.step_per_sample_s
    return EngineModel(
        EngineTimes(
            step_fixed_s=1.0 / config.tokens_per_s - per_sample,
            step_sample_s=per_sample,
            step_context_s=config.step_per_context_token_s,
            prefill_tokens_per_s=config.prefill_tokens_per_s,
            kv_tokens=config.kv_tokens if config.kv_tokens else inf,
            slots=config.slots,
        )
    )


def _open_tally(path: str) -> Any:
    """Open a number in a file that is shared with the disk: it outlives the process."""
    try:
        return np.memmap(path, np.int64, "r+" if Path(path).exists() else "w+", shape=(1,))
    except (OSError, ValueError) as error:
        raise ConfigError(f"tally: {path}: cannot be counted in: {error}") from error
