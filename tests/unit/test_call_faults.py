"""Calls of an episode that cannot be trained on are found before anybody trains on them."""

import numpy as np
import pytest

from polyrl.client.checking import find_call_fault


def call(prompt: list[int], start: int, end: int) -> tuple[np.ndarray, int, int, str, bool]:
    return np.array(prompt, np.int32), start, end, "stop", True


def test_calls_that_follow_one_another_have_no_fault_also_where_tokens_are_left_out():
    assert find_call_fault([call([1, 2], 0, 3), call([1, 2, 5, 5, 5, 9], 3, 3), call([7], 4, 6)], 7, vocab=10) is None


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        (call([], 2, 3), "call 1 has no prompt"),
        (call([1, 10], 2, 3), "the prompt of call 1: token id 10; expected 0 to 9, the vocabulary's"),
        (call([-1], 2, 3), "the prompt of call 1: token id -1; expected 0 to 9, the vocabulary's"),
        (call([1], 1, 3), "call 1 has tokens 1 to 3 of 5, after 2"),
        (call([1], 4, 3), "call 1 has tokens 4 to 3 of 5, after 2"),
        (call([1], 2, 6), "call 1 has tokens 2 to 6 of 5, after 2"),
    ],
)
def test_a_call_that_cannot_be_is_named_and_no_worker_is_blamed(wrong, why):
    fault = find_call_fault([call([1], 0, 2), wrong], 5, vocab=10)
    assert fault is not None and not fault.is_lie
    assert str(fault) == why
