"""How many samples of a round the trainer's own engine takes at once."""

import pytest

from polyrl.run.local_worker import num_slots


@pytest.mark.parametrize(("num_samples", "slots"), [(8, 8), (32, 32), (48, 32), (128, 64), (255, 128), (4096, 128)])
def test_on_a_cpu_half_of_a_round_is_left_for_workers_that_fetch_the_weights(num_samples: int, slots: int):
    assert num_slots(num_samples, "cpu") == slots


def test_on_a_gpu_it_takes_what_it_has_slots_for():
    assert [num_slots(num, "cuda") for num in (128, 4096)] == [128, 256]
