"""The redo log: what each step was trained on. Writing a few megabytes makes a step safe.

    RUN/checkpoints/redo/step-000012     all that step 12 was trained on, in the order that it was added; and the
                                         step's report
    RUN/checkpoints/redo/rejected-000013 of the open step: the rewards of groups that were rejected. They are part of
                                         its report, and the manager does not deliver them again

A checkpoint and the entries from its step on are one state: training the entries again brings the run back to where it
was. On a CPU the result is the same to the last bit; on a GPU, whose sums have no fixed order, to rounding.

Rules kept here: an entry is on disk, complete, before anyone is told that its step is done. It is verified when it is
read, and a missing step in between is an error: a run does not continue from half of its state. Entries leave the log
when two checkpoints cover them (one, if only one is kept), so that one may turn out damaged (saving.py); they then move
to the run's samples (entries.py). A rejection is on file before the manager hears of it. It is not flushed: a power
failure costs a metric, not a step.
"""

import asyncio
import contextlib
import shlex
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import msgspec
from msgspec import Struct

from polyrl.disk import sync_folder, write_whole
from polyrl.errors import UserError
from polyrl.trainer.batch import TrainGroup, decode_groups
from polyrl.trainer.devices import Devices
from polyrl.trainer.state import checkpoint, entries
from polyrl.trainer.state.entries import Entry
from polyrl.trainer.step_stats import Steps


def append(
    run_dir: Path,
    step: int,
    num_steps: int,
    batches: Sequence[Sequence[TrainGroup]],
    report: bytes = b"",
    rejected: Sequence[TrainGroup] = (),
) -> None:
    """Write the entry of a step. Raises OSError; existing entries stay complete then."""
    folder = _folder(run_dir)
    if not folder.exists():
        folder.mkdir(parents=True)
        sync_folder(folder.parent)
    write_whole(
        folder / checkpoint.name_of(step), entries.encode(entries.make(step, num_steps, batches, report, rejected))
    )


def read(run_dir: Path, first_step: int) -> list[Entry]:
    """Return the entries from this step on. Raises UserError if one is damaged, or missing in between."""
    logged = [one for one in found(run_dir) if checkpoint.step_of(one) >= first_step]
    for step, path in enumerate(logged, first_step):
        if checkpoint.step_of(path) != step:
            missing = path.with_name(checkpoint.name_of(step))
            raise UserError(f"{missing}: is missing, and later steps are there; {_what_is_left(run_dir)}")
    return [_read(path, run_dir) for path in logged]


def report_of(run_dir: Path, step: int) -> bytes:
    """Return the encoded report of a step; empty if it is not known."""
    if has(run_dir, step):
        with contextlib.suppress(UserError):  # the run can go on without it
            return _read(_folder(run_dir) / checkpoint.name_of(step), run_dir).report
    return b""


def has(run_dir: Path, step: int) -> bool:
    return (_folder(run_dir) / checkpoint.name_of(step)).is_file()


def num_after(run_dir: Path, checkpoint_step: int) -> int:
    """Return how many logged steps the checkpoint of this step does not cover."""
    return sum(checkpoint.step_of(one) >= checkpoint_step for one in found(run_dir))


def forget(run_dir: Path, before: int, samples_bytes: int = entries.DEFAULT_SAMPLES_BYTES) -> None:
    """Move the entries before this step, which are not trained again, to the run's samples. Raises OSError."""
    entries.retire(run_dir, [one for one in found(run_dir) if checkpoint.step_of(one) < before], samples_bytes)


class Rejection(Struct, frozen=True):
    """A rejected group of the open step."""

    group: int
    rewards: list[float]


def note_rejection(run_dir: Path, step: int, rejection: Rejection) -> None:
    """Append a rejection to the file of the open step. Raises OSError."""
    path = _rejections_of(run_dir, step)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as file:  # on a new line, since a killed process may have left half of one
        file.write((b"\n" if file.tell() else b"") + msgspec.json.encode(rejection))


def read_rejections(run_dir: Path, step: int) -> list[Rejection]:
    """Return the rejections of a step by an earlier process. The group of a truncated line is delivered again."""
    try:
        lines = _rejections_of(run_dir, step).read_bytes().splitlines()
    except FileNotFoundError:
        return []
    found: list[Rejection] = []
    for line in lines:
        with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError):
            found.append(msgspec.json.decode(line, type=Rejection))
    return found


def forget_rejections(run_dir: Path, step: int) -> None:
    """Remove the rejections of a step, which its entry has now. Raises OSError."""
    _rejections_of(run_dir, step).unlink(missing_ok=True)


def _rejections_of(run_dir: Path, step: int) -> Path:
    return _folder(run_dir) / f"rejected-{step:06}"


async def train_again(
    steps: Steps,
    log: Sequence[Entry],
    say: Callable[[str], None],
    after: Callable[[int], Awaitable[None]] | None = None,
) -> None:
    """Repeat the logged steps, so that the weights change as they did before. `after` runs after each step. Nothing
    else may use the devices meanwhile."""
    if not log:
        return
    first, last = log[0].step, log[-1].step
    say(f"trains steps {first} to {last} again from the log" if first < last else f"trains step {first} again")
    devices = Devices()
    try:
        for entry in log:
            steps.begin(entry.step, entry.num_steps)
            for batch in entry.batches:
                groups = await asyncio.to_thread(decode_groups, batch)
                await devices.train(lambda groups=groups: steps.add(groups))
            await devices.train(steps.finish)
            if after is not None:
                await after(entry.step)
            if entry.step < last:
                say(f"step {entry.step} is trained again")
    finally:
        devices.close()


def _folder(run_dir: Path) -> Path:
    return run_dir / entries.REDO_FOLDER


def found(run_dir: Path) -> list[Path]:
    return entries.found(_folder(run_dir))


def _read(path: Path, run_dir: Path) -> Entry:
    try:
        return entries.read(path)
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}; {_what_is_left(run_dir)}") from error
    except entries.Damaged as error:
        raise UserError(f"{error}; {_what_is_left(run_dir)}") from error


def _what_is_left(run_dir: Path) -> str:
    return (
        "the run cannot go on without that step: put the file back from a copy, or take what the last checkpoint has "
        f"with `polyrl export {shlex.quote(str(run_dir))} DIR` and begin anew from there"
    )
