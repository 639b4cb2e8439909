"""A host makes its calls more slowly than what the manager takes for a flood."""

import pytest

from polyrl.hosts.pace import CallPace
from polyrl.wire.host_frames import FRAMES_A_SECOND, FRAMES_AT_ONCE, LEAST_EPISODES


@pytest.mark.parametrize("num_episodes", [1, 8, 100])
def test_calls_in_a_loop_come_at_half_the_rate_that_the_manager_takes(num_episodes: int):
    pace, now = CallPace(), 10.0
    num = 5000
    for _ in range(num):
        now += pace.wait_s(now, num_episodes)
    allowed = FRAMES_A_SECOND * max(LEAST_EPISODES, num_episodes)
    assert num - FRAMES_AT_ONCE <= (now - 10.0) * allowed
    assert now - 10.0 == pytest.approx((num - FRAMES_AT_ONCE / 2) / (allowed / 2), rel=0.01)


def test_calls_at_a_pace_of_their_own_do_not_wait():
    pace = CallPace()
    assert all(pace.wait_s(at / 100, 1) == 0.0 for at in range(5000))
