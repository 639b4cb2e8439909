"""Which version may write for which step: the two rules are two views of one."""

from hypothesis import given
from hypothesis import strategies as st

from polyrl.ids import Step, Version
from polyrl.scheduling.staleness import newest_step, oldest_version


def test_strictly_on_policy_a_step_is_written_by_its_own_version():
    assert oldest_version(Step(5), 0) == 5
    assert newest_step(Version(5), 0) == 5


def test_with_staleness_two_a_step_may_hold_tokens_two_versions_old():
    assert oldest_version(Step(5), 2) == 3
    assert newest_step(Version(3), 2) == 5


def test_the_first_steps_are_written_by_the_first_version():
    assert oldest_version(Step(1), 3) == 0


@given(st.integers(0, 1000), st.integers(0, 1000), st.integers(0, 5))
def test_a_round_may_open_exactly_when_the_published_version_may_write_for_it(step, published, staleness):
    may_open = step <= newest_step(Version(published), staleness)
    assert may_open == (published >= oldest_version(Step(step), staleness))
