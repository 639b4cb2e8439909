"""Weight transfers beside peers, where a peer is not installed."""

from benchmarks.environments import CannotMeasure
from benchmarks.weights import compare
from benchmarks.weights.peers import Iperf

OURS = {"pull_gb_s": 0.8, "pull_gb_s_by_streams": {"1": {"best": 0.8, "median": 0.6}}, "shared_memory_gb_s": 2.0}


def test_without_iperf3_there_is_no_ratio_to_it():
    assert compare.beside_iperf(OURS, {}) == {}


def test_ratios_are_to_the_best_of_iperf3():
    found = compare.beside_iperf(OURS, {"1": [Iperf(1.0, 0.5, 0.1), Iperf(1.6, 0.7, 0.2)]})
    assert (found["iperf3_gb_s"], found["ratio_to_iperf3"], found["ratio_of_best_medians"]) == (1.6, 0.5, 1.0)
    assert found["shared_memory_ratio_to_iperf3"] == 1.25


def test_a_peer_that_cannot_be_measured_leaves_a_note_and_no_figure():
    def missing(num_streams, seconds):
        raise CannotMeasure("iperf3 is not installed")

    notes: dict[str, str] = {}
    found: dict[str, list[Iperf]] = {}
    compare.add_iperf(found, 1, 1, notes, missing)
    assert found == {} and notes == {"iperf3": "iperf3 is not installed"}
