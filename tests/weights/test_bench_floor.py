"""The bare loop beside which a pull is measured moves the bytes that it says."""

from polyrl.cli.bench_weights import floor
from polyrl.weights.chunks import CHUNK_BYTES


def test_the_floor_of_a_pull_is_measured_step_by_step_at_both_ends():
    found = floor.measure(5 * CHUNK_BYTES, 1)
    assert list(found) == ["one_place", "in_place", "in_place_hashed"]
    for step in found.values():
        assert step["gb_s"] > 0
        assert 0 < step["sender_cpu_s_per_gb"] < 100
        assert 0 < step["receiver_cpu_s_per_gb"] < 100
