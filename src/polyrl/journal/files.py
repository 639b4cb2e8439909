"""The journal as a file. Its bytes are made and read in journal/records.py; here they meet the disk.

Rules kept here: a journal is never written over. A file that cannot be read is a JournalError that names it.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self

from polyrl.errors import JournalError, UserError
from polyrl.ids import Seconds
from polyrl.journal.records import (
    Journal,
    JournalDigest,
    JournalHeader,
    Record,
    encode_header,
    encode_record,
    read_records,
)
from polyrl.scheduling.core.commands import Command
from polyrl.scheduling.core.events import Event
from polyrl.scheduling.core.parameters import SchedulerConfig

FILE_NAME = "journal.bin"
"""The name of a simulation's journal in its directory."""
LIVE_FOLDER = "journal"
"""Where a live run keeps its journals: `events-000001.bin` and so on, and their payload beside them."""
EVENTS = "events"
PAYLOAD = "payload"

_BUFFER_BYTES = 1 << 18


class JournalWriter:
    """A new journal. Raises UserError if there is a file already, or none can be made."""

    def __init__(self, path: Path | str, config: SchedulerConfig, about: dict[str, str] | None = None) -> None:
        self.path = Path(path)
        try:
            self._file = self.path.open("xb", buffering=_BUFFER_BYTES)
        except FileExistsError as error:
            raise UserError(f"{self.path}: exists already; a journal is never written over") from error
        except OSError as error:
            raise UserError(f"{self.path}: cannot write a journal there: {error.strerror}") from error
        self._digest = JournalDigest()
        self._file.write(encode_header(config, about))

    def append(self, now: Seconds, event: Event, commands: Sequence[Command]) -> None:
        """Call it before the commands are carried out."""
        self.append_encoded(encode_record(now, event, commands))

    def append_encoded(self, encoded: bytes) -> None:
        """Append a record that the driver has encoded already, for its digest."""
        self._digest.add_encoded(encoded)
        self._file.write(encoded)

    @property
    def num_records(self) -> int:
        return self._digest.num_records

    @property
    def digest(self) -> str:
        """The digest of all records so far."""
        return self._digest.hex()

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def open_journals(path: Path | str) -> Iterator[Journal]:
    """Open a run's journals, one after the other: the file, or what the directory of a run holds.

    Raises JournalError if there is none or one is damaged; the records raise it when the damage is reached.
    """
    for file in find_begun(Path(path)):
        yield open_journal(file)


def open_journal(file: Path) -> tuple[JournalHeader, Iterator[Record]]:
    """Return a journal's header, and its records as they are asked for."""
    try:
        opened = file.open("rb")
    except FileNotFoundError as error:
        raise JournalError(f"{file}: there is no such file") from error
    except OSError as error:
        raise JournalError(f"{file}: cannot be read: {error.strerror}") from error
    try:
        return read_records(_chunks(opened), str(file))
    except JournalError:
        opened.close()
        raise


def segments(folder: Path, stem: str) -> list[Path]:
    """Return the files of a live run's journal, oldest first."""
    return sorted(folder.glob(f"{stem}-*.bin"))


def find_journals(path: Path) -> list[Path]:
    """Return the files of a run, oldest first; for a directory that holds no run, one that is not there."""
    if not path.is_dir():
        return [path]
    return segments(path / LIVE_FOLDER, EVENTS) or segments(path, EVENTS) or [path / FILE_NAME]


def find_begun(path: Path) -> list[Path]:
    """Return a run's journals, those that were not even begun left out. Raises JournalError for a directory without a
    run."""
    files = find_journals(path)
    if path.is_dir():
        files = [file for file in files if file.exists() and (file != files[-1] or file.stat().st_size > 0)]
        if not files and (segments(path / LIVE_FOLDER, PAYLOAD) or segments(path / LIVE_FOLDER, EVENTS)):
            raise JournalError(f"{path}: a manager was started there, but no trainer has opened a run")
        if not files:
            expected = f"{FILE_NAME} of a simulation, or {LIVE_FOLDER}/{EVENTS}-*.bin of a live run"
            raise JournalError(f"{path}: there is no run; expected {expected}")
    return files


def _chunks(file: BinaryIO) -> Iterator[bytes]:
    with file:
        while chunk := file.read(_BUFFER_BYTES):
            yield chunk
