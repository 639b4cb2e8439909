"""Where a worker may send others: to its own address, as the manager sees it, and nowhere else."""

import pytest

from polyrl.config import build
from polyrl.errors import ConfigError
from polyrl.manager.peers.relay_addresses import own_addresses, reachable
from polyrl.manager.settings import ManagerSettings

PORT = ":7000"


@pytest.mark.parametrize(
    ("host", "seen_at", "networks", "is_own"),
    [
        ("10.0.0.5", "10.0.0.5", (), True),
        ("10.0.0.6", "10.0.0.5", (), False),
        ("192.168.7.5", "10.0.0.5", (), False),
        ("192.168.7.5", "10.0.0.5", ("192.168.0.0/16",), True),
        ("8.8.8.8", "10.0.0.5", ("192.168.0.0/16",), False),
        ("127.0.0.1", "10.0.0.5", (), False),
        ("127.0.0.1", "127.0.0.1", (), True),
        ("127.0.0.2", "127.0.0.1", (), False),
        ("8.8.8.8", "127.0.0.1", (), False),
        ("169.254.169.254", "10.0.0.5", (), False),
        ("metadata.internal", "10.0.0.5", (), False),
        ("", "10.0.0.5", (), False),
        ("", "", (), False),
        ("[fd00::5]", "fd00::5", (), True),
        ("[fd00::6]", "fd00::5", (), False),
        ("10.0.0.5", "::ffff:10.0.0.5", (), True),
        ("10.0.0.5", "fd00::5", ("fd00::/8",), False),
    ],
)
def test_an_address_is_a_workers_own_if_it_is_seen_there(
    host: str, seen_at: str, networks: tuple[str, ...], is_own: bool
):
    assert own_addresses([host + PORT], seen_at, networks) == ((host + PORT,) if is_own else ())


def test_loopback_is_told_to_those_on_this_machine_alone():
    addresses = ("127.0.0.1:7000", "10.0.0.5:7000", "[::1]:7000")
    assert reachable(addresses, "127.0.0.1") == addresses
    assert reachable(addresses, "10.0.0.9") == ("10.0.0.5:7000",)


def test_a_network_that_is_none_is_named():
    with pytest.raises(ConfigError, match=r"limits.relay_networks.1: 'ten'; expected a network like"):
        build({"limits": {"relay_networks": ["10.0.0.0/8", "ten"]}}, ManagerSettings)
