"""Seeding: how long the trainer's own devices generate at the start of a step before they turn to training.

They hold the newest weights while the fleet still pulls them. Too short a window and the trainer waits for samples; too
long and the fleet waits for the trainer. After each step the window moves by a third of the difference of the two
waits, and the learned window is remembered by the number of workers, so a fleet size that returns starts right.

Rules kept here:
- Zero workers: the window is unbounded in every mode. Generation is local and the step completes.
- Nothing is learned from a step that ends with zero workers, and no constants for a model are preloaded.
- A value is remembered only for a fleet that did not change during the step.
- A correction in the opposite direction of the one before is at most half as big (`damped`). A second of seeding moves
  the
  round's end by 1 + 1/(n r) seconds, n workers each r times as fast as the trainer; with one worker at r = 0.2 that is
  six, and a third of six overshoots by as much as it corrects: the plain rule swings between 180 s and 221 s for ever.

Left out: the early end of a window (nothing left to generate, micro-batches already waiting): the driver sees those.
"""

import math
from typing import Literal

import msgspec

from polyrl.ids import Seconds
from polyrl.scheduling.core.bounds import NotNegative

SAME_FLEET = 0.05
"""A fleet counts as unchanged when its mean number of workers was this near the present one."""


class SeedingConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`fixed_s` is used in mode fixed only, the fields after it in mode learned only."""

    mode: Literal["learned", "fixed", "whole_round", "off"] = "learned"
    fixed_s: NotNegative = 0.0
    initial_s: NotNegative = 60.0
    gain: NotNegative = 1 / 3
    max_step_s: NotNegative = 120.0
    """The most that one step corrects."""
    damped: bool = True
    """False is the published rule to the letter."""
    remember: bool = True
    """Go back to the window learned for a number of workers when that number is back. Off: for comparison."""


class SeedingState(msgspec.Struct):
    t_seed_s: Seconds
    memory: dict[int, Seconds] = msgspec.field(default_factory=dict)
    """The window last learned, by number of workers."""
    num_workers: int = 0
    """The number of workers that `t_seed_s` is for; kept where the autoscaler is at work."""
    last_correction_s: Seconds = 0.0
    """Zero when the next correction has nothing to turn back on."""


class StepTimes(msgspec.Struct, frozen=True):
    """The times of one step."""

    wait_train_s: Seconds
    """The trainer idle, waiting for a micro-batch."""
    wait_remote_s: Seconds
    """The fleet idle, from its last sample to the step's end."""
    remote_s: Seconds
    """The fleet generating."""
    train_s: Seconds
    mean_workers: float
    """Active workers, averaged over the step's time."""
    workers_now: int
    num_reserved: int
    """How many workers the trainer's own devices stand for while they seed."""


class SeedWindow(msgspec.Struct, frozen=True):
    seconds: Seconds
    """math.inf: until the round is generated."""
    why: str


def start(config: SeedingConfig) -> SeedingState:
    return SeedingState(t_seed_s=config.initial_s)


def window(config: SeedingConfig, state: SeedingState, workers_now: int) -> SeedWindow:
    """Return how long the trainer's devices may generate in the step that starts now."""
    if workers_now == 0:
        return SeedWindow(math.inf, "no workers: the trainer's devices generate the whole round")
    match config.mode:
        case "whole_round":
            return SeedWindow(math.inf, "seeding.mode is whole_round")
        case "off":
            return SeedWindow(0.0, "seeding.mode is off")
        case "fixed":
            return SeedWindow(config.fixed_s, f"seeding.fixed_s is {config.fixed_s:.1f} s")
        case "learned":
            known = "remembered" if workers_now in state.memory else "not yet settled"
            return SeedWindow(state.t_seed_s, f"learned: {state.t_seed_s:.1f} s, {known} for {workers_now} workers")


def learn(config: SeedingConfig, state: SeedingState, times: StepTimes) -> str:
    """Correct the window after a step; the result says why it is what it is now."""
    if config.mode != "learned":
        return f"nothing learned: seeding.mode is {config.mode}"
    if times.workers_now == 0:
        return "nothing learned: the step ended with no workers"
    workers = times.workers_now
    correction = _correction(config, state, times)
    before = state.t_seed_s
    state.t_seed_s = max(0.0, before + correction)
    moved = (
        f"{before:.1f} s to {state.t_seed_s:.1f} s:"
        f" the trainer waited {times.wait_train_s:.1f} s, the fleet {times.wait_remote_s:.1f} s"
    )
    if abs(times.mean_workers - workers) < SAME_FLEET:
        state.memory[workers] = state.t_seed_s
        state.last_correction_s = correction
        return f"{moved}; remembered for {workers} workers"
    state.last_correction_s = 0.0
    if config.remember and workers in state.memory:
        state.t_seed_s = state.memory[workers]
        return f"{state.t_seed_s:.1f} s: the fleet changed to {workers} workers, whose window is remembered"
    return f"{moved}; the fleet changed to {workers} workers, not met before"


def _correction(config: SeedingConfig, state: SeedingState, times: StepTimes) -> Seconds:
    limit = config.max_step_s
    wanted = (times.wait_train_s - times.wait_remote_s) * config.gain
    if config.damped and wanted * state.last_correction_s < 0.0:
        limit = min(limit, abs(state.last_correction_s) / 2.0)
    return min(limit, max(-limit, wanted))
