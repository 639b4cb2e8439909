"""Saves a run while it goes on: an entry in the redo log for each step, and now and then a checkpoint.

    step t ends -> log (a few megabytes, at once) -> the step is done
                -> every k steps: copy to host memory, at once; write that to disk while the next steps run

Rules kept here: a step is on disk before anyone is told that it is done, and a version's digest before anyone is told
of the version. Only one checkpoint is written at a time. If one falls due meanwhile, it is taken afterwards, from the
newest step. A step that must have its own checkpoint makes the run wait for the one being written. A write that fails
ends the run: `failed` says why. Steps without a checkpoint are in the log.
"""

import asyncio
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from msgspec import structs

from polyrl.errors import UserError
from polyrl.trainer.batch import TrainGroup
from polyrl.trainer.state import checkpoint, redo
from polyrl.trainer.state.checkpoint import Best, Keep, TrainerState
from polyrl.weights.tensors import pin, unpin

Tensor = torch.Tensor

_PINNED_BYTES = 1 << 20
"""The size from which on memory is pinned. Smaller tensors share pages, and CUDA pins a page only once."""


class Rules(NamedTuple):
    """When a checkpoint is written. Every `validates_every` steps, a checkpoint may turn out the best; 0: never."""

    every: int
    keep: Keep
    validates_every: int = 0

    def is_due(self, step: int, newest: int) -> bool:
        return step - newest >= self.every

    def is_asked_for(self, step: int) -> bool:
        """Return whether this very step must have a checkpoint."""
        may_be_best = self.validates_every > 0 and step % self.validates_every == 0
        return may_be_best or self.keep.is_for_good(step)


class Snapshot:
    """Copies of tensors in host memory, all from one moment. The memory is reused for the next snapshot."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._pinned: list[int] = []
        """The addresses of pinned memory."""

    def take(self, named: Iterable[tuple[str, Tensor]]) -> None:
        for name, one in named:
            kept = self.tensors.get(name)
            if kept is None:
                kept = self.tensors[name] = self._make_room(one)
            kept.copy_(one.detach(), non_blocking=True)
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    def _make_room(self, like: Tensor) -> Tensor:
        room = torch.empty(like.shape, dtype=like.dtype)
        if like.is_cuda and room.nbytes >= _PINNED_BYTES:  # copies into pageable memory are several times slower
            data: Any = room.view(-1).view(torch.uint8).numpy()
            if pin(memoryview(data)):
                self._pinned.append(room.data_ptr())
        return room

    def close(self) -> None:
        for address in self._pinned:
            unpin(address)
        self._pinned.clear()
        self.tensors.clear()


class Shards(Protocol):
    """Checkpoints that ranks write together, each its own shard (sharded.py)."""

    def take(self, next_step: int) -> None:
        """Copy all shards to the hosts. Nothing may change them meanwhile."""
        ...

    def save(self, run_dir: Path, state: TrainerState, stop: threading.Event) -> None:
        """Put on disk what was taken. Raises OSError, and Stopped."""
        ...

    def close(self) -> None: ...


class Saver:
    """Saves a run. `about` describes the trained models and has the step that the run goes on at; `newest` is the step
    of the newest checkpoint, `num_steps` the length of the run. `gather` yields all tensors of a checkpoint, whole;
    `write` puts them on disk. `shards`: ranks write them instead."""

    def __init__(
        self,
        run_dir: Path,
        about: TrainerState,
        rules: Rules,
        gather: Callable[[], Iterable[tuple[str, Tensor]]],
        *,
        newest: int,
        num_steps: int,
        metric: str = "",
        digests_kept: int = 16,
        write: Callable[..., object] = checkpoint.save,
        shards: Shards | None = None,
    ) -> None:
        self._run_dir, self._about, self._rules, self._gather = run_dir, about, rules, gather
        self._newest, self._num_steps = newest, num_steps
        self._metric, self._digests_kept, self._write_checkpoint = metric, digests_kept, write
        self._next_step = about.next_step
        self._published = checkpoint.read_published(run_dir)
        self._candidate: Best | None = None
        """A version that may be the best, and whose checkpoint may still be on its way to disk."""
        self._snapshot, self._shards = Snapshot(), shards
        self._copying: asyncio.Task[None] | None = None
        self._writing: asyncio.Task[None] | None = None
        self._stop, self._broken = threading.Event(), asyncio.Event()

    async def begin(self) -> None:
        """Save the run before its first step, when it is just the recipe's models. Raises UserError."""
        with _disk(f"{self._run_dir}: the run's state cannot be written"):
            checkpoint.note_run(self._run_dir, self._about.run)
            await asyncio.to_thread(checkpoint.save, self._run_dir, self._about, {})

    async def offered(self, version: int, digest: str) -> bool:
        """Record a version's digest, before anyone is told of it. Return whether it had another digest before. Raises
        UserError."""
        before = self._published.get(version, ())
        if before and before[-1] == digest:
            return False
        self._published[version] = (*(one for one in before if one != digest), digest)
        for old in sorted(self._published)[: -self._digests_kept]:
            del self._published[old]
        with _disk(f"{self._run_dir}: the digest of version {version} cannot be written"):
            await asyncio.to_thread(checkpoint.note_published, self._run_dir, self._published)
        return bool(before)

    async def rejected(self, step: int, group: int, rewards: list[float]) -> None:
        """Record a rejection, before the manager hears of it. Raises UserError if the disk fails."""
        with _disk(f"{self._run_dir}: what was rejected of step {step} cannot be written"):
            redo.note_rejection(self._run_dir, step, redo.Rejection(group, rewards))

    async def rejected_before(self, step: int) -> dict[int, list[float]]:
        """Return the rewards of the groups of a step that an earlier process rejected, by group. Raises UserError."""
        with _disk(f"{self._run_dir}: what was rejected of step {step} cannot be read"):
            return {one.group: one.rewards for one in redo.read_rejections(self._run_dir, step)}

    async def trained(
        self,
        step: int,
        batches: Sequence[Sequence[TrainGroup]],
        report: bytes = b"",
        rejected: Sequence[TrainGroup] = (),
    ) -> None:
        """Save a step. Nothing may change the weights meanwhile. Raises UserError if the disk fails.

        `report` is the encoded StepReport; `rejected` are the groups that arrived and were not trained on.
        """
        with _disk(f"{self._run_dir}: what step {step} was trained on cannot be written"):
            await asyncio.to_thread(redo.append, self._run_dir, step, self._num_steps, batches, report, rejected)
            redo.forget_rejections(self._run_dir, step)
        self._next_step = step + 1
        is_asked_for = self._rules.is_asked_for(self._next_step)
        if self._writing is not None and not self._writing.done() and not is_asked_for:
            return
        await self._written()
        if is_asked_for or self._rules.is_due(self._next_step, self._newest):
            await self._checkpoint()

    async def trained_again(self, step: int) -> None:
        """Note a step that was trained again from the log. Write its own checkpoint if it must have one and has none:
        the process that logged the step may have died too early. Raises UserError if the disk fails."""
        self._next_step = step + 1
        if self._rules.is_asked_for(self._next_step) and not checkpoint.is_there(self._run_dir, self._next_step):
            await self._written()
            await self._checkpoint()

    async def data_ended(self, step: int) -> None:
        """Record that there is no data left for this step. Raises UserError if the disk fails."""
        with _disk(f"{self._run_dir}: that the data has ended cannot be written"):
            checkpoint.note_data_ended(self._run_dir, step)

    async def finish(self) -> None:
        """End the run with a checkpoint of its last step on disk. Raises UserError."""
        await self._written()
        if self._newest < self._next_step:
            await self._checkpoint()
        await self._written()
        with _disk(f"{self._run_dir}: an old checkpoint or log cannot be removed"):
            await asyncio.to_thread(tidy, self._run_dir, self._rules.keep)  # another step may be the best since

    async def failed(self) -> None:
        """Wait while all is well. Raises UserError when a checkpoint could not be written."""
        await self._broken.wait()
        await self._written()

    async def stop(self) -> None:
        """Stop the write in progress. Nothing is lost: the redo log has its steps."""
        self._stop.set()
        running = [one for one in (self._copying, self._writing) if one is not None]
        await asyncio.gather(*running, return_exceptions=True)
        self._snapshot.close()
        if self._shards is not None:
            self._shards.close()

    def validated(self, version: int, rates: Mapping[str, float]) -> None:
        """Note the validation of a version, which may make it the best. Raises UserError if the disk fails."""
        if self._metric in rates:
            self._candidate = Best(version, self._metric, rates[self._metric])
            if self._writing is None or self._writing.done():
                self._note_best()

    def _note_best(self) -> None:
        """Record the candidate as the best if it is. A version without a checkpoint on disk cannot be the best."""
        candidate, self._candidate = self._candidate, None
        if candidate is None or not checkpoint.is_there(self._run_dir, candidate.step):
            return
        with _disk(f"{self._run_dir}: that version {candidate.step} is the best so far cannot be written"):
            checkpoint.note_best(self._run_dir, candidate)

    async def _checkpoint(self) -> None:
        self._newest = self._next_step
        self._copying = asyncio.create_task(asyncio.to_thread(self._take))
        await asyncio.shield(self._copying)  # if cancelled, `stop` waits for the copy, which uses the devices
        self._writing = asyncio.create_task(self._write(), name="writing a checkpoint")

    async def _write(self) -> None:
        state = structs.replace(self._about, next_step=self._newest, models="")
        try:
            with _disk(f"{self._run_dir}: the checkpoint of step {self._newest} cannot be written"):
                await asyncio.to_thread(self._save, state)
            self._note_best()
        except checkpoint.Stopped:
            pass
        except BaseException:
            self._broken.set()
            raise

    def _take(self) -> None:
        if self._shards is None:
            self._snapshot.take(self._gather())
        else:
            self._shards.take(self._newest)

    def _save(self, state: TrainerState) -> None:
        if self._shards is None:
            self._write_checkpoint(self._run_dir, state, self._snapshot.tensors, stop=self._stop)
        else:
            self._shards.save(self._run_dir, state, self._stop)
        tidy(self._run_dir, self._rules.keep)

    async def _written(self) -> None:
        """Wait for the write in progress. Raises its error if it failed."""
        if self._writing is not None:
            await asyncio.shield(self._writing)


def tidy(run_dir: Path, keep: Keep) -> None:
    """Remove checkpoints and entries that are no longer needed: a killed process may have left some. Raises OSError."""
    checkpoint.prune(run_dir, keep)
    steps = [checkpoint.step_of(one) for one in checkpoint.found(run_dir)]
    if steps:  # the last entry stays even if it is covered: its report may still be untold
        covered = min(steps[-min(2, keep.last, len(steps))], steps[-1] - 1)
        redo.forget(run_dir, covered, keep.samples_bytes)


@contextmanager
def _disk(what: str) -> Iterator[None]:
    """Turn an error of the disk, such as a full one, into a UserError of one line."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f"{what}: {error.strerror or error}; the last checkpoint and the log after it are whole: make room, and "
            "go on with --resume"
        ) from error
