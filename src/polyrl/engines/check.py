"""A check of an engine: start it, write one sample, install one version, write again.

The second sample is truncated to the likeliest token: its log-probabilities are zero where an engine reports those
after truncation, which mean something else than every other engine's.
"""

import asyncio
import time
from collections.abc import Callable

from polyrl.engines.engine import Engine, EngineError, EngineInfo, Job, Weights
from polyrl.engines.single import SingleSink
from polyrl.ids import LeaseId, SampleId, Version
from polyrl.wire.frames import Sampling

_PROMPT = [1, 2, 3]
_NUM_TOKENS = 16
_WHOLE = Sampling(ignore_eos=True)
_TRUNCATED = Sampling(temperature=2.0, top_k=1, ignore_eos=True)
"""As hot as vLLM takes it, so that no model is sure of every token."""
_NOTHING = 1e-6
_ANSWER_S = 300.0
"""The first answer of a server may compile."""

Say = Callable[[str], object]


async def check(engine: Engine, folder: str | None, say: Say) -> None:
    """Check an engine. `say` is given a line for everything that went well. Raises EngineError. The caller closes the
    engine."""
    sink = SingleSink()
    began = time.monotonic()
    info = await engine.start(sink)
    say(f"{info.engine} is up after {time.monotonic() - began:.1f} s: {_shown(info)}")
    held, is_attached = info.version, getattr(engine, "is_attached", False)
    if held is None:
        if is_attached:
            raise EngineError(
                "the server's weights were installed by another client, and a check would replace them; "
                "expected one that was just started"
            )
        held = Version(0)
        await _install(engine, held, folder, say)
    await _write(engine, sink, LeaseId(1), held, _WHOLE, say)
    await _install(engine, Version(held + 1), folder, say)
    try:
        logprobs = await _write(engine, sink, LeaseId(2), Version(held + 1), _TRUNCATED, say)
    finally:
        if is_attached:
            await _put_back(engine, held, folder, say)
    if max(map(abs, logprobs)) < _NOTHING:
        raise EngineError(
            "with top_k = 1 every log-probability is 0: they are those after truncation; expected those before it, as "
            "every engine reports them"
        )
    say("all is well")


def _shown(info: EngineInfo) -> str:
    cache = f"{info.kv_tokens:,} tokens of cache" if info.kv_tokens else "a cache of unknown size"
    return f"{info.model}, {info.slots} slots, {cache}"


async def _write(
    engine: Engine, sink: SingleSink, lease: LeaseId, version: Version, sampling: Sampling, say: Say
) -> list[float]:
    """Write a sample, and return its log-probabilities."""
    versions: list[Version] = []
    logprobs: list[float] = []
    began, first_s = time.monotonic(), 0.0
    try:
        async with asyncio.timeout(_ANSWER_S):
            async for news in sink.generate(engine, Job(lease, SampleId(1), _PROMPT, [], _NUM_TOKENS, 1, sampling)):
                first_s = first_s or time.monotonic() - began
                versions += [news.version] * len(news.tokens)
                logprobs += news.logprobs
                if news.end not in (None, "length"):
                    raise EngineError(f"a sample ended in {news.end}: {news.detail}")
    except TimeoutError:
        raise EngineError(f"a sample of {_NUM_TOKENS} tokens has no end after {_ANSWER_S:.0f} s") from None
    if versions != [version] * _NUM_TOKENS:
        raise EngineError(f"tokens are stamped {versions}; expected {_NUM_TOKENS} of version {version}")
    whole_s = time.monotonic() - began
    say(f"wrote {_NUM_TOKENS} tokens of version {version} in {whole_s:.2f} s, the first after {first_s:.2f} s")
    return logprobs


async def _install(engine: Engine, version: Version, folder: str | None, say: Say) -> None:
    """Install the model's own weights, under another number."""
    began = time.monotonic()
    await engine.install(Weights(version, folder=folder))
    say(f"installed version {version}, the model's own weights, in {time.monotonic() - began:.2f} s")


async def _put_back(engine: Engine, version: Version, folder: str | None, say: Say) -> None:
    """Others go on with the server. An error that came before says more than an error of this."""
    try:
        await engine.install(Weights(version, folder=folder))
    except EngineError as error:
        say(f"version {version} could not be put back: {error}")
    else:
        say(f"put version {version} back")
