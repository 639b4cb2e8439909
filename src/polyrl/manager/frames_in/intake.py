"""Frames of tokens: checked, added to their samples and put into the journal; ends of answers become events.

Rules kept here: tokens that were taken in go into the journal as they came, and no others do. Late tokens of a lease
that is over are counted and dropped. A worker is refused for a gap, an unknown version, a lease that was never given,
or a token too many; and for an answer whose end does not fit its tokens: cut off before the cap, or stopped with a
token that is no stop token.
"""

import logging

from polyrl.errors import Refused
from polyrl.ids import LeaseId, SampleId, group_of, show_sample
from polyrl.manager import frames_out
from polyrl.manager.frames_in import stride
from polyrl.manager.payload import SampleTokens, append_cells, without_rows
from polyrl.manager.peers.sessions import WorkerSession, most_small_frames
from polyrl.manager.run import Run
from polyrl.scheduling.core import events as e
from polyrl.scheduling.core.fleet import Worker
from polyrl.wire import columns, frames
from polyrl.wire.columns import CELL_BYTES, TOKEN_IDS, BadColumns
from polyrl.wire.control import AnswerRules

log = logging.getLogger("polyrl.manager")

BEFORE_ANY_LEASE = "tokens before any lease; expected them after an order"
_ROWS_A_LEASE = 4
_MORE_ROWS = 64
"""Room for leases with rows of two versions, and for those that are over without the worker's knowing."""


def take_in(run: Run, session: WorkerSession, frame: frames.NewTokens, raw: bytes) -> None:
    """Take a worker's frame of tokens in, or raise Refused."""
    worker = run.seat_of(session)
    if worker is None:
        raise Refused("order", BEFORE_ANY_LEASE)
    desk = run.desk
    try:
        if session.stride is not None and session.stride.takes(frame, worker, run.vocabulary):
            _took_stride(run, session, frame, raw)
            return
        check_amount(session, worker, len(frame.leases) // 8 + len(frame.ended))
        column = columns.check(frame.leases, frame.offsets, frame.counts, frame.versions, frame.cells)
        columns.check_cells(frame.cells, run.vocabulary)
    except BadColumns as error:
        raise Refused("columns", str(error)) from error
    if column.leases:
        if (most := max(map(int.__add__, column.offsets, column.counts))) > desk.max_new_tokens:
            raise Refused("budget", f"{most} tokens of a sample; expected no more than {desk.max_new_tokens}")
        _check_versions(run, worker, column)
    session.acknowledge(frame.seq, has_ends=bool(frame.ended))
    idle, num_missing, num_gaps, num_invented = _append(run, worker, column, frame.cells)
    session.stride = None
    if column.leases and not idle and not frame.ended:
        session.stride = _begin_stride(run, worker, frame, column)
    ends, lie = _check_ends(run, worker, frame.ended)
    _journal_tokens(run, frame, raw, column, idle, ends)
    for ended in ends:
        _ended(run, session, worker, ended)
    if lie is not None:
        raise lie
    num_vain = len(idle) + len(frame.ended) - len(ends)
    if num_vain or not column.leases:
        _check_waste(run, session, num_vain, num_missing, brings=bool(ends) or len(idle) < len(column.leases))
    if num_invented:
        raise Refused("lease", f"tokens of {num_invented} leases that were never given; expected its own")
    if num_gaps:
        raise Refused("offset", f"{num_gaps} samples with a gap in their tokens; expected what follows the last")


def check_amount(session: WorkerSession, worker: Worker | None, num_leases: int) -> None:
    """Refuse more rows than the worker can have: a million lookups would hold the other peers up."""
    most = session.facts.slots if worker is None else max(session.most_held, len(worker.leases))
    if num_leases > _ROWS_A_LEASE * most + _MORE_ROWS:
        raise Refused("lease", f"news of {num_leases} leases in one frame; expected few, since it had {most} at once")


def _check_waste(run: Run, session: WorkerSession, num_rows: int, num_tokens: int, *, brings: bool) -> None:
    if brings and num_rows < _MORE_ROWS and num_tokens < _MORE_ROWS:  # nearly always: a sample was aborted just now
        return
    beat_s = run.lobby.settings.stream.heartbeat_interval_s
    if not session.may_waste(num_rows, num_tokens, session.heard_at, beat_s):
        most = f"{most_small_frames(beat_s):g} frames of them at once at most"
        raise Refused("flood", f"too many tokens of leases that are over; expected {most}")


def _took_stride(run: Run, session: WorkerSession, frame: frames.NewTokens, raw: bytes) -> None:
    run.num_tokens += len(frame.cells) // CELL_BYTES
    session.acknowledge(frame.seq, has_ends=False)
    run.note_grants()
    run.lobby.journal.add_tokens(raw)


def _begin_stride(run: Run, worker: Worker, frame: frames.NewTokens, column: columns.Columns) -> stride.Stride | None:
    """Begin a stride after a frame that was appended as a whole, unless a lease has two rows in it."""
    if run.questions or len(set(column.leases)) < len(column.leases):  # clients that stream want every frame at once
        return None
    desk, all_tokens = run.desk, run.payload.tokens
    rows = [all_tokens[desk.leases[LeaseId(lease)].id] for lease in column.leases]
    return stride.Stride(frame, rows, worker, desk.max_new_tokens)


def _check_versions(run: Run, worker: Worker, column: columns.Columns) -> None:
    """Refuse versions that the worker does not hold, or that are older than its lease."""
    held = worker.version
    if min(column.versions) == max(column.versions) == held >= 0:  # nearly always
        return
    for lease, version in zip(column.leases, column.versions, strict=True):
        sample = run.desk.leases.get(LeaseId(lease))
        if sample is None or sample.worker != worker.seat:
            continue  # late, and perhaps of a version that was replaced since
        if not 0 <= version <= held:
            raise Refused("version", f"tokens of version {version}, which it does not hold; expected those of {held}")
        if version < sample.version:
            raise Refused(
                "version", f"tokens of version {version}; expected {sample.version}, which the lease was given to"
            )


def _journal_tokens(
    run: Run,
    frame: frames.NewTokens,
    raw: bytes,
    column: columns.Columns,
    idle: list[int],
    ends: tuple[frames.Ended, ...],
) -> None:
    """Journal what was taken in, and nothing else: a restart does not check it again."""
    run.note_grants()  # the order in the journal tells late tokens from timely ones
    if len(idle) == len(column.leases) and not ends:
        return
    if idle or len(ends) < len(frame.ended):
        raw = frames.encode(without_rows(frame, column, frozenset(idle), ends))
    run.lobby.journal.add_tokens(raw)


def _append(run: Run, worker: Worker, column: columns.Columns, cells: bytes) -> tuple[list[int], int, int, int]:
    """Add a frame's tokens to their samples.

    Returns the rows without new tokens, by where their cells start; the number of late tokens; and the number of rows
    with a gap or an unknown lease.
    """
    leases, all_tokens, seat = run.desk.leases, run.payload.tokens, worker.seat
    next_lease = run.desk.state.next_lease
    start = num_gaps = num_invented = num_missing = 0
    idle: list[int] = []
    # The hottest loop there is: once a frame and running sample. See `make bench NAME=relay`.
    for lease, offset, count, version, end in zip(*column, strict=False):
        sample = leases.get(lease)  # pyright: ignore[reportArgumentType]  a number becomes a lease by being found
        if sample is None or sample.worker != seat:
            if lease < next_lease:
                run.lobby.refused["late_lease"] += 1
            else:
                num_invented += 1
            idle.append(start)
            num_missing += count
        else:
            tokens = all_tokens[sample.id]
            buffer = tokens.cells
            if version == tokens.version and len(buffer) == offset * CELL_BYTES:
                buffer += cells[start:end]
            else:
                num_new = append_cells(tokens, offset, version, cells[start:end])
                num_gaps += num_new < 0
                num_missing += count - max(0, num_new)
                if num_new <= 0:
                    idle.append(start)
        start = end
    run.num_tokens += start // CELL_BYTES - num_missing
    return idle, num_missing, num_gaps, num_invented


def _check_ends(
    run: Run, worker: Worker, ended: tuple[frames.Ended, ...]
) -> tuple[tuple[frames.Ended, ...], Refused | None]:
    """Return the ends that can be true, up to the first that cannot; and why that one cannot."""
    known: dict[int, frames.Ended] = {}
    lie: Refused | None = None
    for one in ended:
        sample = worker.leases.get(LeaseId(one.lease))
        if sample is None or one.lease in known:
            if one.lease >= run.desk.state.next_lease:
                lie = Refused("lease", f"an end of lease {one.lease}, which was never given; expected its own")
                break
            run.lobby.refused["late_lease"] += 1
            continue
        num_tokens = run.payload.tokens_of(sample).num_tokens
        if one.num_tokens != num_tokens:
            lie = Refused("offset", f"an end after {one.num_tokens} tokens; expected {num_tokens}, which have come")
            break
        if one.reason in ("stop", "length") and (why := _why_no_end(run, sample, one)):
            lie = Refused("end", why)
            break
        known[one.lease] = one
    return tuple(known.values()), lie


def _why_no_end(run: Run, sample: SampleId, ended: frames.Ended) -> str:
    """Return why an answer with these tokens cannot have ended so; empty where it can."""
    tokens = run.payload.tokens_of(sample)
    call = tokens.calls[-1] if tokens.calls else None
    num_tokens = ended.num_tokens - (0 if call is None else call.start)
    if num_tokens <= 0:
        return f"an answer without a token ({num_tokens}); expected at least one"
    rules, prompt = run.answers, run.payload.prompts.get(group_of(sample))
    if rules is None or prompt is None:
        return ""
    if ended.reason == "length" or call is not None:
        num_prompt = len(prompt.tokens) // TOKEN_IDS.itemsize
        most = min(frames_out.max_tokens(run, sample), rules.max_context - num_prompt)
        most = most if call is None else call.max_tokens
        if num_tokens > most and call is not None:
            return f"an answer of {num_tokens} tokens; expected no more than {most}, the cap of its call"
        if ended.reason == "length" and num_tokens < most:
            return f"an answer cut off after {num_tokens} tokens; expected {most}: is its engine's context shorter?"
    return "" if ended.reason == "length" else _why_no_stop(tokens, prompt.sampling, rules)


def _why_no_stop(tokens: SampleTokens, sampling: frames.Sampling, rules: AnswerRules) -> str:
    """Return why an answer cannot have stopped with its last token; empty where it can."""
    stop_ids = (*sampling.stop_ids, *(tokens.calls[-1].stop_ids if tokens.calls else ()))
    stop = sampling.stop or (tokens.calls and tokens.calls[-1].stop)
    if stop or sampling.imposed is not None:  # a stop string, or an imposed length: not for us to judge
        return ""
    last = int.from_bytes(tokens.cells[-CELL_BYTES:][:4], "little")
    ends = (*stop_ids, *(() if sampling.ignore_eos else rules.end_ids))
    if last in ends:
        return ""
    return f"an answer that stopped with token id {last}, which ends none; expected one of {ends}"


def _ended(run: Run, session: WorkerSession, worker: Worker, ended: frames.Ended) -> None:
    sample = run.desk.leases.get(LeaseId(ended.lease))
    if sample is None or sample.worker != worker.seat:  # an end before it in the frame has ended its round
        run.lobby.refused["late_lease"] += 1
        return
    if ended.reason == "stop" or ended.reason == "length":
        tokens = run.payload.tokens_of(sample.id)
        tokens.finish = ended.reason
        if tokens.calls:
            tokens.calls[-1].close(ended.num_tokens, ended.reason)
        run.tell(e.SampleFinished(sample.lease, ended.num_tokens))
    else:
        if ended.reason != "handed_over" or sample.state != "stopping":
            detail = ended.detail if ended.reason != "handed_over" else "it was not asked for"
            session.last_failure = f"{ended.reason}: {detail}"
            if (often := session.failures.again(session.last_failure)) is not None:
                log.warning("sample %s on %s: %s%s", show_sample(sample.id), worker.name, session.last_failure, often)
            if (question := run.questions.get(sample.group)) is not None:
                question.is_refused, question.detail = ended.reason == "refused", ended.detail
        run.tell(e.LeaseEnded(sample.lease, ended.num_tokens, ended.reason))
