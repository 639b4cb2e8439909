"""The messages of weight transfer: frames, the handshake, and their limits. No sockets here.

    client                                      server
    HELLO(nonce)                     ->
                                     <-         WELCOME(nonce, node, proof)
    PROOF(proof), then requests      ->
    CATALOG                          ->         CATALOG_IS(blobs)
    MANIFEST(blob)                   ->         MANIFEST_IS(its canonical bytes)
    HAVE(blob, revision, wait)       ->         HAVE_IS(revision, bits of chunks), once there is news, or after `wait`
    GET(blob, first, count)          ->         DATA(the chunks' bytes)
    PASS(blob)                       ->         PASSED, with the file's descriptor     (on a UNIX socket only)
    LOCATE(blob)                     ->         LOCATED(where mooncake finds its memory)
                                                or REFUSED(code, reason) to any of them

A frame is a kind (one byte), a length (four bytes, little endian) and that many bytes. Requests may be sent before
earlier ones are answered; answers come in the order of the requests.

Both sides prove that they hold the key, by HMAC-SHA256 over both nonces, the server's node and their own role. The key
never travels, and a proof is useless on another connection or in the other direction. Until then only HELLO and PROOF
are accepted. On plain TCP, later messages are not protected: bytes are checked against digests, and TLS keeps others
from reading them.
"""

import hmac
import struct
from collections.abc import Mapping
from enum import IntEnum
from typing import Annotated, Literal, NamedTuple

import msgspec
from msgspec import Meta, Struct

from polyrl.not_data import NOT_DATA
from polyrl.weights.chunks import MAX_BLOB_BYTES, MAX_CHUNK_BYTES

MAGIC = b"PRLW"
PROTOCOL = 1
NONCE_BYTES = 32
NODE_BYTES = 16
HEADER = struct.Struct("<BI")
_HELLO = struct.Struct(f"<4sH{NONCE_BYTES}s")
_WELCOME = struct.Struct(f"<4sH{NONCE_BYTES}s{NODE_BYTES}s32s")
_HAVE = struct.Struct("<32sII")
_GET = struct.Struct("<32sII")
_REVISION = struct.Struct("<I")
_NAME_BYTES = 32

MAX_CATALOG_BYTES = 1 << 20
MAX_MANIFEST_BYTES = 1 << 28
MAX_BITMAP_BYTES = 1 << 21
MAX_DATA_BYTES = MAX_CHUNK_BYTES
MAX_WAIT_S = 10.0
_MAX_REASON_BYTES = 300


class FrameKind(IntEnum):
    """The first byte of a frame."""

    HELLO = 1
    WELCOME = 2
    PROOF = 3
    CATALOG = 4
    CATALOG_IS = 5
    MANIFEST = 6
    MANIFEST_IS = 7
    HAVE = 8
    HAVE_IS = 9
    GET = 10
    DATA = 11
    PASS = 12
    PASSED = 13
    REFUSED = 14
    LOCATE = 15
    LOCATED = 16


class Code(IntEnum):
    """Why a request was refused."""

    NOT_ALLOWED = 1
    NONSENSE = 2
    GONE = 3
    """The blob is not held here, or not any more."""
    NOT_YET = 4
    """The blob is on its way here, and these chunks have not arrived."""


Limits = Mapping[FrameKind, tuple[int, int]]
"""The accepted frame kinds, each with the least and the most bytes of its body."""

BEFORE_HELLO: Limits = {FrameKind.HELLO: (_HELLO.size, _HELLO.size)}
BEFORE_PROOF: Limits = {FrameKind.PROOF: (32, 32)}
REQUESTS: Limits = {
    FrameKind.CATALOG: (0, 0),
    FrameKind.MANIFEST: (_NAME_BYTES, _NAME_BYTES),
    FrameKind.HAVE: (_HAVE.size, _HAVE.size),
    FrameKind.GET: (_GET.size, _GET.size),
    FrameKind.PASS: (_NAME_BYTES, _NAME_BYTES),
    FrameKind.LOCATE: (_NAME_BYTES, _NAME_BYTES),
}
ANSWERS: Limits = {
    FrameKind.WELCOME: (_WELCOME.size, _WELCOME.size),
    FrameKind.CATALOG_IS: (1, MAX_CATALOG_BYTES),
    FrameKind.MANIFEST_IS: (1, MAX_MANIFEST_BYTES),
    FrameKind.HAVE_IS: (4, 4 + 2 * MAX_BITMAP_BYTES),
    FrameKind.DATA: (1, MAX_DATA_BYTES),
    FrameKind.PASSED: (0, 0),
    FrameKind.LOCATED: (1, 1 << 10),
    FrameKind.REFUSED: (1, 1 + _MAX_REASON_BYTES),
}


class ProtocolError(Exception):
    """The other side broke the protocol. The connection cannot be used any more."""


class NotAllowed(ProtocolError):
    """The other side could not prove that it holds the key, or did not accept our proof."""


class SourceRefused(Exception):
    """The other side understood the request and refused it."""

    def __init__(self, code: Code, reason: str) -> None:
        super().__init__(reason)
        self.code = code


class WeightFrame(NamedTuple):
    kind: FrameKind
    body: bytes


class Incoming:
    """Bytes in, whole frames out. A frame that is too long is refused before its bytes are collected."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self._pending = bytearray()

    def feed(self, data: bytes | memoryview) -> None:
        self._pending += data

    def take(self) -> WeightFrame | None:
        """Return the next frame under the current limits, or None until it is whole. Raises ProtocolError."""
        if len(self._pending) < HEADER.size:
            return None
        kind, num_bytes = read_header(self._pending[: HEADER.size], self.limits)
        end = HEADER.size + num_bytes
        if len(self._pending) < end:
            return None
        body = bytes(self._pending[HEADER.size : end])
        del self._pending[:end]
        return WeightFrame(kind, body)


def read_header(data: bytes | bytearray, limits: Limits) -> tuple[FrameKind, int]:
    """Return the kind and the length of a frame. Raises ProtocolError for a frame outside of the limits."""
    number, num_bytes = HEADER.unpack(data)
    try:
        kind = FrameKind(number)
        least, most = limits[kind]
    except (ValueError, KeyError):
        raise ProtocolError(f"a frame of kind {number} where none is expected") from None
    if not least <= num_bytes <= most:
        raise ProtocolError(f"{kind.name} of {num_bytes} bytes; expected {least} to {most}")
    return kind, num_bytes


def frame(kind: FrameKind, body: bytes = b"") -> bytes:
    return HEADER.pack(kind, len(body)) + body


# The handshake.


def hello(nonce: bytes) -> bytes:
    return frame(FrameKind.HELLO, _HELLO.pack(MAGIC, PROTOCOL, nonce))


def read_hello(body: bytes) -> bytes:
    """Return the client's nonce."""
    magic, protocol, nonce = _HELLO.unpack(body)
    _check_magic(magic, protocol)
    return nonce


def welcome(key: bytes, theirs: bytes, ours: bytes, node: bytes) -> bytes:
    proof = _proof(key, "server", theirs, ours, node)
    return frame(FrameKind.WELCOME, _WELCOME.pack(MAGIC, PROTOCOL, ours, node, proof))


def read_welcome(key: bytes, ours: bytes, body: bytes) -> tuple[bytes, bytes]:
    """Return the server's node, and the frame with our proof. Raises NotAllowed if the server's proof is wrong."""
    magic, protocol, theirs, node, proof = _WELCOME.unpack(body)
    _check_magic(magic, protocol)
    if not hmac.compare_digest(proof, _proof(key, "server", ours, theirs, node)):
        raise NotAllowed("it does not hold the run's key")
    return node, frame(FrameKind.PROOF, _proof(key, "client", ours, theirs, node))


def check_proof(key: bytes, theirs: bytes, ours: bytes, node: bytes, body: bytes) -> None:
    if not hmac.compare_digest(body, _proof(key, "client", theirs, ours, node)):
        raise NotAllowed("it does not hold the run's key")


def _proof(key: bytes, role: Literal["client", "server"], client: bytes, server: bytes, node: bytes) -> bytes:
    said = b"polyrl weights %d %s\0" % (PROTOCOL, role.encode())
    return hmac.digest(key, said + client + server + node, "sha256")


def _check_magic(magic: bytes, protocol: int) -> None:
    if magic != MAGIC:
        raise ProtocolError("it does not speak PolyRL's weight protocol")
    if protocol != PROTOCOL:
        raise ProtocolError(f"it speaks version {protocol} of the weight protocol; expected {PROTOCOL}")


# Requests and answers.

Hex = Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]


class BlobEntry(Struct, frozen=True, array_like=True):
    """A blob that is held, or on its way. `name` is the digest of its manifest."""

    name: Hex
    kind: Literal["full", "delta"]
    version: Annotated[int, Meta(ge=0, le=(1 << 53) - 1)]
    num_bytes: Annotated[int, Meta(ge=0, le=MAX_BLOB_BYTES)]
    complete: bool
    base: str = ""
    target: str = ""
    """The versions that a delta leads from (`base`) and to; empty for a full version."""


class Catalog(Struct, frozen=True, array_like=True):
    origin: bool
    """Whether this is the trainer's catalog. The trainer is asked last for chunks that a neighbour has."""
    blobs: Annotated[tuple[BlobEntry, ...], Meta(max_length=1024)]
    coming: Annotated[tuple[tuple[str, str], ...], Meta(max_length=1024)] = ()
    """The deltas that are being made, as (base, target)."""


_CATALOGS = msgspec.msgpack.Decoder(Catalog)
"""Built once, at import: msgspec 0.22 crashes if two threads are the first to decode a type."""


class Get(NamedTuple):
    name: str
    first: int
    num_chunks: int


class Have(NamedTuple):
    name: str
    revision: int
    """The revision that the client knows already."""
    wait_s: float


class Holdings(NamedTuple):
    """The chunks of a blob that a process has, one bit each, the first chunk in the lowest bit."""

    revision: int
    right: bytes
    """Chunks that are there, and verified."""
    claimed: bytes
    """Chunks that are on their way there from the trainer, which need not be asked for them again."""


def catalog_is(catalog: Catalog) -> bytes:
    return frame(FrameKind.CATALOG_IS, msgspec.msgpack.encode(catalog))


def read_catalog(body: bytes) -> Catalog:
    try:
        return _CATALOGS.decode(body)
    except NOT_DATA as error:
        raise ProtocolError(f"not a catalog: {error}") from error


def request(kind: Literal[FrameKind.MANIFEST, FrameKind.PASS, FrameKind.LOCATE], name: str) -> bytes:
    return frame(kind, bytes.fromhex(name))


class Located(Struct, frozen=True, array_like=True):
    """A blob's memory, as mooncake's transfer engine names it."""

    address: Annotated[str, Meta(max_length=300)]
    place: Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]


_LOCATED = msgspec.msgpack.Decoder(Located)


def located(found: Located) -> bytes:
    return frame(FrameKind.LOCATED, msgspec.msgpack.encode(found))


def read_located(body: bytes) -> Located:
    try:
        return _LOCATED.decode(body)
    except NOT_DATA as error:
        raise ProtocolError(f"not a place in memory: {error}") from error


def read_name(body: bytes) -> str:
    return body.hex()


def have(name: str, revision: int, wait_s: float) -> bytes:
    return frame(FrameKind.HAVE, _HAVE.pack(bytes.fromhex(name), revision, int(wait_s * 1000)))


def read_have(body: bytes) -> Have:
    name, revision, wait_ms = _HAVE.unpack(body)
    return Have(name.hex(), revision, min(wait_ms / 1000, MAX_WAIT_S))


def have_is(holdings: Holdings) -> bytes:
    return frame(FrameKind.HAVE_IS, _REVISION.pack(holdings.revision) + holdings.right + holdings.claimed)


def read_holdings(body: bytes, num_chunks: int) -> Holdings:
    size = -(-num_chunks // 8)
    if len(body) != _REVISION.size + 2 * size:
        raise ProtocolError(f"HAVE_IS of {len(body)} bytes for {num_chunks} chunks")
    bits = body[_REVISION.size :]
    return Holdings(_REVISION.unpack_from(body)[0], bits[:size], bits[size:])


def get(name: str, first: int, count: int) -> bytes:
    return frame(FrameKind.GET, _GET.pack(bytes.fromhex(name), first, count))


def read_get(body: bytes) -> Get:
    name, first, count = _GET.unpack(body)
    return Get(name.hex(), first, count)


def data_header(num_bytes: int) -> bytes:
    return HEADER.pack(FrameKind.DATA, num_bytes)


def refused(code: Code, reason: str) -> bytes:
    return frame(FrameKind.REFUSED, bytes([code]) + reason.encode()[:_MAX_REASON_BYTES])


def read_refused(body: bytes) -> SourceRefused:
    reason = body[1:].decode(errors="replace")
    try:
        return SourceRefused(Code(body[0]), "".join(letter if letter.isprintable() else "?" for letter in reason))
    except ValueError:
        raise ProtocolError(f"refused with the unknown code {body[0]}") from None
