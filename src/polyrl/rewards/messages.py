"""The messages between the trainer and a process of the pool: msgspec, never pickle; the size first.

Rules kept here: every request has an unguessable nonce, and only a message that repeats the nonce is a reply. Replies
are small: a process that announces a larger one has broken the protocol. Functions are sent by name, inputs as plain
data.
"""

import struct
from collections.abc import Iterator
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from polyrl.rewards.groups import AnswerFacts
from polyrl.rewards.reward import RewardInput

NONCE_BYTES = 16
MAX_REPLY_BYTES = 64 << 10
"""The most that a process may say of an answer."""
_SIZE = struct.Struct("<I")


class RewardSetup(Struct, frozen=True, tag=True, array_like=True):
    """The first message, sent once."""

    folders: list[str]
    """Directories to add to the module search path."""
    memory_bytes: int
    """The most memory that a process may take; 0: no limit."""


class FunctionRequest(Struct, frozen=True, tag=True, array_like=True):
    nonce: bytes
    key: str
    """The setting that names the function. Error messages begin with it."""
    function: str
    arguments: dict[str, Any]
    given: RewardInput | None
    """None: only look the function up."""
    timeout_s: float
    cpu_s: float = 0.0
    """The most CPU time of a plain function; 0: no limit."""
    answers: list[AnswerFacts] | None = None
    """The answers of a whole group, which share what `given` has; None: `given` is one answer."""


class Began(Struct, frozen=True, tag=True, array_like=True):
    """The function was found and is called now: its time limit starts."""

    nonce: bytes
    is_async: bool
    closes: bool = False
    """Whether the process has objects to close before it is ended."""


class RewardScored(Struct, frozen=True, tag=True, array_like=True):
    nonce: bytes
    score: float
    parts: dict[str, float]
    outcome: Literal["scored", "timed_out", "crashed"] = "scored"
    cpu_s: Annotated[float, Meta(ge=0, le=1e9)] | None = None
    correct: bool | None = None


class GroupScored(Struct, frozen=True, tag=True, array_like=True):
    nonce: bytes
    rewards: list[RewardScored | None]
    """One for each answer, with an empty nonce; None: its infrastructure failed."""


class Failed(Struct, frozen=True, tag=True, array_like=True):
    nonce: bytes
    reason: str
    kind: Literal["failed", "timed_out", "unavailable", "stops", "unknown"] = "failed"
    """`unavailable`: another attempt may succeed. `stops`: none will. `unknown`: there is no such function."""


RewardRequest = RewardSetup | FunctionRequest
Reply = Began | RewardScored | GroupScored | Failed

_LARGE_INTEGER = 1
"""The code of an extension of msgpack, whose own integers end at 64 bits. Values of code exercises do not."""
_WIDEST = 64


def pack_plain(value: Any, encoder: msgspec.msgpack.Encoder) -> bytes:
    """Encode a message, or anything, whose rows may have integers of any size.

    Raises TypeError, ValueError, OverflowError or RecursionError for what is no plain data.
    """
    try:
        return encoder.encode(value)
    except OverflowError:
        return encoder.encode(_spelled_out(value))


def _spelled_out(value: Any) -> Any:
    """Return a value with its large integers as extensions."""
    match value:
        case bool():
            return value
        case int() if value.bit_length() >= _WIDEST:
            return msgspec.msgpack.Ext(_LARGE_INTEGER, value.to_bytes(value.bit_length() // 8 + 1, signed=True))
        case dict():
            return {name: _spelled_out(one) for name, one in value.items()}
        case list() | tuple():
            return [_spelled_out(one) for one in value]
        case FunctionRequest():
            given = None if value.given is None else RewardInput(*_spelled_out(value.given))
            return msgspec.structs.replace(value, given=given, arguments=_spelled_out(value.arguments))
        case _:
            return value


def read_extension(code: int, data: memoryview) -> int:
    """Return the large integer that an extension has. Raises ValueError."""
    if code != _LARGE_INTEGER:
        raise ValueError(f"an extension with the code {code}")
    return int.from_bytes(data, signed=True)


_encoder = msgspec.msgpack.Encoder(enc_hook=str)
decode_request = msgspec.msgpack.Decoder(RewardRequest, ext_hook=read_extension).decode
decode_reply = msgspec.msgpack.Decoder(Reply).decode


class TooLarge(Exception):
    """A message announces more bytes than allowed."""


def encode(message: RewardRequest | Reply) -> bytes:
    """Encode a message, with its size first. Raises TypeError, ValueError or OverflowError if it is not plain data."""
    body = pack_plain(message, _encoder)
    return _SIZE.pack(len(body)) + body


def take_messages(buffer: bytearray, max_bytes: int = 0) -> Iterator[bytes]:
    """Remove the whole messages at the start of a buffer, and yield them.

    Raises TooLarge; `max_bytes` 0 is no bound.
    """
    while len(buffer) >= _SIZE.size:
        (size,) = _SIZE.unpack_from(buffer)
        if max_bytes and size > max_bytes:
            raise TooLarge(f"a message of {size:,} bytes, expected at most {max_bytes:,}")
        if len(buffer) < _SIZE.size + size:
            return
        body = bytes(buffer[_SIZE.size : _SIZE.size + size])
        del buffer[: _SIZE.size + size]
        yield body
