"""The laws hold for episodes in every history: hosts die, drain, hang and lie between any two calls."""

import pytest

from tests.properties.halves import first_seeds
from tests.properties.hosts import EpisodeWorld

CHUNK = 25


@pytest.mark.parametrize("first", first_seeds(200, CHUNK))
def test_all_laws_hold_where_environments_are_played_and_the_run_goes_on_when_the_world_is_fair(first):
    for seed in range(first, first + CHUNK):
        EpisodeWorld(seed).play(250)


def test_the_worlds_reach_every_end_of_an_episode():
    ends: dict[str, int] = {}
    lost = judged = 0
    for seed in range(40):
        world = EpisodeWorld(seed)
        world.play(250)
        ledger = world.scheduler.ledger
        for outcome, num in ledger.episodes_ended.items():
            ends[outcome] = ends.get(outcome, 0) + num
        lost += sum(line.num_losses for line in ledger.hosts.values())
        judged += len(world.judged & world.rewarded)
        assert ledger.num_calls > 0
    assert set(ends) == {"scored", "failed", "timed_out"}
    assert lost > 20 and judged > 20
