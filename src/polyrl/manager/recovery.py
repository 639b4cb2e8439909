"""Going on with the run of a directory: whatever earlier managers wrote becomes the state that they had.

Rules kept here: what peers did while nobody listened is nobody's fault, so waits begin again (DriverResumed). All that
holds is written down anew, whatever half of a batch was on file. Peers bring the rest when they dial.
"""

import gc
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from polyrl.errors import JournalError
from polyrl.ids import Incarnation, show_sample
from polyrl.manager.journal import RunOpened, SessionOpened
from polyrl.manager.payload import Payload
from polyrl.manager.payload_reader import PayloadReader
from polyrl.manager.peers.sessions import TrainerSession, WorkerSession
from polyrl.manager.run import Executor
from polyrl.scheduling.core import events as e
from polyrl.scheduling.core.desk import RULES, Desk


def recover(executor: Executor) -> str:
    """Go on with the run of this directory. Returns a line about it."""
    journal = executor.journal
    found = journal.recover()
    if found is None:
        journal.begin()
        return "a new run"
    reader = PayloadReader(() if found.scheduler is None else found.scheduler.desk.groups)
    with _no_collection():
        _read_payload(executor, reader, found.payload)
        executor.payload = reader.finish(found.scheduler)
    if found.scheduler is not None:
        _check_answers(found.scheduler.desk, executor.payload)
    executor.scheduler = found.scheduler
    open_steps = () if found.scheduler is None else tuple(found.scheduler.desk.rounds)
    journal.go_on(open_steps)
    executor.set_clock(found.now + found.away_s)
    if found.scheduler is None:
        return f"going on: {len(executor.workers)} workers, no run was opened"
    if found.scheduler.rules < RULES:  # its events were told again as the version decided that wrote them
        found.scheduler.adopt(RULES)
        journal.follow_events(found.scheduler, executor.about)
    fleet = found.scheduler.desk.state.fleet
    executor.lives.update(fleet.last_incarnations)  # also of those whose sessions are in files long deleted
    gone = [one for one in executor.workers.values() if fleet.find(one.name, one.incarnation) is None]
    for session in gone:
        del executor.workers[session.name]
    for session in executor.workers.values():
        session.heard_at = session.told_at = session.told_heard_at = executor.now()
    executor.tell(e.DriverResumed(found.away_s, executor.settings.restart_grace_s))
    for group in list(found.scheduler.desk.asked.groups):  # whoever asked lost its connection with the former manager
        executor.tell(e.GroupWithdrawn(group, "the manager was started again"))
    if executor.trainer is not None:
        executor.trainer.away_since = executor.now()
        executor.tell(e.TrainerLeft(found.away_s))
    _expect_prompts(executor)
    _write_down_what_holds(executor)
    return (
        f"going on after {found.away_s:.1f} s away: {found.num_records} records, {len(executor.workers)} workers, "
        f"{len(found.scheduler.desk.leases)} samples running, {executor.payload.num_bytes // 8} tokens held"
    )


@contextmanager
def _no_collection() -> Iterator[None]:
    """Millions of objects are made, and none of them is garbage; the service looks for it when it runs."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _read_payload(executor: Executor, reader: PayloadReader, payload: Iterable[Any]) -> None:
    for item in payload:
        match item:
            case list():
                reader.tokens(item)
            case SessionOpened():
                _reopen(executor, item)
                reader.note(item)
            case RunOpened():
                executor.trainer = TrainerSession(
                    item.key,
                    has_reward=item.has_reward,
                    has_weights=item.has_weights,
                    trains=item.trains,
                    answers=item.answers,
                )
                executor.set_caveat(item.caveat)
            case _:
                reader.note(item)


def _check_answers(desk: Desk, payload: Payload) -> None:
    """A kill never parts an answer from its end. A machine without power may: half an answer must not be trained on."""
    for sample in desk.samples.values():
        if sample.state in ("generated", "scoring", "scored") and sample.group not in desk.asked.groups:
            text = payload.texts.get(sample.id)
            num_tokens = 0 if text is None else text.num_tokens
            if text is None or num_tokens != sample.num_tokens or not text.finish:
                raise JournalError(
                    f"sample {show_sample(sample.id)}: it ended at token {sample.num_tokens}, and the payload has "
                    f"{num_tokens}: lost with the machine's power, or with a file. This run cannot go on"
                )


def _reopen(executor: Executor, note: SessionOpened) -> None:
    session = WorkerSession(note.key, Incarnation(note.incarnation), note.facts)
    session.is_expected = True
    session.most_held = note.facts.slots  # it may hold as many that are over: how many it had, nobody wrote down
    session.heard_at = executor.now()
    executor.workers[session.name] = session
    executor.lives[session.name] = session.incarnation


def _write_down_what_holds(executor: Executor) -> None:
    """After a restart: sessions and leases as we know them, whatever half of a batch was on file before."""
    assert executor.scheduler is not None
    for note in executor.standing():
        executor.journal.add_note(note)
    desk = executor.scheduler.desk
    granted = executor.granted
    for lease, sample in desk.leases.items():
        text = executor.payload.text(sample.id)
        text.worker = desk.seats[sample.worker].name
        text.engine = executor.engine_of(text.worker)
        granted.leases.append(lease)
        granted.samples.append(sample.id)
        granted.from_tokens.append(text.num_tokens)
        granted.workers.append(text.worker)


def _expect_prompts(executor: Executor) -> None:
    """After a restart: leases that were given before their prompt was there are sent when it is."""
    assert executor.scheduler is not None
    for sample in executor.scheduler.desk.leases.values():
        if sample.group not in executor.payload.prompts:
            executor.no_prompt_yet.setdefault(sample.group, []).append(sample.lease)
