"""What the trainer and a process of the pool say to each other: msgspec, never pickle; size first.

Rules kept here: every question has a nonce that nobody can guess, and only a reply that repeats it is one. A reply is
small: a process that announces a larger one is not believed. Functions are named, inputs are plain data.
"""

import struct
from collections.abc import Iterator
from typing import Any, Literal

import msgspec
from msgspec import Struct

from polyrl.rewards.reward import RewardInput

NONCE_BYTES = 16
MAX_REPLY_BYTES = 64 << 10
_SIZE = struct.Struct("<I")


class RewardSetup(Struct, frozen=True, tag=True, array_like=True):
    """Said once, first."""

    folders: list[str]
    """Where modules are found, beside where they are found anyway."""
    memory_bytes: int
    """What a process may have at most; 0: any."""


class Ask(Struct, frozen=True, tag=True, array_like=True):
    nonce: bytes
    key: str
    """The setting that names the function: what is said of it begins with that."""
    function: str
    arguments: dict[str, Any]
    given: RewardInput | None
    """None: only look the function up."""
    timeout_s: float


class Began(Struct, frozen=True, tag=True, array_like=True):
    """The function is there, and is called now: its time runs."""

    nonce: bytes
    is_async: bool


class RewardScored(Struct, frozen=True, tag=True, array_like=True):
    nonce: bytes
    score: float
    parts: dict[str, float]


class Failed(Struct, frozen=True, tag=True, array_like=True):
    nonce: bytes
    reason: str
    kind: Literal["failed", "timed_out", "unknown"] = "failed"
    """`unknown`: there is no such function."""


RewardRequest = RewardSetup | Ask
Reply = Began | RewardScored | Failed

_encoder = msgspec.msgpack.Encoder(enc_hook=str)
decode_question = msgspec.msgpack.Decoder(RewardRequest).decode
decode_reply = msgspec.msgpack.Decoder(Reply).decode


class TooLarge(Exception):
    """A message announces more than it may have."""


def encode(message: RewardRequest | Reply) -> bytes:
    """With its size before it. Raises TypeError, ValueError or OverflowError for what is no plain data."""
    body = _encoder.encode(message)
    return _SIZE.pack(len(body)) + body


def take_messages(buffer: bytearray, max_bytes: int = 0) -> Iterator[bytes]:
    """The whole messages at the beginning of a buffer, which are taken out of it. Raises TooLarge; 0 is no bound."""
    while len(buffer) >= _SIZE.size:
        (size,) = _SIZE.unpack_from(buffer)
        if max_bytes and size > max_bytes:
            raise TooLarge(f"a message of {size:,} bytes, expected at most {max_bytes:,}")
        if len(buffer) < _SIZE.size + size:
            return
        body = bytes(buffer[_SIZE.size : _SIZE.size + size])
        del buffer[: _SIZE.size + size]
        yield body
