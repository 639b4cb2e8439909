"""Figures of a run's measured steps, and of several runs."""

from collections.abc import Callable
from statistics import fmean

from polyrl.reproduce.playing import Runs
from polyrl.sim.result import Measured

Value = Callable[[list[Measured]], float]


def step_s(steps: list[Measured]) -> float:
    return fmean(step.step_s for step in steps)


def rollout_s(steps: list[Measured]) -> float:
    return fmean(step.rollout_s for step in steps)


def after_rollout_s(steps: list[Measured]) -> float:
    return step_s(steps) - rollout_s(steps)


def tok_s(steps: list[Measured]) -> float:
    return sum(step.tokens for step in steps) / sum(step.step_s for step in steps)


def tok_per_usd(steps: list[Measured]) -> float:
    return sum(step.tokens for step in steps) / sum(step.usd for step in steps)


def window_s(steps: list[Measured]) -> float:
    return fmean(step.line.seed_window_s for step in steps)


def longest(steps: list[Measured]) -> float:
    return fmean(step.line.longest for step in steps)


def trained_length(steps: list[Measured]) -> float:
    return sum(step.line.tokens_trained for step in steps) / sum(step.line.num_samples for step in steps)


def discarded_share(steps: list[Measured]) -> float:
    discarded = sum(sum(step.line.tokens_discarded.values()) for step in steps)
    return discarded / (discarded + sum(step.line.tokens_trained for step in steps))


def of_kind(kind: str, value: Value) -> Value:
    """Return the same figure, of short or of long rounds only."""
    return lambda steps: value([step for step in steps if step.line.kind == kind])


def mean(runs: Runs, value: Value) -> float:
    return fmean(value(played.measured) for played in runs)


def span(runs: Runs, value: Value, shape: str = ",.0f", scale: float = 1.0) -> str:
    """Return the lowest and the highest figure of the seeds."""
    values = [value(played.measured) * scale for played in runs]
    return f"{min(values):{shape}} to {max(values):{shape}}"


def tokens(steps: list[Measured]) -> float:
    return fmean(step.tokens for step in steps)
