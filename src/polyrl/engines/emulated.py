"""An engine with no model: it writes made-up tokens at a believable pace, in real time, on a clock that can run faster.

For trying a whole fleet on one machine, and for tests. `EmulatedEngine` is the asyncio shell; what runs, what waits and
how far everybody is, `Batch` knows, from moments that are passed in.

Rules it keeps, beside those of engine.py:
- Nothing is remembered: where an answer ends, and each token and log-probability, are functions of the job's seed and
  the position (the end also of the prompt). A sample that moves goes on with the same tokens, whatever the version.
- All decode in lock-step. One step takes 1 / tokens_per_s, and step_per_sample_s more for every further sample.
- Samples wait in order of arrival, for a slot and for room in the cache; one alone may always run. A full cache throws
  the newest out: its tokens stay, it waits first in line and is prefilled again.
- Prompts, and what is there of an answer, are prefilled one after the other, beside the decoding of the rest.
- One task wakes every `TICK_S` of real time while there is work, and tells what came since. A change inside a tick
  counts from its own moment, so a fast clock costs no accuracy. The sink is never called inside `generate`.

It leaves out: what tokens mean, temperature and truncation, cached prefixes, context in the step's time, and the pause
of an install.
"""

import asyncio
import time
from collections import OrderedDict
from hashlib import blake2b
from heapq import heappop, heappush
from itertools import accumulate
from math import exp, inf, log, sqrt
from pathlib import Path
from statistics import NormalDist
from typing import Annotated, Any, NamedTuple

import numpy as np
from msgspec import Meta, Struct

from polyrl.engines.engine import Capabilities, EngineEnd, EngineError, EngineInfo, EngineStats, Job, Sink, Weights
from polyrl.errors import ConfigError
from polyrl.ids import LeaseId, Seconds, Version
from polyrl.scheduling.order import mix64
from polyrl.scheduling.parameters import AtLeastOne, Count, NotNegative, Positive, Share
from polyrl.wire.columns import pack_tokens

_LONGEST_LOOK_S = 0.5
"""A longer time between two looks at the clock means that the process was stopped."""
TICK_S = 0.02
EOS = 2
_FIRST_TOKEN = 3
"""Smaller ids are special, and are never drawn."""
_LARGEST_TOKEN = 2**31 - 1
_LEAST_LOGPROB = -8.0

TOKEN_STREAM, _PROMPT_STREAM, _SAMPLE_STREAM, _TRACE_STREAM = 0x20, 0x21, 0x22, 0x23
_WHOLE_TOKEN = 1e-6
"""A token is whole when less than this is missing: positions carry rounding."""
_ADMISSION_MARGIN = 0.01
"""Share of the cache that admission leaves free, so that a newcomer is not thrown out at once."""


class EmulatedConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the engine is like; docs/concepts/engines.md. Seconds and speeds are those of the emulated machine."""

    slots: AtLeastOne = 64
    tokens_per_s: Positive = 50.0
    """Of one sample that runs alone."""
    step_per_sample_s: NotNegative = 0.0001
    """How much longer a decode step is for each further running sample."""
    prefill_tokens_per_s: Positive = 20_000.0
    kv_tokens: Count = 0
    """Tokens that fit into the cache; 0: any number."""
    median_tokens: Annotated[float, Meta(ge=1, le=1e9)] = 660.0
    sigma: Annotated[float, Meta(ge=0, le=10)] = 1.0
    """Spread of the logarithm of lengths. 1.0: one answer in ten is 3.6 times the median or longer."""
    correlation: Share = 0.5
    """Of the logarithms of the lengths of two answers to one prompt."""
    trace: str = ""
    """A file of lengths to pick from instead, a whole number a line."""
    vocab: Annotated[int, Meta(gt=_FIRST_TOKEN, le=_LARGEST_TOKEN + 1)] = 32_000
    version: Count | None = None
    """What is installed from the start; none: nothing."""
    start_s: NotNegative = 0.0
    install_s: NotNegative = 0.0
    speedup: Positive = 1.0
    """10: everything takes a tenth of its time."""
    tally: str = ""
    """A file in which it counts the tokens it has made: of those that a killed worker never sent, nobody else knows."""
    fail_every: Count = 0
    """Every so many jobs, one ends in `engine_failed` halfway; 0: none."""


def _open_tally(path: str) -> Any:
    """A number in a file that is shared with the disk: it outlives the process."""
    try:
        return np.memmap(path, np.int64, "r+" if Path(path).exists() else "w+", shape=(1,))
    except (OSError, ValueError) as error:
        raise ConfigError(f"tally: {path}: cannot be counted in: {error}") from error


# What is written: functions of seed and position


class Ending(NamedTuple):
    num_tokens: int
    """All tokens of the sample."""
    reason: EngineEnd
    has_eos: bool
    """Its last token is the end of text."""


def ending_of(job: Job, config: EmulatedConfig, recorded: list[int]) -> Ending:
    """Where the job ends if nobody stops it."""
    drawn = answer_tokens(job, config, recorded)
    ending = Ending(drawn, "stop", True)
    if job.sampling.ignore_eos or drawn > job.max_tokens:
        ending = Ending(job.max_tokens, "length", False)
    done = len(job.so_far)
    if ending.num_tokens <= done:  # its end was made already, and not heard of
        return Ending(done, "stop", False)
    if job.sampling.stop_ids:
        tokens, _ = draw([mix64(job.seed, TOKEN_STREAM)], [done], [ending.num_tokens - done], config.vocab)
        stops = np.flatnonzero(np.isin(tokens, job.sampling.stop_ids))
        if stops.size and not (ending.has_eos and stops[0] == len(tokens) - 1):
            return Ending(done + int(stops[0]) + 1, "stop", False)
    return ending


def answer_tokens(job: Job, config: EmulatedConfig, recorded: list[int]) -> int:
    """How long the answer is: drawn, or picked from the recorded lengths if there are any."""
    if recorded:
        return recorded[mix64(job.seed, _TRACE_STREAM) % len(recorded)]
    prompt_key = int.from_bytes(blake2b(pack_tokens(job.prompt), digest_size=8).digest(), "little")
    z = sqrt(config.correlation) * _normal(prompt_key, _PROMPT_STREAM)
    z += sqrt(1.0 - config.correlation) * _normal(job.seed, _SAMPLE_STREAM)
    return max(1, round(exp(log(config.median_tokens) + config.sigma * z)))


def _normal(*key: int) -> float:
    # 52 bits and a half are exact in a double, and never 0 or 1.
    return NormalDist().inv_cdf(((mix64(*key) >> 12) + 0.5) * 2.0**-52)


def draw(keys: list[int], starts: list[int], counts: list[int], vocab: int) -> tuple[Any, Any]:
    """Tokens and log-probabilities of many samples in a row: `counts` of each, from position `starts` on."""
    num = np.asarray(counts)
    offsets = np.asarray(starts) - np.cumsum(num) + num
    positions = (np.arange(num.sum()) + np.repeat(offsets, num)).astype(np.uint64)
    bits = _splitmix64(np.repeat(np.asarray(keys, np.uint64), num), positions)
    high, low = bits >> np.uint64(32), bits & np.uint64(0xFFFFFF)
    tokens = (high * np.uint64(vocab - _FIRST_TOKEN) >> np.uint64(32)) + np.uint64(_FIRST_TOKEN)
    # To the fourth power most are near 0, as a trained model's. 24 bits are exact in the float32 of the wire.
    share = low.astype(np.float32) * np.float32(2.0**-24)
    return tokens.astype(np.int64), np.float32(_LEAST_LOGPROB) * np.square(np.square(share))


def _splitmix64(key: Any, position: Any) -> Any:
    bits = key + (position + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return bits ^ (bits >> np.uint64(31))


def read_lengths(path: str) -> list[int]:
    """The lengths of a trace, a whole number a line. Raises ConfigError with the file and the line."""
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"trace: {path}: cannot be read: {error}") from error
    lengths: list[int] = []
    for number, line in enumerate(lines, start=1):
        text = line.strip()
        if not text:
            continue
        if not (text.isascii() and text.isdecimal() and len(text) < 10 and int(text) > 0):
            raise ConfigError(f"trace: {path}:{number}: got {text[:40]!r}, expected a number of tokens, such as 700")
        lengths.append(int(text))
    if not lengths:
        raise ConfigError(f"trace: {path}: has no lengths, expected a number of tokens a line")
    return lengths


# What runs


class Sample:
    """A job in the batch."""

    __slots__ = ("ending", "key", "lease", "order", "origin", "prompt_tokens", "tokens", "told")

    def __init__(self, lease: LeaseId, prompt_tokens: int, so_far: int, ending: Ending, key: int = 0) -> None:
        self.lease = lease
        self.prompt_tokens = prompt_tokens
        self.tokens = so_far  # while it decodes: those it began with
        self.told = so_far
        self.ending = ending
        self.key = key
        self.origin = 0.0  # the position at which it had, or would have had, no token
        self.order = -1  # number of its latest turn at decoding; -1 while it does not

    @property
    def context(self) -> int:
        return self.prompt_tokens + self.tokens


class Batch:
    """Who runs and how far everybody is. Moments are the emulated machine's, and must not go back.

    The position is how many steps were decoded since nobody did. A sample that decodes has `position - origin` tokens.
    """

    def __init__(self, config: EmulatedConfig) -> None:
        self._config = config
        self._capacity = config.kv_tokens if config.kv_tokens else inf
        self._waiting: OrderedDict[LeaseId, Sample] = OrderedDict()
        self._prefilling: OrderedDict[LeaseId, Sample] = OrderedDict()
        self._decoding: dict[LeaseId, Sample] = {}
        self._ended: dict[LeaseId, Sample] = {}
        self._finishes: list[tuple[float, int, Sample]] = []  # a heap; entries of samples that left stay until popped
        self._now: Seconds = 0.0
        self._position = 0.0
        self._prefilling_since: Seconds = 0.0
        self._prefilling_context = 0
        self._context_at_zero = 0.0  # context of those that decode = this + their number * position
        self._num_turns = 0
        self.num_preemptions = 0

    def __contains__(self, lease: LeaseId) -> bool:
        places = (self._waiting, self._prefilling, self._decoding, self._ended)
        return any(lease in place for place in places)

    @property
    def is_idle(self) -> bool:
        return not (self._waiting or self._prefilling or self._decoding or self._ended)

    @property
    def num_running(self) -> int:
        return len(self._prefilling) + len(self._decoding)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def context(self) -> float:
        """Tokens in the cache."""
        return self._prefilling_context + self._context_at_zero + len(self._decoding) * self._position

    def start(self, sample: Sample, now: Seconds) -> None:
        self.settle(now)
        self._waiting[sample.lease] = sample
        self._admit()

    def stop(self, lease: LeaseId, now: Seconds) -> None:
        """Forget a sample, if it is here."""
        self.settle(now)
        self._ended.pop(lease, None)
        self._waiting.pop(lease, None)
        running = self._decoding.get(lease, self._prefilling.get(lease))
        if running is not None:
            self._remove(running)
        self._admit()

    def take_news(self, now: Seconds) -> tuple[list[tuple[Sample, int]], list[Sample]]:
        """Samples that have more tokens than was told, with their number; and those that ended. Each is told once."""
        self.settle(now)
        ended, self._ended = list(self._ended.values()), {}
        reached = self._position + _WHOLE_TOKEN
        grown = [(sample, int(reached - sample.origin)) for sample in self._decoding.values()]
        grown += [(sample, sample.tokens) for sample in (*self._prefilling.values(), *self._waiting.values(), *ended)]
        return [(sample, tokens) for sample, tokens in grown if tokens > sample.told], ended

    def settle(self, now: Seconds) -> None:
        """Play everything that happens up to this moment."""
        while self._play_next(now):
            self._admit()
        self._move_to(now)

    def _play_next(self, until: Seconds) -> bool:
        first = self._first_to_finish()
        finished_at = inf if first is None else self._moment_of(first.origin + first.ending.num_tokens)
        prefilled_at = self._prefilled_at()
        full_at = self._full_at()
        at = min(finished_at, prefilled_at, full_at)
        if at > until:
            return False
        self._move_to(at)
        if first is not None and at == finished_at:
            self._finish(first)
        elif at == prefilled_at:
            self._begin_decoding()
        else:
            self._preempt_newest()
        return True

    def _first_to_finish(self) -> Sample | None:
        while self._finishes:
            _, order, sample = self._finishes[0]
            if sample.order == order:
                return sample
            heappop(self._finishes)
        return None

    def _prefilled_at(self) -> Seconds:
        for sample in self._prefilling.values():
            return self._prefilling_since + sample.context / self._config.prefill_tokens_per_s
        return inf

    def _full_at(self) -> Seconds:
        """When the cache overflows, if nothing else happens."""
        if self.num_running < 2 or not self._decoding or self._capacity == inf:
            return inf
        room = self._capacity - self._prefilling_context - self._context_at_zero
        return self._moment_of(room / len(self._decoding))

    def _step_s(self) -> Seconds:
        return 1.0 / self._config.tokens_per_s + self._config.step_per_sample_s * (len(self._decoding) - 1)

    def _moment_of(self, position: float) -> Seconds:
        return self._now + max(0.0, position - self._position) * self._step_s()

    def _move_to(self, now: Seconds) -> None:
        if self._decoding:
            self._position += max(0.0, now - self._now) / self._step_s()
        self._now = max(self._now, now)

    def _admit(self) -> None:
        """Let samples from the front of the queue run while they fit."""
        while self._waiting and self.num_running < self._config.slots:
            sample = next(iter(self._waiting.values()))
            # A token more for each: else the sample that was just thrown out would come back at the same moment.
            margin = max(_ADMISSION_MARGIN * self._config.kv_tokens, self.num_running + 1)
            if self.num_running and self.context + sample.context + margin > self._capacity:
                return
            del self._waiting[sample.lease]
            if not self._prefilling:
                self._prefilling_since = self._now
            self._prefilling[sample.lease] = sample
            self._prefilling_context += sample.context

    def _begin_decoding(self) -> None:
        sample = next(iter(self._prefilling.values()))
        self._remove(sample)
        self._num_turns += 1
        sample.order = self._num_turns
        sample.origin = self._position - sample.tokens
        self._decoding[sample.lease] = sample
        self._context_at_zero += sample.prompt_tokens - sample.origin
        heappush(self._finishes, (sample.origin + sample.ending.num_tokens, sample.order, sample))

    def _finish(self, sample: Sample) -> None:
        self._remove(sample)
        sample.tokens = sample.ending.num_tokens
        self._ended[sample.lease] = sample

    def _preempt_newest(self) -> None:
        newest = next(reversed(self._prefilling.values() if self._prefilling else self._decoding.values()))
        self._remove(newest)
        self._waiting[newest.lease] = newest
        self._waiting.move_to_end(newest.lease, last=False)
        self.num_preemptions += 1

    def _remove(self, sample: Sample) -> None:
        """Take a running sample out. A fraction of a token is lost."""
        if sample.order < 0:
            is_first = next(iter(self._prefilling)) == sample.lease
            del self._prefilling[sample.lease]
            self._prefilling_context -= sample.context
            self._prefilling_since = self._now if is_first else self._prefilling_since
            return
        del self._decoding[sample.lease]
        self._context_at_zero -= sample.prompt_tokens - sample.origin
        sample.tokens = int(self._position - sample.origin + _WHOLE_TOKEN)
        sample.order = -1
        if not self._decoding:  # a fresh zero, so that rounding does not pile up
            self._position = self._context_at_zero = 0.0
            self._finishes.clear()


# The engine


class EmulatedEngine:
    """Raises ConfigError for a trace that cannot be read."""

    def __init__(self, config: EmulatedConfig) -> None:
        self._config = config
        self._recorded = read_lengths(config.trace) if config.trace else []
        self._batch = Batch(config)
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
        if self._is_closed or job.lease in self._batch:
            return  # nobody listens any more; or it was said twice
        why_not = self._why_not(job)
        if why_not:
            self._refused[job.lease] = why_not
        else:
            self._batch.start(self._sample_of(job), self._now())
        self._has_work.set()

    async def abort(self, lease: LeaseId) -> None:
        self._refused.pop(lease, None)
        self._batch.stop(lease, self._now())

    async def install(self, weights: Weights) -> None:
        await self._sleep(self._config.install_s)
        trouble = self.health()
        if self._sink is None or trouble is not None:
            raise EngineError(f"version {weights.version} cannot be installed: {trouble}")
        self._tell(self._sink)  # up to here the old version wrote
        self._version = weights.version

    def stats(self) -> EngineStats:
        batch, capacity = self._batch, self._config.kv_tokens
        batch.settle(self._now())
        kv_used = min(1.0, batch.context / capacity) if capacity else 0.0
        return EngineStats(batch.num_running, batch.num_waiting, self._config.slots, kv_used, batch.num_preemptions)

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
        self._batch, self._refused = Batch(self._config), {}
        if self._teller is not None:
            self._teller.cancel()
            await asyncio.wait([self._teller])

    def _now(self) -> Seconds:
        """The engine's clock. It stands while the process is stopped, as a real engine would."""
        at = time.monotonic()
        self._clock += min(at - self._looked_at, _LONGEST_LOOK_S) * self._config.speedup
        self._looked_at = at
        return self._clock

    async def _sleep(self, seconds: Seconds) -> None:
        await asyncio.sleep(seconds / self._config.speedup)

    def _why_not(self, job: Job) -> str:
        """Why the job is refused; empty when it is not."""
        if self._version is None:
            return "no weights are installed"
        if not job.prompt:
            return "the prompt is empty"
        if job.max_tokens <= len(job.so_far):
            return f"max_tokens is {job.max_tokens}, and {len(job.so_far)} tokens are there already"
        if job.sampling.stop:
            return "stop strings are not supported: there is no text; give stop ids"
        for tokens in (job.prompt, job.so_far):
            if tokens and not 0 <= min(tokens) <= max(tokens) <= _LARGEST_TOKEN:
                return f"token ids go from 0 to {_LARGEST_TOKEN}; got {min(tokens)} to {max(tokens)}"
        context, capacity = len(job.prompt) + len(job.so_far), self._config.kv_tokens
        if capacity and context >= capacity:
            return f"prompt and answer so far are {context} tokens, and the cache holds {capacity}"
        return ""

    def _sample_of(self, job: Job) -> Sample:
        so_far = len(job.so_far)
        ending = ending_of(job, self._config, self._recorded)
        self._num_jobs += 1
        if self._config.fail_every and self._num_jobs % self._config.fail_every == 0:
            ending = Ending((so_far + ending.num_tokens) // 2, "engine_failed", False)
        return Sample(job.lease, len(job.prompt), so_far, ending, mix64(job.seed, TOKEN_STREAM))

    async def _tell_for_ever(self, sink: Sink) -> None:
        while True:
            await self._has_work.wait()
            self._tell(sink)
            if self._batch.is_idle and not self._refused:
                self._has_work.clear()
            else:
                await asyncio.sleep(TICK_S)

    def _tell(self, sink: Sink) -> None:
        refused, self._refused = self._refused, {}
        for lease, why in refused.items():
            sink.ended(lease, "refused", why)
        grown, ended = self._batch.take_news(self._now())
        if grown:
            self._tell_tokens(sink, grown)
        for sample in ended:
            detail = "as fail_every asks" if sample.ending.reason == "engine_failed" else ""
            sink.ended(sample.lease, sample.ending.reason, detail)

    def _tell_tokens(self, sink: Sink, grown: list[tuple[Sample, int]]) -> None:
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
