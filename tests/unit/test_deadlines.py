"""Waits: the earliest comes first, a deadline that moves is found where it moved to, a cleared one never fires."""

from hypothesis import given
from hypothesis import strategies as st

from polyrl.scheduling.core.deadlines import Deadlines, Wait

HEARTBEAT: Wait = ("heartbeat", 1)
PULL: Wait = ("pull", 1)


def test_nothing_is_due_when_nothing_is_waited_for():
    deadlines = Deadlines()
    assert deadlines.earliest() is None
    assert deadlines.pop_due(1e9) is None


def test_the_earliest_wait_comes_first_and_only_when_it_is_over():
    deadlines = Deadlines()
    deadlines.set(PULL, 9.0)
    deadlines.set(HEARTBEAT, 3.0)
    assert deadlines.earliest() == 3.0
    assert deadlines.pop_due(2.9) is None
    assert deadlines.pop_due(3.0) == HEARTBEAT
    assert deadlines.pop_due(3.0) is None
    assert deadlines.earliest() == 9.0


def test_a_deadline_pushed_back_fires_once_and_later():
    deadlines = Deadlines()
    deadlines.set(HEARTBEAT, 3.0)
    deadlines.entries[HEARTBEAT] = 5.0
    assert deadlines.pop_due(4.0) is None
    assert deadlines.pop_due(5.0) == HEARTBEAT
    assert deadlines.pop_due(99.0) is None


def test_a_deadline_pulled_forward_fires_earlier():
    deadlines = Deadlines()
    deadlines.set(PULL, 9.0)
    deadlines.set(PULL, 2.0)
    assert deadlines.earliest() == 2.0


def test_a_cleared_deadline_never_fires_and_clearing_twice_is_no_error():
    deadlines = Deadlines()
    deadlines.set(PULL, 2.0)
    deadlines.clear(PULL)
    deadlines.clear(PULL)
    assert deadlines.earliest() is None
    deadlines.set(PULL, 7.0)
    assert deadlines.earliest() == 7.0


def test_waits_that_end_together_come_in_one_order_however_they_were_set():
    waits: list[Wait] = [("stall", 2), ("heartbeat", 9), ("heartbeat", 1), ("balance", 0)]
    orders = []
    for sequence in (waits, waits[::-1]):
        deadlines = Deadlines()
        for wait in sequence:
            deadlines.set(wait, 1.0)
        orders.append([deadlines.pop_due(1.0) for _ in waits])
    assert orders[0] == orders[1] == sorted(waits)


moves = st.lists(
    st.tuples(st.sampled_from(["set", "clear", "pop"]), st.integers(0, 4), st.integers(0, 20)), max_size=60
)


@given(moves)
def test_whatever_is_set_and_cleared_a_rebuilt_heap_tells_the_same(steps):
    deadlines = Deadlines()
    for action, key, at in steps:
        if action == "set":
            deadlines.set(("pull", key), float(at))
        elif action == "clear":
            deadlines.clear(("pull", key))
        else:
            rebuilt = Deadlines(dict(deadlines.entries))
            assert rebuilt.pop_due(at) == deadlines.pop_due(at)
        assert deadlines.earliest() == min(deadlines.entries.values(), default=None)
