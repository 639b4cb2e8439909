"""Where a worker may say that others fetch weights from it: at its own address, as it is seen from here.

What a worker names is dialled by every other worker that is sent to it. If that were any address, one worker could have
a whole fleet knock at somebody else's door.

Rules kept here: an address is the worker's own if its connection comes from there. One that comes from this machine may
name any address of this machine. Other networks of the workers (a second interface for data, say) are named by whoever
runs the manager. Loopback is told to those on this machine alone: elsewhere it is another machine's.
"""

from collections.abc import Sequence
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network

from polyrl.weights.interfaces import local_addresses

Address = IPv4Address | IPv6Address


def own_addresses(claimed: Sequence[str], seen_at: str, networks: Sequence[str]) -> tuple[str, ...]:
    """Those of the claimed addresses, as HOST:PORT, that a worker seen at `seen_at` may have named."""
    seen = _parse(seen_at)
    here = set(local_addresses()) if seen is not None and claimed and seen.is_loopback else set()
    trusted = [ip_network(one, strict=False) for one in networks]

    def is_own(text: str) -> bool:
        host = _parse(text.rpartition(":")[0])
        if host is None:
            return False
        if host == seen or host in here:
            return True
        return any(host.version == one.version and host in one for one in trusted)

    return tuple(one for one in claimed if is_own(one))


def reachable(addresses: Sequence[str], seen_at: str) -> tuple[str, ...]:
    """Those that mean the same to a worker seen at `seen_at` as they do here."""
    seen = _parse(seen_at)
    is_here = seen is not None and seen.is_loopback
    return tuple(one for one in addresses if is_here or not _is_loopback(one))


def _is_loopback(address: str) -> bool:
    host = _parse(address.rpartition(":")[0])
    return host is not None and host.is_loopback


def _parse(host: str) -> Address | None:
    try:
        found = ip_address(host.strip("[]"))
    except ValueError:
        return None
    return found if isinstance(found, IPv4Address) or found.ipv4_mapped is None else found.ipv4_mapped
