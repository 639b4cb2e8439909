"""An episode that the manager gave a host: its calls go to the manager, and are said again after a break.

Rules kept here: what the manager would refuse is refused here, and fails this episode alone.
"""

import asyncio
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import msgspec

from polyrl.hosts.calls import CallMemory
from polyrl.hosts.episode import CallLimits, DrawnAnswer, Episode, EpisodeFailed, NoRoom
from polyrl.ids import SampleId, show_sample
from polyrl.wire import columns, host_frames
from polyrl.wire.host_frames import HeldEpisode

Result = TypeVar("Result")

_NO_CONTEXT = 1 << 31
_MAX_CALL_BYTES = host_frames.MAX_HOST_FRAME_BYTES - (1 << 16)


class WayToManager(Protocol):
    """A host's way to the manager."""

    async def in_own_loop(self, work: Coroutine[Any, Any, Result]) -> Result: ...

    async def wait_for_pace(self) -> None: ...

    async def send(self, frame: host_frames.FromHost) -> None: ...


class PlayedEpisode(Episode):
    """An attempt at an episode that the manager gave us. Its calls go to the manager."""

    def __init__(self, agent: WayToManager, order: host_frames.EpisodeOrder, play: host_frames.Play) -> None:
        super().__init__(
            f"{show_sample(SampleId(order.sample))}-{order.attempt}",
            index=order.index,
            seed=order.seed,
            max_context=play.max_context or _NO_CONTEXT,
            task=_task(order.task),
            attempt=order.attempt - 1,
        )
        self.key = HeldEpisode(order.sample, order.attempt)
        self._agent = agent
        self._vocabulary = play.vocabulary
        self._memory = CallMemory()
        self.open_call: host_frames.MakeCall | None = None
        self._answer: asyncio.Future[host_frames.CallAnswer] | None = None

    @property
    def num_calls(self) -> int:
        """Calls that were answered."""
        return self._memory.num_calls

    async def draw(self, prompt: Sequence[int], limits: CallLimits) -> DrawnAnswer:
        return await self._agent.in_own_loop(self._draw(prompt, limits))

    async def _draw(self, prompt: Sequence[int], limits: CallLimits) -> DrawnAnswer:
        number = self._memory.num_calls
        if number >= host_frames.MAX_CALLS:
            raise NoRoom(f"an episode of {number} calls; expected at most {host_frames.MAX_CALLS}")
        grown = self._memory.grow(prompt)
        packed = columns.pack_tokens(grown.tokens)
        self._check(packed)
        call = host_frames.MakeCall(
            *(self.key.sample, self.key.attempt, number, grown.base, grown.kept, packed),
            limits.max_tokens or 0,
            limits.stop_ids,
            limits.stop,
        )
        await self._agent.wait_for_pace()
        self._answer = asyncio.get_running_loop().create_future()
        self.open_call = call
        try:
            await self._agent.send(call)
            answer = await self._answer
        finally:
            self.open_call = self._answer = None
        if answer.no_room:
            raise NoRoom(answer.no_room)
        cells = columns.view_cells(answer.cells)
        tokens: list[int] = cells["token"].tolist()
        self._memory.add(prompt, tokens)
        return DrawnAnswer(tokens, cells["logprob"].tolist(), "stop" if answer.finish == "stop" else "length")

    def _check(self, packed: bytes) -> None:
        """Raise where the manager would refuse the call: that would cost all other episodes here their host."""
        if len(packed) > _MAX_CALL_BYTES:
            raise NoRoom(f"{len(packed) // 4} new tokens in one call; expected at most {_MAX_CALL_BYTES // 4}")
        if packed and (why := columns.why_no_ids(columns.view_tokens(packed), self._vocabulary)):
            raise EpisodeFailed(f"a prompt with {why}")

    def answered(self, answer: host_frames.CallAnswer) -> None:
        """Take an answer. An answer that nothing waits for was sent twice."""
        if self._answer is not None and not self._answer.done() and answer.number == self._memory.num_calls:
            self._answer.set_result(answer)


def _task(task: bytes) -> Mapping[str, Any] | None:
    return msgspec.json.decode(task, type=dict[str, Any]) if task else None
