"""The addresses at which a worker may offer weights to others: its own, as seen from here.

Every worker that is sent to it dials the address it names. If that could be any address, one worker could turn a whole
fleet against a foreign machine.

Rules kept here: an address is the worker's own if its connection comes from there. A worker on this machine may
name any address of it. Other networks of the workers (a second interface for data, say) are named in the manager's
settings. Loopback is told to those on this machine alone: elsewhere it is another machine's.
"""

from collections.abc import Sequence
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network

from polyrl.weights.interfaces import local_addresses

Address = IPv4Address | IPv6Address


def own_addresses(claimed: Sequence[str], seen_at: str, networks: Sequence[str]) -> tuple[str, ...]:
    """Return those of the claimed addresses, HOST:PORT, that belong to a worker seen at `seen_at`."""
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
    """Return the addresses that mean the same to a worker seen at `seen_at` as they do here."""
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
