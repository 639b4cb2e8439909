"""How far engines are from the trainer: KL of their log-probabilities, by kind of engine and by version.

For the weights that the trainer has now (age 0) it is the engine's own error: rounding, other kernels, or weights
that did not arrive whole. For older ones it is that and how far the policy has moved since.

Everything stays on the device: a mask a writer, no look at the numbers. The tally divides by all tokens of the step;
`of_their_own` divides by a writer's own.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from polyrl.trainer.batch import TrainSample
from polyrl.trainer.objectives import kl

KL = "actor/mismatch_kl"
ABS = "actor/mismatch_abs"
_SHARE = "mismatch_share/"
"""Beside it in the tally: how many of the tokens are this writer's; without a name, how many were compared at all."""


def of_tokens(
    ours: torch.Tensor, theirs: torch.Tensor, samples: Sequence[TrainSample], step: int, *, is_part: bool
) -> dict[str, torch.Tensor]:
    """For the tally, of the samples' tokens, in order. `is_part`: others of the step are not told of."""
    apart = kl.estimate(theirs, ours, "k3")
    told = {KL: apart, ABS: (ours - theirs).abs(), **by_writer(apart, samples, step)}
    return told | {_SHARE: torch.ones_like(apart)} if is_part else told


def by_writer(apart: torch.Tensor, samples: Sequence[TrainSample], step: int) -> dict[str, torch.Tensor]:
    """Of each writer, its tokens' numbers, and ones; zeros elsewhere. `apart` is of the samples' tokens, in order."""
    labels: dict[str, int] = {}
    marks: list[np.ndarray[Any, Any]] = []
    for sample in samples:
        names = [f"{segment.engine or 'unknown'}/{step - segment.version}" for segment in sample.written_by]
        numbers = [labels.setdefault(name, len(labels)) for name in names]
        mark = np.repeat(np.array(numbers, np.int64), [segment.num_tokens for segment in sample.written_by])
        if len(mark) != len(sample.answer):  # nobody says who wrote it
            mark = np.full(len(sample.answer), -1, np.int64)
        marks.append(mark)
    if not labels:
        return {}
    all_marks = torch.from_numpy(np.concatenate(marks)).to(apart.device, non_blocking=True)
    told: dict[str, torch.Tensor] = {}
    for label, number in labels.items():
        is_its = (all_marks == number).to(apart.dtype)
        told |= {f"{KL}/{label}": apart * is_its, _SHARE + label: is_its}
    return told


def of_their_own(metrics: Mapping[str, float]) -> dict[str, float]:
    """The tally's means over all tokens, as means over each writer's tokens, and over those that were compared."""
    told: dict[str, float] = {}
    for name, number in metrics.items():
        share = metrics.get(_SHARE + name.removeprefix(f"{KL}/")) if name.startswith(f"{KL}/") else 1.0
        if name in (KL, ABS):
            share = metrics.get(_SHARE, 1.0)
        if not name.startswith(_SHARE):
            told[name] = number / share if share else 0.0
    return told


def too_far(metrics: Mapping[str, float], bound: float) -> list[tuple[str, float]]:
    """Kinds of engines that are further from the trainer than the bound, with the same weights."""
    if not bound:
        return []
    same = {name: number for name, number in metrics.items() if name.startswith(f"{KL}/") and name.endswith("/0")}
    found = [(name.removeprefix(f"{KL}/").removesuffix("/0"), number) for name, number in same.items()]
    return [(engine, number) for engine, number in found if not number <= bound]
