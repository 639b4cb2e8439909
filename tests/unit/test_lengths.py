"""The survival function of answer lengths, from samples that finished and samples that were cut off."""

import bisect
import math
from itertools import pairwise

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyrl.scheduling.rules.lengths import EDGES, LengthModel
from polyrl.scheduling.rules.order import unit

# Published lengths of math answers, 14B with a 16k cap (docs/concepts/tail-batching.md#lengths).
MATH = [(0.0, 50), (0.05, 151), (0.25, 415), (0.5, 661), (0.75, 1129), (0.9, 2566), (0.95, 4101), (0.99, 16384)]

observations = st.lists(st.tuples(st.integers(0, 2**21), st.booleans()), max_size=300)


def math_length(share: float) -> int:
    i = min(bisect.bisect_right([q for q, _ in MATH], share), len(MATH) - 1)
    (q0, x0), (q1, x1) = MATH[i - 1], MATH[i]
    return int(x0 * (x1 / x0) ** min(1.0, (share - q0) / (q1 - q0)))


def learned(samples: list[tuple[int, bool]]) -> LengthModel:
    model = LengthModel()
    for num_tokens, finished in samples:
        model.observe(num_tokens, finished=finished)
    model.age(1.0)
    return model


@given(samples=observations, xs=st.lists(st.floats(0, 2**22), min_size=2, max_size=20))
def test_survival_starts_at_one_and_never_rises(samples, xs):
    model = learned(samples)
    shares = [model.survival(x) for x in sorted(xs)]
    assert model.survival(0) == 1.0
    assert all(0.0 <= after <= before <= 1.0 for before, after in pairwise(shares))


@given(lengths=st.lists(st.integers(2, 2**20 - 1), min_size=1, max_size=200))
def test_without_cut_samples_survival_is_the_share_that_was_longer(lengths):
    model = learned([(x, True) for x in lengths])
    for edge in EDGES[::8]:
        assert model.survival(edge) == pytest.approx(sum(x >= edge for x in lengths) / len(lengths), abs=1e-9)


def test_cut_samples_do_not_make_answers_look_short():
    """Half of all samples are aborted somewhere before 3,000 tokens, as races do."""
    samples, finished_only = [], []
    for i in range(20_000):
        length, cut_at = math_length(unit(1, i)), int(3_000 * unit(2, i)) if i % 2 else 16_384
        samples.append((min(length, cut_at), length <= cut_at))
        if length <= cut_at:
            finished_only.append((length, True))
    model, naive = learned(samples), learned(finished_only)
    for share, length in MATH[1:-1]:
        assert model.quantile(share) == pytest.approx(length, rel=0.08)
    assert model.survival(16_000) == pytest.approx(0.011, abs=0.004)
    assert naive.quantile(0.9) < 0.85 * 2566


def test_the_mean_under_a_cap_and_what_remains_agree_with_the_samples():
    lengths = [math_length(unit(3, i)) for i in range(20_000)]
    model = learned([(x, x < 16_384) for x in lengths])
    assert model.mean(16_384) == pytest.approx(sum(lengths) / len(lengths), rel=0.02)
    left = [x - 2_000 for x in lengths if x > 2_000]
    assert model.expected_remaining(2_000, 16_384) == pytest.approx(sum(left) / len(left), rel=0.03)
    left = [min(x, 4_000) - 2_000 for x in lengths if x > 2_000]
    assert model.expected_remaining(2_000, 4_000) == pytest.approx(sum(left) / len(left), rel=0.03)


def test_the_longer_an_answer_of_a_heavy_tail_already_is_the_more_remains():
    model = learned([(math_length(unit(4, i)), True) for i in range(5_000)])
    remaining = [model.expected_remaining(x, 16_384) for x in (700, 1_500, 3_000)]
    assert remaining == sorted(remaining)


def test_with_nothing_known_half_of_the_room_to_the_cap_remains():
    model = LengthModel()
    assert model.expected_remaining(0, 8_192) == 4_096
    assert model.mean(8_192) == 4_096
    assert model.survival(5_000) == 1.0
    assert model.quantile(0.5) == math.inf
    beyond = learned([(100, True)] * 50)
    assert beyond.expected_remaining(4_096, 8_192) == 2_048


@given(samples=observations, num_tokens=st.integers(0, 2**21), cap=st.integers(1, 2**21))
def test_what_remains_is_never_negative_and_never_passes_the_cap(samples, num_tokens, cap):
    remaining = learned(samples).expected_remaining(num_tokens, cap)
    assert 0.0 <= remaining <= max(0, cap - num_tokens)


@given(samples=observations.filter(len), q=st.floats(0, 1))
def test_no_more_than_the_rest_survives_a_quantile(samples, q):
    model = learned(samples)
    length = model.quantile(q)
    assert length == math.inf or model.survival(length) <= 1.0 - q + 1e-9


def test_lengths_that_nobody_was_seen_to_finish_have_no_quantile():
    model = learned([(500, True)] * 90 + [(8_192, False)] * 10)
    assert model.quantile(0.5) == pytest.approx(500, rel=0.09)
    assert model.quantile(0.95) == math.inf
    assert model.survival(100_000) == pytest.approx(0.1)


def test_ageing_lets_new_lengths_win():
    model = learned([(500, True)] * 1_000)
    for _ in range(20):
        model.age(0.8)
        for _ in range(50):
            model.observe(4_000, finished=True)
    assert model.quantile(0.5) == pytest.approx(4_000, rel=0.09)
    assert model.num_observed == 2_000


@given(samples=observations, factor=st.floats(0.1, 1.0))
def test_ageing_alone_keeps_the_shape(samples, factor):
    model = learned(samples)
    before = [model.survival(x) for x in EDGES]
    model.age(factor)
    assert [model.survival(x) for x in EDGES] == pytest.approx(before, abs=1e-9)


@pytest.mark.parametrize("factor", [-0.1, 1.1, math.nan])
def test_a_factor_outside_zero_to_one_is_refused(factor):
    with pytest.raises(ValueError, match="factor"):
        LengthModel().age(factor)


@given(before=observations, after=observations)
def test_a_model_saved_and_loaded_goes_on_like_the_one_that_was_not(before, after):
    model = LengthModel()
    for num_tokens, finished in before:
        model.observe(num_tokens, finished=finished)
    loaded = msgspec.msgpack.decode(msgspec.msgpack.encode(model), type=LengthModel)
    assert loaded == model
    for num_tokens, finished in after:
        assert loaded.expected_remaining(num_tokens, 2**20) == model.expected_remaining(num_tokens, 2**20)
        model.observe(num_tokens, finished=finished)
        loaded.observe(num_tokens, finished=finished)
    assert loaded == model


def test_reading_changes_nothing():
    model = LengthModel()
    for i in range(1_000):
        model.observe(i, finished=True)
    before = msgspec.msgpack.encode(model)
    _ = (model.survival(10), model.quantile(0.9), model.mean(4096), model.expected_remaining(500, 4096))
    assert msgspec.msgpack.encode(model) == before


def test_readers_lag_by_at_most_an_eighth_or_256_samples():
    model = LengthModel()
    for i in range(10_000):
        model.observe(100, finished=True)
        num_unseen = len(model.unseen_finished) + len(model.unseen_cut)
        assert num_unseen < 256
        assert num_unseen * 8 < i + 1
