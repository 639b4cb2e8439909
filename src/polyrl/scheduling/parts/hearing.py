"""Routine news of workers, which changes no decision by itself: heartbeats, progress, samples that engines hold back.

A driver hears it all the time and gathers it; a journal that held each piece would grow by gigabytes a day. It is told
in one event, of all workers at once, when something depends on it: before time passes, since a silent worker is
then given up, before an event that takes leases away without saying how far they were, and at once of a worker that has
not been heard of since the driver was away.

Rules kept here: what is told late is told exactly. A worker's deadline counts from when it was heard, not from when
that was reported, so no worker is given up sooner or later for it.
"""

from collections.abc import Iterable, Sequence

from polyrl.ids import LeaseId, Seconds
from polyrl.scheduling.core.desk import Desk
from polyrl.scheduling.core.events import (
    EngineBack,
    EngineDown,
    EpisodeEnded,
    Event,
    FleetReported,
    GroupRejected,
    HostJoined,
    HostLeft,
    SampleFinished,
    TimePassed,
    VersionReplaced,
    WorkerLeft,
)
from polyrl.scheduling.core.fleet import Worker
from polyrl.scheduling.parts import balancing, credit, devices, membership
from polyrl.scheduling.parts.leases import note_tokens

MS_A_TICK = 10
"""The unit of `FleetReported.heard_ago`, in milliseconds."""
_WAITS = ("heartbeat", "unheard", "stall", "switch", "drain", "notice")
"""Reasons for which a worker may end all its leases at once."""
_WAITS_OF_SAMPLES = ("hand_over", "turn", "episode", "host_drain")


def fleet_reported(desk: Desk, event: FleetReported, now: Seconds) -> None:
    workers: list[Worker | None] = []
    seat = 0
    for more, ago in zip(event.seats, event.heard_ago, strict=False):
        seat += more
        worker = desk.seats.get(seat)
        workers.append(worker)
        if worker is None:
            desk.ledger.late_news += 1
        elif ago >= 0:
            membership.heard_from(desk, worker, now, ago * MS_A_TICK / 1000)
    for which, first, *runs in event.progress:
        if 0 <= which < len(workers) and (worker := workers[which]) is not None:
            _progressed(desk, worker, LeaseId(first), runs, now)
    for which, num_waiting, num_preemptions in event.engines:
        if 0 <= which < len(workers) and (worker := workers[which]) is not None:
            balancing.learn_plateau(desk, worker, num_waiting)
            worker.num_preemptions = max(worker.num_preemptions, num_preemptions)


def _progressed(desk: Desk, worker: Worker, first: LeaseId, runs: Sequence[int], now: Seconds) -> None:
    """Take in a worker's progress. `runs` are pairs, from lease `first` on: a number of leases, and the tokens that
    each gained."""
    most, at, until, gain = 0, 0, int(first), 0
    for lease in worker.leases:
        while lease >= until and at + 1 < len(runs):
            until, gain, at = until + runs[at], runs[at + 1], at + 2
        if lease < first or lease >= until or gain <= 0:
            continue
        sample = desk.leases[lease]
        gained = note_tokens(desk, sample, sample.num_tokens + gain)
        most = gained if gained > most else most
    if most:
        balancing.learn_speed(worker, len(worker.leases), most, now)
        if worker.earned < worker.slots:
            credit.progressed(desk, worker)


def runs_of(gains: Iterable[tuple[LeaseId, int]]) -> tuple[int, ...]:
    """Return the first lease, and then for each run of leases with the same gain how far it reaches and what that
    is."""
    runs: list[int] = []
    first = at = last = -1
    its = 0
    for lease, gain in gains:
        if first < 0:
            first = at = lease
        elif gain != its:
            runs += (last + 1 - at, its)
            at = last + 1
        last, its = lease, gain
    if first >= 0:
        runs += (last + 1 - at, its)
    return (first, *runs)


def teaches(worker: Worker, num_waiting: int) -> bool:
    """Return whether a report of `num_waiting` held-back samples, or of progress, would change a worker's credit."""
    grows = len(worker.leases) >= worker.limit < worker.slots
    return num_waiting > 0 or worker.held_back_at >= 0 or worker.num_waiting > 0 or grows


def concerned(desk: Desk, event: Event, now: Seconds) -> Sequence[int] | None:
    """Return the seats whose samples the event may take away: their news must be reported before. None: no seat."""
    match event:
        case TimePassed():
            waits = desk.deadlines.entries
            if any(name in _WAITS_OF_SAMPLES and at <= now for (name, _), at in waits.items()):
                return list(desk.seats)
            return [seat for seat in desk.seats if any(waits.get((name, seat), now + 1.0) <= now for name in _WAITS)]
        case WorkerLeft() | EngineDown() | EngineBack():
            worker = desk.state.fleet.find(event.worker, event.incarnation)
            return None if worker is None else [worker.seat]
        case GroupRejected():
            by_name = desk.state.fleet.by_name
            return [by_name[name] for name in event.blamed if name in by_name] or None
        case SampleFinished():
            return _concerned_by_answer(desk, event)
        case VersionReplaced() | HostLeft() | HostJoined():
            return list(desk.seats)
        case EpisodeEnded():  # a host may be given up for it, and with it all of its calls
            sample = desk.samples.get(event.sample)
            if sample is not None and sample.failed_at >= 0:
                return list(desk.seats)
            return None if sample is None or sample.worker < 0 else [sample.worker]
        case _:
            return None


def _concerned_by_answer(desk: Desk, event: SampleFinished) -> Sequence[int] | None:
    """Return the seats of workers that failed where this one did not, and may be given up for it; and those of the
    trainer's own, if some of them may be given back: how fast they are, and how far their samples, decides which."""
    sample = desk.leases.get(event.lease)
    if sample is None:
        return None
    round_ = devices.oldest_round(desk)
    its_round = desk.groups[sample.group].step
    if round_ is not None and devices.hand_back_is_due(desk, round_, round_.num_generated + (round_.step == its_round)):
        return [*desk.groups[sample.group].failed_on, *desk.state.fleet.local_seats]
    return desk.groups[sample.group].failed_on or None
