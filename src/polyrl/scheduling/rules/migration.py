"""Migration: which running samples move to another worker although their own is alive.

There are three reasons. An engine holds samples back because its KV cache is full, while another worker has credit: the
youngest samples move. Or a worker has few samples while another runs many: a sample that moves decodes faster there,
and moves if the time it saves pays for its re-prefill and `move_gain_s` beyond. The longest expected remaining length
goes first, a sample at most once in `move_every_tokens`, reserved machines before spot. In the tail of a round this
spreads the stragglers out. Or a worker is far slower than another that has room: a token now and then is no stall, and
would hold a round up for days. A sample that is rescued from there moves as often as it must.

Everything is decided from values: loads, speeds that were seen, expected remaining tokens. Nothing moves away from a
worker whose speed is not yet known.
"""

import heapq
from collections.abc import Callable, Iterable

from msgspec import Struct

from polyrl.ids import LeaseId, Seconds
from polyrl.scheduling.core.fleet import Worker
from polyrl.scheduling.core.parameters import RoutingConfig

_MIN_EXCESS = 0.25
"""A worker gives samples away only to one that has at least this share fewer."""
_MAX_MOVES = 256
_SLOW = 8.0
"""A worker is far slower than another whose decode step takes this much less."""
HAND_OVER_S = 0.5
"""Seconds that a move costs besides prefilling again: stop, deliver, start."""


class Candidate(Struct, frozen=True, gc=False):
    """A running sample that may move."""

    lease: LeaseId
    num_tokens: int
    moved_at: int
    remaining: float


class Move(Struct, frozen=True, gc=False):
    target: int
    """The seat of the worker that should go on with it."""
    lease: LeaseId
    why: str


def relieve_waiting(workers: Iterable[Worker]) -> list[tuple[Worker, int]]:
    """Return how many of its youngest samples each overfull worker gives up: no more than the others have credit
    for."""
    able = [worker for worker in workers if worker.may_generate]
    room = sum(worker.credit for worker in able if worker.may_take and worker.num_waiting == 0 and worker.credit > 0)
    given: list[tuple[Worker, int]] = []
    for worker in able:
        num = min(worker.num_waiting, room, len(worker.leases) - 1)
        if num > 0:
            given.append((worker, num))
            room -= num
    return given


def plan_moves(
    workers: Iterable[Worker],
    config: RoutingConfig,
    prompt_tokens: int,
    candidates: Callable[[Worker], list[Candidate]],
) -> list[Move]:
    """Moves from crowded workers to empty ones, each of which pays for itself; at most `_MAX_MOVES` at a time."""
    able = [worker for worker in workers if worker.may_generate]
    targets = [
        (len(one.leases), one.spot, one.seat, one) for one in able if one.may_take and len(one.leases) < one.limit
    ]
    heapq.heapify(targets)
    moves: list[Move] = []
    for source in sorted(able, key=lambda one: (-len(one.leases), one.seat)):
        if not targets or not _is_crowded(len(source.leases), targets[0][0]):
            break
        _move_from(source, targets, config, prompt_tokens, candidates, moves)
        if len(moves) >= _MAX_MOVES:
            break
    return moves


def _is_crowded(num_here: int, num_there: int) -> bool:
    return num_here - num_there >= max(2, _MIN_EXCESS * num_here)


def _move_from(
    source: Worker,
    targets: list[tuple[int, bool, int, Worker]],
    config: RoutingConfig,
    prompt_tokens: int,
    candidates: Callable[[Worker], list[Candidate]],
    moves: list[Move],
) -> None:
    num_here = len(source.leases)
    if _gain_s(source, num_here, targets[0][3], targets[0][0]) <= 0.0:
        return
    for candidate in sorted(candidates(source), key=lambda one: (-one.remaining, one.lease)):
        if not targets or len(moves) >= _MAX_MOVES:
            return
        num_there, spot, seat, target = targets[0]
        saved = candidate.remaining * _gain_s(source, num_here, target, num_there)
        cost = HAND_OVER_S + (prompt_tokens + candidate.num_tokens) / config.prefill_tokens_per_s
        if not _is_crowded(num_here, num_there) or saved < cost + config.move_gain_s:
            return
        if candidate.moved_at > 0 and candidate.num_tokens < candidate.moved_at + config.move_every_tokens:
            continue
        moves.append(Move(seat, candidate.lease, f"saves about {saved:.0f} s, costs {cost:.1f} s"))
        num_here -= 1
        if num_there + 1 < target.limit:
            heapq.heapreplace(targets, (num_there + 1, spot, seat, target))
        else:
            heapq.heappop(targets)


def plan_rescues(
    workers: Iterable[Worker],
    config: RoutingConfig,
    prompt_tokens: int,
    candidates: Callable[[Worker], list[Candidate]],
    slowest_s: Seconds,
) -> list[Move]:
    """Moves from workers that are far slower than another with room that has brought answers.

    `slowest_s`: no worker that brings answers takes longer for a token. It stands for a speed that was not seen.
    """
    able = [worker for worker in workers if worker.may_generate]
    fastest = [entry for one in able if (entry := _entry(one, len(one.leases), slowest_s / _SLOW)) is not None]
    heapq.heapify(fastest)
    moves: list[Move] = []
    for source in sorted(able, key=lambda one: one.seat):
        here = source.speed.step_s(len(source.leases)) if source.leases else None
        if not fastest or len(moves) >= _MAX_MOVES:
            break
        if here is None or here < _SLOW * fastest[0][0] or fastest[0][3] is source:
            continue
        for candidate in candidates(source):
            there, _, num_there, target = fastest[0]
            saved = candidate.remaining * (here - there)
            cost = HAND_OVER_S + (prompt_tokens + candidate.num_tokens) / config.prefill_tokens_per_s
            if saved < cost + config.move_gain_s:
                continue
            why = f"its worker takes {here:.3g} s a token, {target.name} {there:.3g} s: saves about {saved:.0f} s"
            moves.append(Move(target.seat, candidate.lease, why))
            entry = _entry(target, num_there + 1, slowest_s / _SLOW)
            _ = heapq.heappop(fastest) if entry is None else heapq.heapreplace(fastest, entry)
            if not fastest or here < _SLOW * fastest[0][0] or len(moves) >= _MAX_MOVES:
                break
    return moves


def _entry(worker: Worker, num_leases: int, unseen_s: Seconds) -> tuple[Seconds, int, int, Worker] | None:
    """Return the seconds that a proven worker takes for a token with a sample more, with which it is sorted; None if
    it has no room."""
    if not (worker.may_take and worker.is_proven and worker.num_waiting == 0 and num_leases < worker.limit):
        return None
    return worker.speed.step_s(num_leases + 1) or unseen_s, worker.seat, num_leases, worker


def _gain_s(source: Worker, num_source: int, target: Worker, num_target: int) -> float:
    """Return the seconds that a sample would gain with every token.

    A target is not believed to be faster than the source with as few samples.
    """
    here = source.speed.step_s(num_source)
    alike = source.speed.step_s(num_target + 1)
    if here is None or alike is None:
        return 0.0
    there = target.speed.step_s(num_target + 1)
    return here - (alike if there is None else max(there, alike))
