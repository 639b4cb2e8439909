"""The journal's byte format, and replaying it: what was heard, when, and a digest of what was asked for in answer.

    first line      polyrl-journal FORMAT\\n
    header          a frame (framing.py): the scheduler's configuration, words about the run, the state it starts from
    records         a frame each: [now, event, digest of the commands]

Rules kept here: a record holds all that is needed to ask the scheduler again. When it reaches the disk is the writer's
matter. A long run has several journals, each starting from the state that the one before ended with. Every error is one
line, with the record's number and its offset.

Left out: files (journal/files.py), and tokens: payload stays with the driver. Fields added to the end of a record
or a header are skipped by older readers of the same format.
"""

import hashlib
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import get_args

import msgspec

from polyrl.errors import JournalError
from polyrl.ids import Seconds
from polyrl.journal.framing import FRAME_BYTES, FrameSource, frame, read_frame
from polyrl.scheduling.core.commands import Command
from polyrl.scheduling.core.desk import RULES, State, TrainerClock
from polyrl.scheduling.core.events import Event
from polyrl.scheduling.core.fleet import FleetState, Worker
from polyrl.scheduling.core.hosts import Host
from polyrl.scheduling.core.ledger import Ledger, WorkerLine
from polyrl.scheduling.core.parameters import RewardConfig, SchedulerConfig
from polyrl.scheduling.core.samples import Round, TrackedGroup, TrackedSample
from polyrl.scheduling.rules.parallelism import ParallelismState
from polyrl.scheduling.rules.scaling import ScalingState
from polyrl.scheduling.rules.seeding import SeedingState
from polyrl.scheduling.rules.tail_batching import TailBatching
from polyrl.scheduling.scheduler import Scheduler

FORMAT = 1
COMMANDS_DIGEST_BYTES = 8

CAVEAT = "caveat"
"""The key in `about` of the warning that every output on the run repeats: its numbers should not be read without it."""

_MAGIC = b"polyrl-journal "
_MAX_FIRST_LINE = 32
_END_OF_TIME = 1e12
"""In seconds. A later time would be infinite as microseconds, or in another program's unit."""


class JournalHeader(msgspec.Struct, frozen=True, array_like=True):
    config: SchedulerConfig
    about: dict[str, str] = {}
    """Facts of the driver: scenario, host, version. Nothing depends on them."""
    saved: bytes = b""
    """The state from `Scheduler.save` at the start of this journal; empty at the start of the run."""
    rules: int = 0
    """By which the run decides (desk.RULES), where the journal starts with it. A saved state knows its own."""


class Record(msgspec.Struct, frozen=True):
    number: int
    """From 1; the header is 0."""
    offset: int
    """Where its frame starts, in bytes."""
    now: Seconds
    event: Event
    commands_digest: bytes
    payload: bytes
    """The record's bytes without their frame. The journal's digest is made of these."""


class _Stored(msgspec.Struct, frozen=True, array_like=True):
    now: Seconds
    event: Event
    commands_digest: bytes


_encoder = msgspec.msgpack.Encoder()
_stored_decoder = msgspec.msgpack.Decoder(_Stored)
_header_decoder = msgspec.msgpack.Decoder(JournalHeader)
_EVENT_NAMES = frozenset(event.__name__ for event in get_args(Event))


# Writing


def encode_header(config: SchedulerConfig, about: dict[str, str] | None = None, saved: bytes = b"") -> bytes:
    """Return the first record of a journal."""
    header = JournalHeader(config, {} if about is None else about, saved, RULES)
    return _MAGIC + str(FORMAT).encode() + b"\n" + frame(_encoder.encode(header))


def encode_record(now: Seconds, event: Event, commands: Sequence[Command]) -> bytes:
    """Return an event and the commands that followed it. Fields that are seconds or dollars must hold floats, not
    ints."""
    return frame(_encoder.encode(_Stored(float(now), event, digest_commands(commands))))


def digest_commands(commands: Sequence[Command]) -> bytes:
    if not commands:
        return _DIGEST_OF_NONE
    return hashlib.blake2b(_encoder.encode(commands), digest_size=COMMANDS_DIGEST_BYTES).digest()


_DIGEST_OF_NONE = hashlib.blake2b(_encoder.encode([]), digest_size=COMMANDS_DIGEST_BYTES).digest()


class JournalDigest:
    """A running digest over all records, without the header: the same run gives the same one, on any machine."""

    def __init__(self) -> None:
        self._hash = hashlib.blake2b(digest_size=16)
        self.num_records = 0

    def add(self, payload: bytes) -> None:
        """Take in a record's payload; a msgpack value says by itself where it ends."""
        self._hash.update(payload)
        self.num_records += 1

    def add_encoded(self, encoded: bytes) -> None:
        """Take in what `encode_record` gave."""
        self.add(encoded[FRAME_BYTES:])

    def hex(self) -> str:
        return self._hash.hexdigest()


# Reading


def read_records(data: bytes | Iterable[bytes], name: str) -> tuple[JournalHeader, Iterator[Record]]:
    """Read a journal's header now and its records as they are asked for. `name` is what errors call it.

    Raises JournalError for what is not a journal or is damaged, and its subclass CutShort when it ends inside a record.
    """
    source = FrameSource([data] if isinstance(data, bytes) else data, name)
    _read_first_line(source)
    return _read_header(source), _iterate(source)


def _read_first_line(source: FrameSource) -> None:
    line, newline, _ = bytes(source.peek(_MAX_FIRST_LINE)).partition(b"\n")
    if not newline and 0 < len(line) < _MAX_FIRST_LINE and line.startswith(_MAGIC[: len(line)]):
        raise source.cut_short("it ends in its first line")
    text = line[len(_MAGIC) :]
    if not newline or not line.startswith(_MAGIC) or not text.isdigit():
        raise JournalError(f"{source.name}: not a journal: expected a first line `polyrl-journal {FORMAT}`")
    if int(text) != FORMAT:
        raise JournalError(
            f"{source.name}: a journal of format {int(text)}; this version of PolyRL reads format {FORMAT}"
        )
    source.skip(len(line) + 1)


def _read_header(source: FrameSource) -> JournalHeader:
    payload = read_frame(source)
    if payload is None:
        raise source.cut_short("it has no header")
    try:
        header = _header_decoder.decode(payload)
    except msgspec.MsgspecError as error:
        raise source.error(f"not a header that this version of PolyRL knows: {error}") from error
    source.skip_frame(payload)
    return header


def _iterate(source: FrameSource) -> Iterator[Record]:
    last = -math.inf
    while (payload := read_frame(source)) is not None:
        stored = _decode(source, payload)
        if not last <= stored.now < _END_OF_TIME:
            raise source.error(f"time goes from {last} to {stored.now}")
        last = stored.now
        yield Record(source.number, source.offset, stored.now, stored.event, stored.commands_digest, bytes(payload))
        source.skip_frame(payload)


def _decode(source: FrameSource, payload: memoryview) -> _Stored:
    try:
        stored = _stored_decoder.decode(payload)
    except msgspec.MsgspecError as error:
        raise source.error(_why_not_a_record(payload, error)) from error
    if len(stored.commands_digest) != COMMANDS_DIGEST_BYTES:
        raise source.error(f"not a record: a digest of {len(stored.commands_digest)} bytes")
    return stored


def _why_not_a_record(payload: memoryview, error: msgspec.MsgspecError) -> str:
    try:
        _, event, *_ = msgspec.msgpack.decode(payload, type=tuple[object, dict[str, object], object])
    except msgspec.MsgspecError:
        return f"not a record: {error}"
    name = event.get("event")
    return f"not a record: {error}" if name in _EVENT_NAMES else f"unknown event {name!r}"


# Replaying


class Difference(msgspec.Struct, frozen=True):
    """The first record whose commands are not those of the journal."""

    record: int
    now: Seconds
    event: Event
    expected: str
    """The digest in the journal."""
    got: str
    commands: tuple[Command, ...]
    """The commands that the scheduler gives now. Of the original ones the journal holds only the digest."""


class ReplayReport(msgspec.Struct, frozen=True):
    num_records: int
    """How many were replayed: all, or those up to and with the first difference."""
    digest: str
    """The digest of those records."""
    first_difference: Difference | None


Journal = tuple[JournalHeader, Iterable[Record]]


def replay(journals: Iterable[Journal]) -> ReplayReport:
    """Tell a scheduler all that was heard, and compare what it asks for. Stops at the first difference.

    Raises JournalError if a journal does not start from the state that the one before ended with.
    """
    scheduler: Scheduler | None = None
    digest = JournalDigest()
    for header, records in journals:
        scheduler = resume_scheduler(header, scheduler)
        for record in records:
            digest.add(record.payload)
            commands = scheduler.handle(record.event, record.now)
            got = digest_commands(commands)
            if got != record.commands_digest:
                expected = record.commands_digest.hex()
                difference = Difference(
                    digest.num_records, record.now, record.event, expected, got.hex(), tuple(commands)
                )
                return ReplayReport(digest.num_records, digest.hex(), difference)
    return ReplayReport(digest.num_records, digest.hex(), None)


def resume_scheduler(header: JournalHeader, before: Scheduler | None) -> Scheduler:
    """Return the scheduler that a journal starts with; `before` is how the journal before it ended, if that was
    read."""
    if not header.saved:
        if header.rules > RULES:
            raise JournalError(f"a journal of rules {header.rules}; this version of PolyRL knows those up to {RULES}")
        return Scheduler(header.config, rules=header.rules)
    try:
        saved = Scheduler.load(header.saved)
    except msgspec.MsgspecError as error:
        raise JournalError(f"a journal starts from a state that this version does not know: {error}") from error
    if before is None:
        return saved
    before.adopt(saved.rules)
    if before.save() != saved.save() and not _agree(*(_state_of(one) for one in (before.save(), header.saved))):
        raise JournalError("a journal does not start from the state that the one before it ended with")
    return before


def _state_of(saved: bytes) -> object:
    return msgspec.msgpack.decode(saved)["state"]


def _agree(ours: object, theirs: object) -> bool:
    """Return whether two states are equal in all that both keep: the version that wrote `theirs` may be older than
    ours."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        both = ours.keys() & theirs.keys()
        return (
            ours.keys() ^ both <= _ADDED
            and theirs.keys() ^ both <= _DROPPED
            and all(_agree(ours[key], theirs[key]) for key in both)
        )
    if isinstance(ours, list) and isinstance(theirs, list):
        return len(ours) == len(theirs) and all(map(_agree, ours, theirs))
    return ours == theirs


_ADDED = frozenset(
    field.name
    for kind in (
        State,
        ScalingState,
        SeedingState,
        TrainerClock,
        Worker,
        FleetState,
        Host,
        TailBatching,
        TrackedSample,
        TrackedGroup,
        Round,
        Ledger,
        WorkerLine,
        ParallelismState,
        RewardConfig,
    )
    for field in msgspec.structs.fields(kind)
    if not field.required
)
"""Fields that the state of an older version may lack."""
_DROPPED = frozenset({"tp_by_kind"})
"""Fields that it may have and that are no longer kept: the parallelism planner's, which no live run has."""
