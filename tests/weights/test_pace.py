"""A pace: over any stretch of time no more than the rate, and a short burst."""

import math

from hypothesis import given
from hypothesis import strategies as st

from polyrl.weights.pace import BURST_S, Pace


@given(st.lists(st.tuples(st.integers(1, 1000), st.floats(0, 0.1)), min_size=1, max_size=60), st.floats(10, 1e5))
def test_what_goes_stays_below_the_rate(sends, rate):
    pace, now, total = Pace(rate), 0.0, 0
    for num_bytes, idle_s in sends:
        now += idle_s
        now += pace.reserve(num_bytes, now)
        assert total <= rate * (now + BURST_S) * 1.000001
        total += num_bytes


def test_no_limit_never_waits():
    assert [Pace(0).reserve(1 << 40, 0.0) for _ in range(3)] == [0.0] * 3


@given(st.floats(1e5, math.inf))
def test_a_piece_is_soon_gone_and_never_more_than_fits(rate):
    assert 4096 <= Pace(rate).piece_bytes(1 << 18) <= min(1 << 18, max(4096, rate * BURST_S))
    assert Pace(0).piece_bytes(1 << 18) == 1 << 18
