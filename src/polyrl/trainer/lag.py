"""The lag in force: how many versions weights may be behind, lowered by alarms and raised again after calm steps.

Collapse of asynchronous training announces itself in the effective sample size of a step's samples and in the norm of
its gradient (arXiv 2602.17616). Each step is compared with two bounds:

    actor/effective_sample_size     below `train.min_sample_size`
    actor/grad_norm                 above `train.max_norm_growth` times the median of the last steps without an alarm;
                                    steps that trained nothing do not count

An alarm halves the lag, down to 0; after CALM_STEPS steps without an alarm it goes up by one, to `max_staleness` at
most. The loop requests rounds only so far ahead. Rounds that were requested before are trained, so a lower lag is in
force `max_staleness` steps later at the latest; until then no further alarm lowers it.

A resumed run begins with `max_staleness` again.
"""

import logging
import math
from collections import deque
from collections.abc import Mapping
from statistics import median

from polyrl.config.recipe import TrainSection

log = logging.getLogger("polyrl.trainer")

CALM_STEPS = 16
"""Steps without an alarm before the lag goes up by one."""
_FEWEST_NORMS = 4
_MOST_NORMS = 32


class Lag:
    """The lag of one run. `most` is the recipe's `max_staleness`; without bounds the lag stays there."""

    def __init__(self, train: TrainSection, most: int) -> None:
        self._least_size, self._most_growth, self._most = train.min_sample_size, train.max_norm_growth, most
        self._norms: deque[float] = deque(maxlen=_MOST_NORMS)
        self._num_calm = 0
        self._waits_until = 0
        self.now = most
        """How many versions the next rounds may be behind."""

    def after(self, step: int, metrics: Mapping[str, float]) -> dict[str, float]:
        """Take in the numbers of a step, and change the lag if they ask for it. Return the metrics of the guard."""
        if not (self._least_size or self._most_growth):
            return {}
        alarm = self._alarm(metrics)
        if alarm:
            self._num_calm = 0
            self._lower(step, alarm)
        elif metrics["actor/grad_norm"]:  # a step that trained nothing says nothing of the others
            self._num_calm += 1
            self._norms.append(metrics["actor/grad_norm"])
            if self._num_calm >= CALM_STEPS and self.now < self._most:
                self._num_calm = 0
                self.now += 1
                log.info("step %d: no alarm for %d steps: weights may be %d behind", step, CALM_STEPS, self.now)
        return {"staleness/allowed": float(self.now), "staleness/alarm": float(bool(alarm))}

    def _alarm(self, metrics: Mapping[str, float]) -> str:
        """Return what is wrong with the step; empty: nothing."""
        size, norm = metrics["actor/effective_sample_size"], metrics["actor/grad_norm"]
        if size < self._least_size:
            return f"the effective sample size is {size:.3f}, below train.min_sample_size={self._least_size:g}"
        if not self._most_growth:
            return ""
        if not math.isfinite(norm):
            return f"the gradient's norm is {norm}"
        usual = median(self._norms) if len(self._norms) >= _FEWEST_NORMS else math.inf
        if norm > self._most_growth * usual:
            return f"the gradient's norm is {norm:.3g}, above train.max_norm_growth={self._most_growth:g} x {usual:.3g}"
        return ""

    def _lower(self, step: int, alarm: str) -> None:
        if step < self._waits_until or not self.now:
            log.warning("step %d: %s", step, alarm)
            return
        before, self.now = self.now, self.now // 2
        self._waits_until = step + 1 + before  # rounds requested at the old lag are trained until then
        log.warning("step %d: %s: weights may be %d behind, not %d", step, alarm, self.now, before)
