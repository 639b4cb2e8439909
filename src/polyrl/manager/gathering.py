"""What was heard of workers and not told yet, as one event: when to tell it is said in scheduling/parts/hearing.py.

Progress and what engines hold back are told every few seconds, or at once where somebody asks for all of it; that a
worker was heard, when its deadline comes near.
"""

from collections.abc import Collection, Iterable, Mapping

from polyrl.ids import SampleId, Seconds
from polyrl.manager.payload import SampleTokens
from polyrl.manager.peers.sessions import WorkerSession
from polyrl.scheduling.core.desk import Desk
from polyrl.scheduling.core.events import FleetReported
from polyrl.scheduling.core.fleet import Worker
from polyrl.scheduling.parts.hearing import MS_A_TICK, runs_of, teaches

_TELL_EVERY_S = 2.0
AT_LAST_S = 5.0
"""So long is it waited for something that depends on it, before what an engine holds back is told anyway."""


def gather(
    desk: Desk,
    sessions: Iterable[WorkerSession],
    texts: Mapping[SampleId, SampleTokens],
    now: Seconds,
    whole: Collection[int] = (),
) -> FleetReported | None:
    """What is due, and all of the seats in `whole`. None: nothing is. It counts as told."""
    found = [(worker, one) for one in sessions if (worker := desk.state.fleet.find(one.name, one.incarnation))]
    found.sort(key=lambda one: one[0].seat)
    seats: list[int] = []
    heard_ago: list[int] = []
    progress: list[tuple[int, ...]] = []
    engines: list[tuple[int, int, int]] = []
    last = 0
    for worker, session in found:
        ago = _heard_ago(desk, worker, session, now)
        is_due = worker.seat in whole or now - session.told_at >= _TELL_EVERY_S
        runs = _gains(desk, worker, texts) if is_due and worker.leases else ()
        report = session.report if is_due and session.report is not session.told_report else None
        if report is not None and not teaches(worker, report.num_waiting):
            report = None
        if is_due:
            session.told_at, session.told_report = now, session.report
        if ago < 0 and not runs and report is None:
            continue
        if runs:
            progress.append((len(seats), *runs))
        if report is not None:
            engines.append((len(seats), report.num_waiting, report.num_preemptions))
        seats.append(worker.seat - last)
        heard_ago.append(ago)
        last = worker.seat
    return FleetReported(tuple(seats), tuple(heard_ago), tuple(progress), tuple(engines)) if seats else None


def _heard_ago(desk: Desk, worker: Worker, session: WorkerSession, now: Seconds) -> int:
    """In ticks; -1 where that can wait: its deadline is not near yet, or it was told already."""
    if session.heard_at <= session.told_heard_at:
        return -1
    left_s = desk.deadlines.entries[("heartbeat", worker.seat)] - now
    if not worker.unheard and left_s > desk.config.fleet_rules.heartbeat_timeout_s / 2:
        return -1
    session.told_heard_at = session.heard_at
    return max(0, round((now - session.heard_at) * 1000 / MS_A_TICK))


def _gains(desk: Desk, worker: Worker, texts: Mapping[SampleId, SampleTokens]) -> tuple[int, ...]:
    """How many tokens more than was told each of its samples has; empty when none has any."""
    leases = desk.leases
    gains = [
        (lease, max(0, texts[sample].num_tokens - leases[lease].num_tokens) if sample in texts else 0)
        for lease, sample in worker.leases.items()
    ]
    return runs_of(gains) if any(gain for _, gain in gains) else ()
