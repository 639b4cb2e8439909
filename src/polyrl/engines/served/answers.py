"""A sample's stay at a server: what is asked for it, what came of it, and how it ended."""

import asyncio
from collections.abc import Sequence
from typing import NamedTuple

from polyrl.engines.engine import EngineEnd, EngineError, Job, is_whole, why_no_tokens, why_not_begun
from polyrl.engines.served.http import EventStream
from polyrl.engines.served.server import AnswerPart, Facts, ServedEnd, Server, ServerRequest
from polyrl.ids import Version
from polyrl.scheduling.rules.order import mix64

_SEED_BITS = 31
"""The size of a seed that both kinds of server take."""


class AnswerEnd(NamedTuple):
    reason: EngineEnd
    detail: str = ""
    goes_on: bool = False
    """The server still writes it, and is told to stop."""


ENDS: dict[ServedEnd, AnswerEnd | None] = {
    "": None,
    "stop": AnswerEnd("stop"),
    "length": AnswerEnd("length"),
    "aborted": AnswerEnd("engine_failed", "the server ended it"),
}
"""The contract's end of an answer, by the server's own word for it."""


class ServedAnswer:
    """The record of a sample while a server writes it. Made within an event loop."""

    __slots__ = ("end", "ends", "events", "is_silent", "job", "num_tokens", "request", "runs", "server", "task")

    def __init__(self, job: Job, request: str) -> None:
        self.job = job
        self.request = request
        self.ends: frozenset[int] = frozenset()
        self.num_tokens = 0
        """Written since the sample came here."""
        self.runs: list[tuple[int, Version]] = []
        """(from this token on, that version wrote)."""
        self.is_silent = False
        """It was aborted: nothing more is sent to the sink."""
        self.server: Server | None = None
        """The server that it was sent to."""
        self.events: EventStream[AnswerPart] | None = None
        """The stream of its tokens."""
        self.end: asyncio.Future[AnswerEnd | Exception] = asyncio.get_running_loop().create_future()
        """How it ended, or the error: awaited by its task, which tells the sink."""
        self.task: asyncio.Task[None] | None = None


def why_refused(job: Job, facts: Facts, server: Server, version: Version | None) -> str:
    """Return why the job is refused; empty when it is not."""
    num = len(job.prompt) + len(job.so_far)
    if why := why_not_begun(job, version):
        return why
    if job.sampling.stop:
        return "stop strings need a tokenizer, and the server runs without one; give stop ids"
    if job.sampling.truncates and not server.tells_policy:
        return (
            "top-p, top-k and min-p: this server reports log-probabilities after truncation, while those of every "
            "other engine are before it; start it with the extension of this PolyRL, and without speculation"
        )
    if why := why_no_tokens(job, facts.vocab):
        return why
    if is_whole(job, facts.max_context):
        return ""
    if num >= facts.max_context:
        return f"prompt and answer so far are {num} tokens, and the context is {facts.max_context}"
    longest = min(len(job.prompt) + job.max_tokens, facts.max_context)
    if facts.kv_tokens and longest > facts.kv_tokens:
        return f"{longest} tokens do not fit into the cache of {facts.kv_tokens}"
    return ""


def request_of(answer: ServedAnswer, facts: Facts) -> ServerRequest:
    job = answer.job
    tokens = [*job.prompt, *job.so_far]
    max_new = min(job.max_tokens - len(job.so_far), facts.max_context - len(tokens))
    # A turn of its own draws: the same seed would draw again what it drew for the answer's first tokens.
    seed = mix64(job.seed, len(job.so_far)) >> (64 - _SEED_BITS)
    return ServerRequest(tokens, max_new, seed, job.sampling, sorted(answer.ends))


def joined(parts: Sequence[AnswerPart]) -> AnswerPart:
    """Return parts that came together as one: only the last has an end. Raises EngineError."""
    for part in parts:
        if len(part.tokens) != len(part.logprobs):
            raise EngineError(f"{len(part.tokens)} tokens with {len(part.logprobs)} log-probabilities")
    if len(parts) == 1:
        return parts[0]
    tokens = [one for part in parts for one in part.tokens]
    return AnswerPart(tokens, [one for part in parts for one in part.logprobs], parts[-1].end, parts[-1].spans)
