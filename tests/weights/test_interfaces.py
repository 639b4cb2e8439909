"""Which addresses a sender listens on."""

import ipaddress

import pytest

from polyrl.errors import ConfigError
from polyrl.weights.interfaces import listening_addresses, local_addresses


def test_the_kernel_lists_loopback():
    assert ipaddress.ip_address("127.0.0.1") in local_addresses()


def test_by_default_loopback_is_left_out_unless_there_is_nothing_else():
    found = [ipaddress.ip_address(one) for one in listening_addresses([])]
    assert found
    assert all(not one.is_loopback for one in found) or len(found) == 1
    assert not any(one.is_link_local for one in found)


def test_networks_choose_addresses_each_once():
    assert listening_addresses(["127.0.0.0/8", "127.0.0.1/32"]) == ["127.0.0.1"]


@pytest.mark.parametrize(
    ("networks", "said"),
    [
        (["127.0.0.0/8", "everything"], r"weights.interfaces\[1\]: 'everything'; expected a network"),
        (["203.0.113.0/24"], r"weights.interfaces\[0\]: no address of this machine is in 203.0.113.0/24; it has 127"),
    ],
)
def test_what_cannot_be_is_named_with_its_place(networks, said):
    with pytest.raises(ConfigError, match=said):
        listening_addresses(networks)
