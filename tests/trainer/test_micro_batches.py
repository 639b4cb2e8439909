"""When the loop has enough for a turn on the device."""

import pytest

from polyrl.config.recipe import TrainSection
from polyrl.trainer.loop import is_micro_batch


@pytest.mark.parametrize(
    ("num_samples", "num_tokens", "device_type", "is_one"),
    [
        (15, 1000, "cpu", False),
        (16, 1000, "cpu", True),
        (1, 16_384, "cpu", True),
        (500, 16_383, "cuda", False),  # part of a pack leaves a GPU idle
        (1, 16_384, "cuda", True),
    ],
)
def test_by_default_a_gpu_waits_for_a_full_pack(num_samples, num_tokens, device_type, is_one):
    assert is_micro_batch(num_samples, num_tokens, TrainSection(), device_type) == is_one


@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
def test_who_names_a_number_of_samples_gets_it(device_type):
    train = TrainSection(min_micro_batch_samples=64)
    assert not is_micro_batch(63, 1000, train, device_type)
    assert is_micro_batch(64, 1000, train, device_type)
    assert is_micro_batch(8, 16_384, train, device_type)
