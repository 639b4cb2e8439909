"""The settings of weight transfer, and its errors.

Everything has a default that works; values that can be measured or derived are not settings.
"""

import ssl
from typing import Annotated, Literal, NamedTuple

from msgspec import Meta, Struct

from polyrl.errors import PolyrlError
from polyrl.scheduling.core.bounds import Positive
from polyrl.weights.chunks import CHUNK_BYTES, MAX_CHUNK_BYTES, HashName


class WeightSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings for the trainer's side and for a worker's. The two sides may have different values."""

    interfaces: tuple[str, ...] = ()
    """Listen on every local address inside these networks, written as CIDR. Empty: on all of them."""
    port: Annotated[int, Meta(ge=0, le=65535)] = 0
    """The first group's port; the next group has the next one. 0: any that is free."""
    groups: Annotated[int, Meta(ge=1, le=64)] = 1
    """The number of ports per interface. Workers are spread over them."""
    streams: Annotated[int, Meta(ge=1, le=64)] = 4
    """The number of connections of one pull, over all of its sources."""
    chunk_bytes: Annotated[int, Meta(ge=1024, le=MAX_CHUNK_BYTES)] = CHUNK_BYTES
    hash: HashName = "blake3"
    num_full: Annotated[int, Meta(ge=2, le=16)] = 2
    """The number of full versions that the trainer keeps, each in a buffer of its own."""
    num_deltas: Annotated[int, Meta(ge=0, le=256)] = 16
    egress_mb_s: Annotated[float, Meta(ge=0)] = 0.0
    """The most that this process may send, in megabytes per second. 0: no limit."""
    congestion: str = ""
    """TCP's congestion control by name. Empty: reno on loopback, where bbr would pace; elsewhere the system's."""
    shared_memory: bool = True
    """Whether a neighbour on the same host may read the buffers directly."""
    mooncake: Literal["", "tcp", "rdma"] = ""
    """Read full versions through mooncake's transfer engine in this mode, where both sides have it. Empty: do not."""
    stall_s: Positive = 10.0
    """A peer that takes or gives less than 128 KiB in this long is cut."""
    one_machine: bool = False
    """All relays run on this machine and are trusted, so xxh3-128 is accepted from relays too."""
    min_relay_mb_s: Annotated[float, Meta(ge=0)] = 1.0
    """A relay that gives less on average is abandoned; so is one that would not finish within half of the time left."""
    relay_patience_s: Positive = 20.0
    """How many seconds a relay may fall behind that rate before it is abandoned."""
    grace_s: Annotated[float, Meta(ge=0)] = 2.0
    """How long the readers of a version may go on after it is given up."""


class Tls(NamedTuple):
    """TLS contexts of the standard library. With TLS on, a process without a server context relays nothing."""

    server: ssl.SSLContext | None
    client: ssl.SSLContext
    name: str = ""
    """The host name that sources' certificates must have; empty: the address that is dialled."""


class TransferError(PolyrlError):
    """A version did not arrive. The version held before is still held; the chunks that arrived are kept for a retry."""

    def __init__(self, reason: str, *, source_is_bad: bool = False, bad_addresses: tuple[str, ...] = ()) -> None:
        super().__init__(reason)
        self.reason = reason
        self.source_is_bad = source_is_bad
        """Whether a source gave bytes that do not match their digest, or could not prove that it holds the key."""
        self.bad_addresses = bad_addresses


class Unreadable(TransferError):
    """A version that the manager vouches for, in a format that this PolyRL does not know. No other source helps."""
