"""The interface of a kind of server: how it is started, how it streams, how it takes weights; and its settings.

A server speaks in token ids only. Tokens are passed on as they come: `AnswerPart` holds those since the last part.
"""

import math
import os
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Protocol

import msgspec
from msgspec import Meta, Struct

from polyrl.config.model_dir import ModelFacts, read_facts
from polyrl.engines.engine import EngineError, Weights
from polyrl.engines.served.http import EventStream, Http, ServerAnswered
from polyrl.errors import ConfigError
from polyrl.wire.frames import Sampling

ServerKind = Literal["vllm", "sglang"]
NAMES: dict[ServerKind, str] = {"vllm": "vLLM", "sglang": "SGLang"}

_GPU_FILES = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")
_HIDERS = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")
_CPU_KV_TOKENS = 32_768
_CPU_SLOTS = 64


class ServedConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    model: str
    """A Hugging Face directory."""
    python: str = ""
    """The interpreter of the environment that the server is installed in; empty: ours."""
    url: str = ""
    """A server that runs already, and is not ours to start or to end."""
    flags: tuple[str, ...] = ()
    """Passed to the server unchanged; they win over ours."""
    log: str = ""
    """A file for what the server prints; empty: one in the directory for temporary files."""
    device: Literal["auto", "gpu", "cpu"] = "auto"
    threads: Annotated[int, Meta(ge=1, le=256)] = 1
    """CPU threads, if it computes there. Two on a busy machine have been seen to be 20 times slower than one."""
    slots: Annotated[int, Meta(ge=1, le=4096)] | None = None
    """Samples that run at once; none: what the server takes, on the CPU 64."""
    kv_tokens: Annotated[int, Meta(ge=16)] | None = None
    """Tokens that fit into the cache; none: on a GPU the server fills its memory, on the CPU 32,768."""
    max_context: Annotated[int, Meta(ge=2)] | None = None
    """Prompt and answer together; none: what the model can."""
    after_install: Literal["keep", "recompute"] = "recompute"
    """Whether running samples keep their cache when weights change, or compute it anew."""
    speculation: Literal["off", "ngram", "suffix"] = "off"
    """Drafts of the server's own: from the sample's text, or from that of other samples too."""
    draft_tokens: Annotated[int, Meta(ge=1, le=32)] = 5
    """Tokens of such a draft."""
    version: Annotated[int, Meta(ge=0)] | None = 0
    """Which version the directory holds; none: it may not be used before another is installed."""
    start_timeout_s: Annotated[float, Meta(gt=0)] = 1800.0
    """A server that is not ready by then is ended. Large models load and compile for long."""
    stall_s: Annotated[float, Meta(gt=0)] = 60.0
    """A server that has samples, and writes no token of any for so long, hangs. More for long prompts on a slow CPU."""

    def __post_init__(self) -> None:
        if self.url and self.speculation != "off":
            raise ValueError("speculation: the server runs already, expected off; start it with its own flags for that")

    @property
    def is_on_cpu(self) -> bool:
        """Whether the server is to compute on the CPU. We have no library to ask a GPU; its driver's files tell."""
        if self.device != "auto":
            return self.device == "cpu"
        hidden = any(os.environ.get(name, "all") in ("", "-1") for name in _HIDERS)
        return hidden or not any(Path(one).exists() for one in _GPU_FILES)

    @property
    def interpreter(self) -> str:
        return self.python or sys.executable

    @property
    def cpu_kv_tokens(self) -> int:
        return _CPU_KV_TOKENS if self.kv_tokens is None else self.kv_tokens

    @property
    def num_slots(self) -> int | None:
        """Samples that run at once; None: the server's own default, which is meant for GPUs."""
        return _CPU_SLOTS if self.slots is None and self.is_on_cpu else self.slots

    def cpu_context(self, model_context: int | None) -> int:
        """Prompt and answer together: no more than the model can, and than its cache can hold."""
        wanted = (self.max_context, model_context, self.cpu_kv_tokens)
        return min(one for one in wanted if one is not None)


ServedEnd = Literal["", "stop", "length", "aborted"]
"""How an answer ended; empty while it has not."""


def facts_of(folder: str) -> ModelFacts:
    """Return what the model's directory says. Raises EngineError where that is too little to serve it."""
    try:
        return read_facts(folder, strict=True)
    except ConfigError as error:
        raise EngineError(str(error)) from error


class ServerBroken(EngineError):
    """The version that the server runs is unknown: it must be started again."""


class LaunchCommand(NamedTuple):
    argv: list[str]
    environment: dict[str, str]
    """Beside the one we run in."""


class Facts(NamedTuple):
    """The facts about a server that is ready, from itself or from its model's directory."""

    model: str
    slots: int
    kv_tokens: int
    """0 when it does not say."""
    max_context: int
    vocab: int
    end_ids: frozenset[int]
    label: str
    """The label of the weights that it runs: a version's number, or its own label for weights we did not install."""


class ServerRequest(NamedTuple):
    """A request for what comes after these tokens."""

    tokens: list[int]
    max_new: int
    seed: int
    sampling: Sampling
    end_ids: list[int]
    """The answer ends with the first of these; nothing else ends it before `max_new`."""


class LabelSpan(Struct, frozen=True):
    """These tokens of an answer were written under that label. Both kinds of server write it so."""

    label: str = msgspec.field(name="version")
    start: int
    end: int


class AnswerPart(NamedTuple):
    """The tokens of an answer since the last part."""

    tokens: Sequence[int]
    logprobs: Sequence[float]
    end: ServedEnd = ""
    spans: Sequence[LabelSpan] = ()
    """With the end, where the server says it."""


def number(logprob: float | None) -> float:
    """JSON has no NaN: servers write null."""
    return math.nan if logprob is None else logprob


class ServerLoad(NamedTuple):
    num_running: int
    num_waiting: int
    kv_used: float
    num_preemptions: int


class WeightLoading(Protocol):
    """How a kind of server takes weights. Made anew for every life of a server."""

    def flags(self) -> list[str]:
        """Return the flags that the server must be started with."""
        ...

    def environment(self) -> Mapping[str, str]: ...

    async def stage(self, weights: Weights) -> Any:
        """Bring a version near, while samples go on. The copy is ours until `put` has returned. Raises EngineError."""
        ...

    async def pause(self) -> None:
        """Stop generation. No token is written after it returns; running samples keep their place."""
        ...

    async def put(self, staged: Any) -> None:
        """Put the weights in place, verify them, and set the server's label. Raises EngineError or ServerBroken."""
        ...

    async def resume(self) -> None: ...

    async def is_paused(self) -> bool:
        """Return whether the server was paused and not resumed."""
        ...


class Server(Protocol):
    """A server from its start to its end, at the address of `http`."""

    http: Http
    loading: WeightLoading
    tells_policy: bool
    """Log-probabilities are those before truncation (top-k, top-p, min-p)."""

    def command(self, port: int) -> LaunchCommand:
        """Return the command that starts it: listening on loopback, at this port. Raises EngineError for what cannot be
        served."""
        ...

    async def is_ready(self) -> bool:
        """Return whether it would answer. Cheap, and never an error."""
        ...

    async def facts(self) -> Facts:
        """Raises EngineError for a server, or a model, that cannot serve us."""
        ...

    def stream(self, request: str, asked: ServerRequest) -> AbstractAsyncContextManager[EventStream[AnswerPart]]:
        """Generate. The last part has an end.

        Entering and reading raise EngineError when the server fails, JobRefused when it refuses the request.
        """
        ...

    async def abort(self, request: str) -> None:
        """Tell the server to abort. The stream then ends, unless the request has not reached the server yet."""
        ...

    async def load(self) -> ServerLoad: ...


class JobRefused(EngineError):
    """The server will not do this job; others it may."""


@asynccontextmanager
async def stream(
    http: Http, path: str, body: Mapping[str, Any], decode: Callable[[bytes], Sequence[AnswerPart]]
) -> AsyncIterator[EventStream[AnswerPart]]:
    """Stream a job's tokens. Both kinds of server refuse a job with status 400."""
    try:
        async with http.events(path, body, decode) as events:
            yield events
    except ServerAnswered as error:
        if error.status == 400:
            raise JobRefused(error.said) from error
        raise
