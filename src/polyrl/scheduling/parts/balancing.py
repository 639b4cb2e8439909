"""Continuous balancing: every few seconds, while samples run, see whether some of them should run elsewhere.

The moves are decided in migration.py, from values; here the values are gathered and the moves requested. The speed
of each worker is learned from the progress it brings, its plateau from what its engine reports.
"""

from polyrl.ids import Seconds
from polyrl.scheduling.core.desk import Desk
from polyrl.scheduling.core.fleet import Worker
from polyrl.scheduling.parts import failures, leases
from polyrl.scheduling.rules import migration
from polyrl.scheduling.rules.migration import Candidate

_MIN_SPAN_S = 0.05
_MAX_GRANTED = 0.1
"""A span says nothing about decoding if more than this share of the samples were new: it has prefills in it."""
STARVED = 8
"""A sample is starved if it gets this much less between two looks for stalled ones than its worker's speed gives."""
_PLATEAU_GROWTH = 20
"""A plateau that holds grows by one part in this many, at every report."""


def learn_speed(worker: Worker, num_running: int, num_steps: int, now: Seconds) -> None:
    """Learn a worker's speed: `num_steps` decode steps with `num_running` samples since its last tokens.

    Samples decode in lock step, so the most that any of them gained is the number of steps; the others came later.
    """
    worker.has_progressed = True
    span = now - worker.last_tokens_at
    if span < _MIN_SPAN_S:
        return
    worker.last_tokens_at = now
    disturbed = worker.num_granted > _MAX_GRANTED * num_running
    worker.num_granted = 0
    if disturbed:
        return
    worker.speed.observe(num_running, span / num_steps)


def learn_plateau(desk: Desk, worker: Worker, num_waiting: int) -> None:
    """Learn how many samples an engine can run: fewer if it holds some back, a few more if it runs all it has.

    The number it can run at once depends on its cache and on the current context lengths, which only the engine knows.
    But samples also wait during prefill and compilation. So an engine counts as full only if it also held samples back
    at the previous report, has sent tokens since, and runs no more than then. A report of more waiting samples than the
    worker has is out of date, and does not count.
    """
    num = len(worker.leases)
    num_running = num - num_waiting
    holds_back = 0 < num_waiting < num
    is_full = holds_back and worker.has_progressed and num_running <= worker.held_back_at
    worker.num_waiting = num_waiting if is_full else 0
    worker.held_back_at = num_running if holds_back else -1
    worker.has_progressed = False
    plateau = worker.plateau
    if is_full:
        plateau = min(plateau, num_running)
    elif num_waiting == 0 and num >= plateau:
        plateau = min(worker.slots, plateau + max(1, plateau // _PLATEAU_GROWTH))
    if plateau != worker.plateau:
        worker.plateau = plateau
        desk.router.update(worker)
        desk.place_due = True


def balance(desk: Desk, now: Seconds) -> None:
    """Move what should move; then arm the next look."""
    desk.devices_due = True
    waiting = any(round_.num_waiting for round_ in desk.rounds.values())
    if not waiting and len(desk.seats) > 1:
        workers = list(desk.seats.values())
        remaining: dict[int, float] = {}
        if not _relieve(desk, workers, now) and not _rescue(desk, workers, remaining, now):
            _move(desk, workers, remaining, now)
    if desk.leases:
        leases.look_later(desk, now)


def _relieve(desk: Desk, workers: list[Worker], now: Seconds) -> bool:
    """Request samples back that full engines hold back. Returns whether any was: loads are unknown until it is
    placed."""
    given = migration.relieve_waiting(workers)
    for worker, num in given:
        for lease in list(worker.leases)[-num:]:
            leases.hand_over(desk, desk.leases[lease], "its engine holds it back, another worker has room", now)
    return bool(given)


def _rescue(desk: Desk, workers: list[Worker], remaining: dict[int, float], now: Seconds) -> bool:
    """Request samples back from workers that are far slower than others. Returns whether any was.

    A worker that brings next to no token between two checks for stalled samples has failed them.
    """
    if desk.state.rules < 3:
        return False
    slowest_s = desk.config.fleet_rules.stall_timeout_s / STARVED
    moves = migration.plan_rescues(
        workers,
        desk.config.routing,
        desk.config.prompt_tokens,
        lambda worker: _candidates(desk, worker, remaining),
        slowest_s,
    )
    for move in moves:
        sample = desk.leases[move.lease]
        worker = desk.seats[sample.worker]
        if not worker.local and (worker.speed.step_s(len(worker.leases)) or 0.0) > slowest_s:
            failures.keeps(desk, worker, sample)
        sample.target = move.target
        leases.hand_over(desk, sample, move.why, now)
    return bool(moves)


def _move(desk: Desk, workers: list[Worker], remaining: dict[int, float], now: Seconds) -> None:
    moves = migration.plan_moves(
        workers, desk.config.routing, desk.config.prompt_tokens, lambda worker: _candidates(desk, worker, remaining)
    )
    for move in moves:
        sample = desk.leases[move.lease]
        sample.target = move.target
        leases.hand_over(desk, sample, move.why, now)


def _candidates(desk: Desk, worker: Worker, remaining: dict[int, float]) -> list[Candidate]:
    """Return the worker's samples that may move. `remaining` caches expected lengths by tokens so far: of 100,000
    running samples, most are as long as another."""
    lengths, cap = desk.lengths, desk.config.max_new_tokens
    found: list[Candidate] = []
    for lease in worker.leases:
        sample = desk.leases[lease]
        if sample.state == "leased" and sample.group not in desk.asked.groups:
            num_tokens = sample.num_tokens
            if num_tokens not in remaining:
                remaining[num_tokens] = lengths.expected_remaining(num_tokens, cap)
            found.append(Candidate(lease, num_tokens, sample.moved_at, remaining[num_tokens]))
    return found
