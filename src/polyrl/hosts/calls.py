"""The calls of an episode, as its host remembers them, and how a new prompt goes on from them. Pure."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

_LOOK_BACK = 8
"""Calls that a prompt is compared with: harnesses go on from a recent one, or from the first."""
_FORGOTTEN = np.zeros(0, np.int64)


class GrownPrompt(NamedTuple):
    """A prompt as the first `kept` tokens of what call `base` saw and drew, and further ones."""

    base: int
    kept: int
    tokens: list[int]


class CallMemory:
    """Everything that each call saw and drew, of those that a prompt is compared with."""

    def __init__(self) -> None:
        self._seen: list[np.ndarray[tuple[int], np.dtype[np.int64]]] = []

    @property
    def num_calls(self) -> int:
        return len(self._seen)

    def grow(self, prompt: Sequence[int]) -> GrownPrompt:
        """Find the call whose tokens the prompt shares most of, the newest of equals."""
        tokens = np.asarray(prompt, np.int64)
        best, kept = -1, 0
        recent = range(len(self._seen) - 1, max(0, len(self._seen) - _LOOK_BACK) - 1, -1)
        for number in (*recent, *([0] if self._seen else [])):
            shared = _num_shared(self._seen[number], tokens)
            if shared > kept:
                best, kept = number, shared
        return GrownPrompt(best, kept, tokens[kept:].tolist())

    def add(self, prompt: Sequence[int], drawn: Sequence[int]) -> None:
        self._seen.append(np.concatenate([np.asarray(prompt, np.int64), np.asarray(drawn, np.int64)]))
        if len(self._seen) > _LOOK_BACK + 1:  # otherwise an episode's memory would grow with the square of its calls
            self._seen[-_LOOK_BACK - 1] = _FORGOTTEN


def _num_shared(
    seen: "np.ndarray[tuple[int], np.dtype[np.int64]]", tokens: "np.ndarray[tuple[int], np.dtype[np.int64]]"
) -> int:
    most = min(len(seen), len(tokens))
    differs = seen[:most] != tokens[:most]
    return int(np.argmax(differs)) if differs.any() else most
