"""Frames on sockets of the sandbox: a length, a JSON header, and pieces of bytes, whose lengths the header has.

A job goes to its child in one; so do the requests of tests to their program, and its answers.

Rules kept here: both sides cap what they read before they hold it. A header says how long each piece is; pieces that
do not add up to the frame are an error.
"""

import json
import struct
from collections.abc import Callable
from typing import Any

Read = Callable[[int], bytes]
"""Reads at most so many bytes from the other side, and none at its end: a socket's `recv`."""

SIZES = struct.Struct("<II")
"""The length of the whole frame after this prefix, and of its header."""
MAX_HEADER_BYTES = 64 << 10
MAX_JOB_BYTES = 64 << 20


class BadFrame(Exception):
    """The other side broke the protocol."""


def pack(header: dict[str, Any], pieces: list[bytes]) -> bytes:
    text = json.dumps({**header, "pieces": [len(one) for one in pieces]}).encode()
    body = b"".join((text, *pieces))
    return SIZES.pack(len(body), len(text)) + body


def check_sizes(prefix: bytes, most: int) -> tuple[int, int]:
    """Return the length of a frame and of its header. Raises BadFrame."""
    total, header = SIZES.unpack(prefix)
    if not header <= total <= most or header > MAX_HEADER_BYTES:
        raise BadFrame(f"a frame of {total} bytes with a header of {header}; expected at most {most}")
    return total, header


def unpack(body: bytes, header_bytes: int) -> tuple[dict[str, Any], list[bytes]]:
    """Split a frame. Raises BadFrame."""
    try:
        header = json.loads(body[:header_bytes])
        lengths = [int(one) for one in header["pieces"]]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise BadFrame(f"a header that is none: {error}") from error
    if any(one < 0 for one in lengths) or header_bytes + sum(lengths) != len(body):
        raise BadFrame("pieces that do not add up to the frame")
    pieces, at = [], header_bytes
    for length in lengths:
        pieces.append(body[at : at + length])
        at += length
    return header, pieces


def read(receive: Read, most: int) -> tuple[dict[str, Any], list[bytes]]:
    """Read one frame. Raises BadFrame, or EOFError."""
    total, header = check_sizes(read_exactly(receive, SIZES.size), most)
    return unpack(read_exactly(receive, total), header)


def read_exactly(receive: Read, length: int) -> bytes:
    held = bytearray()
    while len(held) < length:
        data = receive(min(1 << 20, length - len(held)))
        if not data:
            raise EOFError("the other side hung up")
        held += data
    return bytes(held)
