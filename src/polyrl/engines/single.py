"""Single samples from an engine, without worker and manager: for `polyrl generate` and `polyrl worker --check`."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import NamedTuple

from polyrl.engines.engine import Engine, EngineEnd, EngineError, Job
from polyrl.ids import LeaseId, Version

_HEALTH_INTERVAL_S = 1.0


class News(NamedTuple):
    """Tokens of a sample, all of one version; or its end."""

    tokens: Sequence[int] = ()
    logprobs: Sequence[float] = ()
    version: Version = Version(0)
    end: EngineEnd | None = None
    detail: str = ""


class SingleSink:
    """An engine's sink. News waits in a queue, so that a terminal which is slow or gone does not hold the engine up."""

    def __init__(self) -> None:
        self._news: asyncio.Queue[News] = asyncio.Queue()
        self._lease: LeaseId | None = None

    def tokens(self, lease: LeaseId, tokens: Sequence[int], logprobs: Sequence[float], version: Version) -> None:
        if lease == self._lease:
            self._news.put_nowait(News(tokens, logprobs, version))

    def ended(self, lease: LeaseId, reason: EngineEnd, detail: str = "") -> None:
        if lease == self._lease:
            self._news.put_nowait(News(end=reason, detail=detail))

    async def generate(self, engine: Engine, job: Job) -> AsyncIterator[News]:
        """Begin a sample and yield its news, the end last. Raises EngineError when the engine cannot go on."""
        self._lease = job.lease
        engine.generate(job)
        while True:
            try:
                async with asyncio.timeout(_HEALTH_INTERVAL_S):
                    news = await self._news.get()
            except TimeoutError:
                trouble = engine.health()
                if trouble is not None:
                    raise EngineError(trouble) from None
                continue
            yield news
            if news.end is not None:
                return
