"""Making a run safe while it goes on: a line in the redo log for each step, and now and then a checkpoint beside it.

    step t ends -> log (a few megabytes, at once) -> the step is done
                -> every k steps: copy to the host's memory, at once; write that to the disk while the next steps run

Rules kept here: a step is on the disk before anyone is told that it is done, and a version's digest before anyone is
told of the version. One checkpoint is written at a time. One that is due meanwhile waits, and is then made of
the step that is newest; but a step whose own checkpoint was asked for has the run wait for the former. A write that
fails ends the run: `failed` says why. What was not written is in the log.
"""

import asyncio
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from msgspec import structs

from polyrl.errors import UserError
from polyrl.trainer.batch import TrainGroup
from polyrl.trainer.state import checkpoint, redo
from polyrl.trainer.state.checkpoint import Best, Keep, TrainerState
from polyrl.weights.tensors import pin, unpin

Tensor = torch.Tensor

_PINNED_BYTES = 1 << 20
"""From this size on: smaller ones share pages, which CUDA pins only once."""


class Rules(NamedTuple):
    """When a checkpoint is written. `validates_every` so many steps one may turn out the best; 0: never."""

    every: int
    keep: Keep
    validates_every: int = 0

    def is_due(self, step: int, newest: int) -> bool:
        return step - newest >= self.every

    def is_asked_for(self, step: int) -> bool:
        """Of this step, and no other would do."""
        may_be_best = self.validates_every > 0 and step % self.validates_every == 0
        return may_be_best or self.keep.is_for_good(step)


class Snapshot:
    """Tensors in the host's memory, as they were at one moment. The memory is kept for the next one."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._pinned: list[int] = []
        """Where."""

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
        if like.is_cuda and room.nbytes >= _PINNED_BYTES:  # a copy into other memory is several times slower
            data: Any = room.view(-1).view(torch.uint8).numpy()
            if pin(memoryview(data)):
                self._pinned.append(room.data_ptr())
        return room

    def close(self) -> None:
        for address in self._pinned:
            unpin(address)
        self._pinned.clear()
        self.tensors.clear()


class Saver:
    """`about` says what is trained, and the step that the run goes on at; `newest` is the newest checkpoint's step,
    `num_steps` are those of the run. `gather` gives all tensors of a checkpoint, whole; `write` puts them on the disk.
    """

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
    ) -> None:
        self._run_dir, self._about, self._rules, self._gather = run_dir, about, rules, gather
        self._newest, self._num_steps = newest, num_steps
        self._metric, self._digests_kept, self._write_checkpoint = metric, digests_kept, write
        self._next_step = about.next_step
        self._published = checkpoint.read_published(run_dir)
        self._candidate: Best | None = None
        """A version that may be the best, whose checkpoint is still on its way."""
        self._snapshot = Snapshot()
        self._copying: asyncio.Task[None] | None = None
        self._writing: asyncio.Task[None] | None = None
        self._stop, self._broken = threading.Event(), asyncio.Event()

    async def begin(self) -> None:
        """Before the first step: the run is the recipe's models and nothing else. Raises UserError."""
        with _disk(f"{self._run_dir}: the run's state cannot be written"):
            checkpoint.note_run(self._run_dir, self._about.run)
            await asyncio.to_thread(checkpoint.save, self._run_dir, self._about, {})

    async def offered(self, version: int, digest: str) -> bool:
        """A version is about to be told of. Returns whether it was another before. Raises UserError."""
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
        """A group is about to be rejected. Raises UserError if the disk does not take it."""
        with _disk(f"{self._run_dir}: what was rejected of step {step} cannot be written"):
            redo.note_rejection(self._run_dir, step, redo.Rejection(group, rewards))

    async def rejected_before(self, step: int) -> dict[int, list[float]]:
        """What a process before this one rejected of a step: rewards by group. Raises UserError."""
        with _disk(f"{self._run_dir}: what was rejected of step {step} cannot be read"):
            return {one.group: one.rewards for one in redo.read_rejections(self._run_dir, step)}

    async def trained(
        self,
        step: int,
        batches: Sequence[Sequence[TrainGroup]],
        report: bytes = b"",
        rejected: Sequence[TrainGroup] = (),
    ) -> None:
        """Make a step safe; nobody moves the weights meanwhile. Raises UserError if the disk does not take it.

        `report` is what will be told of it; `rejected` came and was not trained on.
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
        """A step of the log: whoever logged it may have died before its checkpoint, if one was asked for, was written.

        Raises UserError if the disk does not take it.
        """
        self._next_step = step + 1
        if self._rules.is_asked_for(self._next_step) and not checkpoint.is_there(self._run_dir, self._next_step):
            await self._written()
            await self._checkpoint()

    async def data_ended(self, step: int) -> None:
        """There is nothing left to train this step on. Raises UserError if the disk does not take it."""
        with _disk(f"{self._run_dir}: that the data has ended cannot be written"):
            checkpoint.note_data_ended(self._run_dir, step)

    async def finish(self) -> None:
        """The run is over: its last step has a checkpoint, on the disk. Raises UserError."""
        await self._written()
        if self._newest < self._next_step:
            await self._checkpoint()
        await self._written()
        with _disk(f"{self._run_dir}: what nobody needs any more cannot be removed"):
            await asyncio.to_thread(tidy, self._run_dir, self._rules.keep)  # the best may be another since

    async def failed(self) -> None:
        """Waits for as long as all is well; raises UserError when a checkpoint could not be written."""
        await self._broken.wait()
        await self._written()

    async def stop(self) -> None:
        """Break off what is being written: the log has it."""
        self._stop.set()
        running = [one for one in (self._copying, self._writing) if one is not None]
        await asyncio.gather(*running, return_exceptions=True)
        self._snapshot.close()

    def validated(self, version: int, rates: Mapping[str, float]) -> None:
        """Raises UserError if the disk does not take it."""
        if self._metric in rates:
            self._candidate = Best(version, self._metric, rates[self._metric])
            if self._writing is None or self._writing.done():
                self._note_best()

    def _note_best(self) -> None:
        """A checkpoint that is not on the disk is not the best."""
        candidate, self._candidate = self._candidate, None
        if candidate is None or not checkpoint.is_there(self._run_dir, candidate.step):
            return
        with _disk(f"{self._run_dir}: that version {candidate.step} is the best so far cannot be written"):
            checkpoint.note_best(self._run_dir, candidate)

    async def _checkpoint(self) -> None:
        self._newest = self._next_step
        self._copying = asyncio.create_task(asyncio.to_thread(lambda: self._snapshot.take(self._gather())))
        await asyncio.shield(self._copying)  # who is interrupted waits for it in `stop`: it uses the devices
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

    def _save(self, state: TrainerState) -> None:
        self._write_checkpoint(self._run_dir, state, self._snapshot.tensors, stop=self._stop)
        tidy(self._run_dir, self._rules.keep)

    async def _written(self) -> None:
        """Wait for what is being written. Raises what it failed of."""
        if self._writing is not None:
            await asyncio.shield(self._writing)


def tidy(run_dir: Path, keep: Keep) -> None:
    """Let go of checkpoints and entries that nobody needs: who was killed may not have come to it. Raises OSError."""
    checkpoint.prune(run_dir, keep)
    steps = [checkpoint.step_of(one) for one in checkpoint.found(run_dir)]
    if steps:  # the last entry stays, whatever covers it: what it says of its step may still be untold
        covered = min(steps[-min(2, keep.last, len(steps))], steps[-1] - 1)
        redo.forget(run_dir, covered, keep.samples_bytes)


@contextmanager
def _disk(what: str) -> Iterator[None]:
    """A disk that is full, or worse, is one line."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f"{what}: {error.strerror or error}; the last checkpoint and the log after it are whole: make room, and "
            "go on with --resume"
        ) from error
