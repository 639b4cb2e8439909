"""Ids: a sample's id holds its group's, and people read and write it as GROUP/INDEX."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyrl.ids import MAX_SAMPLES_PER_GROUP, GroupId, group_of, index_of, parse_sample, sample_id, show_sample

groups = st.integers(min_value=0, max_value=2**50).map(GroupId)
indices = st.integers(min_value=0, max_value=MAX_SAMPLES_PER_GROUP - 1)


@given(groups, indices)
def test_a_sample_knows_its_group_and_its_index(group, index):
    sample = sample_id(group, index)
    assert (group_of(sample), index_of(sample)) == (group, index)


@given(groups, indices)
def test_what_is_shown_reads_back_as_the_same_sample(group, index):
    sample = sample_id(group, index)
    assert show_sample(sample) == f"{group}/{index}"
    assert parse_sample(show_sample(sample)) == sample


@given(groups, indices, groups, indices)
def test_two_samples_share_an_id_only_if_they_are_the_same(group, index, other_group, other_index):
    same = (group, index) == (other_group, other_index)
    assert (sample_id(group, index) == sample_id(other_group, other_index)) == same


@pytest.mark.parametrize("text", ["", "12", "12/", "/3", "a/3", "12/b", "-1/3", "1/2/3", f"1/{MAX_SAMPLES_PER_GROUP}"])
def test_what_is_not_a_sample_is_refused_with_an_example(text):
    with pytest.raises(ValueError, match="for example 12/3"):
        parse_sample(text)
