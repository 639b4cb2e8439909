"""Going on with the run of a directory: the files of earlier managers become the state that they had.

Rules kept here: no peer is blamed for silence while no manager listened, so waits begin again (DriverResumed). All that
holds is written down anew, whatever half of a batch was on file. Peers bring the rest when they dial.
"""

import gc
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from polyrl.errors import JournalError
from polyrl.ids import Incarnation, Seconds, show_sample
from polyrl.manager.frames_out import carry_out
from polyrl.manager.lobby import Lobby
from polyrl.manager.notes import HostOpened, RunOpened, SessionOpened
from polyrl.manager.payload import Payload
from polyrl.manager.payload_reader import PayloadReader
from polyrl.manager.peers.sessions import HostSession, TrainerSession, WorkerSession
from polyrl.manager.run import Run
from polyrl.scheduling.core import events as e
from polyrl.scheduling.core.desk import RULES, Desk


def recover(lobby: Lobby) -> str:
    """Go on with the run of this directory. Returns a line about it."""
    with _no_collection():
        return _recover(lobby)


def _recover(lobby: Lobby) -> str:
    journal = lobby.journal
    found = journal.recover()
    if found is None:
        journal.begin()
        return "a new run"
    scheduler = found.scheduler
    reader = PayloadReader(() if scheduler is None else scheduler.desk.groups)
    trainer = _read_payload(lobby, reader, found.payload)
    payload = reader.finish(scheduler)
    if scheduler is not None:
        _check_answers(scheduler.desk, payload)
    journal.go_on(() if scheduler is None else tuple(scheduler.desk.rounds))
    lobby.set_clock(found.now + found.away_s)
    if scheduler is None:
        return f"going on: {len(lobby.workers)} workers, no run was opened"
    if scheduler.rules < RULES:  # its events were told again as the version decided that wrote them
        scheduler.adopt(RULES)
        journal.follow_events(scheduler, lobby.about)
    run = lobby.run = Run(lobby, scheduler, carry_out)
    run.payload, run.trainer = payload, trainer
    _go_on(run, found.away_s)
    return (
        f"going on after {found.away_s:.1f} s away: {found.num_records} records, {len(lobby.workers)} workers, "
        f"{len(run.desk.leases)} samples running, {payload.num_bytes // 8} tokens held"
    )


def _go_on(run: Run, away_s: Seconds) -> None:
    """Tell the scheduler what ended with the former manager, and write down all that holds now."""
    lobby, fleet = run.lobby, run.desk.state.fleet
    lobby.lives.update(fleet.last_incarnations)  # also of those whose sessions are in files long deleted
    gone = [one for one in lobby.workers.values() if run.seat_of(one) is None]
    for session in gone:
        del lobby.workers[session.name]
    for session in lobby.workers.values():
        session.heard_at = session.told_at = session.told_heard_at = lobby.now()
    lobby.host_lives.update(run.desk.hosts.last_incarnations)
    for host in list(lobby.hosts.values()):
        host.heard_at = lobby.now() + lobby.settings.restart_grace_s
        if run.desk.hosts.find(host.name, host.incarnation) is None:
            del lobby.hosts[host.name]
    run.tell(e.DriverResumed(away_s, lobby.settings.restart_grace_s))
    for group in list(run.desk.asked.groups):  # the askers lost their connections with the former manager
        run.tell(e.GroupWithdrawn(group, "the manager was started again"))
    if run.trainer is not None:
        run.trainer.away_since = lobby.now()
        run.tell(e.TrainerLeft(away_s))
    for sample in run.desk.leases.values():
        if sample.group not in run.payload.prompts:
            run.no_prompt_yet.setdefault(sample.group, []).append(sample.lease)
    for one in run.desk.samples.values():
        if one.host >= 0 and one.group not in run.payload.prompts:
            run.no_task_yet.setdefault(one.group, []).append(one.id)
    _write_down_what_holds(run)


@contextmanager
def _no_collection() -> Iterator[None]:
    """Keep the garbage collector off: millions of objects are made, and none of them is garbage."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _read_payload(lobby: Lobby, reader: PayloadReader, payload: Iterable[Any]) -> TrainerSession | None:
    """Read everything. Returns the last trainer that opened the run."""
    trainer: TrainerSession | None = None
    for item in payload:
        match item:
            case list():
                reader.tokens(item)
            case SessionOpened():
                _reopen(lobby, item)
                reader.note(item)
            case HostOpened():
                session = HostSession(item.key, Incarnation(item.incarnation), item.facts)
                session.heard_at = lobby.now()
                lobby.hosts[session.name] = session
                lobby.host_lives[session.name] = session.incarnation
            case RunOpened():
                trainer = TrainerSession(
                    item.key,
                    has_reward=item.has_reward,
                    has_weights=item.has_weights,
                    trains=item.trains,
                    answers=item.answers,
                )
                lobby.set_caveat(item.caveat)
            case _:
                reader.note(item)
    return trainer


def _check_answers(desk: Desk, payload: Payload) -> None:
    """Raise JournalError for half an answer. A kill never leaves one; a machine that loses power may."""
    for sample in desk.samples.values():
        if sample.state in ("generated", "scoring", "scored") and sample.group not in desk.asked.groups:
            tokens = payload.tokens.get(sample.id)
            num_tokens = 0 if tokens is None else tokens.num_tokens
            if tokens is None or num_tokens != sample.num_tokens or not tokens.finish:
                raise JournalError(
                    f"sample {show_sample(sample.id)}: it ended at token {sample.num_tokens}, and the payload has "
                    f"{num_tokens}: lost with the machine's power, or with a file. This run cannot go on"
                )


def _reopen(lobby: Lobby, note: SessionOpened) -> None:
    session = WorkerSession(note.key, Incarnation(note.incarnation), note.facts)
    session.is_expected = True
    session.most_held = note.facts.slots  # it may hold as many that are over: how many it had is not on file
    session.heard_at = lobby.now()
    lobby.workers[session.name] = session
    lobby.lives[session.name] = session.incarnation


def _write_down_what_holds(run: Run) -> None:
    """Write all sessions and leases, whatever half of a batch was on file before."""
    for note in run.lobby.standing():
        run.lobby.journal.add_note(note)
    granted = run.granted
    for lease, sample in run.desk.leases.items():
        tokens = run.payload.tokens_of(sample.id)
        tokens.worker = run.desk.seats[sample.worker].name
        tokens.engine = run.lobby.engine_of(tokens.worker)
        granted.leases.append(lease)
        granted.samples.append(sample.id)
        granted.from_tokens.append(tokens.num_tokens)
        granted.workers.append(tokens.worker)
