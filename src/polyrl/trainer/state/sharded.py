"""A checkpoint in shards: every rank writes the rows that it holds, and any number of ranks reads those that it needs.

    step-000012/     state.json                            the next step, and the digest of every other file
                     shard-00002-of-00004.safetensors      what rank 1 of four held

Files are those of torch.distributed.checkpoint with safetensors: a file's header says where the rows of each tensor
begin. They are read with that library, which finds the overlap of rows saved and rows wanted; nothing in them is
pickled. They are written here, in the background and in pieces, as one rank's are (checkpoint.py).

Rules kept here: ranks share the run's directory, or there are no shards (`is_shared`). Rank zero makes the folder under
a temporary name; the others wait for it, write, and leave the digest of their file beside it. Rank zero seals the
checkpoint when it has all digests. No rank waits for another one's disk.
"""

import contextlib
import json
import logging
import secrets
import threading
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from polyrl.disk import write_whole
from polyrl.errors import UserError
from polyrl.trainer import sharding
from polyrl.trainer.ranks import Ranks
from polyrl.trainer.sharding import StoredTensors
from polyrl.trainer.state import checkpoint
from polyrl.trainer.state.checkpoint import Stopped, TrainerState
from polyrl.trainer.state.saving import Snapshot

log = logging.getLogger("polyrl.trainer")

Tensor = torch.Tensor

_SHARDING_INFO, _OFFSETS = "DCP_SHARDING_INFO", "saved_offsets"
"""Keys of torch.distributed.checkpoint, in the header of a file."""
_LOOK_EVERY_S = 0.2
_PROBE = ".is-shared"


class ShardFile(NamedTuple):
    """One rank's file of a checkpoint."""

    rank: int
    size: int

    @property
    def name(self) -> str:
        return f"shard-{self.rank + 1:05}-of-{self.size:05}.safetensors"

    @property
    def digest_name(self) -> str:
        return f"{self.name}.digest"


def is_shared(run_dir: Path, ranks: Ranks) -> bool:
    """Return whether all ranks see the same directory of the run. All of them call this together."""
    probe = run_dir / checkpoint.FOLDER / _PROBE
    mark = ranks.broadcast(secrets.token_bytes(16))
    if ranks.rank == 0:
        probe.parent.mkdir(parents=True, exist_ok=True)
        write_whole(probe, mark)
    ranks.exchange(b"")
    seen = b""
    with contextlib.suppress(OSError):
        seen = probe.read_bytes()
    everywhere = all(one == mark for one in ranks.exchange(seen))
    if ranks.rank == 0:
        probe.unlink(missing_ok=True)
    return everywhere


def own_rows(state: Mapping[str, Tensor], rank: int) -> Iterator[tuple[str, Tensor, int]]:
    """Yield what this rank has to write: its rows of each tensor, and the number of the first one. Tensors that are not
    sharded are rank zero's."""
    for name, one in state.items():
        if sharding.is_part(one):
            rows = sharding.rows_of(one.detach())
            if rows.shape[0]:
                yield name, rows, sharding.first_row(one)
        elif rank == 0:
            yield name, one.detach(), 0


class ShardWriter:
    """Writes one rank's shard of one checkpoint after the other."""

    def __init__(self, run_dir: Path, shard: ShardFile) -> None:
        self._run_dir, self._shard = run_dir, shard
        self._snapshot = Snapshot()
        self._first_rows: dict[str, int] = {}
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()

    def take(self, state: Mapping[str, Tensor]) -> None:
        """Copy this rank's rows to the host. The devices may go on when it returns."""
        self._end()
        rows = list(own_rows(state, self._shard.rank))
        self._first_rows = {name: first for name, _, first in rows}
        self._snapshot.take((name, one) for name, one, _ in rows)

    def write(self, folder: Path, stop: threading.Event) -> str:
        """Write the file, and return its digest. Raises OSError, and Stopped."""
        tensors = {name: self._snapshot.tensors[name] for name in self._first_rows}
        offsets = {name: [self._first_rows[name], *([0] * one.dim())][: one.dim()] for name, one in tensors.items()}
        where = {name: {_OFFSETS: its} for name, its in offsets.items()}
        metadata = {_SHARDING_INFO: json.dumps(where), "format": "pt"}
        return checkpoint.write_tensors(folder / self._shard.name, tensors, stop, metadata)

    def write_beside(self, next_step: int) -> None:
        """Write what was taken, in a thread, as soon as rank zero has made the folder."""
        self._stop.clear()
        self._thread = threading.Thread(target=self._write, args=(next_step,), name="writing a shard", daemon=True)
        self._thread.start()

    def _write(self, next_step: int) -> None:
        folder = checkpoint.unfinished(self._run_dir, next_step)
        while not folder.is_dir():
            if self._stop.wait(_LOOK_EVERY_S):
                return
        try:
            write_whole(folder / self._shard.digest_name, self.write(folder, self._stop).encode())
        except Stopped:
            return
        except OSError as error:
            if folder.is_dir():
                log.error("%s: cannot be written: %s", folder / self._shard.name, error.strerror)
                with contextlib.suppress(OSError):
                    write_whole(folder / self._shard.digest_name, f"!{error.strerror}".encode())

    def _end(self) -> None:
        if self._thread is not None:
            self._stop.set()
            self._thread.join()
            self._thread = None

    def close(self) -> None:
        self._end()
        self._snapshot.close()


def save(run_dir: Path, state: TrainerState, writer: ShardWriter, size: int, stop: threading.Event) -> Path:
    """Write rank zero's shard, and seal the checkpoint when the others have written theirs. Raises OSError, and Stopped
    if `stop` is set before."""

    def fill(folder: Path) -> dict[str, str]:
        digests = {ShardFile(0, size).name: writer.write(folder, stop)}
        for rank in range(1, size):
            shard = ShardFile(rank, size)
            digests[shard.name] = _wait_for(folder / shard.digest_name, stop)
        return digests

    return checkpoint.save_with(run_dir, state, fill)


def _wait_for(path: Path, stop: threading.Event) -> str:
    while True:
        with contextlib.suppress(FileNotFoundError):
            said = path.read_text()
            if said.startswith("!"):
                raise OSError(0, f"{path.name.removesuffix('.digest')}: {said[1:]}")
            path.unlink()
            return said
        if stop.wait(_LOOK_EVERY_S):
            raise Stopped


class _Reader(HuggingFaceStorageReader):
    """Reads the headers once, for all tensors."""

    _known: Metadata | None = None

    def read_metadata(self, *args: Any, **more: Any) -> Metadata:
        if self._known is None:
            self._known = super().read_metadata(*args, **more)
        return self._known


class ShardedTensors(StoredTensors):
    """The tensors of a checkpoint in shards. A tensor is read from disk when it is asked for, whole or in part."""

    def __init__(self, folder: Path, prefix: str = "") -> None:
        self._folder, self._prefix = folder, prefix
        self._reader = _Reader(str(folder))
        known: Any = self._reader.read_metadata().state_dict_metadata
        self._known: dict[str, TensorStorageMetadata] = {
            name.removeprefix(prefix): one for name, one in known.items() if name.startswith(prefix)
        }

    def under(self, prefix: str) -> "ShardedTensors":
        return ShardedTensors(self._folder, self._prefix + prefix)

    def __iter__(self) -> Iterator[str]:
        return iter(self._known)

    def __len__(self) -> int:
        return len(self._known)

    def __getitem__(self, name: str) -> Tensor:
        known = self._known[name]
        return self._read(name, torch.empty(known.size, dtype=known.properties.dtype))

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._known[name].size)

    def part(self, name: str, other: Tensor) -> Tensor:
        return self._read(name, torch.empty_like(other.detach()))

    def _read(self, name: str, target: Tensor) -> Tensor:
        try:
            with warnings.catch_warnings():  # that it is one process is what we ask for
                warnings.filterwarnings("ignore", message="torch.distributed is disabled")
                load(
                    {self._prefix + name: target},
                    storage_reader=self._reader,
                    planner=DefaultLoadPlanner(),
                    no_dist=True,
                )
        except (OSError, RuntimeError, AssertionError) as error:
            raise UserError(f"{self._folder}: {name} cannot be read: {error}") from error
        return target
