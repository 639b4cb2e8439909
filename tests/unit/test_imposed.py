"""Imposed lengths: drawn from the sample's id alone, from the distribution that was asked for."""

import math
import statistics

import msgspec
import pytest

from polyrl.ids import GroupId, SampleId, sample_id
from polyrl.wire.imposed import ImposedLengths, length_of

CAP = 8192


def samples(num_groups: int, per_group: int) -> list[SampleId]:
    return [sample_id(GroupId(group), place) for group in range(1, num_groups + 1) for place in range(per_group)]


def test_lengths_have_the_median_and_the_spread_that_were_asked_for():
    imposed = ImposedLengths(median=600.0, sigma=0.5, correlation=0.0)
    lengths = [length_of(one, imposed, 1 << 30) for one in samples(2000, 4)]
    assert statistics.median(lengths) == pytest.approx(600, rel=0.03)
    quarters = statistics.quantiles(lengths, n=4)
    assert quarters[2] / quarters[0] == pytest.approx(2.718281828 ** (0.5 * 2 * 0.6745), rel=0.05)


def test_quantiles_are_met_and_nothing_is_longer_than_the_cap():
    imposed = ImposedLengths(quantiles=((0.05, 150), (0.5, 660), (0.95, 4100), (0.99, 16000)), correlation=0.0)
    lengths = sorted(length_of(one, imposed, CAP) for one in samples(3000, 4))
    assert lengths[len(lengths) // 2] == pytest.approx(660, rel=0.06)
    assert lengths[int(0.95 * len(lengths))] == pytest.approx(4100, rel=0.15)
    assert lengths[0] == 150
    assert lengths[-1] == CAP


@pytest.mark.parametrize(("correlation", "low", "high"), [(0.0, -0.1, 0.1), (0.5, 0.4, 0.6), (1.0, 0.999, 1.001)])
def test_samples_of_a_group_are_as_alike_as_was_asked_for(correlation: float, low: float, high: float):
    imposed = ImposedLengths(median=1e6, sigma=1.0, correlation=correlation)
    pairs = [[math.log(length_of(one, imposed, 1 << 60)) for one in samples(group, 2)[-2:]] for group in range(1, 1500)]
    assert low < statistics.correlation([a for a, _ in pairs], [b for _, b in pairs]) < high


def test_a_sample_has_one_length_wherever_it_is_asked():
    imposed = ImposedLengths()
    assert len({length_of(SampleId(77), imposed, CAP) for _ in range(3)}) == 1
    assert 1 <= length_of(SampleId(1), ImposedLengths(median=1e-3), CAP) == 1


@pytest.mark.parametrize(
    "wrong",
    [
        {"median": 0.5},
        {"median": math.nan},
        {"sigma": math.nan},
        {"correlation": -0.1},
        {"quantiles": [[0.9, 5], [0.1, 7]]},
        {"quantiles": [[0.5, 5], [0.5, 7]]},
        {"quantiles": [[0.1, 7], [0.9, 5]]},
        {"quantiles": [[-0.5, 5], [0.5, 7]]},
        {"quantiles": [[0.0, 5e-324], [1.0, 1e9]]},
        {"quantiles": [[0.5, math.nan]]},
    ],
    ids=str,
)
def test_what_is_no_distribution_is_refused_where_it_is_decoded(wrong: dict[str, object]):
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(msgspec.msgpack.encode(wrong), type=ImposedLengths)


@pytest.mark.parametrize(
    "odd",
    [
        ImposedLengths(quantiles=((0.5, 7),), correlation=0.0),
        ImposedLengths(quantiles=((0.0, 1.0), (1.0, 1e9)), correlation=1.0),
        ImposedLengths(median=1e9, sigma=10.0, correlation=0.5),
    ],
    ids=str,
)
def test_any_distribution_gives_lengths_between_one_and_the_cap(odd: ImposedLengths):
    assert all(1 <= length_of(one, odd, CAP) <= CAP for one in samples(500, 2))


def test_a_group_may_have_its_lengths_one_by_one():
    imposed = ImposedLengths(lengths=(30, 7, 9000))
    assert [length_of(sample_id(GroupId(3), place), imposed, CAP) for place in range(5)] == [30, 7, CAP, 30, 7]
