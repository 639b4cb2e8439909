"""Tokens as they come in: checked, added to their samples' texts, put into the journal, and their ends told.

Rules kept here: what was taken in goes into the journal as it came, and nothing else does. Late tokens of a lease that
is over are counted and go nowhere; a gap, an unknown version or a token too many is a lie.
"""

import logging

from polyrl.ids import LeaseId, show_sample
from polyrl.manager import stride
from polyrl.manager.executor import Executor
from polyrl.manager.payload import append_cells, without_rows
from polyrl.manager.refusals import Refused
from polyrl.manager.sessions import WorkerSession
from polyrl.scheduling import events as e
from polyrl.scheduling.fleet import Worker
from polyrl.wire import columns, frames
from polyrl.wire.columns import CELL_BYTES, BadColumns

log = logging.getLogger("polyrl.manager")


def take_in(executor: Executor, session: WorkerSession, frame: frames.Tokens, raw: bytes) -> None:
    worker = executor.seat_of(session)
    if worker is None or executor.scheduler is None:
        raise Refused("order", "tokens before any lease")
    desk = executor.scheduler.desk
    try:
        if session.stride is not None and session.stride.takes(frame, worker):
            _took_stride(executor, session, frame, raw)
            return
        column = columns.check(frame.leases, frame.offsets, frame.counts, frame.versions, frame.cells)
    except BadColumns as error:
        raise Refused("columns", str(error)) from error
    if column.leases:
        if max(map(int.__add__, column.offsets, column.counts)) > desk.max_new_tokens:
            raise Refused("budget", f"more than {desk.max_new_tokens} tokens of a sample")
        _check_versions(executor, worker, column)
    session.acknowledge(frame.seq, has_ends=bool(frame.ended))
    idle, num_gaps = _append(executor, worker, column, frame.cells)
    session.stride = None
    if column.leases and not idle and not frame.ended:
        session.stride = _begin_stride(executor, worker, frame, column)
    _journal_tokens(executor, worker, frame, raw, column, idle)
    for ended in frame.ended:
        _ended(executor, session, worker, ended)
    if num_gaps:
        raise Refused("offset", f"{num_gaps} samples with a gap in their tokens")


def _took_stride(executor: Executor, session: WorkerSession, frame: frames.Tokens, raw: bytes) -> None:
    executor.num_tokens += len(frame.cells) // CELL_BYTES
    session.acknowledge(frame.seq, has_ends=False)
    executor.note_grants()
    executor.journal.add_tokens(raw)


def _begin_stride(
    executor: Executor, worker: Worker, frame: frames.Tokens, column: columns.Columns
) -> stride.Stride | None:
    """The next frame may go on from one that was appended as a whole, unless a lease has two rows in it."""
    assert executor.scheduler is not None
    if executor.questions or len(set(column.leases)) < len(column.leases):  # who reads along wants every frame at once
        return None
    desk, texts = executor.scheduler.desk, executor.payload.texts
    rows = [texts[desk.leases[LeaseId(lease)].id] for lease in column.leases]
    return stride.Stride(frame, rows, worker, desk.max_new_tokens)


def _check_versions(executor: Executor, worker: Worker, column: columns.Columns) -> None:
    """Nobody writes with weights that it has not got yet, or had before its lease was given."""
    assert executor.scheduler is not None
    held = worker.version
    if min(column.versions) == max(column.versions) == held >= 0:  # nearly always
        return
    for lease, version in zip(column.leases, column.versions, strict=True):
        sample = executor.scheduler.desk.leases.get(LeaseId(lease))
        if sample is None or sample.worker != worker.seat:
            continue  # late, and perhaps of a version that was replaced since
        if not 0 <= version <= held:
            raise Refused("version", f"tokens of a version that it does not hold; it holds {held}")
        if version < sample.version:
            raise Refused("version", f"tokens of version {version}; the lease was given to {sample.version}")


def _journal_tokens(
    executor: Executor, worker: Worker, frame: frames.Tokens, raw: bytes, column: columns.Columns, idle: list[int]
) -> None:
    """What was taken in, and nothing else: at a restart nobody asks whose lease it was."""
    executor.note_grants()  # the order in the journal tells late tokens from timely ones
    ended = tuple(one for one in frame.ended if one.lease in worker.leases)
    if not idle and len(ended) == len(frame.ended):
        executor.journal.add_tokens(raw)
    elif len(idle) < len(column.leases) or ended:
        executor.journal.add_tokens(frames.encode(without_rows(frame, column, frozenset(idle), ended)))


def _append(executor: Executor, worker: Worker, column: columns.Columns, cells: bytes) -> tuple[list[int], int]:
    """Add a frame's tokens to their samples.

    Returns the rows that brought nothing, by where their cells start, and how many of them left a gap.
    """
    assert executor.scheduler is not None
    leases, texts, seat = executor.scheduler.desk.leases, executor.payload.texts, worker.seat
    start = num_gaps = num_missing = 0
    idle: list[int] = []
    # The hottest loop there is: once a frame and running sample. See `polyrl bench relay`.
    for lease, offset, count, version, end in zip(*column, strict=False):
        sample = leases.get(lease)  # pyright: ignore[reportArgumentType]  a number becomes a lease by being found
        if sample is None or sample.worker != seat:
            executor.refused["late_lease"] += 1
            idle.append(start)
            num_missing += count
        else:
            text = texts[sample.id]
            buffer = text.cells
            if version == text.version and len(buffer) == offset * CELL_BYTES:
                buffer += cells[start:end]
            else:
                num_new = append_cells(text, offset, version, cells[start:end])
                num_gaps += num_new < 0
                num_missing += count - max(0, num_new)
                if num_new <= 0:
                    idle.append(start)
        start = end
    executor.num_tokens += start // CELL_BYTES - num_missing
    return idle, num_gaps


def _ended(executor: Executor, session: WorkerSession, worker: Worker, ended: frames.Ended) -> None:
    assert executor.scheduler is not None
    sample = executor.scheduler.desk.leases.get(LeaseId(ended.lease))
    if sample is None or sample.worker != worker.seat:
        executor.refused["late_lease"] += 1
        return
    text = executor.payload.text(sample.id)
    if ended.num_tokens != text.num_tokens:
        raise Refused("offset", f"an end after {ended.num_tokens} tokens; {text.num_tokens} have come")
    if ended.reason == "stop" or ended.reason == "length":
        if text.num_tokens == 0:
            raise Refused("budget", "an answer without a token")
        text.finish = ended.reason
        executor.tell(e.SampleFinished(sample.lease, ended.num_tokens))
    else:
        if ended.reason != "handed_over":
            session.last_failure = f"{ended.reason}: {ended.detail}"
            if (often := session.failures.again(session.last_failure)) is not None:
                log.warning("sample %s on %s: %s%s", show_sample(sample.id), worker.name, session.last_failure, often)
            if (question := executor.questions.get(sample.group)) is not None:
                question.is_refused, question.detail = ended.reason == "refused", ended.detail
        executor.tell(e.LeaseEnded(sample.lease, ended.num_tokens, ended.reason))
