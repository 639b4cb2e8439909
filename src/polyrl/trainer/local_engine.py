"""The builtin engine on the trainer's own model: parameters are shared, nothing is copied.

It has two users: a local worker, which is a member of the fleet, and the trainer itself, which validates between
rounds. The trainer's own leases are negative; the fleet never sees them.
"""

import asyncio
from collections.abc import Sequence
from typing import NamedTuple

from polyrl.engines.builtin.config import BuiltinConfig
from polyrl.engines.builtin.engine import BuiltinEngine
from polyrl.engines.builtin.models import Loaded
from polyrl.engines.engine import EngineEnd, EngineError, EngineInfo, EngineStats, Job, Sink, Weights
from polyrl.ids import LeaseId, SampleId, Version
from polyrl.wire.frames import Sampling


class LocalPrompt(NamedTuple):
    """A request of the trainer itself for one answer."""

    prompt: list[int]
    max_tokens: int
    seed: int
    sampling: Sampling


class LocalAnswer(NamedTuple):
    tokens: list[int]
    finish: str
    """"stop" or "length"; otherwise the reason why there is no complete answer."""
    logprobs: Sequence[float] = ()

    @property
    def is_whole(self) -> bool:
        return self.finish in ("stop", "length")


class _Nobody:
    """The sink of an engine that no worker hosts."""

    def tokens(self, lease: LeaseId, tokens: Sequence[int], logprobs: Sequence[float], version: Version) -> None:
        pass

    def ended(self, lease: LeaseId, reason: EngineEnd, detail: str = "") -> None:
        pass


class LocalEngine:
    """Implements the contract of an engine, so that a worker can host it."""

    def __init__(self, config: BuiltinConfig, loaded: Loaded) -> None:
        self._engine = BuiltinEngine(config, loaded)
        self._sink: Sink = _Nobody()
        self._info: EngineInfo | None = None
        self._texts: dict[LeaseId, list[int]] = {}
        self._logprobs: dict[LeaseId, list[float]] = {}
        self._waited_for: dict[LeaseId, asyncio.Future[str]] = {}
        self._next_lease = -1

    # For the fleet

    async def start(self, sink: Sink | None = None) -> EngineInfo:
        if sink is not None:
            self._sink = sink
        if self._info is None:
            self._info = await self._engine.start(self)
        return self._info

    def generate(self, job: Job) -> None:
        self._engine.generate(job)

    async def abort(self, lease: LeaseId) -> None:
        await self._engine.abort(lease)

    async def install(self, weights: Weights) -> None:
        await self._engine.install(weights)

    def stats(self) -> EngineStats:
        return self._engine.stats()

    def health(self) -> str | None:
        return self._engine.health()

    async def sleep(self) -> None:
        await self._engine.sleep()

    async def wake(self) -> None:
        await self._engine.wake()

    async def close(self) -> None:
        why = self.health() or "the engine is closed"
        for waiting in self._waited_for.values():
            if not waiting.done():
                waiting.set_exception(EngineError(why))
        await self._engine.close()

    # For the engine: it is its own sink

    def tokens(self, lease: LeaseId, tokens: Sequence[int], logprobs: Sequence[float], version: Version) -> None:
        if lease < 0:
            self._texts[lease].extend(tokens)
            self._logprobs[lease].extend(logprobs)
        else:
            self._sink.tokens(lease, tokens, logprobs, version)

    def ended(self, lease: LeaseId, reason: EngineEnd, detail: str = "") -> None:
        if lease >= 0:
            self._sink.ended(lease, reason, detail)
        elif not self._waited_for[lease].done():
            self._waited_for[lease].set_result(f"{reason} {detail}".strip())

    # For the trainer

    async def answer(self, questions: Sequence[LocalPrompt]) -> list[LocalAnswer]:
        """Return the answers, in order. Nothing else may use the devices. Raises EngineError if the engine fails."""
        await self.wake()
        loop = asyncio.get_running_loop()
        leases: list[LeaseId] = []
        for question in questions:
            lease = LeaseId(self._next_lease)
            self._next_lease -= 1
            leases.append(lease)
            self._texts[lease], self._logprobs[lease] = [], []
            self._waited_for[lease] = loop.create_future()
            sample = SampleId(-lease)
            self._engine.generate(
                Job(lease, sample, question.prompt, [], question.max_tokens, question.seed, question.sampling)
            )
        try:
            ends = [await self._end_of(lease) for lease in leases]
            return [
                LocalAnswer(self._texts[lease], end, self._logprobs[lease])
                for lease, end in zip(leases, ends, strict=True)
            ]
        finally:
            for lease in leases:
                await self._engine.abort(lease)
                del self._texts[lease], self._logprobs[lease], self._waited_for[lease]

    async def _end_of(self, lease: LeaseId) -> str:
        while True:
            done, _ = await asyncio.wait((self._waited_for[lease],), timeout=1.0)
            if done:
                return self._waited_for[lease].result()
            trouble = self.health()
            if trouble is not None:
                raise EngineError(trouble)
