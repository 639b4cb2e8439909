"""What can be set about moving weights, and the errors of moving them.

Everything has a default that works; what can be measured or derived is not here.
"""

import ssl
from typing import Annotated, Literal, NamedTuple

from msgspec import Meta, Struct

from polyrl.errors import PolyrlError
from polyrl.scheduling.core.bounds import Positive
from polyrl.weights.chunks import CHUNK_BYTES, MAX_CHUNK_BYTES, HashName


class WeightSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The same for the trainer's side and a worker's. Both need not have the same values."""

    interfaces: tuple[str, ...] = ()
    """Listen on every local address inside these networks, written as CIDR. Empty: on all of them."""
    port: Annotated[int, Meta(ge=0, le=65535)] = 0
    """The first group's port; the next group has the next one. 0: any that is free."""
    groups: Annotated[int, Meta(ge=1, le=64)] = 1
    """Ports an interface. Workers are spread over them."""
    streams: Annotated[int, Meta(ge=1, le=64)] = 4
    """Connections of one pull, over all of its sources."""
    chunk_bytes: Annotated[int, Meta(ge=1024, le=MAX_CHUNK_BYTES)] = CHUNK_BYTES
    hash: HashName = "blake3"
    num_full: Annotated[int, Meta(ge=2, le=16)] = 2
    """Full versions that the trainer keeps, in as many buffers of a version's size."""
    num_deltas: Annotated[int, Meta(ge=0, le=256)] = 16
    egress_mb_s: Annotated[float, Meta(ge=0)] = 0.0
    """What this process may send, in megabytes a second. 0: all it can."""
    congestion: str = ""
    """TCP's congestion control by name. Empty: reno on loopback, where bbr would pace; elsewhere the system's."""
    shared_memory: bool = True
    """Whether a neighbour on the same host may read the buffers directly."""
    mooncake: Literal["", "tcp", "rdma"] = ""
    """Read full versions through mooncake's transfer engine in this mode, where both sides have it. Empty: do not."""
    stall_s: Positive = 10.0
    """A peer that takes or gives less than 128 KiB in this long is cut."""
    one_machine: bool = False
    """Whoever passes weights on runs on this machine, and is believed: xxh3-128 is taken from relays too."""
    min_relay_mb_s: Annotated[float, Meta(ge=0)] = 1.0
    """A relay that gives less on average is left; so is one that would not be done in half of the time there is."""
    relay_patience_s: Positive = 20.0
    """How far behind that a relay may be."""
    grace_s: Annotated[float, Meta(ge=0)] = 2.0
    """How long the readers of a version that is given up may go on."""


class Tls(NamedTuple):
    """Contexts of the standard library. A process without a server context relays nothing when TLS is on."""

    server: ssl.SSLContext | None
    client: ssl.SSLContext
    name: str = ""
    """Whom the certificates of sources must be of; empty: of the address that is dialled."""


class TransferError(PolyrlError):
    """A version did not arrive. What was held before is still held; the chunks that did arrive are kept for a retry."""

    def __init__(self, reason: str, *, source_is_bad: bool = False, bad_addresses: tuple[str, ...] = ()) -> None:
        super().__init__(reason)
        self.reason = reason
        self.source_is_bad = source_is_bad
        """Whether a source gave bytes that are not those of their digest, or could not prove who it is."""
        self.bad_addresses = bad_addresses


class Unreadable(TransferError):
    """A version that the manager vouches for, in a form that this PolyRL does not know: no other source helps."""
