"""`polyrl worker --check`: start an engine, write one sample, install one version, write again, and say how it went.

The second sample is truncated to the likeliest token: its log-probabilities are zero where an engine reports those
after truncation, which mean something else than every other engine's.
"""

import asyncio
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from polyrl.engines.engine import Engine, EngineEnd, EngineError, EngineInfo, Job, Weights
from polyrl.ids import LeaseId, SampleId, Version
from polyrl.wire.frames import Sampling

EXIT_ILL = 1
EXIT_TERMINATED = 143  # 128 + SIGTERM, as a shell reports it
_PROMPT = [1, 2, 3]
_NUM_TOKENS = 16
_WHOLE = Sampling(ignore_eos=True)
_TRUNCATED = Sampling(temperature=2.0, top_k=1, ignore_eos=True)
"""As hot as vLLM takes it, so that no model is sure of every token."""
_NOTHING = 1e-6
_ANSWER_S = 300.0
"""The first answer of a server may compile."""
_TAIL_LINES = 20


class _Hearing:
    """A sink of one sample."""

    def __init__(self) -> None:
        self.versions: list[Version] = []
        self.logprobs: list[float] = []
        self.first_at = 0.0
        self.end: asyncio.Future[tuple[EngineEnd, str]] = asyncio.get_running_loop().create_future()

    def tokens(self, lease: LeaseId, tokens: Sequence[int], logprobs: Sequence[float], version: Version) -> None:
        self.first_at = self.first_at or time.monotonic()
        self.versions += [version] * len(tokens)
        self.logprobs += logprobs

    def ended(self, lease: LeaseId, reason: EngineEnd, detail: str = "") -> None:
        if not self.end.done():
            self.end.set_result((reason, detail))


class _Switch:
    """The engine's sink: news goes to whoever asked last."""

    def __init__(self) -> None:
        self.hearing: _Hearing | None = None

    def tokens(self, lease: LeaseId, tokens: Sequence[int], logprobs: Sequence[float], version: Version) -> None:
        if self.hearing is not None:
            self.hearing.tokens(lease, tokens, logprobs, version)

    def ended(self, lease: LeaseId, reason: EngineEnd, detail: str = "") -> None:
        if self.hearing is not None:
            self.hearing.ended(lease, reason, detail)


async def check(engine: Engine, folder: str | None) -> int:
    """The exit code. What went wrong is said in a line, with the end of the server's log."""
    is_terminated = asyncio.Event()
    _on_sigterm(is_terminated)
    try:
        await _check(engine, folder)
    except asyncio.CancelledError:
        if not is_terminated.is_set():
            raise
        print("polyrl: error: check: ended by SIGTERM", file=sys.stderr)
        return EXIT_TERMINATED
    except EngineError as error:
        print(f"polyrl: error: check: {error}", file=sys.stderr)
        _show_log(engine)
        return EXIT_ILL
    finally:
        await engine.close()
    return 0


def _on_sigterm(is_terminated: asyncio.Event) -> None:
    """End the check as any other: its server is stopped, and its temporary directories are removed."""
    checking = asyncio.current_task()
    assert checking is not None

    def end() -> None:
        is_terminated.set()
        checking.cancel()

    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, end)


async def _check(engine: Engine, folder: str | None) -> None:
    switch = _Switch()
    began = time.monotonic()
    info = await engine.start(switch)
    _say(f"{info.engine} is up after {time.monotonic() - began:.1f} s: {_shown(info)}")
    held, is_attached = info.version, getattr(engine, "is_attached", False)
    if held is None:
        if is_attached:
            raise EngineError(
                "the server runs weights that somebody installed, and a check would replace them; "
                "expected one that was just started"
            )
        held = Version(0)
        await _install(engine, held, folder)
    await _write(engine, switch, LeaseId(1), held, _WHOLE)
    await _install(engine, Version(held + 1), folder)
    try:
        logprobs = await _write(engine, switch, LeaseId(2), Version(held + 1), _TRUNCATED)
    finally:
        if is_attached:
            await _put_back(engine, held, folder)
    if max(map(abs, logprobs)) < _NOTHING:
        raise EngineError(
            "with top_k = 1 every log-probability is 0: they are those after truncation; expected those before it, as "
            "every engine reports them"
        )
    _say("all is well")


def _shown(info: EngineInfo) -> str:
    cache = f"{info.kv_tokens:,} tokens of cache" if info.kv_tokens else "a cache of unknown size"
    return f"{info.model}, {info.slots} slots, {cache}"


async def _write(engine: Engine, switch: _Switch, lease: LeaseId, version: Version, sampling: Sampling) -> list[float]:
    """The log-probabilities."""
    hearing = switch.hearing = _Hearing()
    began = time.monotonic()
    engine.generate(Job(lease, SampleId(1), _PROMPT, [], _NUM_TOKENS, 1, sampling))
    try:
        reason, detail = await asyncio.wait_for(hearing.end, _ANSWER_S)
    except TimeoutError:
        raise EngineError(f"a sample of {_NUM_TOKENS} tokens has no end after {_ANSWER_S:.0f} s") from None
    if reason != "length":
        raise EngineError(f"a sample ended in {reason}: {detail}")
    if hearing.versions != [version] * _NUM_TOKENS:
        raise EngineError(f"tokens are stamped {hearing.versions}; expected {_NUM_TOKENS} of version {version}")
    first_s, whole_s = hearing.first_at - began, time.monotonic() - began
    _say(f"wrote {_NUM_TOKENS} tokens of version {version} in {whole_s:.2f} s, the first after {first_s:.2f} s")
    return hearing.logprobs


async def _install(engine: Engine, version: Version, folder: str | None) -> None:
    """The model's own weights, under another number."""
    began = time.monotonic()
    await engine.install(Weights(version, folder=folder))
    _say(f"installed version {version}, the model's own weights, in {time.monotonic() - began:.2f} s")


async def _put_back(engine: Engine, version: Version, folder: str | None) -> None:
    """Others go on with the server. What went wrong before says more than that this does, too."""
    try:
        await engine.install(Weights(version, folder=folder))
    except EngineError as error:
        print(f"polyrl: version {version} could not be put back: {error}", file=sys.stderr)
    else:
        _say(f"put version {version} back")


def _say(line: str) -> None:
    print(f"check: {line}", flush=True)


def _show_log(engine: Engine) -> None:
    log_file = getattr(engine, "log_file", None)
    if not isinstance(log_file, Path):
        return
    from polyrl.engines.served.process import tail

    for line in tail(log_file, _TAIL_LINES):
        print(f"  | {line[:300]}", file=sys.stderr)
