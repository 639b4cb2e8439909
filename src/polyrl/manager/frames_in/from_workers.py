"""What workers say: frames become events.

Rules kept here: a worker that connects, for the first time or again, says what it holds, and is sent what it lacks. One
that says what cannot be true is cut off, counted, and its samples move on; it harms nobody else. The scheduler hears of
an answer's end at once, and of progress and heartbeats when something depends on them. intake.py takes tokens in.
"""

import logging
from typing import assert_never

from polyrl.errors import plain, shorten
from polyrl.ids import LeaseId, Version
from polyrl.manager import frames_out
from polyrl.manager.frames_in import intake, joining
from polyrl.manager.gathering import AT_LAST_S
from polyrl.manager.peers.link import Link
from polyrl.manager.peers.relay_addresses import own_addresses
from polyrl.manager.peers.sessions import WorkerSession
from polyrl.manager.refusals import Refused
from polyrl.manager.run import Executor
from polyrl.scheduling.core import events as e
from polyrl.scheduling.core.samples import NO_VERSION, Sample
from polyrl.scheduling.parts.hearing import teaches
from polyrl.scheduling.rules.weight_delivery import TRAINER
from polyrl.wire import columns, frames

log = logging.getLogger("polyrl.manager")

_MOST_FAILED_INSTALLS = 8
"""Of a worker that has never installed a version of this run: minutes, since each pause is twice the one before. It is
told to go then, so that nobody pays for it for ever. A worker that cannot read our versions leaves by itself, but one
of an older PolyRL does not know that it cannot."""
_DUTIES: dict[str, frames.Duty] = {"to_training": "training", "to_generating": "generating"}


def said(executor: Executor, session: WorkerSession, link: Link, raw: bytes) -> None:
    if executor.workers.get(session.name) is not session or session.link is not link:
        link.close("that session is over, or has another connection")
        return
    executor.num_frames += 1
    try:
        _hear(executor, session, raw)
    except Refused as refused:
        _refuse(executor, session, refused)


def _hear(executor: Executor, session: WorkerSession, raw: bytes) -> None:
    try:
        frame = frames.decode_from_worker(raw)
    except frames.NO_FRAME as error:
        raise Refused("frame", f"not a frame: {error}") from error
    if not session.greeted and not isinstance(frame, frames.Hello):
        raise Refused("order", f"a {type(frame).__name__} before a Hello")
    session.heard_at = executor.now()
    executor.dirty[session.key] = session
    if isinstance(frame, frames.NewTokens):
        intake.take_in(executor, session, frame, raw)
        return
    if not session.may_say(frame, session.heard_at, executor.settings.stream.heartbeat_interval_s):
        raise Refused("flood", f"too many frames within a heartbeat, the last a {type(frame).__name__}")
    match frame:
        case frames.Report():
            _report(executor, session, frame)
        case frames.Hello():
            _hello(executor, session, frame)
        case frames.Installed():
            if executor.payload.was(frame.version, frame.digest):
                return  # it is told to fetch the version again
            _check_version(executor, session, frame)
            session.has_installed = True
            executor.tell(e.WeightsInstalled(session.name, session.incarnation, Version(frame.version)))
        case frames.InstallFailed():
            _install_failed(executor, session, frame)
        case frames.Down():
            _down(executor, session, frame.reason)
        case frames.Back():
            _back(executor, session, frame.version, "")
        case frames.OnDuty():
            executor.tell(e.DutyChanged(session.name, session.incarnation, frame.duty))
        case frames.Leaving():
            joining.drain(executor, session.name, frame.reason, frame.notice_s)
        case frames.Goodbye():
            if frame.is_misfit:
                log.warning("worker %s has left: %s", session.name, frame.reason)
                executor.turn_away(session.name, frame.reason)
            executor.tell(e.WorkerLeft(session.name, session.incarnation, frame.reason))
            executor.forget(session.name, frame.reason)
        case _:
            assert_never(frame)


def _refuse(executor: Executor, session: WorkerSession, refused: Refused) -> None:
    executor.refused[refused.kind] += 1
    log.warning("worker %s is refused: %s", session.name, refused)
    executor.turn_away(session.name, str(refused))
    executor.tell(e.WorkerLeft(session.name, session.incarnation, f"refused: {refused}"))
    executor.forget(session.name, f"refused: {refused}", in_anger=True)


def _check_version(executor: Executor, session: WorkerSession, installed: frames.Installed) -> None:
    version = installed.version
    if executor.scheduler is None or version > executor.scheduler.desk.state.published:
        raise Refused("version", f"version {version} was never published")
    digest = executor.payload.digest_of(version)
    if not _is_ours(executor, version, installed.digest) and not session.facts.local:  # that one has the trainer's own
        raise Refused("digest", f"version {version} is {digest or 'a number'}, not {installed.digest or 'a number'}")


def _install_failed(executor: Executor, session: WorkerSession, failed: frames.InstallFailed) -> None:
    worker, version = executor.seat_of(session), Version(failed.version)
    if worker is None or worker.pulling != version:  # it was told to stop meanwhile, or never to start
        executor.refused["late_news"] += 1
        return
    if (often := session.failures.again(failed.reason)) is not None:
        log.warning("worker %s could not install version %d: %s%s", session.name, version, failed.reason, often)
    session.num_failed_installs += worker.source == TRAINER  # a peer that gives nothing is not its fault
    is_trainer_here = executor.trainer is not None and executor.trainer.link is not None
    if session.num_failed_installs >= _MOST_FAILED_INSTALLS and not session.has_installed and is_trainer_here:
        tries = f"{session.num_failed_installs} tries"
        raise Refused("install", f"no version could be installed in {tries}, the last time since {failed.reason}")
    executor.tell(e.WeightsFailed(session.name, session.incarnation, version, failed.reason))


def _down(executor: Executor, session: WorkerSession, reason: str) -> None:
    worker = executor.seat_of(session)
    if worker is not None and worker.down:
        executor.refused["late_news"] += 1
        return
    if (often := session.failures.again(reason)) is not None:
        log.warning("worker %s: its engine is down: %s%s", session.name, reason, often)
    executor.tell(e.EngineDown(session.name, session.incarnation, reason))


def _back(executor: Executor, session: WorkerSession, version: int, digest: str) -> None:
    """An engine that is there again. As at a join, what is not a version of this run is as good as none."""
    held = Version(version) if _is_ours(executor, version, digest) else None
    executor.tell(e.EngineBack(session.name, session.incarnation, held))


def _is_ours(executor: Executor, version: int, digest: str) -> bool:
    """Whether that digest is the version's. In a run with weights, one of which nothing is known is nobody's."""
    fetches = executor.trainer is not None and executor.trainer.has_weights
    return digest == executor.payload.digest_of(version) and bool(digest) == fetches


def _hello(executor: Executor, session: WorkerSession, hello: frames.Hello) -> None:
    if len(hello.leases) % 8:
        raise Refused("columns", "a column ends inside a number")
    intake.check_amount(session, executor.seat_of(session), len(hello.leases) // 8)
    if session.greeted:
        raise Refused("order", "a second Hello on one connection")
    session.greeted = executor.is_urgent = True
    session.is_expected = False
    session.weight_addresses = _own_addresses(executor, session, hello.weight_addresses)
    worker = executor.seat_of(session)
    if worker is None or executor.scheduler is None:
        session.say(frames.Welcome(()))
        return
    desk = executor.scheduler.desk
    theirs = list(dict.fromkeys(map(LeaseId, columns.unpack_column("Q", hello.leases))))
    if theirs and max(theirs) >= desk.state.next_lease:
        raise Refused("lease", f"it holds lease {max(theirs)}, which was never given")
    ours = worker.leases
    held = tuple(frames.HeldLease(one, executor.payload.text(ours[one]).num_tokens) for one in theirs if one in ours)
    session.say(frames.Welcome(held))
    if hello.down:
        if not worker.down:
            _down(executor, session, hello.down)
    elif worker.down or (hello.version < worker.version and not worker.local):  # it came back, or died, unheard
        _back(executor, session, hello.version, hello.digest)
    is_ours = _is_ours(executor, hello.version, hello.digest)
    session.has_installed = session.has_installed or (is_ours and bool(hello.digest))
    if is_ours and worker.version < hello.version <= desk.state.published:  # as at a join, others are as good as none
        executor.tell(e.WeightsInstalled(session.name, session.incarnation, Version(hello.version)))
    if worker.pulling != NO_VERSION:
        source = desk.seats.get(worker.source)
        name = "" if source is None else source.name
        session.say(frames_out.pull(executor, session, worker.pulling, name, worker.version))
    if worker.duty == "to_training" or worker.duty == "to_generating":
        session.say(frames.ChangeDuty(_DUTIES[worker.duty], "it was to turn"))
    known = frozenset(theirs)
    for lease in list(ours):
        sample = desk.leases[lease]
        if lease not in known:
            _order_again(executor, lease, sample)
        elif sample.state == "stopping":
            session.hand_over(lease)
    if hello.draining:
        joining.drain(executor, session.name, hello.draining, hello.notice_s)
    if worker.state == "draining" and not worker.leases:
        session.say(frames.Release("it has handed everything over"))


def _own_addresses(executor: Executor, session: WorkerSession, claimed: tuple[str, ...]) -> tuple[str, ...]:
    seen_at = "" if session.link is None else session.link.seen_at
    own = own_addresses(claimed, seen_at, executor.settings.limits.relay_networks)
    if len(own) < len(claimed):
        executor.refused["address"] += len(claimed) - len(own)
        strange = plain(", ".join(one for one in claimed if one not in own))
        log.warning(
            "worker %s at %s: nobody is sent to fetch weights at %s, which is not its own (limits.relay_networks)",
            session.name, seen_at, shorten(strange),
        )  # fmt: skip
    return own


def _order_again(executor: Executor, lease: LeaseId, sample: Sample) -> None:
    """A lease that its worker never heard of, or has forgotten: it had better start, or end, now."""
    if sample.state == "stopping":
        executor.tell(e.LeaseEnded(lease, executor.payload.text(sample.id).num_tokens, "handed_over"))
    else:
        frames_out.order(executor, lease)


def _report(executor: Executor, session: WorkerSession, report: frames.Report) -> None:
    session.report = report
    worker = executor.seat_of(session)
    if worker is None:
        return  # otherwise the scheduler hears of it when something depends on it (scheduling/parts/hearing.py)
    waited_s = executor.now() - session.told_at
    if worker.unheard or (waited_s > AT_LAST_S and teaches(worker, report.num_waiting)):
        executor.tell_news(session)


def gone(executor: Executor, session: WorkerSession, link: Link) -> None:
    """Its connection broke: it may dial again. If not, its heartbeat is missed."""
    if session.link is link:
        session.link, session.greeted = None, False
