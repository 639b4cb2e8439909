"""Looks shared by the terminal and the pictures: activities of a worker, kinds of rounds, units of time,
and the words for causes.

Rules kept here: every activity has a character of its own, so that a timeline reads without colour; colours are told
apart by colour-blind people (after Okabe and Ito) on a dark and on a white ground.
"""

import math
from typing import NamedTuple

from polyrl.ids import Seconds


class Look(NamedTuple):
    glyph: str
    colour: str
    words: str


ACTIVITIES: dict[str, Look] = {
    "generating": Look("█", "#3a86c8", "generating"),
    "training": Look("▒", "#e69f00", "training, or ready to"),
    "validating": Look("▓", "#8c6bb1", "validating"),
    "idle": Look("·", "#a8adb3", "idle"),
    "pulling": Look("▾", "#009e73", "pulling weights"),
    "starting": Look("░", "#cc79a7", "starting"),
    "draining": Look("▚", "#d55e00", "draining"),
    "switching": Look("╱", "#c9b400", "switching"),
    "left": Look("✕", "#e0218a", "gone"),
}
LEFT = "left"
"""Not an activity of the timeline: the moment at which a worker is there no longer."""
GONE = " "
KINDS: dict[str, str] = {"short": "#3a86c8", "long": "#d55e00"}
TRAINER = "#e69f00"

CAUSES = {
    "speculation": "extra samples not needed",
    "deferral": "prompts put off to a long round",
    "preemption": "lost with a worker",
    "filtered": "groups that teach nothing",
    "reward_failed": "rewards that failed",
    "failed": "samples that failed",
    "refused": "prompts that workers refused",
    "not_taken": "not taken by the trainer",
    "environment_lost": "calls of episodes that took another way when begun again",
    "abandoned": "calls that their environment no longer waited for",
    "withdrawn": "asked for beside the trainer, and no longer wanted",
}
OUTCOMES = {
    "scored": "their environments gave a reward",
    "failed": "through no fault of the policy: begun again, or left out",
    "timed_out": "scored with environments.timeout_reward",
}
MOVES = {
    "handed_over": "handed over",
    "lost": "worker lost",
    "stalled": "worker stalled",
    "hand_over_timeout": "hand-over not answered",
    "engine_failed": "engine failed",
    "refused": "refused by the worker",
    "replaced": "weights replaced",
}


class TimeUnit(NamedTuple):
    name: str
    seconds: float


_UNITS = (TimeUnit("s", 1.0), TimeUnit("min", 60.0), TimeUnit("h", 3600.0))


def unit_for(total_s: Seconds) -> TimeUnit:
    """Return the unit in which a time reads best: seconds to 10 minutes, minutes to 4 hours, then hours."""
    if total_s <= 600:
        return _UNITS[0]
    return _UNITS[1] if total_s <= 4 * 3600 else _UNITS[2]


def nice_ticks(total: float, most: int) -> list[float]:
    """Round numbers from 0 up to `total`, at most about `most` of them."""
    if total <= 0 or most < 1:
        return [0.0]
    rough = total / most
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * (1 - 1e-9))
    return [number * step for number in range(int(total / step + 1e-9) + 1)]


def show_seconds(seconds: float) -> str:
    """Return a duration in the unit that fits it."""
    if seconds < 600:
        return f"{seconds:,.1f} s" if seconds < 100 else f"{seconds:,.0f} s"
    return f"{seconds / 60:,.0f} min" if seconds < 4 * 3600 else f"{seconds / 3600:,.1f} h"


def show_tokens(num_tokens: float) -> str:
    """Return a number of tokens in millions or thousands, or as it is."""
    if num_tokens >= 1e6:
        return f"{num_tokens / 1e6:,.1f} M"
    return f"{num_tokens / 1e3:,.1f} k" if num_tokens >= 10_000 else f"{num_tokens:,.0f}"
