"""Notices: a worker whose machine is about to be taken away works on until it must hand its samples over.

Rules kept here:
- It goes on with what it has until `fleet_rules.leave_margin_s` before its machine goes. Then it is drained: what has
  not ended by then moves, at its current token. A notice shorter than the margin, or none, drains at once.
- It gets samples like any other worker until moving them again would cost more than it can still write of them (the
  rule of a move: `routing.move_gain_s` beyond its cost); from then on it gets none, and serves no weights.
- The latest notice counts: a repeated notice moves the moment, in either direction.

So a notice costs the fleet the margin, where a death without one costs the tokens not yet sent and the time until it
is missed. Draining at once, or giving it nothing new from the notice on, leaves a paid machine idle: with long notices
both cost more than no notice at all.
"""

import math

from polyrl.ids import Seconds
from polyrl.scheduling.core.desk import Desk
from polyrl.scheduling.core.fleet import Worker
from polyrl.scheduling.parts import devices, membership
from polyrl.scheduling.rules import migration

_NO_TIME_S = 1e-6
"""Less than this is none: clocks carry rounding."""


def given(desk: Desk, worker: Worker, why: str, notice_s: Seconds, now: Seconds) -> None:
    """Take in that a worker's machine goes in `notice_s` seconds. 0, or a value that is no time, drains it now."""
    if worker.state == "draining":
        return
    worker.leaves_at = now + (notice_s if 0.0 < notice_s < math.inf else 0.0)
    worker.why_leaving = why
    worker.is_taken = desk.config.scaling.enabled and notice_s > 0.0
    look(desk, worker, now)


def look(desk: Desk, worker: Worker, now: Seconds) -> None:
    """Act on the time that is left, and arm the next look for when the action changes."""
    assert worker.leaves_at is not None, f"{worker.name} was given no notice"
    left_s = worker.leaves_at - desk.config.fleet_rules.leave_margin_s - now
    if left_s <= _NO_TIME_S:
        membership.drain(desk, worker, worker.why_leaving, now)
        devices.arm_window(desk, now)
        return
    still_takes_s = left_s - migration.HAND_OVER_S - desk.config.routing.move_gain_s
    worker.is_closed = still_takes_s <= _NO_TIME_S
    desk.deadlines.set(("notice", worker.seat), now + (left_s if worker.is_closed else still_takes_s))
    desk.router.update(worker)
    desk.place_due = True
    desk.devices_due = True
