"""The counts and metrics of a step; and the interface of whatever trains it: a process, or several ranks."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from polyrl.trainer.batch import TrainGroup


class Added(NamedTuple):
    """The counts of one call of `add`. Groups that are held back are trained by `finish`."""

    num_groups: int = 0
    num_samples: int = 0
    """Episodes count once, however many training sequences they have."""
    num_masked: int = 0
    """Samples that count in their group's advantages but are not trained on."""
    num_packs: int = 0
    num_tokens: int = 0
    """Tokens that went through the model, prompts included."""
    num_trained_tokens: int = 0
    """Drawn tokens in the loss."""

    def plus(self, other: "Added") -> "Added":
        return Added(*(a + b for a, b in zip(self, other, strict=True)))

    def metrics(self) -> dict[str, float]:
        return {
            "token/trained": float(self.num_trained_tokens),
            "token/through_model": float(self.num_tokens),
            "sample/trained": float(self.num_samples - self.num_masked),
            "sample/masked": float(self.num_masked),
            "group/trained": float(self.num_groups),
            "perf/micro_batches": float(self.num_packs),
        }


class StepStats(NamedTuple):
    step: int
    added: Added
    metrics: dict[str, float]
    too_far: tuple[tuple[str, float], ...] = ()
    """Workers whose samples were left out for their log-probabilities (guard.py), each with its distance in nats."""
    is_void: bool = False
    """Nothing was trained, since most of the step's samples were to be left out."""


class Steps(Protocol):
    """The interface of a step. `first` is the number of the first episode of these groups within the step, where other
    processes get the rest of its groups; None: every group comes here, in order."""

    @property
    def device_type(self) -> str: ...

    def begin(self, step: int, num_steps: int | None = None) -> None: ...

    def add(self, groups: Sequence[TrainGroup], first: int | None = None) -> Added: ...

    def finish(self, *, may_be_void: bool = False) -> StepStats: ...
