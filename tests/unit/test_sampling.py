"""How tokens are drawn: what the settings say together."""

import msgspec
import pytest

from polyrl.wire.frames import Sampling


@pytest.mark.parametrize("sampling", [Sampling(top_k=1), Sampling(top_p=0.99), Sampling(min_p=0.01)])
def test_any_of_top_k_top_p_and_min_p_truncates(sampling: Sampling):
    assert sampling.truncates


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0.0), Sampling(stop_ids=(1,), ignore_eos=True)])
def test_nothing_else_truncates(sampling: Sampling):
    assert not sampling.truncates


def test_an_empty_stop_string_is_not_taken_from_the_wire():
    with pytest.raises(msgspec.ValidationError, match="length >= 1"):
        msgspec.convert({"stop": ["done", ""]}, Sampling)
