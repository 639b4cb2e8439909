"""The scheduler's commands to hosts, carried out: frames for the host that each concerns.

Rules kept here: no opinions. A host that is not connected is told when it dials again, from the state (from_hosts.py).
"""

import logging

from polyrl.errors import LawViolation
from polyrl.ids import GroupId, SampleId, show_sample
from polyrl.manager.calls import OPEN, num_received
from polyrl.manager.notes import EpisodeKept
from polyrl.manager.peers.sessions import HostSession
from polyrl.manager.run import Run
from polyrl.scheduling.core import commands as c
from polyrl.scheduling.parts import turns
from polyrl.scheduling.rules.order import mix64
from polyrl.wire import host_frames
from polyrl.wire.columns import CELL_BYTES

log = logging.getLogger("polyrl.manager")

HostCommand = c.PlayEpisode | c.AnswerCall | c.StopEpisode | c.ReleaseHost | c.ForgetHost


def carry_out(run: Run, command: HostCommand) -> None:
    session = run.lobby.host(command.host)
    match command:
        case c.PlayEpisode():
            if session is not None:
                play(run, session, command.sample, command.attempt)
        case c.AnswerCall():
            number = len(run.payload.tokens_of(command.sample).calls) - 1
            if session is not None:
                answer(run, session, command.sample, command.attempt, number)
        case c.StopEpisode():
            if session is not None:
                session.stop(command.sample, command.attempt)
            if command.num_tokens >= 0:
                _score_over_time(run, command)
        case c.ReleaseHost():
            if session is not None:
                session.say(host_frames.Release(command.why))
        case c.ForgetHost():
            run.lobby.forget_host(command.host, command.why, in_anger=command.hangs)


def play(run: Run, session: HostSession, sample: SampleId, attempt: int) -> None:
    """Tell a host to begin an episode, once its task is there."""
    group = run.desk.groups[run.desk.samples[sample].group]
    prompt = run.payload.prompts.get(group.id)
    if prompt is None:
        waiting = run.no_task_yet.setdefault(group.id, [])
        if sample not in waiting:  # a host may dial again before the task is there
            waiting.append(sample)
        return
    rules = run.answers
    seed = mix64(run.desk.config.seed, group.domain, group.prompt, group.epoch) >> 1
    order = host_frames.EpisodeOrder(sample, attempt, group.prompt, seed, prompt.task)
    max_context = 0 if rules is None else rules.max_context
    turn_timeout_s = turns.present_turn_limit_s(run.desk, group.domain, run.lobby.now())
    size, most = run.vocabulary.size, run.desk.max_new_tokens
    session.say(host_frames.Play((order,), max_context, most, size, turn_timeout_s))


def play_waiting(run: Run, group: GroupId) -> None:
    """Begin the episodes that waited for their task."""
    for sample_id in run.no_task_yet.pop(group, ()):
        sample = run.desk.samples.get(sample_id)
        host = None if sample is None else run.desk.hosts.seats.get(sample.host)
        session = None if host is None else run.lobby.host(host.name)
        if sample is not None and session is not None:
            play(run, session, sample.id, sample.attempt)


def answer(run: Run, session: HostSession, sample: SampleId, attempt: int, number: int) -> None:
    """Send the answer to a call that is whole."""
    tokens = run.payload.tokens_of(sample)
    record = tokens.calls[number]
    if record.end == OPEN:
        raise LawViolation(f"call {number} of episode {show_sample(sample)} is answered and not whole")
    cells = bytes(tokens.cells[record.start * CELL_BYTES : record.end * CELL_BYTES])
    session.say(host_frames.CallAnswer(sample, attempt, number, cells, record.finish))
    run.lobby.dirty_hosts[session.name] = session
    run.lobby.is_urgent = True


def keep_episode(
    run: Run,
    sample: SampleId,
    num_calls: int,
    num_tokens: int,
    reward: float,
    parts: dict[str, float],
    untrained: tuple[int, ...] = (),
) -> None:
    """Note an episode's end: its reward, and the tokens that its environment received."""
    tokens = run.payload.tokens_of(sample)
    is_cut = tokens.num_tokens > num_tokens
    if is_cut:
        tokens.cut(num_calls, num_tokens)
    else:
        del tokens.calls[num_calls:]
    tokens.end_episode(tokens.calls[-1].finish, reward, parts, untrained)
    run.note_grants()
    kept = EpisodeKept(sample, num_calls, num_tokens, is_cut, tokens.finish, tokens.reward, tokens.parts, untrained)
    run.lobby.journal.add_note(kept)


def _score_over_time(run: Run, command: c.StopEpisode) -> None:
    calls = run.payload.tokens_of(command.sample).calls
    num_calls = sum(one.end != OPEN and one.end <= command.num_tokens for one in calls)
    if num_received(calls, num_calls) != command.num_tokens:
        raise LawViolation(f"episode {show_sample(command.sample)} has other calls than the scheduler says")
    reward = run.desk.config.environments.timeout_reward
    log.warning("episode %s is over time, and scored with %g: %s", show_sample(command.sample), reward, command.why)
    keep_episode(run, command.sample, num_calls, command.num_tokens, reward, {})
