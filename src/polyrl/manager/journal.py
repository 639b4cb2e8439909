"""A live run on disk: the scheduler's events, and the tokens, prompts and rewards themselves (payload).

    RUN_DIR/journal/events-000001.bin     journal/records.py: replay and stories read these, and these alone
    RUN_DIR/journal/payload-000001.bin    frames: `B` and workers' NewTokens frames as they came, or `N` and a note

Rules kept here:
- `commit` writes the payload first, then the events, and only then may anything be acknowledged or sent. So whatever a
  peer was told is on file, and events never speak of payload that is not.
- A killed manager's last frame may be cut short: it is cut off when the run goes on. Any other damage is an error.
- Events are never deleted. An event file that has grown large is followed by one that starts from the saved state, so
  that recovery reads the last one only. A payload file is deleted when every step that was open while it was written is
  over, and the disk knows that they are.
"""

import contextlib
import os
import struct
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from polyrl.descriptors import Spare
from polyrl.disk import sync_folder
from polyrl.errors import JournalError, UserError
from polyrl.ids import Seconds
from polyrl.journal.files import EVENTS, LIVE_FOLDER, PAYLOAD, segments
from polyrl.journal.framing import CutShort, FrameSource, frame_head, read_frame
from polyrl.journal.records import digest_commands, encode_header, encode_record, read_records, resume_scheduler
from polyrl.manager.notes import AnyNote
from polyrl.manager.settings import JournalSettings
from polyrl.scheduling.core.commands import Command
from polyrl.scheduling.core.events import Event
from polyrl.scheduling.core.parameters import SchedulerConfig
from polyrl.scheduling.scheduler import Scheduler
from polyrl.wire.frames import NewTokens

_PAYLOAD_FIRST_LINE = b"polyrl-payload 1\n"
_CHUNK_BYTES = 1 << 20
_MB = 1 << 20
_SPARE_DESCRIPTORS = 3
"""Kept free for the next file of events, the next one of payload, and their folder."""


_note_decoder = msgspec.msgpack.Decoder(AnyNote)
_batch_decoder = msgspec.msgpack.Decoder(list[NewTokens])
_tokens_decoder = msgspec.msgpack.Decoder(NewTokens)
_ARRAY = struct.Struct(">BI")
"""The head of an array in msgpack, of up to 2^32 - 1 values."""
_encode = msgspec.msgpack.Encoder().encode


class Recovered(NamedTuple):
    """A run as it was when its last record was written."""

    scheduler: Scheduler | None
    """None: no run was opened."""
    now: Seconds
    away_s: Seconds
    num_records: int
    payload: Iterator[AnyNote | list[NewTokens]]
    """Notes and NewTokens frames, in order."""


class RunJournal:
    """The files of one run. Call `recover` first, if there are any."""

    def __init__(self, run_dir: Path, settings: JournalSettings) -> None:
        self._folder = run_dir / LIVE_FOLDER
        self._folder.mkdir(parents=True, exist_ok=True)
        sync_folder(run_dir)
        self._settings = settings
        self._segment_bytes = int(settings.segment_mb * _MB)
        self._events: _Segment | None = None
        self._payload: _Segment | None = None
        self._old_payload: list[tuple[Path, frozenset[int]]] = []
        self._full: list[_Segment] = []
        """Files that others follow, and that may not be on the disk yet."""
        self._over: list[Path] = []
        """Files of payload to delete, once the ends of their steps are on the disk."""
        self._beginning_bytes = 0
        """The size of the header in the file of events that a run goes on with."""
        self._event_parts: list[bytes] = []
        self._payload_parts: list[bytes] = []
        self._tokens: list[bytes] = []
        """NewTokens frames since the last note."""
        self._num_read = 0
        self._synced_at = time.monotonic()
        self._spare = Spare(_SPARE_DESCRIPTORS)

    # Going on

    @property
    def num_to_read(self) -> int:
        """The bytes that `recover` reads: the last file of events, and all payload."""
        files = (*segments(self._folder, EVENTS)[-1:], *segments(self._folder, PAYLOAD))
        return sum(path.stat().st_size for path in files)

    @property
    def num_read(self) -> int:
        """The bytes that have been read so far."""
        return self._num_read

    def _note_read(self, num_bytes: int) -> None:
        self._num_read += num_bytes

    def recover(self) -> Recovered | None:
        """Return what earlier managers wrote; None for a new run. Call `go_on` when the payload has been read."""
        events, payload = segments(self._folder, EVENTS), segments(self._folder, PAYLOAD)
        if not payload:
            if events:
                raise JournalError(f"{self._folder}: there are events without payload; was a file removed?")
            return None
        newest = max(path.stat().st_mtime for path in (*events, *payload))
        replayed = _replay_last(events, self._note_read)
        self._beginning_bytes = replayed.beginning_bytes
        away_s = max(0.0, time.time() - newest)
        return Recovered(
            replayed.scheduler, replayed.now, away_s, replayed.num_records, _read_payload(payload, self._note_read)
        )

    def go_on(self, open_steps: Collection[int]) -> None:
        """Append to the files from now on. `open_steps` are the steps whose payload is still needed."""
        events, payload = segments(self._folder, EVENTS), segments(self._folder, PAYLOAD)
        if events:
            self._events = _Segment(events[-1], b"")
            self._events.num_grown_bytes -= self._beginning_bytes
        self._payload = _Segment(payload[-1], _PAYLOAD_FIRST_LINE)
        self._old_payload = [(path, frozenset(open_steps)) for path in payload[:-1]]

    def begin(self) -> None:
        """Begin a new run."""
        self._payload = _Segment(self._folder / f"{PAYLOAD}-{1:06}.bin", _PAYLOAD_FIRST_LINE)

    def begin_events(self, config: SchedulerConfig, about: dict[str, str]) -> None:
        self._events = _Segment(self._folder / f"{EVENTS}-{1:06}.bin", encode_header(config, about))

    # Writing

    def add_event(self, now: Seconds, event: Event, commands: Sequence[Command]) -> None:
        self._event_parts.append(encode_record(now, event, commands))

    def add_tokens(self, raw: bytes) -> None:
        self._tokens.append(raw)

    def add_note(self, note: AnyNote) -> None:
        self._end_batch()
        self._add_payload(b"N" + _encode(note))

    def _end_batch(self) -> None:
        """Write NewTokens frames in a row as one frame, one value of msgpack: they are read at once."""
        if self._tokens:
            self._add_payload(b"".join((b"B", _ARRAY.pack(0xDD, len(self._tokens)), *self._tokens)))
            self._tokens = []

    def _add_payload(self, data: bytes) -> None:
        self._payload_parts.append(frame_head(data))
        self._payload_parts.append(data)

    def commit(self) -> None:
        """Write all that was added to the operating system, payload first; to the disk too, if that is the policy."""
        self._end_batch()
        if not self._payload_parts and not self._event_parts:
            return
        if self._payload_parts and self._payload is not None:
            self._payload.write(self._payload_parts)
            self._payload_parts = []
        if self._event_parts and self._events is not None:
            self._events.write(self._event_parts)
            self._event_parts = []
        if self._settings.fsync == "always":
            self.sync()

    @property
    def sync_due(self) -> bool:
        if self._settings.fsync == "never":
            return bool(self._full or self._over)
        if self._settings.fsync == "always":
            return False  # every commit does it
        return time.monotonic() - self._synced_at >= self._settings.fsync_interval_s

    def sync(self) -> None:
        """Bring everything to the disk, and wait for it."""
        self.take_sync()()

    def take_sync(self) -> Callable[[], None]:
        """Return a function that brings all that was committed to the disk. It may run in a thread of its own.

        Take no second one before the first has run: it would close files under it.
        """
        self._synced_at = time.monotonic()
        full, self._full = self._full, []
        over, self._over = self._over, []
        current = [one for one in (self._payload, self._events) if one is not None]

        def sync() -> None:
            for segment in (*full, *current):
                segment.sync()
            for segment in full:
                segment.close()
            for path in over:
                path.unlink(missing_ok=True)

        return sync

    @property
    def rotation_is_due(self) -> bool:
        """Whether a file has grown large, or waits for the end of its steps."""
        newest = (self._payload, self._events)
        return bool(self._old_payload) or any(one is not None and self._is_large(one) for one in newest)

    def _is_large(self, segment: "_Segment") -> bool:
        return segment.num_grown_bytes > self._segment_bytes

    def rotate(self, scheduler: Scheduler | None, about: dict[str, str], standing: Sequence[AnyNote]) -> None:
        """Start new files for those that have grown large. Call it right after `commit`.

        `standing` are the notes that a payload file begins with: sessions and the run outlive every step.
        """
        open_steps = frozenset() if scheduler is None else frozenset(scheduler.desk.rounds)
        for path, steps in self._old_payload[:]:
            if not steps & open_steps:
                self._old_payload.remove((path, steps))
                self._over.append(path)
        if self._payload is not None and self._is_large(self._payload):
            self._old_payload.append((self._payload.path, open_steps))
            self._payload = self._follow(self._payload, _PAYLOAD_FIRST_LINE)
            for note in standing:
                self.add_note(note)
        if self._events is not None and scheduler is not None and self._is_large(self._events):
            self.follow_events(scheduler, about)
        self.commit()

    def follow_events(self, scheduler: Scheduler, about: dict[str, str]) -> None:
        """Start a file of events from the state that the last one ends with."""
        assert self._events is not None, "the run is open"
        beginning = encode_header(scheduler.desk.config, about, scheduler.save())
        self._events = self._follow(self._events, beginning)

    def _follow(self, full: "_Segment", beginning: bytes) -> "_Segment":
        """Return the file after a full one. Where it cannot be created, the full one is still the last."""
        with self._spare.lent():
            following = _Segment(full.next_path, beginning)
        self._full.append(full)
        return following

    def close(self) -> None:
        self.commit()
        if self._settings.fsync != "never":
            self.sync()
        self.abandon()

    def abandon(self) -> None:
        """Close the files as they are, without writing anything."""
        self._spare.close()
        for segment in (*self._full, self._payload, self._events):
            if segment is not None:
                segment.close()


class _Segment:
    """A file of the journal, appended to without a buffer of ours."""

    def __init__(self, path: Path, beginning: bytes) -> None:
        self.path = path
        try:
            self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
            sync_folder(path.parent)
        except OSError as error:
            raise _not_written(path, error) from error
        self._num_bytes = self.num_grown_bytes = os.fstat(self._file).st_size
        """Bytes after the saved state that it begins with: a state above the limit for a file still has one file."""
        if self._num_bytes == 0:
            self.write([beginning])
            self.num_grown_bytes = 0

    def write(self, parts: Sequence[bytes]) -> None:
        """Write all of it or nothing: a frame is never appended behind half of one. Raises UserError."""
        data = memoryview(b"".join(parts))
        num_bytes = len(data)
        try:
            while data:
                data = data[os.write(self._file, data) :]
        except OSError as error:
            os.ftruncate(self._file, self._num_bytes)
            raise _not_written(self.path, error) from error
        self._num_bytes += num_bytes
        self.num_grown_bytes += num_bytes

    def sync(self) -> None:
        try:
            os.fsync(self._file)
        except OSError as error:
            raise _not_written(self.path, error) from error

    @property
    def next_path(self) -> Path:
        stem, _, number = self.path.stem.rpartition("-")
        return self.path.with_name(f"{stem}-{int(number) + 1:06}.bin")

    def close(self) -> None:
        os.close(self._file)


def _not_written(path: Path, error: OSError) -> UserError:
    """Return one line about a disk that is full or broken, for the user to mend."""
    why = error.strerror or str(error)
    return UserError(f"{path}: cannot be written: {why}; what was acknowledged is there: make room first")


# Reading


class _Replayed(NamedTuple):
    scheduler: Scheduler | None = None
    now: Seconds = 0.0
    num_records: int = 0
    beginning_bytes: int = 0


def _replay_last(events: Sequence[Path], note: Callable[[int], None]) -> _Replayed:
    """Return the scheduler as of the last whole record. A record that was cut short is cut off the file."""
    if not events:
        return _Replayed()
    path = events[-1]
    if path.stat().st_size == 0:  # killed before it wrote anything
        path.unlink()
        return _replay_last(events[:-1], note)
    scheduler: Scheduler | None = None
    num_records, beginning_bytes = 0, 0
    try:
        header, records = read_records(path.read_bytes(), str(path))
        scheduler = resume_scheduler(header, None)
        for record in records:
            commands = scheduler.handle(record.event, record.now)
            if digest_commands(commands) != record.commands_digest:
                raise JournalError(
                    f"{path}: record {record.number}: this version of PolyRL decides otherwise than the one that wrote "
                    "it; go on with that one"
                )
            num_records += 1
            note(len(record.payload))
            beginning_bytes = beginning_bytes or record.offset
    except CutShort as cut:
        if scheduler is None:  # killed while it wrote the header
            path.unlink()
            return _replay_last(events[:-1], note)
        os.truncate(path, cut.offset)
    return _Replayed(scheduler, max(0.0, scheduler.now), num_records, beginning_bytes or path.stat().st_size)


def read_payload(run_dir: Path) -> Iterator[AnyNote | list[NewTokens]]:
    """Yield notes and NewTokens frames of a run that may be written to meanwhile: a frame cut short is left out."""
    for path in segments(run_dir / LIVE_FOLDER, PAYLOAD):
        with contextlib.suppress(CutShort, FileNotFoundError):  # steps that are over take theirs along
            yield from _read_payload_file(path)


def _read_payload(paths: Sequence[Path], note: Callable[[int], None]) -> Iterator[AnyNote | list[NewTokens]]:
    for path in paths:
        try:
            yield from _read_payload_file(path, note)
        except CutShort as cut:
            if path != paths[-1]:
                raise
            os.truncate(path, cut.offset)


def _read_payload_file(path: Path, note: Callable[[int], object] = int) -> Iterator[AnyNote | list[NewTokens]]:
    with path.open("rb") as file:
        source = FrameSource(iter(lambda: file.read(_CHUNK_BYTES), b""), str(path))
        first = bytes(source.peek(len(_PAYLOAD_FIRST_LINE)))
        if first != _PAYLOAD_FIRST_LINE:
            if _PAYLOAD_FIRST_LINE.startswith(first):
                raise source.cut_short("it ends in its first line")
            raise JournalError(f"{path}: not a run's payload")
        source.skip(len(first))
        source.number = 1
        while (data := read_frame(source)) is not None:
            item = _decode(data, source)
            source.skip_frame(data)
            note(len(data))
            yield item


def _decode(data: memoryview, source: FrameSource) -> AnyNote | list[NewTokens]:
    kind, rest = data[:1], data[1:]
    try:
        if kind == b"B":
            return _batch_decoder.decode(rest)
        return [_tokens_decoder.decode(rest)] if kind == b"T" else _note_decoder.decode(rest)
    except msgspec.MsgspecError as error:
        raise source.error(f"not a note, and not tokens, that this version knows: {error}") from error
