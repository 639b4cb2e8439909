"""The chain that is taken leads from what is held to what is wanted, and none costs fewer bytes."""

from itertools import pairwise, permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyrl.weights.chains import Chain, Delta, Full, cheapest


def delta(base, target, num_bytes):
    return Delta(f"{base}-{target}", base, target, num_bytes)


WINDOW = [
    Full("v9", 1000),
    delta("v8", "v9", 10),
    delta("v7", "v8", 10),
    delta("v7", "v9", 15),
    delta("v1", "v9", 2000),
]


def test_who_holds_the_version_before_takes_one_delta():
    assert cheapest(["v8"], "v9", WINDOW) == Chain((delta("v8", "v9", 10),), 10)


def test_a_direct_delta_beats_two_that_cost_more_together():
    assert cheapest(["v7"], "v9", WINDOW) == Chain((delta("v7", "v9", 15),), 15)


def test_two_deltas_beat_a_direct_one_that_costs_more():
    offers = [delta("v7", "v8", 10), delta("v8", "v9", 10), delta("v7", "v9", 21)]
    assert cheapest(["v7"], "v9", offers) == Chain((delta("v7", "v8", 10), delta("v8", "v9", 10)), 20)


def test_of_ways_with_the_same_bytes_the_shorter_is_taken():
    offers = [delta("v7", "v8", 10), delta("v8", "v9", 10), delta("v7", "v9", 20)]
    assert cheapest(["v7"], "v9", offers) == Chain((delta("v7", "v9", 20),), 20)


@pytest.mark.parametrize("held", [[], ["v1"], ["unknown"]])
def test_the_full_version_is_taken_where_deltas_cost_more_or_lead_nowhere(held):
    assert cheapest(held, "v9", WINDOW) == Chain((Full("v9", 1000),), 1000)


def test_an_older_full_version_and_a_delta_serve_a_newcomer_when_the_newest_is_not_offered_in_full():
    offers = [Full("v8", 1000), delta("v8", "v9", 10)]
    assert cheapest([], "v9", offers) == Chain((Full("v8", 1000), delta("v8", "v9", 10)), 1010)


def test_what_is_held_needs_nothing():
    assert cheapest(["v8", "v9"], "v9", WINDOW) == Chain((), 0)


def test_nothing_leads_to_a_version_that_nobody_offers():
    assert cheapest(["v8"], "v10", WINDOW) is None
    assert cheapest(["v8"], "v10", [delta("v8", "v8", 0), delta("v9", "v10", 1)]) is None


def test_offers_that_bear_each_others_names_are_told_apart():
    offers = [Full("a", 1), Delta("a", "z", "a", 1), Delta("a", "", "a", 1)]
    assert cheapest(["z", ""], "a", offers) == cheapest(["", "z"], "a", offers[::-1])


names = st.sampled_from("abcde")
offers = st.lists(
    st.one_of(
        st.builds(Full, names, st.integers(0, 50)),
        st.builds(delta, names, names, st.integers(0, 50)),
    ),
    max_size=10,
)


def fewest_bytes(held, target, found):
    """By trying all ways of up to four steps, which is as long as a way through five versions gets."""
    if target in held:
        return 0
    best = None
    for start in [*held, None]:
        for length in range(5):
            for middle in permutations([name for name in "abcde" if name != target], length):
                path = [start, *middle, target]
                costs = [cost_of(base, to, found) for base, to in pairwise(path)]
                total = None if None in costs else sum(cost for cost in costs if cost is not None)
                best = total if best is None else best if total is None else min(best, total)
    return best


def cost_of(base, target, found):
    costs = [
        one.num_bytes
        for one in found
        if one.target == target and (one.base == base if isinstance(one, Delta) else base is None)
    ]
    return min(costs, default=None)


@given(st.lists(names, max_size=2), names, offers)
def test_the_way_leads_there_and_no_other_is_cheaper(held, target, found):
    chain = cheapest(held, target, found)
    best = fewest_bytes(held, target, found)
    if chain is None:
        assert best is None
        return
    assert chain.num_bytes == sum(step.num_bytes for step in chain.steps) == best
    place = None
    for step in chain.steps:
        assert step in found
        if isinstance(step, Delta):
            assert step.base == place or (place is None and step.base in held)
        place = step.target
    assert place == target or (not chain.steps and target in held)
    assert cheapest(held[::-1], target, found[::-1]) == chain
