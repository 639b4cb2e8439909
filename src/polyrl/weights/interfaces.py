"""The addresses of this machine that lie inside given networks.

Link-local IPv6 addresses are left out, because they mean nothing without an interface. Loopback is left out, unless a
network names it or there is no other address.
"""

import ipaddress
import socket
from collections.abc import Sequence
from typing import TypeAlias

import psutil

from polyrl.errors import ConfigError

Address: TypeAlias = ipaddress.IPv4Address | ipaddress.IPv6Address


def listening_addresses(networks: Sequence[str], key: str = "weights.interfaces") -> list[str]:
    """Return the local addresses inside the networks, in their order. Raises ConfigError if one has none."""
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
    """Return all local addresses, loopback included: IPv4 first, interface by interface."""
    found = [one for all_of_it in psutil.net_if_addrs().values() for one in all_of_it]
    kinds = (socket.AF_INET, socket.AF_INET6)
    texts = [one.address.partition("%")[0] for kind in kinds for one in found if one.family == kind]
    return list(dict.fromkeys(map(ipaddress.ip_address, texts)))
