"""What the builtin engine takes from its device, and what it is told."""

import pytest

from polyrl.engines.builtin.config import BuiltinConfig, Fit, choose_device, fit


@pytest.mark.parametrize(
    ("device", "own"),
    [("cpu", ("float32", 512)), ("cuda", ("bfloat16", 16_384)), ("cuda:1", ("bfloat16", 16_384))],
)
def test_a_device_has_its_own_sizes_and_what_is_given_wins(device, own):
    assert fit(BuiltinConfig(model="m"), device) == Fit(*own)
    given = BuiltinConfig(model="m", dtype="float16", chunk_tokens=100)
    assert fit(given, device) == Fit("float16", 100)


def test_a_device_that_is_named_is_taken():
    assert choose_device("cuda:3") == "cuda:3"
