"""The samples that a step was trained on, as a file: an entry of the redo log, and later a page of the run's samples.

    RUN/checkpoints/redo/step-000012     while a resumed run may have to train the step again (redo.py)
    RUN/samples/step-000012              after that, for `polyrl samples`

Rules kept here: a file is verified when it is read. An entry that is no longer needed for training is moved; it is
copied only if the samples are on another disk. When all samples together exceed their limit, the oldest are removed.
Nothing here knows a model.
"""

import errno
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import blake3
import msgspec
import numpy as np
from msgspec import Meta, Struct

from polyrl.disk import write_whole
from polyrl.errors import UserError, one_line
from polyrl.trainer.batch import TrainGroup, TrainSample, decode_groups, encode_groups

REDO_FOLDER = "checkpoints/redo"
SAMPLES_FOLDER = "samples"
DEFAULT_SAMPLES_BYTES = 1 << 30

_FIRST_LINE = b"polyrl-redo 1\n"
_DIGEST_BYTES = 32
_STEP = "step-"
_KINDS, _NUM_NEEDED = ("<i4", "<i4", "<f4", "<f4", "<i4", "<i4"), 3
Natural = Annotated[int, Meta(ge=0, le=1 << 62)]


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
    try:
        entry = msgspec.msgpack.decode(body, type=Entry)
        for group in entry.groups():
            for sample in group:
                _check(sample)
    except (msgspec.MsgspecError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise Damaged(f"{path}: is no entry of this PolyRL: {one_line(error)}") from error
    return entry


def _check(sample: TrainSample) -> None:
    """Raise ValueError for what no run writes: anybody can make a file with the right digest."""
    lists = (sample.prompt, sample.answer, sample.logprobs, sample.old_logprobs, sample.drawn, sample.order)
    for place, (one, kind) in enumerate(zip(lists, _KINDS, strict=True)):
        if not (isinstance(one, np.ndarray) and one.dtype.str == kind) and (one is not None or place < _NUM_NEEDED):
            raise ValueError(f"a list of a sample that is none of {kind}")
    if any(len(one) and one.min() < 0 for one in (sample.prompt, sample.answer)):
        raise ValueError("a token id below 0")
    num_answer, num_drawn = len(sample.answer), len(sample.logprobs)
    if num_drawn != (num_answer if sample.drawn is None else len(sample.drawn)):
        raise ValueError(f"{num_drawn} log-probabilities that do not fit their answer")
    if sample.drawn is not None and num_drawn and not 0 <= sample.drawn.min() <= sample.drawn.max() < num_answer:
        raise ValueError(f"drawn tokens beyond the {num_answer} of an answer")
    facts = msgspec.convert(_facts_of(sample), _Facts)
    if not all(map(math.isfinite, (facts.reward, *facts.parts.values()))):
        raise ValueError("a reward that is no finite number")
    if sum(one.num_tokens for one in facts.written_by) not in (0, num_drawn):
        raise ValueError(f"segments that do not fit {num_drawn} drawn tokens")


def _facts_of(sample: TrainSample) -> tuple[Any, ...]:
    return sample.reward, sample.group, sample.finish, sample.written_by, sample.parts, sample.episode


class _Segment(Struct, array_like=True):
    version: int
    num_tokens: Natural
    engine: str
    worker: str


class _Facts(Struct, array_like=True):
    reward: float
    group: Natural
    finish: str
    written_by: tuple[_Segment, ...]
    parts: dict[str, float]
    episode: Natural | None


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
