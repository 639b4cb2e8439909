"""Faults of an answer that cannot be trained on, and the worker that wrote it. Pure.

The manager refuses such tokens when they come in (manager/frames_in/intake.py). Tokens that it took before it knew
the vocabulary, or before it looked, are in its journal and are delivered: they are found here.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from polyrl.wire import columns
from polyrl.wire.frames import Segment


class Fault(NamedTuple):
    worker: str
    why: str
    is_lie: bool = True
    """No honest worker sends it. An unknown version may be the trainer's own doing."""

    def __str__(self) -> str:
        return f"{self.why}, by worker {self.worker}" if self.worker else self.why


def find_fault(
    tokens: "np.ndarray[Any, Any]", logprobs: "np.ndarray[Any, Any]", segments: Sequence[Segment], vocab: int
) -> Fault | None:
    """Return the first token that is no id of the vocabulary, or whose log-probability is none."""
    if not len(tokens):
        return None
    if why := columns.why_no_ids(tokens, vocab):
        return Fault(_writer(segments, int(np.argmax((tokens < 0) | (tokens >= vocab)))), why)
    if why := columns.why_no_logprobs(logprobs):
        is_one = (logprobs >= columns.MIN_LOGPROB) & (logprobs <= columns.MAX_LOGPROB)
        return Fault(_writer(segments, int(np.argmin(is_one))), why)
    return None


def find_call_fault(
    calls: Sequence[tuple["np.ndarray[Any, Any]", int, int, str, bool]], num_tokens: int, vocab: int
) -> Fault | None:
    """Return the first call of an episode without a prompt, with a prompt of other ids, or with tokens that are not its
    own. The environment gave the prompts: no worker is at fault."""
    last = 0
    for number, (prompt, start, end, *_) in enumerate(calls):
        if not len(prompt):
            return Fault("", f"call {number} has no prompt", is_lie=False)
        if why := columns.why_no_ids(prompt, vocab):
            return Fault("", f"the prompt of call {number}: {why}", is_lie=False)
        if not last <= start <= end <= num_tokens:
            tokens = f"tokens {start} to {end} of {num_tokens}, after {last}"
            return Fault("", f"call {number} has {tokens}", is_lie=False)
        last = end
    return None


def find_stranger(segments: Sequence[Segment], digests: Mapping[int, Sequence[str]]) -> Fault | None:
    """Return the fault of a version that the trainer did not publish."""
    for one in segments:
        if not one.digest or one.digest not in digests.get(one.version, ()):
            version = f"version {one.version} ({one.digest[:12] or 'no digest'})"
            return Fault(one.worker, f"a token of {version}, which the trainer did not publish", is_lie=False)
    return None


def _writer(segments: Sequence[Segment], token: int) -> str:
    return next((one.worker for one in reversed(segments) if one.from_token <= token), "")
