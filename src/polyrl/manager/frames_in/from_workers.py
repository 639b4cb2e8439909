"""Frames of workers, turned into events.

Rules kept here: a worker that connects, for the first time or again, says what it holds, and is sent what it lacks. A
worker that claims the impossible is cut off and counted, and its samples move on; no other peer notices. The scheduler
hears of an answer's end at once, and of progress and heartbeats when something depends on them. intake.py takes tokens.
"""

import logging
from typing import assert_never

from polyrl.errors import Refused, plain, shorten
from polyrl.ids import LeaseId, Seconds, Version
from polyrl.manager import frames_out
from polyrl.manager.frames_in import intake, joining
from polyrl.manager.frames_in.presence import is_present
from polyrl.manager.lobby import Lobby
from polyrl.manager.peers.link import Link
from polyrl.manager.peers.relay_addresses import own_addresses
from polyrl.manager.peers.sessions import WorkerSession, most_small_frames
from polyrl.manager.run import AT_LAST_BEATS, Run
from polyrl.not_data import NOT_DATA
from polyrl.scheduling.core import events as e
from polyrl.scheduling.core.fleet import Worker
from polyrl.scheduling.core.samples import NO_VERSION, TrackedSample
from polyrl.scheduling.parts.hearing import teaches
from polyrl.scheduling.rules.weight_delivery import TRAINER
from polyrl.wire import columns, frames

log = logging.getLogger("polyrl.manager")

_MOST_FAILED_INSTALLS = 8
"""Of a worker that has never installed a version of this run: minutes, since each pause is twice the one before. The
worker is told to leave then, so that it is not paid for ever. A worker that cannot read our versions leaves by itself,
but one of an older PolyRL does not know that it cannot."""
_DUTIES: dict[str, frames.Duty] = {"to_training": "training", "to_generating": "generating"}


def said(lobby: Lobby, session: WorkerSession, link: Link, raw: bytes) -> None:
    """Hear a frame of a worker's connection."""
    if not is_present(lobby, lobby.workers.get(session.name), session, link):
        return
    try:
        _hear(lobby, session, raw)
    except Refused as refused:
        _refuse(lobby, session, refused)


def _hear(lobby: Lobby, session: WorkerSession, raw: bytes) -> None:
    try:
        frame = frames.decode_from_worker(raw)
    except NOT_DATA as error:
        raise Refused("frame", f"not a frame: {error}") from error
    if not session.greeted and not isinstance(frame, frames.Hello):
        raise Refused("order", f"a {type(frame).__name__}; expected a Hello first")
    session.heard_at = lobby.now()
    lobby.dirty[session.key] = session
    run = lobby.run
    if isinstance(frame, frames.NewTokens):
        if run is None:
            raise Refused("order", intake.BEFORE_ANY_LEASE)
        intake.take_in(run, session, frame, raw)
        return
    if not session.may_say(frame, session.heard_at, lobby.settings.stream.heartbeat_interval_s):
        raise Refused(
            "flood", f"too many frames within a heartbeat, the last a {type(frame).__name__}; {_expected(lobby)}"
        )
    match frame:
        case frames.Leaving():
            _leaving(lobby, session, frame.reason, frame.notice_s)
        case frames.Goodbye():
            _goodbye(lobby, session, frame)
        case _ if run is None:
            _hear_before_a_run(lobby, session, frame)
        case _:
            _hear_in_a_run(run, session, frame)


NewsOfAnEngine = (
    frames.Hello | frames.Report | frames.Installed | frames.InstallFailed | frames.Down | frames.Back | frames.OnDuty
)


def _hear_before_a_run(lobby: Lobby, session: WorkerSession, frame: NewsOfAnEngine) -> None:
    """Hear a worker that waits for a run: there are no versions yet, no leases, and no duties."""
    match frame:
        case frames.Hello():
            _greet(lobby, session, frame, None)
            session.say(frames.Welcome(()))
        case frames.Report():
            session.report = frame
        case frames.Installed():
            raise Refused("version", _never_published(frame.version, -1))
        case frames.InstallFailed():
            lobby.refused["late_news"] += 1
        case frames.Down():
            _count_news(lobby, session, "that its engine is down")
            _log_down(session, frame.reason)
        case frames.Back() | frames.OnDuty():
            pass
        case _:
            assert_never(frame)


def _hear_in_a_run(run: Run, session: WorkerSession, frame: NewsOfAnEngine) -> None:
    match frame:
        case frames.Report():
            _report(run, session, frame)
        case frames.Hello():
            _hello(run, session, frame)
        case frames.Installed():
            if run.payload.was(frame.version, frame.digest):
                return  # the worker is told to fetch the version again
            _check_version(run, session, frame)
            session.has_installed = True
            _installed(run, session, Version(frame.version))
        case frames.InstallFailed():
            _install_failed(run, session, frame)
        case frames.Down():
            _down(run, session, frame.reason)
        case frames.Back():
            _back(run, session, frame.version, "")
        case frames.OnDuty() if not session.facts.local:
            raise Refused("order", "a change of duty; expected none, since only the trainer's own workers have duties")
        case frames.OnDuty():
            run.tell(e.DutyChanged(session.name, session.incarnation, frame.duty))
        case _:
            assert_never(frame)


def _leaving(lobby: Lobby, session: WorkerSession, why: str, notice_s: Seconds) -> None:
    """Let a worker leave that wants to. Its repetitions while it hands over are ignored."""
    worker = None if lobby.run is None else lobby.run.seat_of(session)
    if worker is None or worker.state != "draining":
        _count_news(lobby, session, "that it leaves")
        joining.drain(lobby, session.name, why, notice_s)


def _count_news(lobby: Lobby, session: WorkerSession, what: str) -> None:
    """Raise Refused for a worker that fills the journal with its messages."""
    if not session.may_tell(session.heard_at, lobby.settings.stream.heartbeat_interval_s):
        raise Refused("flood", f"too much news, the last {what}; {_expected(lobby)}")


def _goodbye(lobby: Lobby, session: WorkerSession, goodbye: frames.Goodbye) -> None:
    if goodbye.is_misfit:
        log.warning("worker %s has left: %s", session.name, goodbye.reason)
        lobby.turn_away(session.name, goodbye.reason)
    lobby.tell(e.WorkerLeft(session.name, session.incarnation, goodbye.reason))
    lobby.forget(session.name, goodbye.reason)


def _refuse(lobby: Lobby, session: WorkerSession, refused: Refused) -> None:
    lobby.refused[refused.kind] += 1
    log.warning("worker %s is refused: %s", session.name, refused)
    lobby.turn_away(session.name, str(refused))
    lobby.tell(e.WorkerLeft(session.name, session.incarnation, f"refused: {refused}"))
    lobby.forget(session.name, f"refused: {refused}", in_anger=True)


def _never_published(version: int, newest: int) -> str:
    return f"version {version} was never published; expected {f'at most {newest}' if newest >= 0 else 'none yet'}"


def _expected(lobby: Lobby) -> str:
    most = most_small_frames(lobby.settings.stream.heartbeat_interval_s)
    return f"expected {most:g} at once at most, and few from then on"


def _check_version(run: Run, session: WorkerSession, installed: frames.Installed) -> None:
    version = installed.version
    if version > run.desk.state.published:
        raise Refused("version", _never_published(version, run.desk.state.published))
    digest = run.payload.digest_of(version)
    if not _is_ours(run, version, installed.digest) and not session.facts.local:  # that one has the trainer's own
        expected = digest or "a version that was published by its number"
        raise Refused("digest", f"version {version} with {installed.digest or 'no digest'}; expected {expected}")


def _installed(run: Run, session: WorkerSession, version: Version) -> None:
    worker = run.seat_of(session)
    if worker is None or version <= worker.version:
        run.lobby.refused["late_news"] += 1
    else:
        run.tell(e.WeightsInstalled(session.name, session.incarnation, version))


def _install_failed(run: Run, session: WorkerSession, failed: frames.InstallFailed) -> None:
    worker, version = run.seat_of(session), Version(failed.version)
    if worker is None or worker.pulling != version:  # it was told to stop meanwhile, or never to start
        run.lobby.refused["late_news"] += 1
        return
    if (often := session.failures.again(failed.reason)) is not None:
        log.warning("worker %s could not install version %d: %s%s", session.name, version, failed.reason, often)
    session.num_failed_installs += worker.source == TRAINER  # a peer that gives nothing is not its fault
    is_trainer_here = run.trainer is not None and run.trainer.link is not None
    if session.num_failed_installs >= _MOST_FAILED_INSTALLS and not session.has_installed and is_trainer_here:
        tries = f"{session.num_failed_installs} tries"
        raise Refused("install", f"no version could be installed in {tries}, the last time since {failed.reason}")
    run.tell(e.WeightsFailed(session.name, session.incarnation, version, failed.reason))


def _down(run: Run, session: WorkerSession, reason: str) -> None:
    worker = run.seat_of(session)
    if worker is not None and worker.down:
        run.lobby.refused["late_news"] += 1
        return
    _count_news(run.lobby, session, "that its engine is down")
    _log_down(session, reason)
    run.tell(e.EngineDown(session.name, session.incarnation, reason))


def _log_down(session: WorkerSession, reason: str) -> None:
    if (often := session.failures.again(reason)) is not None:
        log.warning("worker %s: its engine is down: %s%s", session.name, reason, often)


def _back(run: Run, session: WorkerSession, version: int, digest: str) -> None:
    """Tell the scheduler that an engine is back. As at a join, a version of another run counts as none."""
    _count_news(run.lobby, session, "that its engine is back")
    held = Version(version) if _is_ours(run, version, digest) else None
    run.tell(e.EngineBack(session.name, session.incarnation, held))


def _is_ours(run: Run, version: int, digest: str) -> bool:
    """Return whether the digest is the one that the trainer published the version with.

    In a run with weights, a version without a known digest is not ours; in a run without, every digest is empty.
    """
    return digest == run.payload.digest_of(version) and bool(digest) == run.has_weights


def _greet(lobby: Lobby, session: WorkerSession, hello: frames.Hello, worker: Worker | None) -> None:
    """Check a connection's first frame, and note what it says of the worker itself."""
    if len(hello.leases) % 8:
        raise Refused(
            "columns", f"{len(hello.leases)} bytes of leases, which ends inside a number; expected eight each"
        )
    intake.check_amount(session, worker, len(hello.leases) // 8)
    if session.greeted:
        raise Refused("order", "a second Hello on one connection; expected one")
    session.greeted = lobby.is_urgent = True
    session.is_expected = False
    session.weight_addresses = _own_addresses(lobby, session, hello.weight_addresses)


def _hello(run: Run, session: WorkerSession, hello: frames.Hello) -> None:
    """Compare what a worker holds with what it should hold, and send the difference."""
    worker = run.seat_of(session)
    _greet(run.lobby, session, hello, worker)
    if worker is None:
        session.say(frames.Welcome(()))
        return
    desk = run.desk
    theirs = list(dict.fromkeys(map(LeaseId, columns.unpack_column("Q", hello.leases))))
    if theirs and max(theirs) >= desk.state.next_lease:
        raise Refused("lease", f"it holds lease {max(theirs)}, which was never given; expected its own")
    ours = worker.leases
    held = tuple(frames.HeldLease(one, run.payload.tokens_of(ours[one]).num_tokens) for one in theirs if one in ours)
    session.say(frames.Welcome(held))
    _compare_versions(run, session, worker, hello)
    if worker.duty == "to_training" or worker.duty == "to_generating":
        session.say(frames.ChangeDuty(_DUTIES[worker.duty], "it was to turn"))
    known = frozenset(theirs)
    for lease in list(ours):
        sample = desk.leases[lease]
        if lease not in known:
            _order_again(run, lease, sample)
        elif sample.state == "stopping":
            session.hand_over(lease)
    if hello.draining:
        _leaving(run.lobby, session, hello.draining, hello.notice_s)
    if worker.state == "draining" and not worker.leases:
        session.say(frames.Release("it has handed everything over"))


def _compare_versions(run: Run, session: WorkerSession, worker: Worker, hello: frames.Hello) -> None:
    """Tell which version the worker's engine runs, if it runs; repeat an order to fetch one."""
    if hello.down:
        if not worker.down:
            _down(run, session, hello.down)
    elif worker.down or (hello.version < worker.version and not worker.local):  # it came back, or died, unheard
        _back(run, session, hello.version, hello.digest)
    is_ours = _is_ours(run, hello.version, hello.digest)
    session.has_installed = session.has_installed or (is_ours and bool(hello.digest))
    if is_ours and worker.version < hello.version <= run.desk.state.published:
        run.tell(e.WeightsInstalled(session.name, session.incarnation, Version(hello.version)))
    if worker.pulling != NO_VERSION:
        source = run.desk.seats.get(worker.source)
        name = "" if source is None else source.name
        frames_out.send_to_pull(run, session, worker.pulling, name, worker.version)


def _own_addresses(lobby: Lobby, session: WorkerSession, claimed: tuple[str, ...]) -> tuple[str, ...]:
    seen_at = "" if session.link is None else session.link.seen_at
    own = own_addresses(claimed, seen_at, lobby.settings.limits.relay_networks)
    if len(own) < len(claimed):
        lobby.refused["address"] += len(claimed) - len(own)
        strange = plain(", ".join(one for one in claimed if one not in own))
        log.warning(
            "worker %s at %s: no worker is sent to %s for weights: that address is not its own (limits.relay_networks)",
            session.name, seen_at, shorten(strange),
        )  # fmt: skip
    return own


def _order_again(run: Run, lease: LeaseId, sample: TrackedSample) -> None:
    """Start, or end, a lease that its worker never heard of or has forgotten."""
    if sample.state == "stopping":
        run.tell(e.LeaseEnded(lease, run.payload.tokens_of(sample.id).num_tokens, "handed_over"))
    else:
        frames_out.order(run, lease)


def _report(run: Run, session: WorkerSession, report: frames.Report) -> None:
    """Keep a worker's report. The scheduler hears of it when something depends on it."""
    session.report = report
    worker = run.seat_of(session)
    if worker is None:
        return
    is_late = run.lobby.now() - session.told_at > AT_LAST_BEATS * run.beat_s
    may_earn = len(worker.leases) >= worker.earned  # and its first answers may be minutes away
    if worker.unheard or may_earn or (is_late and teaches(worker, report.num_waiting)):
        run.tell_news(session)


def gone(session: WorkerSession, link: Link) -> None:
    """Note that a worker's connection broke. The worker may dial again; if it does not, its heartbeat is missed."""
    if session.link is link:
        session.link, session.greeted = None, False
