"""The samples that a step was trained on, as a file: an entry of the redo log, and later a page of the run's samples.

    RUN/checkpoints/redo/step-000012     while a resumed run may have to train the step again (redo.py)
    RUN/samples/step-000012              after that, for `polyrl samples`

Rules kept here: a file is verified when it is read. An entry that is no longer needed for training is moved; it is
copied only if the samples are on another disk. When all samples together exceed their limit, the oldest are removed.
Nothing here knows a model.
"""

import errno
from collections.abc import Sequence
from pathlib import Path

import blake3
import msgspec
from msgspec import Struct

from polyrl.disk import write_whole
from polyrl.errors import UserError
from polyrl.trainer.batch import TrainGroup, decode_groups, encode_groups

REDO_FOLDER = "checkpoints/redo"
SAMPLES_FOLDER = "samples"
DEFAULT_SAMPLES_BYTES = 1 << 30

_FIRST_LINE = b"polyrl-redo 1\n"
_DIGEST_BYTES = 32
_STEP = "step-"


class Entry(Struct, frozen=True):
    """The log entry of one step."""

    step: int
    num_steps: int
    """The length of the run at that time: the learning rate may depend on it."""
    batches: list[bytes]
    """The groups of each call of `Steps.add` (batch.encode_groups)."""
    report: bytes = b""
    """The step's report (loop.StepReport). If the process dies before it reports the step, the next process does."""
    rejected: bytes = b""
    """Groups that arrived but were rejected for equal rewards (batch.encode_groups). They are never trained on."""

    def groups(self) -> list[TrainGroup]:
        """Return all groups of the step that arrived, trained or not."""
        parts = [*self.batches, *([self.rejected] if self.rejected else [])]
        return [group for part in parts for group in decode_groups(part)]


class Damaged(UserError):
    """Raised when a file is not what was written."""


def make(
    step: int, num_steps: int, batches: Sequence[Sequence[TrainGroup]], report: bytes, rejected: Sequence[TrainGroup]
) -> Entry:
    return Entry(step, num_steps, [encode_groups(one) for one in batches], report, encode_groups(rejected))


def encode(entry: Entry) -> bytes:
    body = msgspec.msgpack.encode(entry)
    return _FIRST_LINE + blake3.blake3(body).digest() + body


def read(path: Path) -> Entry:
    """Read and verify an entry. Raises Damaged, and OSError."""
    data = path.read_bytes()
    head = len(_FIRST_LINE)
    body = data[head + _DIGEST_BYTES :]
    if not data.startswith(_FIRST_LINE) or data[head : head + _DIGEST_BYTES] != blake3.blake3(body).digest():
        raise Damaged(f"{path}: is damaged, or cut short")
    return msgspec.msgpack.decode(body, type=Entry)


def name_of(step: int) -> str:
    return f"{_STEP}{step:06}"


def step_of(path: Path) -> int:
    return int(path.name.removeprefix(_STEP))


def found(folder: Path) -> list[Path]:
    """Return the entries of a folder, ordered by step."""
    names = (one for one in folder.glob(f"{_STEP}*") if one.name.removeprefix(_STEP).isdecimal())
    return sorted(names, key=step_of)


def of_run(run_dir: Path) -> dict[int, Path]:
    """Return all entries that a run has, in its samples and its redo log, by step."""
    files = (*found(run_dir / SAMPLES_FOLDER), *found(run_dir / REDO_FOLDER))
    return dict(sorted((step_of(one), one) for one in files))


def retire(run_dir: Path, paths: Sequence[Path], most_bytes: int) -> None:
    """Move entries that are not trained again to the run's samples, and remove the oldest beyond `most_bytes`. With 0,
    all are removed. Raises OSError."""
    folder = run_dir / SAMPLES_FOLDER
    if most_bytes and paths:
        folder.mkdir(exist_ok=True)
    for path in paths:
        if most_bytes:
            _move(path, folder / path.name)
        else:
            path.unlink(missing_ok=True)
    kept = found(folder)
    sizes = [one.stat().st_size for one in kept]
    while kept and sum(sizes) > most_bytes:
        kept.pop(0).unlink(missing_ok=True)
        sizes.pop(0)


def _move(path: Path, target: Path) -> None:
    """Move a file. RUN/samples may be a link to another disk: then it is copied, complete or not at all."""
    try:
        path.replace(target)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        write_whole(target, path.read_bytes())
        path.unlink()
