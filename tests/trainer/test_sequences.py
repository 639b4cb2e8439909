"""From an episode's calls to training sequences."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.trainer.episodes import ORIGIN, Played, delivered, group_of

from polyrl.client import Group
from polyrl.trainer.batch import TrainSegment, check_samples
from polyrl.trainer.reports import make_report
from polyrl.trainer.sequences import TrainingSequence, make_sequences, train_samples
from polyrl.trainer.step_stats import StepStats
from polyrl.wire.frames import Segment

P, A, B, C = [1, 2, 3], [10, 11], [20], [30, 31, 32]


def sequences_of(*calls: tuple[list[int], list[int]]) -> list[tuple[list[int], list[int]]]:
    """The tokens of each sequence, and a mask of what is trained."""
    sample = delivered(Played(calls))
    found = make_sequences(sample.calls, sample.tokens)
    return [(one.tokens.tolist(), mask(one)) for one in found]


def mask(one: TrainingSequence) -> list[int]:
    return np.isin(np.arange(len(one.tokens)), one.trained).astype(int).tolist()


def test_a_conversation_that_goes_on_is_one_sequence():
    assert sequences_of((P, A), ([*P, *A, 7], B), ([*P, *A, 7, *B], C)) == [
        ([*P, *A, 7, *B, *C], [0, 0, 0, 1, 1, 0, 1, 1, 1, 1])
    ]


def test_of_a_fork_the_shared_answer_is_trained_in_the_first_sequence_alone():
    assert sequences_of((P, A), ([*P, *A, 7], B), ([*P, *A, 8], C)) == [
        ([*P, *A, 7, *B], [0, 0, 0, 1, 1, 0, 1]),
        ([*P, *A, 8, *C], [0, 0, 0, 0, 0, 0, 1, 1, 1]),
    ]


def test_a_call_goes_on_with_the_longest_sequence_that_it_begins_with():
    short, long = (P, A), ([*P, *A[:1]], [11, 40])
    assert sequences_of(short, long, ([*P, *A, 40, 9], B)) == [
        ([*P, *A], [0, 0, 0, 1, 1]),
        ([*P, *A, 40, 9, *B], [0, 0, 0, 0, 1, 1, 0, 1]),
    ]


def test_a_prompt_with_one_other_token_or_one_less_begins_a_sequence():
    assert len(sequences_of((P, A), ([*P, 10, 99, 7], B))) == 2
    assert len(sequences_of((P, A), ([*P, 10], B))) == 2
    assert len(sequences_of((P, A), (P, A))) == 2, "the same prompt, asked again"
    assert len(sequences_of((P, A), ([*P, *A], B))) == 1, "nothing was given in between"


def test_calls_without_drawn_tokens_contribute_nothing():
    assert sequences_of((P, []), ([5], A), ([5, *A, 6], []), ([5, *A, 6, 7], B)) == [
        ([5, *A, 6, 7, *B], [0, 1, 1, 0, 0, 1])
    ]
    assert sequences_of((P, [])) == []


tokens = st.lists(st.integers(0, 2), max_size=4)


@st.composite
def histories(draw: st.DrawFn) -> list[tuple[list[int], list[int]]]:
    """Calls over three token ids, so that prompts begin with each other by chance too."""
    calls: list[tuple[list[int], list[int]]] = []
    for _ in range(draw(st.integers(1, 8))):
        base: list[int] = []
        if calls and draw(st.booleans()):
            prompt, drawn = draw(st.sampled_from(calls))
            base = [*prompt, *drawn]
            base = base[: draw(st.integers(0, len(base)))] if draw(st.booleans()) else base
        calls.append(([*base, *draw(tokens)] or [0], draw(tokens)))
    return calls


@given(histories())
def test_each_drawn_token_is_trained_once_after_exactly_what_the_policy_saw(calls):
    sample = delivered(Played(calls))
    found = make_sequences(sample.calls, sample.tokens)
    assert len(found) <= sum(bool(drawn) for _, drawn in calls)
    saw = [[*prompt, *drawn[:at]] for prompt, drawn in calls for at in range(len(drawn))]
    trained: list[int] = []
    for one in found:
        assert len(one.trained) == len(one.order) and one.trained[-1] == len(one.tokens) - 1
        for position, number in zip(one.trained.tolist(), one.order.tolist(), strict=True):
            assert one.tokens[position] == sample.tokens[number]
            assert one.tokens[:position].tolist() == saw[number]
            trained.append(number)
    assert sorted(trained) == list(range(len(saw)))


@given(histories())
def test_what_an_episode_becomes_can_be_trained_on(calls):
    group = group_of([Played(calls), Played(calls[::-1])])
    check_samples([group])
    assert sum(one.num_drawn for one in group) == 2 * sum(len(drawn) for _, drawn in calls)


def test_log_probabilities_and_writers_go_with_their_tokens():
    calls = [(P, A), ([*P, *A, 7], B), ([9], C), ([*P, *A, 7, *B, 8], [50])]
    segments = [
        Segment(0, 4, "w", engine="e"),
        Segment(1, 4, "w", engine="e"),
        Segment(3, 5, "v", engine="e"),
        Segment(6, 6, "v", engine="e"),
    ]
    played = Played(calls, logprobs=[-0.1, -0.2, -0.3, -0.4, -0.5, -0.6, -0.7], segments=segments)
    first, second = group_of([Played([(P, A)]), played])[1:]
    assert first.logprobs.tolist() == pytest.approx([-0.1, -0.2, -0.3, -0.7])
    assert second.logprobs.tolist() == pytest.approx([-0.4, -0.5, -0.6])
    assert first.order is not None and first.order.tolist() == [0, 1, 2, 6]
    assert first.drawn is not None and first.drawn.tolist() == [0, 1, 3, 5]
    assert (first.episode, second.episode, second.drawn) == (1, 1, None)
    assert first.written_by == (TrainSegment(4, 3, "e", "w"), TrainSegment(6, 1, "e", "v"))
    assert second.written_by == (TrainSegment(5, 3, "e", "v"),)


def test_an_episode_of_one_call_is_what_a_single_answer_is():
    sample = delivered(Played([(P, A)], 0.5, "length", [-0.1, -0.2]))
    single = sample._replace(calls=())
    (one,) = train_samples(Group(0, 4, (sample,), ORIGIN), lambda: np.array([0], np.int32))
    (other,) = train_samples(Group(0, 4, (single,), ORIGIN), lambda: np.array(P, np.int32))
    for name in one._fields:
        mine, its = getattr(one, name), getattr(other, name)
        assert np.array_equal(mine, its) if isinstance(its, np.ndarray) else mine == its, name


def test_answers_that_no_call_received_are_not_trained():
    sample = delivered(Played([(P, A), ([9], B)], logprobs=[-0.1, -0.2, -0.3]))
    sample = sample._replace(calls=sample.calls[1:])
    (one,) = train_samples(Group(0, 0, (sample,), ORIGIN), lambda: np.array([0], np.int32))
    assert one.answer.tolist() == B and one.logprobs.tolist() == pytest.approx([-0.3])


def test_answers_that_the_environment_does_not_pay_for_are_context_where_they_were_seen_and_nothing_elsewhere():
    """As of a user whom the policy plays too: verifiers' user-sim."""
    calls, logprobs = [(P, A), ([9, *A], B), ([*P, *A, *B], C)], [-0.1 * n for n in range(1, 7)]
    (one,) = group_of([Played(calls, logprobs=logprobs, untrained=[1])])
    assert [*one.prompt.tolist(), *one.answer.tolist()] == [*P, *A, *B, *C]
    assert one.drawn is not None and one.drawn.tolist() == [0, 1, 3, 4, 5]
    assert one.logprobs.tolist() == pytest.approx([-0.1, -0.2, -0.4, -0.5, -0.6])
    assert group_of([Played(calls, untrained=range(3))]) == []


def test_an_episode_in_which_nothing_was_drawn_is_left_out_of_its_group():
    nothing = delivered(Played([(P, [])]))
    group = Group(0, 0, (nothing, nothing._replace(calls=()), delivered(Played([(P, A)]))), ORIGIN)
    (one,) = train_samples(group, lambda: np.array(P, np.int32))
    assert one.answer.tolist() == A


def test_a_report_counts_the_training_sequences_of_episodes_that_branch():
    branched = Played([([1, 2], [3]), ([1, 2, 3, 4], [5]), ([1, 2, 3, 6], [7])])  # the last forks from the first
    straight = Played([([1, 2], [3]), ([1, 2, 3, 4], [5])])
    groups = [group_of([branched, straight])]
    report = make_report(StepStats(0, None, {}), [groups], {}, [], {})  # type: ignore[arg-type]
    assert (report.num_sequences, len(report.rewards)) == (3, 2)
