"""Drawing the next tokens: from logits and one random number a sample, which is a function of (seed, position) alone.

So a sample that moves to another worker, or runs in another batch, goes on with the same random stream. The number
cuts the cumulative distribution: one pass over the vocabulary, and a tiny change of a logit rarely changes the token.

The log-probability of the drawn token is that under the sampling temperature before truncation (top-k, top-p, min-p):
what the policy gives it, not what the truncated one does. At temperature 0 the likeliest token is taken, and its
log-probability is that at temperature 1.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.nn.functional import pad

from polyrl.wire.frames import Sampling

Tensor = torch.Tensor
Numbers = np.ndarray[Any, np.dtype[np.int64]]
GREEDY = 1e-5
"""A lower temperature takes the likeliest token."""
GAMMA = 0x9E3779B97F4A7C15
ROUNDS = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
"""Splitmix64's numbers."""
_STRETCH = 128
_SORTED_ROWS = 32
"""At once, of a vocabulary: 100 MB."""


class Draws(NamedTuple):
    """How each row's token is drawn."""

    temperatures: Tensor
    uniforms: Tensor
    """(rows,), or (steps, rows) where several are planned."""
    truncated: list[tuple[int, Sampling]]
    """Rows with top-k, top-p or min-p."""
    is_plain: bool
    """All at temperature 1."""


def uniforms(
    seeds: Numbers | Sequence[int], positions: Numbers | Sequence[int]
) -> "np.ndarray[Any, np.dtype[np.float64]]":
    """Numbers in [0, 1): splitmix64 of the seed and the position of the token in its answer."""
    with np.errstate(over="ignore"):
        bits = _mix(_mix(np.asarray(seeds, np.uint64)) + np.asarray(positions, np.uint64) * np.uint64(GAMMA))
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(bits: "np.ndarray[Any, np.dtype[np.uint64]]") -> "np.ndarray[Any, np.dtype[np.uint64]]":
    bits = bits + np.uint64(GAMMA)
    for count, factor in ROUNDS:
        bits = (bits ^ (bits >> np.uint64(count))) * np.uint64(factor)
    return bits ^ (bits >> np.uint64(31))


def plan_draws(
    samplings: Sequence[Sampling],
    seeds: Numbers | Sequence[int],
    positions: Numbers | Sequence[int],
    device: torch.device,
) -> Draws:
    truncated = [(row, one) for row, one in enumerate(samplings) if one.truncates]
    temperatures = torch.tensor([one.temperature for one in samplings], dtype=torch.float32)
    is_plain = all(one.temperature == 1.0 for one in samplings)
    numbers = torch.from_numpy(uniforms(seeds, positions))
    return Draws(temperatures.to(device), numbers.to(device), truncated, is_plain)


def draw(logits: Tensor, draws: Draws) -> tuple[Tensor, Tensor]:
    """Draw tokens, and return them with their log-probabilities: (rows,) each."""
    if draws.is_plain:
        weights = torch.softmax(logits.float(), -1)
        tokens = _cut(weights, draws)
    else:
        greedy = draws.temperatures < GREEDY
        scaled = logits.float() / torch.where(greedy, 1.0, draws.temperatures).unsqueeze(1)
        weights = torch.softmax(scaled, -1)
        tokens = torch.where(greedy, scaled.argmax(-1), _cut(weights, draws))
    return tokens, weights.gather(1, tokens.unsqueeze(1)).squeeze(1).log_()


def _cut(weights: Tensor, draws: Draws) -> Tensor:
    """Return where each row's number falls in its cumulative distribution, after truncation.

    Found in two goes, the stretch and then the place in it: a running sum of the whole vocabulary takes ten times as
    long. Never a token without weight.
    """
    if draws.truncated:
        weights = weights.clone()
        for rows, way in _alike(draws.truncated):
            weights[rows] = _truncate(weights[rows].log_(), way).exp_()
    stretches = _stretches(weights)
    ends = stretches.sum(-1).cumsum(-1, dtype=torch.float64)
    stretch, cut = _search(ends, draws.uniforms * ends[:, -1])
    before = pad(ends, (1, 0)).gather(1, stretch)
    within = stretches.gather(1, stretch.unsqueeze(2).expand(-1, -1, _STRETCH)).squeeze(1)
    place, _ = _search(within.cumsum(-1, dtype=torch.float64), (cut - before).squeeze(1))
    return (stretch * _STRETCH + place).squeeze(1)


def _stretches(rows: Tensor) -> Tensor:
    """Reshape to (rows, stretches, _STRETCH)."""
    missing = -rows.shape[1] % _STRETCH
    return (pad(rows, (0, missing)) if missing else rows).unflatten(1, (-1, _STRETCH))


def _running_sums(rows: Tensor) -> Tensor:
    """Add up in float64, stretch by stretch: the running sum of one long row is added up in another order each time on
    a GPU (pytorch/pytorch#75240), which can turn a token.
    """
    within = _stretches(rows).cumsum(-1, dtype=torch.float64)
    before = pad(within[:, :-1, -1].cumsum(-1), (1, 0))
    return (within + before.unsqueeze(2)).flatten(1)[:, : rows.shape[1]]


def _search(ends: Tensor, cut: Tensor) -> tuple[Tensor, Tensor]:
    """Return, (rows, 1) each, the first of a row's running sums beyond the cut, and the cut, which rounding may have
    moved.

    For sums that are NaN it is the last: the token's log-probability will be NaN too, which shows the fault.
    """
    cut = torch.minimum(cut, torch.nextafter(ends[:, -1], ends.new_zeros(()))).unsqueeze(1)
    return torch.searchsorted(ends, cut, right=True).clamp_(max=ends.shape[1] - 1), cut


class _Truncation(NamedTuple):
    top_k: int
    top_p: float
    min_p: float


def _alike(truncated: list[tuple[int, Sampling]]) -> list[tuple[list[int], _Truncation]]:
    """Rows that are truncated in the same way, a few at a time: sorting takes memory."""
    alike: dict[_Truncation, list[int]] = {}
    for row, one in truncated:
        alike.setdefault(_Truncation(one.top_k, one.top_p, one.min_p), []).append(row)
    return [
        (rows[first : first + _SORTED_ROWS], way)
        for way, rows in alike.items()
        for first in range(0, len(rows), _SORTED_ROWS)
    ]


def _truncate(logprobs: Tensor, way: _Truncation) -> Tensor:
    """Log-probabilities of some rows, with those left out at minus infinity. The likeliest token always stays."""
    out = logprobs
    if way.top_k and way.top_k < out.shape[-1]:
        least = torch.topk(out, way.top_k).values[:, -1:]
        out = out.masked_fill(out < least, float("-inf"))
    if way.min_p > 0.0:
        out = out.masked_fill(out < out.amax(-1, keepdim=True) + np.log(way.min_p), float("-inf"))
    if way.top_p < 1.0:
        ordered, index = torch.sort(out, descending=True)
        mass = torch.softmax(ordered, -1)
        beyond = _running_sums(mass) - mass >= way.top_p
        out = out.masked_fill(torch.zeros_like(beyond).scatter(-1, index, beyond), float("-inf"))
    return out
