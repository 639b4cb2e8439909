"""How far engines are from the trainer: the KL of their log-probabilities, by kind of engine and age of the version.

At age 0, with the trainer's current weights, it is the engine's own error: rounding, other kernels, or weights that did
not arrive intact. At higher ages it also includes how far the policy has moved since.

Everything stays on the device: one mask per writer, and no number is read. The tally divides by all tokens of the step;
`of_their_own` turns that into a division by the writer's own tokens.
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
"""The tally's name for the share of tokens that a writer wrote; without a writer, the share that was compared."""


def of_tokens(
    ours: torch.Tensor, theirs: torch.Tensor, samples: Sequence[TrainSample], step: int, *, is_part: bool
) -> dict[str, torch.Tensor]:
    """Return the tally's numbers for the samples' tokens, in order. `is_part`: other tokens are not compared."""
    apart = kl.estimate(theirs, ours, "k3")
    told = {KL: apart, ABS: (ours - theirs).abs(), **by_writer(apart, samples, step)}
    return told | {_SHARE: torch.ones_like(apart)} if is_part else told


def by_writer(apart: torch.Tensor, samples: Sequence[TrainSample], step: int) -> dict[str, torch.Tensor]:
    """Return each writer's numbers and a mask of its tokens, zero elsewhere. `apart` is in the samples' order."""
    labels: dict[str, int] = {}
    marks: list[np.ndarray[Any, Any]] = []
    for sample in samples:
        names = [f"{segment.engine or 'unknown'}/{step - segment.version}" for segment in sample.written_by]
        numbers = [labels.setdefault(name, len(labels)) for name in names]
        mark = np.repeat(np.array(numbers, np.int64), [segment.num_tokens for segment in sample.written_by])
        if len(mark) != sample.num_drawn:  # the writers of this sample are unknown
            mark = np.full(sample.num_drawn, -1, np.int64)
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
    """Turn the tally's means over all tokens into means over each writer's tokens, and over the tokens compared."""
    told: dict[str, float] = {}
    for name, number in metrics.items():
        share = metrics.get(_SHARE + name.removeprefix(f"{KL}/")) if name.startswith(f"{KL}/") else 1.0
        if name in (KL, ABS):
            share = metrics.get(_SHARE, 1.0)
        if not name.startswith(_SHARE):
            told[name] = number / share if share else 0.0
    return told


def too_far(metrics: Mapping[str, float], bound: float) -> list[tuple[str, float]]:
    """Return the kinds of engines whose KL at age 0 exceeds the bound, each with its KL. NaN exceeds every bound."""
    if not bound:
        return []
    same = {name: number for name, number in metrics.items() if name.startswith(f"{KL}/") and name.endswith("/0")}
    found = [(name.removeprefix(f"{KL}/").removesuffix("/0"), number) for name, number in same.items()]
    return [(engine, number) for engine, number in found if not number <= bound]
