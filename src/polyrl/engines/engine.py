"""The contract of an engine, which generates a worker's tokens. `contract` tests every engine against it.

    start(sink)            get ready; says what it is. May take minutes (a server starts); progress goes to the log
    generate(job)          begin or resume a sample; returns at once. Tokens and the end come through the sink
    abort(lease)           stop it: when this returns, its place and its cache are free and the sink hears no more of it
    install(weights)       start using a version. Running samples go on under it, unless the engine declares otherwise
    stats() health()       what it does now; why it cannot go on, if so
    close()                end everything; may be called twice, and after a failed start

Rules every engine keeps:
- Tokens come in order, each once, with its log-probability under the sampling temperature before truncation, which is
  what the trainer computes and an importance ratio compares; and with the version whose weights wrote it. The token
  that ends an answer (end of text, a stop id) is the answer's last token.
- A sample ends by itself in exactly one `ended`: `stop`, `length`, `engine_failed` or `refused`. After an abort: none.
- Resuming is generating after prompt + so_far: `max_tokens` counts both leases together. An engine that declares
  `seeds_survive_moves` draws the same tokens for the same seed and the same weights, wherever the first lease ended.
- A whole answer, whose worker was lost before it told the end, ends at once: as its last token says, or as `length`.
- A job that it cannot do is refused through the sink, with a line that says why; it never raises for a job.
- Cancelling the wait for an abort or an install does not cancel the work: it goes on to its end (`finishing`).
- The sink is called on the event loop that `start` ran on.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

from polyrl.ids import LeaseId, SampleId, Version
from polyrl.wire.frames import Sampling

if TYPE_CHECKING:
    from polyrl.weights.shelf import HostCopy

EngineEnd = Literal["stop", "length", "engine_failed", "refused"]


class Job(NamedTuple):
    """A lease, as the engine sees it."""

    lease: LeaseId
    sample: SampleId
    prompt: list[int]
    so_far: list[int]
    """Tokens that are there already: resume after them."""
    max_tokens: int
    """The sample ends at this many tokens in all."""
    seed: int
    sampling: Sampling
    goes_on: bool = True
    """Whether a later prompt may begin with its answer, so that what was computed of it is worth keeping."""


class Capabilities(NamedTuple):
    """Abilities that the contract suite checks, and a manager may count on."""

    seeds_survive_moves: bool
    keeps_running_over_install: bool
    """Running samples go on when weights change. Otherwise each ends in `engine_failed` and is resumed elsewhere."""
    stop_strings: bool


class EngineInfo(NamedTuple):
    engine: str
    model: str
    slots: int
    """Samples that it runs at once."""
    kv_tokens: int
    """Tokens that fit into its cache; 0 when it does not say."""
    capabilities: Capabilities
    version: Version | None = None
    """The version that it runs from the start, if any."""


class Speculated(NamedTuple):
    """The counts of an engine's drafts, since it started."""

    num_rounds: int = 0
    """Steps that verified drafts."""
    num_drafted: int = 0
    """Tokens of drafts that were verified."""
    num_accepted: int = 0
    """Of these, the ones that the model drew itself: each saved its sample a step."""


class EngineStats(NamedTuple):
    num_running: int
    num_waiting: int
    """Samples that it holds back itself, because its KV cache or its slots are full."""
    slots: int
    kv_used: float
    """A share, from 0 to 1."""
    num_preemptions: int
    """Since it started: how often it threw a running sample's cache away."""
    down: str = ""
    """Why it can do nothing for now, as while its server starts again. All that ran has ended in `engine_failed`, or
    is about to. When it is back it runs what it ran at its start."""
    num_outages: int = 0
    """How often it was down: an outage may be over before it is looked at."""
    num_prefilled: int = 0
    """Tokens that samples came with, and that were computed; since it started, where the engine counts them."""
    num_reused: int = 0
    """Such tokens that were found in its cache."""
    speculated: Speculated = Speculated()


class Weights(NamedTuple):
    """A version to install, and where it is."""

    version: Version
    folder: str | None = None
    """A Hugging Face directory that holds it."""
    copy: "HostCopy | None" = None
    """It is in this machine's memory, verified. The engine must not keep it: the next version may take its place."""
    in_place: bool = False
    """The version is in the engine's weights already: the trainer that shares them has changed them."""
    write: Callable[[], None] | None = None
    """With `in_place`: not yet. This puts it there, and is called while nothing runs."""


class Sink(Protocol):
    """Where an engine's news goes."""

    def tokens(self, lease: LeaseId, tokens: Sequence[int], logprobs: Sequence[float], version: Version) -> None: ...

    def ended(self, lease: LeaseId, reason: EngineEnd, detail: str = "") -> None: ...


def why_not_begun(job: Job, version: Version | None) -> str:
    """Why no engine would begin this job now; empty when one would."""
    if version is None:
        return "no weights are installed"
    if not job.prompt:
        return "the prompt is empty"
    if job.max_tokens < 1:
        return f"max_tokens is {job.max_tokens}"
    if "" in job.sampling.stop:
        return "a stop string is empty, and every answer has that at once"
    return ""


def is_whole(job: Job, max_context: int | None = None) -> bool:
    """Return whether its last token was made already, and its end not heard of: `length`, unless that token says
    `stop`."""
    if not job.so_far:
        return False
    return len(job.so_far) >= job.max_tokens or len(job.prompt) + len(job.so_far) == max_context


def why_no_tokens(job: Job, vocab: int) -> str:
    """Why its ids are no tokens of a vocabulary of this size; empty when they are."""
    for tokens in (job.prompt, job.so_far):
        if tokens and not 0 <= min(tokens) <= max(tokens) < vocab:
            return f"token ids go from 0 to {vocab - 1}; got {min(tokens)} to {max(tokens)}"
    return ""


class EngineError(Exception):
    """An engine could not start, install, or go on. The message is a line for a person."""


class NotOfThisModel(EngineError):
    """A version that this engine can never run: it is of another model, or its weights are of another kind."""


class Engine(Protocol):
    async def start(self, sink: Sink) -> EngineInfo: ...

    def generate(self, job: Job) -> None: ...

    async def abort(self, lease: LeaseId) -> None: ...

    async def install(self, weights: Weights) -> None:
        """Raises EngineError; the engine then still runs what it ran, or its health says why it cannot.

        NotOfThisModel where no version of that run will ever fit: the worker leaves.
        """
        ...

    def stats(self) -> EngineStats: ...

    def health(self) -> str | None:
        """Why it cannot go on; None when it can."""
        ...

    async def close(self) -> None: ...
