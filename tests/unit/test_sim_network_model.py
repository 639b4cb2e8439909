"""Transfers share egress and ingress, and a relay is no faster than its feed."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyrl.sim.network_model import NetworkModel

GB = 1e9


def network(**nodes: tuple[float, float]) -> NetworkModel:
    model = NetworkModel()
    for name, (egress, ingress) in nodes.items():
        model.set_node(name, egress, ingress)
    return model


def play(model: NetworkModel, until: float = 1e9) -> list[tuple[int, float]]:
    """Go from change to change, as the simulation does."""
    told = []
    while (at := model.next_change()) is not None and at <= until:
        told += model.advance(at)
    return told + model.advance(until)


def test_a_lone_transfer_goes_at_the_narrower_end():
    model = network(trainer=(200, 200), w1=(50, 50))
    model.start(1, 10.0, "trainer", "w1", 16 * GB)
    assert model.rate_gbps(1) == pytest.approx(50)
    assert play(model) == [(1, pytest.approx(10 + 16 * 8 / 50))]


def test_transfers_out_of_one_node_share_its_egress_and_speed_up_when_one_ends():
    model = network(trainer=(80, 80), w1=(80, 80), w2=(80, 80))
    model.start(1, 0.0, "trainer", "w1", 10 * GB)
    model.start(2, 0.0, "trainer", "w2", 20 * GB)
    # 40 Gb/s each for 2 s; then the second has 10 GB left at 80 Gb/s.
    assert play(model) == [(1, pytest.approx(2.0)), (2, pytest.approx(3.0))]
    assert model.sent_bytes("trainer") == pytest.approx(30 * GB)


def test_transfers_into_one_node_share_its_ingress():
    model = network(a=(100, 1), b=(100, 1), sink=(1, 80))
    model.start(1, 0.0, "a", "sink", 10 * GB)
    model.start(2, 0.0, "b", "sink", 10 * GB)
    assert play(model) == [(1, pytest.approx(2.0)), (2, pytest.approx(2.0))]


def test_a_relay_that_still_receives_is_no_faster_than_its_feed():
    model = network(trainer=(8, 8), w1=(80, 80), w2=(80, 80), w3=(80, 80))
    model.start(1, 0.0, "trainer", "w1", 2 * GB)
    model.start(2, 1.0, "w1", "w2", 2 * GB)
    model.start(3, 1.0, "w2", "w3", 2 * GB)
    assert model.rate_gbps(2) == model.rate_gbps(3) == pytest.approx(8)
    # From 2 s on nothing feeds w1: it sends its last 1 GB at 80 Gb/s, and w2 the same.
    assert play(model) == [(1, pytest.approx(2.0)), (2, pytest.approx(2.1)), (3, pytest.approx(2.1))]


def test_nodes_that_feed_each_other_do_not_wait_for_ever():
    model = network(w1=(8, 8), w2=(8, 8))
    model.start(1, 0.0, "w1", "w2", GB)
    model.start(2, 0.0, "w2", "w1", GB)
    assert play(model) == [(1, pytest.approx(1.0)), (2, pytest.approx(1.0))]


def test_a_cancelled_transfer_frees_its_share_and_its_bytes_stay_counted():
    model = network(trainer=(80, 80), w1=(80, 80), w2=(80, 80))
    model.start(1, 0.0, "trainer", "w1", 10 * GB)
    model.start(2, 0.0, "trainer", "w2", 10 * GB)
    assert model.cancel(1, 1.0) == pytest.approx(5 * GB)
    assert model.cancel(1, 1.0) is None
    assert play(model) == [(2, pytest.approx(1.5))]
    assert model.sent_bytes("trainer") == pytest.approx(15 * GB)
    assert model.next_change() is None


def test_bytes_on_the_way_are_counted():
    model = network(trainer=(80, 80), w1=(80, 80))
    model.start(1, 0.0, "trainer", "w1", 10 * GB)
    model.advance(0.25)
    assert model.sent_bytes("trainer") == pytest.approx(2.5 * GB)


def test_nothing_to_send_is_sent_at_once():
    model = network(trainer=(80, 80), w1=(80, 80))
    model.start(1, 5.0, "trainer", "w1", 0)
    assert model.next_change() == 5.0
    assert model.advance(5.0) == [(1, 5.0)]


def test_mistakes_of_the_caller_are_refused():
    model = network(trainer=(80, 80), w1=(80, 80))
    model.start(1, 0.0, "trainer", "w1", GB)
    with pytest.raises(ValueError, match="started twice"):
        model.start(1, 0.0, "trainer", "w1", GB)
    with pytest.raises(ValueError, match="'w9' is unknown"):
        model.start(2, 0.0, "trainer", "w9", GB)
    with pytest.raises(ValueError, match="above 0"):
        model.set_node("w2", 0, 1)


NAMES = ["trainer", "w1", "w2", "w3"]
pairs = st.tuples(st.sampled_from(NAMES), st.sampled_from(NAMES)).filter(lambda pair: pair[0] != pair[1])
transfers = st.lists(st.tuples(st.floats(0, 3), pairs, st.floats(0, 5)), max_size=10)
cancels = st.lists(st.tuples(st.floats(0, 6), st.integers(0, 9)), max_size=4)


def happen(transfers, cancels) -> tuple[NetworkModel, list[tuple[int, float]], dict[int, float]]:
    model = network(trainer=(20, 20), w1=(5, 5), w2=(5, 8), w3=(8, 5))
    wishes = [(at, "start", flow) for flow, (at, _, _) in enumerate(transfers)]
    wishes += [(at, "cancel", flow) for at, flow in cancels]
    told: list[tuple[int, float]] = []
    cancelled: dict[int, float] = {}
    for at, wish, flow in sorted(wishes, key=lambda entry: entry[0]):
        told += play(model, at)
        if wish == "start":
            _, (source, sink), size = transfers[flow]
            model.start(flow, at, source, sink, size * GB)
        elif (sent := model.cancel(flow, at)) is not None:
            cancelled[flow] = sent
    return model, told + play(model), cancelled


@given(transfers, cancels)
def test_every_transfer_ends_once_no_faster_than_the_wire_and_every_byte_is_counted(transfers, cancels):
    model, told, cancelled = happen(transfers, cancels)
    assert sorted([flow for flow, _ in told] + list(cancelled)) == list(range(len(transfers)))
    assert [at for _, at in told] == sorted(at for _, at in told)
    capacity = {"trainer": (20, 20), "w1": (5, 5), "w2": (5, 8), "w3": (8, 5)}
    for flow, at in told:
        began, (source, sink), size = transfers[flow]
        fastest_s = size * 8 / min(capacity[source][0], capacity[sink][1])
        assert at >= began + fastest_s - 1e-6
    sent = dict.fromkeys(NAMES, 0.0)
    for flow, (_, (source, _), size) in enumerate(transfers):
        sent[source] += cancelled[flow] if flow in cancelled else size * GB
    assert {name: model.sent_bytes(name) for name in NAMES} == pytest.approx(sent, abs=1)


@given(transfers, cancels)
def test_the_same_wishes_are_told_the_same_to_the_last_bit(transfers, cancels):
    assert happen(transfers, cancels)[1:] == happen(transfers, cancels)[1:]


def test_flows_over_a_regions_link_share_it_and_those_within_do_not_use_it():
    network = NetworkModel()
    network.set_node("trainer", 80.0, 80.0)
    network.set_link("eu", 8.0)
    for name in ("a", "b"):
        network.set_node(name, 80.0, 80.0, "eu")
    network.start(1, 0.0, "trainer", "a", 1e9)
    network.start(2, 0.0, "trainer", "b", 1e9)
    assert (network.rate_gbps(1), network.rate_gbps(2)) == (4.0, 4.0)
    network.cancel(2, 0.0)
    assert network.rate_gbps(1) == 8.0
    network.cancel(1, 0.0)
    network.start(3, 0.0, "a", "b", 1e9)
    assert network.rate_gbps(3) == 80.0
