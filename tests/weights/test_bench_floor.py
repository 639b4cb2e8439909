"""The bare loop beside which a pull is measured moves the bytes that it says."""

from polyrl.bench import floor
from polyrl.weights.chunks import CHUNK_BYTES


def test_the_floor_of_a_pull_is_measured_step_by_step_at_both_ends():
    into = bytearray(5 * CHUNK_BYTES)
    found = floor.measure_into(memoryview(into), 1)
    assert into.count(1) == len(into)
    assert list(found) == ["one_place", "in_place", "in_place_hashed"]
    for step in found.values():
        assert step["gb_s"] > 0
        assert 0 < step["sender_cpu_s_per_gb"] < 100
        assert 0 < step["receiver_cpu_s_per_gb"] < 100


def test_a_size_that_is_no_multiple_of_a_chunk_is_rounded_down():
    assert floor.measure(CHUNK_BYTES + 1, 1).keys() == {step.name for step in floor.STEPS}
