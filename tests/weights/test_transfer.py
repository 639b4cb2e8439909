"""Pulling versions from a trainer: every way there leads to the published bytes, or to an error and what was held."""

import os
import socket
import threading
import time
from contextlib import ExitStack

import msgspec
import pytest
from msgspec.structs import replace
from tests.weights.stage import KEY, SETTINGS, Faults, blob_of, layout_of, publish, pull, stage, weights

from polyrl.errors import UserError
from polyrl.weights import channel, fetch, protocol, sender
from polyrl.weights.buffers import Buffer
from polyrl.weights.channel import DeadlineWatch
from polyrl.weights.chunks import table_of
from polyrl.weights.manifest import DeltaManifest, encode
from polyrl.weights.receiver import SourceDialer
from polyrl.weights.settings import TransferError
from polyrl.weights.store import Blob, Store
from polyrl.wire.credentials import weights_key_of

NUM_BYTES = layout_of().num_bytes


@pytest.mark.parametrize("changes", [{}, {"hash": "blake3"}, {"shared_memory": True}, {"streams": 1}], ids=str)
def test_a_peer_that_holds_nothing_gets_the_full_version(changes):
    settings = replace(SETTINGS, **changes)
    with stage() as on:
        server, peer = on.server(settings), on.peer(settings=settings)
        offer = publish(server, 1)
        assert peer.held is None
        assert pull(peer, offer) == weights(1)
        assert peer.held == (1, offer.digest)
        via_tcp = server.num_bytes_sent
        assert via_tcp == (0 if settings.shared_memory else offer.num_bytes)


def test_a_copy_names_its_tensors_and_keeps_its_bytes_through_later_pulls():
    with stage() as on:
        server, peer = on.server(), on.peer()
        first = publish(server, 1)
        copy = peer.pull(1, first.digest, first.addresses, 15)
        entry = layout_of().by_name["second"]
        assert bytes(copy.tensor("second")) == weights(1)[entry.start : entry.end]
        assert os.pread(copy.fd, 100, 0) == weights(1)[:100]
        for version in (2, 3, 4):
            assert pull(peer, publish(server, version)) == weights(version)
        assert bytes(copy.view) == weights(1)
        copy.close()


def test_a_peer_that_holds_the_version_before_gets_a_delta():
    with stage() as on:
        server, peer = on.server(), on.peer()
        pull(peer, publish(server, 1))
        before = server.num_bytes_sent
        offer = publish(server, 2)
        with peer.pull(2, offer.digest, offer.addresses, 15) as copy:
            assert bytes(copy.view) == weights(2)
            assert copy.changed == {"first", "second"}
        assert server.num_bytes_sent - before < offer.num_bytes / 10


def test_a_peer_that_asks_before_the_delta_is_ready_waits_for_it():
    with stage() as on:
        server, peer = on.server(), on.peer()
        pull(peer, publish(server, 1))
        before = server.num_bytes_sent
        assert pull(peer, publish(server, 2, deltas=False)) == weights(2)
        assert server.num_bytes_sent - before < NUM_BYTES / 10


def test_a_peer_that_missed_versions_gets_a_chain_of_deltas():
    with stage() as on:
        server, peer = on.server(), on.peer()
        pull(peer, publish(server, 1))
        before = server.num_bytes_sent
        offer = [publish(server, version) for version in range(2, 7)][-1]
        assert pull(peer, offer) == weights(6)
        assert server.num_bytes_sent - before < NUM_BYTES / 2


def test_a_chain_may_be_longer_than_what_a_worker_keeps_of_it():
    with stage() as on:
        server, peer = on.server(), on.peer(settings=replace(SETTINGS, num_deltas=1))
        pull(peer, publish(server, 0))
        offer = [publish(server, version) for version in range(1, 4)][-1]
        assert pull(peer, offer) == weights(3)
        assert pull(peer, publish(server, 4)) == weights(4)
        deltas = [entry for entry in on.peer(1).offered(peer.addresses, 5) if entry.kind == "delta"]
        assert len(deltas) == 2  # what is kept of the chain, and the last pull's


def test_deltas_older_than_the_window_are_given_up_and_the_full_version_is_pulled():
    with stage() as on:
        server, peer = on.server(replace(SETTINGS, num_deltas=2)), on.peer()
        pull(peer, publish(server, 1))
        before = server.num_bytes_sent
        offer = [publish(server, version) for version in range(2, 7)][-1]
        assert pull(peer, offer) == weights(6)
        assert server.num_bytes_sent - before == NUM_BYTES


def test_a_publish_that_comes_before_the_delta_is_made_ends_it_and_both_versions_arrive():
    with stage() as on:
        server, peer = on.server(), on.peer()
        offer = [publish(server, version, 3_000_000, deltas=False) for version in range(1, 6)][-1]
        assert pull(peer, offer) == weights(5, 3_000_000)
        assert pull(peer, publish(server, 6, 3_000_000)) == weights(6, 3_000_000)


def test_a_question_to_a_source_is_asked_again_when_its_connection_ended():
    """Between two questions of a long pull a source may end a connection that is idle."""
    with stage() as on:
        server, peer = on.server(), on.peer()
        pull(peer, publish(server, 1))
        offer = publish(server, 2)
        wire = on.wire(offer.addresses[0], Faults(cut_at=500))
        assert pull(peer, offer, (wire.address,)) == weights(2)
        assert wire.faults.num_faults == 1


def test_nothing_changed_is_a_version_too():
    with stage() as on:
        server, peer = on.server(), on.peer()
        pull(peer, publish(server, 1))
        offer = server.publish(2, layout_of(), lambda view: view.__setitem__(slice(None), weights(1)))
        assert server.wait_for_deltas(10)
        assert pull(peer, offer) == weights(1)
        assert peer.held == (2, offer.digest)


def test_another_layout_replaces_the_first():
    with stage() as on:
        server, peer = on.server(), on.peer()
        for version, num_elements in [(1, 50_000), (2, 70_000), (3, 3), (4, 50_000)]:
            offer = publish(server, version, num_elements)
            assert pull(peer, offer) == weights(version, num_elements)


def test_a_version_without_bytes_is_pulled_too():
    with stage() as on:
        assert pull(on.peer(), publish(on.server(), 1, 0)) == b""


def divide_by_zero(view: memoryview) -> None:
    view[0] //= 0


def test_what_fill_raises_is_raised_and_nothing_is_offered():
    with stage() as on:
        server, peer = on.server(), on.peer()
        publish(server, 1)
        offer = publish(server, 2)
        for _ in range(3):
            with pytest.raises(ZeroDivisionError):
                server.publish(3, layout_of(), divide_by_zero)
        assert pull(peer, offer) == weights(2)
        assert pull(peer, publish(server, 4)) == weights(4)


def test_a_pull_that_broke_off_goes_on_where_it_was():
    with stage() as on:
        server, peer = on.server(), on.peer()
        offer = publish(server, 1)
        wire = on.wire(offer.addresses[0], Faults(cut_at=NUM_BYTES // 2, once=False))
        with pytest.raises(TransferError) as failed:
            pull(peer, offer, (wire.address,))
        assert not failed.value.source_is_bad
        assert peer.held is None
        before = server.num_bytes_sent
        assert pull(peer, offer) == weights(1)
        assert server.num_bytes_sent - before < 0.8 * NUM_BYTES


def test_a_connection_that_breaks_is_dialled_again():
    with stage() as on:
        server, peer = on.server(), on.peer()
        offer = publish(server, 1)
        wire = on.wire(offer.addresses[0], Faults(cut_at=NUM_BYTES // 2))
        assert pull(peer, offer, (wire.address,)) == weights(1)
        assert wire.faults.num_faults == 1


@pytest.mark.parametrize("cut_s", [0.0, 0.5])
@pytest.mark.parametrize("streams", [4, 16])
def test_a_cut_that_takes_all_streams_down_is_one_failure(streams, cut_s):
    with stage() as on:
        server, peer = on.server(), on.peer(settings=replace(SETTINGS, streams=streams))
        offer = publish(server, 1)
        wire = on.wire(offer.addresses[0], Faults(cut_at=NUM_BYTES // 2, cut_s=cut_s))
        assert pull(peer, offer, (wire.address,)) == weights(1)
        assert wire.faults.num_faults == 1
        assert not peer.bad_sources


def test_a_source_that_is_gone_for_good_is_given_up():
    with stage() as on:
        server, peer = on.server(), on.peer()
        offer = publish(server, 1)
        wire = on.wire(offer.addresses[0], Faults(cut_at=NUM_BYTES // 2, cut_s=60.0))
        start = time.monotonic()
        with pytest.raises(TransferError, match=f"no source is left; .* {wire.address}: ") as failed:
            pull(peer, offer, (wire.address,))
        assert time.monotonic() - start < 5
        assert not failed.value.source_is_bad


def test_a_slow_source_is_waited_for_while_bytes_come(monkeypatch):
    """All chunks are under way at once, so the first one takes nearly as long as the last one."""
    monkeypatch.setattr(fetch, "APPEAR_S", 0.4)
    monkeypatch.setattr(channel, "PROGRESS_BYTES", 4096)
    settings = replace(SETTINGS, chunk_bytes=1 << 18, egress_mb_s=0.8, stall_s=0.2)
    with stage() as on:
        server, peer = on.server(settings), on.peer(settings=settings)
        start = time.monotonic()
        assert pull(peer, publish(server, 1, 1 << 19)) == weights(1, 1 << 19)
        assert time.monotonic() - start > 1


def test_a_slow_source_that_breaks_in_its_first_chunk_is_dialled_again(monkeypatch):
    """No chunk has come for longer than nothing may come, but bytes have."""
    monkeypatch.setattr(fetch, "APPEAR_S", 0.8)
    monkeypatch.setattr(channel, "PROGRESS_BYTES", 4096)
    settings = replace(SETTINGS, chunk_bytes=1 << 20, streams=1, stall_s=0.2)
    with stage() as on:
        server, peer = on.server(settings), on.peer(settings=settings)
        offer = publish(server, 1, 1 << 19)
        wire = on.wire(offer.addresses[0], Faults(bytes_per_s=7e5, cut_at=750_000, cut_s=0.0))
        assert pull(peer, offer, (wire.address,)) == weights(1, 1 << 19)
        assert wire.faults.num_faults == 1


class Blind(DeadlineWatch):
    """Never looks at what its channels moved, as one whose next look comes too late."""

    def _look(self) -> None:
        self._stop.wait()


def test_what_came_since_the_last_look_at_a_link_counts_when_it_breaks(monkeypatch):
    """The first try of the chunk ends at 1.1 s, before anybody looked, and the second one brings it at 2.4 s."""
    monkeypatch.setattr(fetch, "APPEAR_S", 2.0)
    settings = replace(SETTINGS, chunk_bytes=1 << 20, streams=1, stall_s=1.0)
    with stage() as on, ExitStack() as stack:
        server, peer = on.server(settings), on.peer(settings=settings)
        blind = Blind("blind")
        stack.callback(blind.close)
        peer._dialer = peer._dialer._replace(watch=blind)
        offer = publish(server, 1, 1 << 19)
        wire = on.wire(offer.addresses[0], Faults(bytes_per_s=8.6e5, cut_at=950_000, cut_s=0.0))
        assert pull(peer, offer, (wire.address,)) == weights(1, 1 << 19)
        assert wire.faults.num_faults == 1


@pytest.mark.parametrize("complete", [True, False])
def test_a_source_that_is_paused_is_not_dialled_when_the_fetch_ends(complete):
    """The fetch would wait for that."""
    data, stop = bytes(8192), threading.Event()
    blob = Blob("ab" * 32, "full", 1, b"", table_of(data, 4096), Buffer(len(data)), complete=False)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        source = fetch.ChunkSource(f"127.0.0.1:{listener.getsockname()[1]}", b"", origin=True, complete=complete)
        source.dial_at = time.monotonic() + 60
        watch = DeadlineWatch("watch")
        threading.Timer(0.2, stop.set).start()
        with pytest.raises(TransferError, match="broken off"):
            fetch.Fetch(blob, Store(), [source], SourceDialer(SETTINGS, KEY, None, watch), stop).run(
                time.monotonic() + 10
            )
        watch.close()
        listener.setblocking(False)
        with pytest.raises(BlockingIOError):
            listener.accept()


def test_a_source_that_stalls_is_cut_and_another_one_is_used():
    settings = replace(SETTINGS, stall_s=0.3)
    with stage() as on:
        server, other = on.server(), on.peer(1)
        offer = publish(server, 1)
        pull(other, offer)
        wire = on.wire(offer.addresses[0], Faults(stall_at=NUM_BYTES // 3, once=False))
        assert pull(on.peer(settings=settings), offer, (wire.address, *other.addresses)) == weights(1)


def test_the_deadline_of_a_pull_holds():
    with stage() as on:
        server, peer = on.server(), on.peer()
        offer = publish(server, 1)
        wire = on.wire(offer.addresses[0], Faults(bytes_per_s=50_000))
        start = time.monotonic()
        with pytest.raises(TransferError, match="deadline"):
            pull(peer, offer, (wire.address,), deadline_s=0.5)
        assert time.monotonic() - start < 3


def test_closing_ends_a_pull_that_is_under_way():
    with stage() as on:
        server, peer = on.server(), on.peer()
        offer = publish(server, 1)
        wire = on.wire(offer.addresses[0], Faults(bytes_per_s=50_000))
        threading.Timer(0.3, peer.close).start()
        with pytest.raises(TransferError):
            pull(peer, offer, (wire.address,))
        with pytest.raises(TransferError, match="closing"):
            pull(peer, offer)


@pytest.mark.parametrize(
    "addresses", [("127.0.0.1:1",), ("nonsense",), ("127.0.0.1:99999",), (f"{'a' * 64}:1",), ()], ids=str
)
def test_a_source_that_is_not_there_is_named(addresses):
    with stage() as on:
        offer = publish(on.server(), 1)
        with pytest.raises(TransferError, match="no source answers"):
            on.peer().pull(1, offer.digest, addresses, 60)


def test_another_key_gets_nothing_and_is_not_believed():
    with stage() as on:
        server = on.server()
        offer = publish(server, 1)
        with pytest.raises(TransferError, match="does not hold the run's key") as failed:
            pull(on.peer(key=b"x" * 32), offer)
        assert failed.value.source_is_bad
        assert server.num_bytes_sent == 0


def test_a_digest_of_another_version_number_is_refused():
    with stage() as on:
        offer = publish(on.server(), 1)
        with pytest.raises(TransferError, match="is version 1; expected 2"):
            on.peer().pull(2, offer.digest, offer.addresses, 3)


# Bytes that are wrong.


def test_a_server_whose_chunk_is_wrong_is_found_out_and_what_was_held_is_kept():
    with stage() as on:
        server, peer = on.server(replace(SETTINGS, num_deltas=0)), on.peer()
        first = publish(server, 1)
        pull(peer, first)
        offer = publish(server, 2)
        server._kept[-1].buffer.view[77_777] ^= 16
        with pytest.raises(TransferError, match="chunk 18 is not what its digest says") as failed:
            pull(peer, offer)
        assert failed.value.source_is_bad and failed.value.bad_addresses == offer.addresses
        assert list(peer.bad_sources) == list(offer.addresses)
        assert peer.held == (1, first.digest)
        server._kept[-1].buffer.view[77_777] ^= 16
        assert pull(peer, offer) == weights(2)


def test_a_delta_whose_bytes_are_wrong_is_found_out():
    with stage() as on:
        server, peer = on.server(), on.peer()
        pull(peer, publish(server, 1))
        offer = publish(server, 2)
        [name] = server._deltas
        blob_of(server, name).buffer.view[100] ^= 1
        with pytest.raises(TransferError, match="chunk 0 is not what its digest says") as failed:
            pull(peer, offer)
        assert failed.value.source_is_bad
        assert peer.held is not None and peer.held[0] == 1


def test_a_delta_that_leads_elsewhere_costs_a_full_pull():
    """Its digests are right, so only the version's own manifest tells."""
    with stage() as on:
        server, peer = on.server(), on.peer()
        pull(peer, publish(server, 1))
        offer = publish(server, 2, deltas=False)
        assert server.wait_for_deltas(10)
        [name] = server._deltas
        honest = blob_of(server, name)
        lie = on.server()
        publish(lie, 1)
        lie.publish(2, layout_of(), lambda view: view.__setitem__(slice(None), weights(5)))
        assert lie.wait_for_deltas(10)
        wrong = blob_of(lie, lie._deltas[0])
        manifest = msgspec.json.decode(wrong.manifest, type=DeltaManifest)
        manifest = replace(manifest, base=honest.base, target=honest.target)
        wrong.name, wrong.manifest, wrong.base, wrong.target = (
            manifest.digest,
            encode(manifest),
            honest.base,
            honest.target,
        )
        server._store.give_up(name, 0.0)
        server._store.add(wrong)
        assert pull(peer, offer) == weights(2)


def test_a_manifest_with_a_flipped_bit_is_not_used():
    with stage() as on:
        server, peer = on.server(), on.peer()
        offer = publish(server, 1)
        blob = blob_of(server, offer.digest)
        blob.manifest = blob.manifest.replace(b'"version":1', b'"version":3')
        with pytest.raises(TransferError, match="no source holds") as failed:
            pull(peer, offer)
        assert failed.value.source_is_bad


@pytest.mark.parametrize("seed", range(12))
def test_a_bit_flipped_anywhere_on_the_wire_never_becomes_a_wrong_version(seed):
    bit = int.from_bytes(os.urandom(4), "big") % (8 * (NUM_BYTES + 12_000)) if seed > 3 else seed * 4_001
    with stage() as on:
        server, peer = on.server(), on.peer()
        offer = publish(server, 1)
        wire = on.wire(offer.addresses[0], Faults(flip_bit_at=bit))
        try:
            assert pull(peer, offer, (wire.address,), 6.0) == weights(1)
        except TransferError:
            assert peer.held is None
        assert pull(peer, offer) == weights(1)


# Who disturbs.


def test_a_reader_that_stalls_does_not_hold_up_the_trainer():
    settings = replace(SETTINGS, num_deltas=0, grace_s=0.1)
    num_elements = 8_000_000
    with stage() as on:
        server = on.server(settings)
        offer = publish(server, 1, num_elements)
        wire = on.wire(offer.addresses[0], Faults(stall_at=1_000_000, once=False))
        peer = on.peer(settings=replace(settings, stall_s=0.5))
        failed = []

        def stuck() -> None:
            try:
                pull(peer, offer, (wire.address,))
            except TransferError as error:
                failed.append(error)

        thread = threading.Thread(target=stuck)
        thread.start()
        time.sleep(0.3)
        start = time.monotonic()
        for version in (2, 3, 4):
            newest = publish(server, version, num_elements)
        assert time.monotonic() - start < 3
        assert pull(on.peer(1), newest) == weights(4, num_elements)
        thread.join(20)
        assert not thread.is_alive()
        assert failed and not failed[0].source_is_bad


def test_a_version_given_up_under_a_reader_is_gone_and_its_source_not_accused():
    settings = replace(SETTINGS, num_deltas=0, grace_s=0.0)
    with stage() as on:
        server, peer = on.server(settings), on.peer()
        offer = publish(server, 1, 2_000_000)
        wire = on.wire(offer.addresses[0], Faults(bytes_per_s=2e6))
        thread = threading.Timer(0.3, lambda: [publish(server, version, 2_000_000) for version in (2, 3)])
        thread.start()
        with pytest.raises(TransferError) as failed:
            pull(peer, offer, (wire.address,))
        thread.join()
        assert not failed.value.source_is_bad
        assert peer.bad_sources == {}


@pytest.mark.parametrize(
    "said",
    [b"", b"GET / HTTP/1.1\r\n\r\n", b"\x01", protocol.hello(bytes(32)), protocol.hello(bytes(32)) + bytes(100)],
    ids=["nothing", "HTTP", "a byte", "half a handshake", "a wrong proof"],
)
def test_who_does_not_prove_itself_is_cut_and_told_nothing(said):
    settings = replace(SETTINGS, stall_s=0.3)
    with stage() as on:
        server = on.server(settings)
        offer = publish(server, 1)
        host, _, port = offer.addresses[0].rpartition(":")
        with socket.create_connection((host, int(port)), timeout=5) as sock:
            sock.sendall(said)
            answer = b""
            while data := sock.recv(4096):
                answer += data
        assert offer.digest.encode() not in answer and len(answer) < 200
        deadline = time.monotonic() + 2
        while not server.cuts and time.monotonic() < deadline:
            time.sleep(0.01)
        assert sum(server.cuts.values()) == 1
        assert pull(on.peer(), offer) == weights(1)


def test_a_client_that_trickles_is_cut():
    settings = replace(SETTINGS, stall_s=0.4)
    with stage() as on:
        server = on.server(settings)
        host, _, port = server.addresses[0].rpartition(":")
        start = time.monotonic()
        with socket.create_connection((host, int(port)), timeout=5) as sock, pytest.raises(OSError):
            for byte in protocol.hello(bytes(32)):
                sock.sendall(bytes([byte]))
                time.sleep(0.05)
        assert time.monotonic() - start < 2


def test_late_joiners_pull_while_others_do():
    with stage() as on:
        server = on.server()
        offer = publish(server, 1, 1_000_000)
        peers = [on.peer(number) for number in range(6)]
        got: dict[int, bool] = {}

        def run(number: int) -> None:
            time.sleep(0.02 * number)
            got[number] = pull(peers[number], offer) == weights(1, 1_000_000)

        threads = [threading.Thread(target=run, args=(number,)) for number in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert got == dict.fromkeys(range(6), True)


def test_whoever_has_no_key_cannot_keep_those_out_who_have(monkeypatch):
    monkeypatch.setattr(sender, "MAX_CONNECTIONS", 8)
    with stage() as on, ExitStack() as strangers:
        server, peer = on.server(), on.peer()
        offer = publish(server, 1)
        host, _, port = offer.addresses[0].rpartition(":")
        known = peer._dialer.dial(offer.addresses[0])
        strangers.callback(known.close)
        known.catalog()  # its proof has arrived; before that it is a stranger, too
        for _ in range(30):
            strangers.enter_context(socket.create_connection((host, int(port))))
        assert pull(peer, offer) == weights(1)
        assert known.catalog().blobs  # who has proved the key makes way for nobody
        assert server.cuts["too many connections, and no proof yet"] > 0


def test_the_egress_limit_holds():
    with stage() as on:
        server, peer = on.server(replace(SETTINGS, egress_mb_s=2.0)), on.peer()
        offer = publish(server, 1, 500_000)
        start = time.monotonic()
        assert pull(peer, offer) == weights(1, 500_000)
        assert 0.3 < time.monotonic() - start < 3


def test_groups_are_ports_and_workers_are_spread_over_them():
    with stage() as on:
        server = on.server(replace(SETTINGS, groups=3))
        offer = publish(server, 1)
        assert len(set(offer.addresses)) == 3
        used = []
        for number in range(3):
            wires = [on.wire(address) for address in offer.addresses]
            assert pull(on.peer(number), offer, tuple(wire.address for wire in wires)) == weights(1)
            used.append([wire.faults.num_bytes > NUM_BYTES for wire in wires])
        assert used == [[True, False, False], [False, True, False], [False, False, True]]


def test_keys_are_bytes_of_a_token():
    with stage() as on:
        key = weights_key_of("a token of this run")
        assert key != KEY
        assert pull(on.peer(key=key), publish(on.server(key=key), 1)) == weights(1)


def test_without_memory_for_a_delta_nobody_waits_for_it(monkeypatch, caplog):
    def refuse(num_bytes: int) -> Buffer:
        raise UserError(f"no memory for {num_bytes} bytes of weights")

    with stage() as on, caplog.at_level("WARNING", "polyrl.weights"):
        server, peer = on.server(), on.peer()
        pull(peer, [publish(server, version) for version in (1, 2)][-1])
        monkeypatch.setattr("polyrl.weights.server.Buffer", refuse)
        offer = publish(server, 3)
        before = server.num_bytes_sent
        assert pull(peer, offer) == weights(3)
        assert server.num_bytes_sent - before == offer.num_bytes
    assert "version 3 is offered without a delta: no memory for" in caplog.text
