"""Workers that pass weights on: before they have all of it, and without ever being believed."""

import threading
import time

import pytest
from msgspec.structs import replace
from tests.weights.stage import SETTINGS, Faults, Stage, held_by, layout_of, publish, pull, stage, weights

from polyrl.weights.peer import WeightPeer
from polyrl.weights.server import Offer
from polyrl.weights.settings import TransferError

NUM_BYTES = layout_of().num_bytes
SLOW_S = 0.6
SLOW = NUM_BYTES / SLOW_S
"""Over all connections of a pull; a wire's limit is a connection's."""


class Puller:
    """A pull in a thread of its own."""

    def __init__(self, peer: WeightPeer, offer: Offer, addresses: tuple[str, ...], deadline_s: float = 15) -> None:
        self.got = b""
        self.error: TransferError | None = None
        self.took_s = 0.0
        self.num_seen = 0
        self._args = (peer, offer, addresses, deadline_s)
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        peer, offer, addresses, deadline_s = self._args
        start = time.monotonic()
        try:
            with peer.pull(offer.version, offer.digest, addresses, deadline_s, self._see) as copy:
                self.got = bytes(copy.view)
        except TransferError as error:
            self.error = error
        self.took_s = time.monotonic() - start

    def _see(self, num_bytes: int, _: int) -> None:
        self.num_seen = num_bytes

    def join(self) -> "Puller":
        self._thread.join(30)
        assert not self._thread.is_alive()
        return self


def test_a_worker_that_has_a_version_gives_it_on():
    with stage() as on:
        server, first, second = on.server(), on.peer(0), on.peer(1)
        offer = publish(server, 1)
        pull(first, offer)
        before = server.num_bytes_sent
        assert pull(second, offer, first.addresses) == weights(1)
        assert server.num_bytes_sent == before
        assert first.num_bytes_sent == NUM_BYTES


def test_a_worker_that_got_a_delta_gives_it_on_and_the_full_version_too():
    with stage() as on:
        server, first, second, third = on.server(), on.peer(0), on.peer(1), on.peer(2)
        old = publish(server, 1)
        pull(first, old)
        pull(second, old)
        offer = publish(server, 2)
        pull(first, offer)
        before = first.num_bytes_sent
        assert pull(second, offer, first.addresses) == weights(2)
        assert first.num_bytes_sent - before < NUM_BYTES / 10
        assert pull(third, offer, first.addresses) == weights(2)


def test_a_chain_of_relays_takes_hardly_longer_than_one_pull():
    """Each passes chunks on as they are verified: eight hops are not eight pulls."""
    with stage() as on:
        server = on.server(replace(SETTINGS, num_deltas=0))
        offer = publish(server, 1)
        wire = on.wire(offer.addresses[0], Faults(bytes_per_s=SLOW))
        peers = [on.peer(number, replace(SETTINGS, streams=1)) for number in range(8)]
        sources = [(wire.address,), *(peer.addresses for peer in peers[:-1])]
        pullers = [Puller(peer, offer, source) for peer, source in zip(peers, sources, strict=True)]
        for puller in pullers:
            assert puller.join().got == weights(1)
        assert server.num_bytes_sent == NUM_BYTES
        assert pullers[-1].took_s < 3 * SLOW_S + 1


def test_a_worker_that_is_asked_too_early_is_waited_for():
    with stage() as on:
        server, first, second = on.server(), on.peer(0), on.peer(1)
        offer = publish(server, 1)
        puller = Puller(second, offer, first.addresses)
        time.sleep(0.3)
        pull(first, offer)
        assert puller.join().got == weights(1)


def test_a_swarm_takes_each_chunk_from_the_trainer_about_once():
    with stage() as on:
        num_elements = 1_000_000
        server = on.server(replace(SETTINGS, num_deltas=0, egress_mb_s=2 * num_elements / 1e6))
        offer = publish(server, 1, num_elements)
        peers = [on.peer(number) for number in range(6)]
        everybody = tuple(peer.addresses[0] for peer in peers)
        pullers = [
            Puller(peer, offer, (*offer.addresses, *(one for one in everybody if one not in peer.addresses)))
            for peer in peers
        ]
        for puller in pullers:
            assert puller.join().got == weights(1, num_elements)
        assert server.num_bytes_sent < 1.5 * offer.num_bytes


def lying_relay(on: Stage, offer: Offer) -> WeightPeer:
    relay = on.peer(7)
    pull(relay, offer)
    held_by(relay)[40_000] ^= 4
    return relay


@pytest.mark.parametrize("hash", ["xxh3-128", "blake3"])
def test_a_relay_that_lies_is_found_out_recorded_and_replaced_by_another_source(hash):
    """Workers have settings of their own: which hash it is, the version says."""
    with stage() as on:
        server, peer = on.server(replace(SETTINGS, hash=hash)), on.peer()
        offer = publish(server, 1)
        relay = lying_relay(on, offer)
        assert pull(peer, offer, (*relay.addresses, *offer.addresses)) == weights(1)
        assert list(peer.bad_sources) == list(relay.addresses)


def test_a_relay_that_lies_and_is_the_only_source_fails_the_pull_and_is_named():
    with stage() as on:
        server, peer = on.server(), on.peer()
        offer = publish(server, 1)
        relay = lying_relay(on, offer)
        with pytest.raises(TransferError) as failed:
            pull(peer, offer, relay.addresses)
        assert failed.value.source_is_bad and failed.value.bad_addresses == relay.addresses
        before = server.num_bytes_sent
        assert pull(peer, offer) == weights(1)
        assert server.num_bytes_sent - before < NUM_BYTES


def test_what_a_lying_relay_gave_is_not_passed_on():
    with stage() as on:
        server, middle, last = on.server(), on.peer(0), on.peer(1)
        offer = publish(server, 1)
        relay = lying_relay(on, offer)
        with pytest.raises(TransferError):
            pull(middle, offer, relay.addresses)
        assert pull(last, offer, (*middle.addresses, *offer.addresses)) == weights(1)
        assert last.bad_sources == {}


def test_a_relay_that_dies_costs_a_retry_from_another_source():
    with stage() as on:
        server, relay, peer = on.server(), on.peer(0), on.peer(1)
        offer = publish(server, 1)
        pull(relay, offer)
        wire = on.wire(relay.addresses[0], Faults(cut_at=NUM_BYTES // 2, once=False))
        failed = Puller(peer, offer, (wire.address,)).join().error
        relay.close()
        assert failed is not None and not failed.source_is_bad
        before = server.num_bytes_sent
        assert pull(peer, offer) == weights(1)
        assert server.num_bytes_sent - before < NUM_BYTES


def test_a_cut_before_a_relay_that_still_gets_the_version_is_one_failure():
    with stage() as on:
        server, relay, peer = on.server(), on.peer(0), on.peer(1)
        offer = publish(server, 1)
        slow = on.wire(offer.addresses[0], Faults(bytes_per_s=SLOW / SETTINGS.streams))
        wire = on.wire(relay.addresses[0], Faults(cut_at=NUM_BYTES // 2, cut_s=0.0))
        pulls = Puller(relay, offer, (slow.address,)), Puller(peer, offer, (wire.address,))
        assert [one.join().got == weights(1) for one in pulls] == [True, True]
        assert wire.faults.num_faults == 1
        assert not peer.bad_sources


def test_a_relay_whose_source_died_goes_on_from_another_and_so_does_who_pulls_from_it():
    with stage() as on:
        server, middle, last = on.server(), on.peer(0), on.peer(1)
        offer = publish(server, 1)
        faults = Faults(cut_at=NUM_BYTES // 2, once=False, bytes_per_s=SLOW / SETTINGS.streams)
        wire = on.wire(offer.addresses[0], faults)
        behind = Puller(last, offer, middle.addresses)
        assert Puller(middle, offer, (wire.address,)).join().error is not None
        assert pull(middle, offer) == weights(1)
        assert behind.join().got == weights(1)


def test_a_swarm_survives_a_neighbour_that_dies_and_one_that_lies():
    num_elements = 1_000_000
    with stage() as on:
        server = on.server(replace(SETTINGS, num_deltas=0, egress_mb_s=2 * num_elements / 1e6))
        offer = publish(server, 1, num_elements)
        liar, dying, first, second = (on.peer(number) for number in range(4))
        pull(liar, offer)
        held_by(liar)[::50_000] = bytes(len(held_by(liar)[::50_000]))
        everybody = tuple(one.addresses[0] for one in (liar, dying, first, second))
        pullers = [
            Puller(peer, offer, (*offer.addresses, *(one for one in everybody if one not in peer.addresses)))
            for peer in (dying, first, second)
        ]
        time.sleep(0.2)
        dying.close()
        for puller, peer in zip(pullers[1:], (first, second), strict=True):
            assert puller.join().got == weights(1, num_elements)
            assert set(peer.bad_sources) <= set(liar.addresses)
        assert {**first.bad_sources, **second.bad_sources}
        pullers[0].join()


def test_the_version_before_is_relayed_while_the_next_one_is_built():
    with stage() as on:
        server, relay, late = on.server(replace(SETTINGS, num_deltas=0)), on.peer(0), on.peer(1)
        first = publish(server, 1)
        pull(relay, first)
        second = publish(server, 2)
        wire = on.wire(second.addresses[0], Faults(bytes_per_s=SLOW / SETTINGS.streams))
        building = Puller(relay, second, (wire.address,))
        time.sleep(SLOW_S / 3)
        assert relay.held == (1, first.digest)
        assert pull(late, first, relay.addresses) == weights(1)
        assert building.join().got == weights(2)
        assert relay.held == (2, second.digest)


def test_workers_on_one_host_read_each_others_memory():
    settings = replace(SETTINGS, shared_memory=True)
    with stage() as on:
        server, first, second = on.server(settings), on.peer(0, settings), on.peer(1, settings)
        offer = publish(server, 1)
        pull(first, offer)
        assert pull(second, offer, first.addresses) == weights(1)
        assert server.num_bytes_sent == first.num_bytes_sent == 0


def test_a_lie_in_shared_memory_is_found_out_too():
    settings = replace(SETTINGS, shared_memory=True)
    with stage() as on:
        server, peer = on.server(settings), on.peer(0, settings)
        offer = publish(server, 1)
        server._kept[-1].buffer.view[5] ^= 1
        with pytest.raises(TransferError) as failed:
            pull(peer, offer)
        assert failed.value.source_is_bad
