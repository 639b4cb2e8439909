"""The version that was validated last, on file at once: metrics.jsonl has it only with the step that starts from it.

    RUN/validated.json      {"version": 20, "rates": {"validation/pass@1": 0.5}}

A process killed in between leaves it here for the one that goes on, which tells of it and knows whether that version
is the best so far.
"""

import contextlib
from collections.abc import Mapping
from pathlib import Path

import msgspec

from polyrl.disk import write_whole
from polyrl.errors import UserError
from polyrl.telemetry import metrics

_FILE_NAME = "validated.json"


class _Validated(msgspec.Struct, frozen=True):
    version: int
    rates: dict[str, float]


def note(run_dir: Path, version: int, rates: Mapping[str, float]) -> None:
    """Write down a version's validation. Raises UserError if that fails; the file then stays as it was."""
    path = run_dir / _FILE_NAME
    try:
        write_whole(path, msgspec.json.encode(_Validated(version, dict(rates))))
    except OSError as error:
        raise UserError(f"{path}: cannot be written: {error.strerror or error}; make room, and --resume") from error


def read(run_dir: Path, version: int) -> dict[str, float]:
    """Return the validation of a version, told of or not; empty if there is none. Raises UserError."""
    # Without it, a version is validated again.
    with contextlib.suppress(OSError, msgspec.DecodeError, UnicodeDecodeError):
        last = msgspec.json.decode((run_dir / _FILE_NAME).read_bytes(), type=_Validated)
        if last.version == version:
            return last.rates
    return metrics.read_validation(run_dir / metrics.FILE_NAME, version)
