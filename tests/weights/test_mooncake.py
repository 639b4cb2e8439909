"""Versions through mooncake's transfer engine, in its TCP mode: the same bytes, and no more trust than others get."""

import subprocess
import sys
import threading

import pytest
from msgspec.structs import replace
from tests.weights.stage import KEY, SETTINGS, publish, pull, stage, weights

from polyrl.errors import UserError
from polyrl.weights.server import WeightServer
from polyrl.weights.settings import TransferError

IMPORT = [sys.executable, "-c", "import mooncake.engine"]
is_there = subprocess.run(IMPORT, capture_output=True, timeout=60, check=False).returncode == 0
needs_mooncake = pytest.mark.skipif(
    not is_there, reason="mooncake cannot be imported: pip install 'polyrl[rdma]', and libibverbs1"
)
MOONCAKE = replace(SETTINGS, mooncake="tcp")


def test_without_the_library_the_person_is_told_what_to_install_and_nothing_listens(monkeypatch):
    monkeypatch.setitem(sys.modules, "mooncake.engine", None)
    before = set(threading.enumerate())
    with pytest.raises(UserError, match=r"pip install polyrl\[rdma\]"):
        WeightServer(MOONCAKE, KEY).start()
    assert not [one.name for one in set(threading.enumerate()) - before if one.name.startswith("weights-")]


@needs_mooncake
def test_a_full_version_comes_through_mooncake_and_a_delta_by_itself():
    with stage() as on:
        server, peer = on.server(MOONCAKE), on.peer(settings=MOONCAKE)
        assert pull(peer, publish(server, 1)) == weights(1)
        assert server.num_bytes_sent == 0
        assert pull(peer, publish(server, 2)) == weights(2)
        assert server.num_bytes_sent > 0


@needs_mooncake
def test_a_source_without_it_is_read_over_tcp():
    with stage() as on:
        assert pull(on.peer(settings=MOONCAKE), publish(on.server(), 1)) == weights(1)


@needs_mooncake
def test_wrong_bytes_are_found_out_as_they_are_on_any_wire():
    with stage() as on:
        server, peer = on.server(MOONCAKE), on.peer(settings=MOONCAKE)
        offer = publish(server, 1)
        server._kept[-1].buffer.view[5] ^= 1
        with pytest.raises(TransferError) as failed:
            pull(peer, offer)
        assert failed.value.source_is_bad
