"""Answers of drawn lengths instead of the model's own, so that any model shows a realistic tail. Pure.

The length of a sample is a function of its id alone: a moved sample keeps its length. Samples of a group are alike, by
a Gaussian copula: part of the draw is the group's. A group's lengths may be given one by one instead.
"""

from itertools import pairwise
from math import exp, log
from statistics import NormalDist
from typing import Annotated

from msgspec import Meta, Struct

from polyrl.ids import SampleId, group_of, index_of
from polyrl.scheduling.rules.lengths import interpolate
from polyrl.scheduling.rules.order import mix64

_NORMAL = NormalDist()
_GROUPS, _SAMPLES = 0x1E46, 0x5A3B
"""Two streams of draws."""

Share = Annotated[float, Meta(ge=0, le=1)]
FloatTokens = Annotated[float, Meta(ge=1, le=1e9)]


class ImposedLengths(Struct, frozen=True, gc=False, forbid_unknown_fields=True):
    """Lognormal, unless there are quantiles."""

    median: FloatTokens = 650.0
    sigma: Annotated[float, Meta(ge=0, le=10)] = 0.9
    quantiles: tuple[tuple[Share, FloatTokens], ...] = ()
    """[probability, tokens], both rising; below the first and above the last, those."""
    correlation: Share = 0.2
    lengths: tuple[Annotated[int, Meta(ge=1, lt=1 << 31)], ...] = ()
    """Lengths of a group's samples, in their order, in place of drawn ones. Fewer than samples: they repeat."""

    def __post_init__(self) -> None:
        for earlier, later in pairwise(self.quantiles):
            if later[0] <= earlier[0] or later[1] < earlier[1]:
                raise ValueError(f"quantiles: {list(later)} does not rise above {list(earlier)}")


def length_of(sample: SampleId, imposed: ImposedLengths, cap: int) -> int:
    """Return how many tokens the sample's answer has."""
    if imposed.lengths:
        return min(cap, imposed.lengths[index_of(sample) % len(imposed.lengths)])
    rho = imposed.correlation
    z = rho**0.5 * _draw(_GROUPS, group_of(sample)) + (1.0 - rho) ** 0.5 * _draw(_SAMPLES, sample)
    if not imposed.quantiles:
        wanted = imposed.median * 2.718281828459045 ** (imposed.sigma * z)
    else:
        wanted = exp(interpolate([(share, log(tokens)) for share, tokens in imposed.quantiles], _NORMAL.cdf(z)))
    return max(1, min(cap, round(wanted)))


def _draw(stream: int, number: int) -> float:
    """Draw a standard normal number."""
    return _NORMAL.inv_cdf(((mix64(stream, number) >> 11) + 0.5) / (1 << 53))
