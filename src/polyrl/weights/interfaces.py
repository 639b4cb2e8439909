"""The addresses of this machine that lie inside given networks.

Asked of the kernel by netlink, since nothing in the standard library lists addresses. Link-local IPv6 is left out: its
addresses mean nothing without an interface. So is loopback, unless a network names it or there is nothing else.
"""

import ipaddress
import socket
import struct
from collections.abc import Iterator, Sequence
from typing import TypeAlias

from polyrl.errors import ConfigError

Address: TypeAlias = ipaddress.IPv4Address | ipaddress.IPv6Address

_RTM_GETADDR, _RTM_NEWADDR, _NLMSG_DONE = 22, 20, 3
_REQUEST_DUMP = 0x1 | 0x300
_IFA_ADDRESS, _IFA_LOCAL = 1, 2
_HEADER = struct.Struct("=IHHII")
_ADDRESS = struct.Struct("=BBBBI")
_ATTRIBUTE = struct.Struct("=HH")


def listening_addresses(networks: Sequence[str], key: str = "weights.interfaces") -> list[str]:
    """Every local address inside the networks, in the order of the networks. Raises ConfigError if there is none."""
    found = [one for one in local_addresses() if not one.is_link_local]
    if not networks:
        return [str(one) for one in found if not one.is_loopback] or ["127.0.0.1"]
    chosen: dict[str, None] = {}
    for place, text in enumerate(networks):
        try:
            network = ipaddress.ip_network(text, strict=False)
        except ValueError as error:
            raise ConfigError(f"{key}[{place}]: {text!r}; expected a network like 192.168.0.0/16") from error
        inside = [str(one) for one in found if one.version == network.version and one in network]
        if not inside:
            here = ", ".join(str(one) for one in found)
            raise ConfigError(f"{key}[{place}]: no address of this machine is in {text}; it has {here}")
        chosen.update(dict.fromkeys(inside))
    return list(chosen)


def local_addresses() -> list[Address]:
    """All of them, also loopback's, as the kernel lists them."""
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE) as netlink:
        netlink.settimeout(5.0)
        netlink.send(_HEADER.pack(_HEADER.size + _ADDRESS.size, _RTM_GETADDR, _REQUEST_DUMP, 1, 0) + bytes(8))
        found: dict[Address, None] = {}
        while True:
            data = netlink.recv(1 << 16)
            for kind, body in _messages(data):
                if kind == _NLMSG_DONE:
                    return list(found)
                if kind == _RTM_NEWADDR:
                    found.update(dict.fromkeys(_address_of(body)))


def _messages(data: bytes) -> Iterator[tuple[int, bytes]]:
    while len(data) >= _HEADER.size:
        num_bytes, kind, *_ = _HEADER.unpack_from(data)
        yield kind, data[_HEADER.size : num_bytes]
        data = data[_aligned(num_bytes) :]


def _address_of(body: bytes) -> list[Address]:
    """A point-to-point link has two: its own is the local one."""
    attributes: dict[int, bytes] = {}
    rest = body[_ADDRESS.size :]
    while len(rest) >= _ATTRIBUTE.size:
        num_bytes, kind = _ATTRIBUTE.unpack_from(rest)
        attributes[kind] = rest[_ATTRIBUTE.size : num_bytes]
        rest = rest[_aligned(max(num_bytes, _ATTRIBUTE.size)) :]
    packed = attributes.get(_IFA_LOCAL, attributes.get(_IFA_ADDRESS))
    return [] if packed is None else [ipaddress.ip_address(packed)]


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // 4) * 4
