"""Nodes that serve a version together: the same version as one node's, of which each holds and sends its share."""

import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import chain, pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from tests.weights.stage import SETTINGS, Faults, Stage, layout_of, pull, stage, weights

from polyrl.errors import UserError
from polyrl.weights import delta
from polyrl.weights.huge_pages import HUGE_BYTES
from polyrl.weights.manifest import Spec, lay_out
from polyrl.weights.server import Offer, WeightServer
from polyrl.weights.settings import TransferError, WeightSettings
from polyrl.weights.shares import share_of

NUM_NODES = 3


class Together:
    """Threads in the place of nodes."""

    def __init__(self, size: int) -> None:
        self.told: list[list[bytes]] = [[b""] * size for _ in range(2)]
        self.meetings = [threading.Barrier(size, timeout=20) for _ in range(2)]

    def node(self, number: int) -> "Node":
        return Node(self, number)


class Node:
    def __init__(self, together: Together, number: int) -> None:
        self._together, self.number, self.size = together, number, len(together.told[0])

    def exchange(self, data: bytes) -> list[bytes]:
        return self._exchange(0, data)

    def exchange_beside(self, data: bytes) -> list[bytes]:
        return self._exchange(1, data)

    def _exchange(self, which: int, data: bytes) -> list[bytes]:
        meeting, told = self._together.meetings[which], self._together.told[which]
        told[self.number] = data
        try:
            meeting.wait()
            found = list(told)
            meeting.wait()
        except threading.BrokenBarrierError as error:
            raise RuntimeError("another node is gone") from error
        return found


class Nodes:
    def __init__(self, on: Stage, settings: WeightSettings = SETTINGS, size: int = NUM_NODES) -> None:
        self.together = Together(size)
        self.servers = [on.server(settings, nodes=self.together.node(number)) for number in range(size)]

    def publish(self, version: int, data: bytes | None = None, num_elements: int = 50_000) -> Offer:
        """Each writes only what it is to hold."""
        whole, layout = weights(version) if data is None else data, layout_of(num_elements)

        def one(server: WeightServer) -> Offer:
            def fill(view: memoryview) -> None:
                held = server.held(layout)
                view[held.start : held.stop] = whole[held.start : held.stop]

            offer = server.publish(version, layout, fill)
            assert server.wait_for_deltas(10)
            return offer

        offers = self.all(one)
        assert all(offer == offers[0] for offer in offers)
        return offers[0]

    def all(self, function: Callable[[WeightServer], Offer]) -> list[Offer]:
        with ThreadPoolExecutor(len(self.servers)) as pool:
            return list(pool.map(function, self.servers))

    @property
    def sent(self) -> list[int]:
        return [one.num_bytes_sent for one in self.servers]


@given(
    st.lists(st.integers(0, 9000), min_size=1, max_size=6),
    st.integers(1, 5),
    st.sampled_from([64, 1000, 4096, 1 << 20]),
    st.sampled_from(["bfloat16", "float32", "uint8"]),
)
def test_every_chunk_and_every_piece_is_in_one_share(sizes, num_nodes, chunk_bytes, dtype):
    layout = lay_out([Spec(f"tensor-{number}", dtype, (size,)) for number, size in enumerate(sizes)])
    shares = [share_of(layout, chunk_bytes, number, num_nodes) for number in range(num_nodes)]
    chunks = [index for share in shares for index in share.chunks]
    assert chunks == list(range(-(-layout.num_bytes // chunk_bytes)))
    assert list(chain.from_iterable(share.pieces for share in shares)) == list(delta.pieces_of(layout))
    assert sum(len(share.served) for share in shares) == layout.num_bytes
    for share in shares:
        for piece in share.pieces:
            assert share.held.start <= piece.start
            assert piece.start + piece.num_elements * piece.item_bytes <= share.held.stop <= layout.num_bytes
    assert all(one.served.stop == other.served.start for one, other in pairwise(shares))


@pytest.mark.parametrize("changes", [{}, {"hash": "blake3"}, {"shared_memory": True}, {"streams": 1}], ids=str)
def test_versions_and_deltas_are_those_of_one_node_and_each_node_sends_its_share(changes):
    settings = replace(SETTINGS, **changes)
    with stage() as on:
        nodes, peer = Nodes(on, settings), on.peer(settings=settings)
        alone = Nodes(on, settings, 1)
        offer = nodes.publish(1)
        assert offer.digest == alone.publish(1).digest
        assert offer.addresses == tuple(chain.from_iterable(one.addresses for one in nodes.servers))
        assert pull(peer, offer) == weights(1)
        shares = [share_of(layout_of(), settings.chunk_bytes, number, NUM_NODES) for number in range(NUM_NODES)]
        assert nodes.sent == [len(share.served) for share in shares]

        offer = nodes.publish(2)
        assert offer.digest == alone.publish(2).digest
        before = sum(nodes.sent)
        assert pull(peer, offer) == weights(2)
        assert sum(nodes.sent) - before < offer.num_bytes / 10  # a delta
        deltas = [
            [one.name for one in server._store.entries() if one.kind == "delta"]
            for server in (*nodes.servers, *alone.servers)
        ]
        assert all(one == deltas[0] for one in deltas)
        assert len(deltas[0]) == 1


def test_a_node_has_memory_for_its_share_alone():
    num_elements = 12 * HUGE_BYTES
    layout = layout_of(num_elements)
    data = np.random.default_rng(0).bytes(layout.num_bytes)
    with stage() as on:
        nodes = Nodes(on, replace(SETTINGS, chunk_bytes=1 << 20, num_deltas=0))
        nodes.publish(1, data, num_elements)
        for server in nodes.servers:
            buffer = server._kept[-1].buffer
            taken = os.fstat(buffer.fd).st_blocks * 512
            assert taken <= layout.num_bytes / NUM_NODES + delta.PART_ELEMENTS * 2 + 2 * HUGE_BYTES


def test_changes_of_most_elements_make_no_delta_that_every_node_would_hold():
    with stage() as on:
        nodes, peer = Nodes(on), on.peer()
        pull(peer, nodes.publish(1))
        layout = layout_of()
        data = bytearray(np.random.default_rng(2).bytes(layout.num_bytes))
        data[layout.tensors[0].end : layout.tensors[1].start] = bytes(layout.tensors[1].start - layout.tensors[0].end)
        data[layout.tensors[1].end :] = bytes(layout.num_bytes - layout.tensors[1].end)
        offer = nodes.publish(2, bytes(data))
        assert not any(one.kind == "delta" for server in nodes.servers for one in server._store.entries())
        assert pull(peer, offer) == bytes(data)


def test_a_worker_that_reaches_one_node_alone_says_which_others_it_does_not_reach():
    with stage() as on:
        nodes, peer = Nodes(on), on.peer()
        offer = nodes.publish(1)
        reached = nodes.servers[1].addresses
        gone = "127.0.0.1:9"
        with pytest.raises(TransferError, match=f"of {-(-offer.num_bytes // 4096)} chunks arrived.*{gone}: "):
            pull(peer, offer, (*reached, gone), deadline_s=2.0)


def test_a_node_that_answers_late_is_waited_for():
    with stage() as on:
        nodes, peer = Nodes(on), on.peer()
        offer = nodes.publish(1)
        slow = on.wire(nodes.servers[2].addresses[0], Faults(bytes_per_s=100.0))  # its greeting takes 1.1 s
        quick = tuple(chain.from_iterable(one.addresses for one in nodes.servers[:2]))
        done = threading.Timer(2.0, lambda: setattr(slow.faults, "bytes_per_s", 0.0))
        done.start()
        assert pull(peer, offer, (*quick, slow.address)) == weights(1)
        done.join()


def test_an_address_that_no_pull_needs_is_not_waited_for_again():
    with stage() as on:
        nodes, peer = Nodes(on), on.peer(settings=replace(SETTINGS, stall_s=30.0))
        deaf = on.wire(nodes.servers[0].addresses[0], Faults(stall_at=0, once=False))  # accepts, and says nothing
        took: list[float] = []
        for version in (1, 2):
            offer = nodes.publish(version)
            began = time.monotonic()
            assert pull(peer, offer, (*offer.addresses, deaf.address), deadline_s=30.0) == weights(version)
            took.append(time.monotonic() - began)
        assert took[1] < took[0] / 2, "the second pull knows that it has all it needs"


def test_a_node_that_is_gone_costs_the_delta_alone():
    with stage() as on:
        nodes = Nodes(on, size=2)
        nodes.publish(1)
        nodes.together.meetings[1].abort()
        offer = nodes.publish(2)
        assert pull(on.peer(), offer) == weights(2)
        assert not any(one.kind == "delta" for server in nodes.servers for one in server._store.entries())


def test_a_share_that_no_memory_is_left_for_is_refused():
    with stage() as on:
        server = on.server()
        with pytest.raises(UserError, match=f"no memory for {1 << 42} bytes of weights"):
            server.publish(1, lay_out([Spec("huge", "float32", (1 << 40,))]), lambda _: None)
