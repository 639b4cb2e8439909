"""Checksummed frames in a file that may end anywhere: what journals are made of.

    a frame         length u32, crc32 of the length u32, crc32 of the payload u32 (little endian), payload

Rules kept here: a length has its own checksum. Without it a damaged length looks like the end of the file, and
recovery, which drops a frame that was cut short, would drop everything behind it. Every error is one line,
with the frame's number and its offset.
"""

import struct
import zlib
from collections.abc import Iterable

from polyrl.errors import JournalError, plain, shorten

_FRAME = struct.Struct("<III")
_LENGTH = struct.Struct("<I")
FRAME_BYTES = _FRAME.size
"""The bytes that a frame adds to its payload."""
MAX_FRAME_BYTES = 1 << 30
"""More than any that we write: a trainer's largest message is a quarter of it."""


class CutShort(JournalError):
    """The journal ends inside a record: its writer was killed. Everything before `offset` is whole."""

    def __init__(self, message: str, offset: int) -> None:
        super().__init__(message)
        self.offset = offset


def frame_head(payload: bytes) -> bytes:
    """Return the header of a payload."""
    length = _LENGTH.pack(len(payload))
    return _FRAME.pack(len(payload), zlib.crc32(length), zlib.crc32(payload))


def frame(payload: bytes) -> bytes:
    return frame_head(payload) + payload


class FrameSource:
    """Bytes taken from the front, and where we are in them."""

    def __init__(self, chunks: Iterable[bytes], name: str) -> None:
        self._chunks = iter(chunks)
        self._buffer = memoryview(b"")
        self._start = 0
        self.name = name
        self.offset = 0
        self.number = 0

    def peek(self, num_bytes: int, after: int = 0) -> memoryview:
        """Return the next bytes but the first `after`, fewer only at the end; not copied, since payload is much."""
        missing = num_bytes - len(self._buffer) + self._start
        if missing > 0:
            pieces: list[bytes | memoryview] = [self._buffer[self._start :]]
            while missing > 0 and (chunk := next(self._chunks, None)) is not None:
                pieces.append(chunk)
                missing -= len(chunk)
            self._buffer, self._start = memoryview(b"".join(pieces)), 0
        return self._buffer[self._start + after : self._start + num_bytes]

    def skip(self, num_bytes: int) -> None:
        self._start += num_bytes
        self.offset += num_bytes

    def skip_frame(self, payload: memoryview) -> None:
        self.skip(_FRAME.size + len(payload))
        self.number += 1

    def error(self, what: str) -> JournalError:
        return JournalError(f"{self._place()}: {shorten(plain(what))}")

    def cut_short(self, what: str) -> CutShort:
        return CutShort(f"{self._place()}: cut short: {what}", self.offset)

    def _place(self) -> str:
        what = "header" if self.number == 0 else f"record {self.number}"
        return f"{self.name}: {what} at byte {self.offset}"


def read_frame(source: FrameSource) -> memoryview | None:
    """Return the payload of the next frame, or None at the end. The source stays in front of it, where errors point."""
    head = source.peek(_FRAME.size)
    if not head:
        return None
    if len(head) < _FRAME.size:
        raise source.cut_short(f"{len(head)} of {_FRAME.size} bytes of its frame are there")
    length, length_crc, payload_crc = _FRAME.unpack(head)
    if zlib.crc32(head[: _LENGTH.size]) != length_crc:
        raise source.error("the checksum of its length does not match")
    if length > MAX_FRAME_BYTES:
        raise source.error(f"a length of {length:,} bytes; expected at most {MAX_FRAME_BYTES:,}")
    payload = source.peek(_FRAME.size + length, _FRAME.size)
    if len(payload) < length:
        raise source.cut_short(f"{len(payload)} of its {length} bytes are there")
    if zlib.crc32(payload) != payload_crc:
        raise source.error("its checksum does not match")
    return payload
