"""The same answer to the same prompt is scored once: the score is kept, and answers that come meanwhile wait for it.

Rules kept here: only scores are kept, never failures, nor answers that ran into a time limit, which may be longer the
next time. Memory is bounded: scores that were used longest ago are forgotten first.
"""

import asyncio
import hashlib
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, TypeVar

import msgspec

from polyrl.rewards.groups import RewardGroup, take_apart
from polyrl.rewards.messages import pack_plain
from polyrl.rewards.reward import Reward, RewardInput

_MAX_KEPT = 16_384
_Score = TypeVar("_Score", Reward, list[Reward | None])
"""The reward of an answer, or those of a group."""
_encoder = msgspec.msgpack.Encoder(enc_hook=str, order="deterministic")


class ScoredOnce:
    """The scores of the last answers and groups, by function, arguments and input."""

    def __init__(self, max_kept: int = _MAX_KEPT) -> None:
        self._max_kept = max_kept
        self._kept: OrderedDict[bytes, Any] = OrderedDict()
        self._under_way: dict[bytes, asyncio.Task[Any]] = {}
        self.num_saved = 0
        """The number of answers that were not scored again."""

    async def score(
        self,
        function: str,
        arguments: Mapping[str, object],
        given: RewardInput | RewardGroup,
        make: Callable[[], Coroutine[Any, Any, _Score]],
    ) -> _Score:
        """Return the known score, or that of `make`. Raises what it raises."""
        key = _key(function, arguments, given)
        if key is None:
            return await make()
        num_answers = len(given.answers) if isinstance(given, RewardGroup) else 1
        if key in self._kept:
            self._kept.move_to_end(key)
            self.num_saved += num_answers
            return self._kept[key]
        task = self._under_way.get(key)
        if task is None:
            task = self._under_way[key] = asyncio.create_task(make())
            task.add_done_callback(lambda done: self._keep(key, done))
        else:
            self.num_saved += num_answers
        return await asyncio.shield(task)

    def _keep(self, key: bytes, task: "asyncio.Task[Any]") -> None:
        del self._under_way[key]
        if task.cancelled() or task.exception() is not None or not _is_final(task.result()):
            return
        self._kept[key] = task.result()
        if len(self._kept) > self._max_kept:
            self._kept.popitem(last=False)


def _is_final(score: Reward | list[Reward | None]) -> bool:
    rewards = [score] if isinstance(score, Reward) else score
    return all(one is not None and one.outcome != "timed_out" for one in rewards)


def _key(function: str, arguments: Mapping[str, object], given: RewardInput | RewardGroup) -> bytes | None:
    """Return a digest of all that a function sees, apart from its limit; None: a row that is no plain data."""
    shared, answers = take_apart(given)
    try:
        text = pack_plain((function, arguments, shared._replace(limit_s=0.0), answers), _encoder)
    except (TypeError, ValueError, OverflowError):
        return None
    return hashlib.blake2b(text, digest_size=16).digest()
