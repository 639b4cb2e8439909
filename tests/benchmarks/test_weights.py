"""`polyrl bench weights` where a peer is not installed."""

from benchmarks.weights import compare


def test_without_iperf3_there_are_pulls_and_no_ratio_to_it():
    result = compare.summary({}, {"1": [0.5, 0.7]}, [0.1], [0.2])
    assert result["pull_gb_s"] == 0.7
    assert not [name for name in result if "iperf" in name]


def test_a_peer_that_cannot_be_measured_leaves_a_note_and_no_figure():
    def missing(num_streams, seconds):
        raise compare.peers.CannotMeasure("iperf3 is not installed")

    notes: dict[str, str] = {}
    found: dict[str, list[compare.peers.Iperf]] = {}
    compare.add_iperf(found, 1, 1, notes, missing)
    assert found == {} and notes == {"iperf3": "iperf3 is not installed"}
