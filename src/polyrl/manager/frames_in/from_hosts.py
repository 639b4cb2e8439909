"""Frames of hosts become events: calls of environments, and the ends of episodes.

Rules kept here: a host that connects, for the first time or again, says what it plays, and is sent what it lacks; then
it says its open calls again. A call that is on file whole, with the same prompt, is answered at once; one that is on
file in part goes on; where a prompt differs, that call and all after it are gone. A host that claims the impossible is
cut off and counted, and its episodes begin again elsewhere.
"""

import logging
from typing import assert_never

from polyrl.errors import Refused, plain
from polyrl.ids import SampleId, Seconds, show_sample
from polyrl.manager import to_hosts
from polyrl.manager.calls import OPEN, CallRecord, grown_prompt, num_received, prompt_of, remember_prompt
from polyrl.manager.frames_in.presence import is_present
from polyrl.manager.lobby import Lobby
from polyrl.manager.notes import CallKept
from polyrl.manager.payload import SampleTokens
from polyrl.manager.peers.link import Link
from polyrl.manager.peers.sessions import HostSession
from polyrl.manager.run import Run
from polyrl.not_data import NOT_DATA
from polyrl.scheduling.core import events as e
from polyrl.scheduling.core.bounds import MAX_REWARD
from polyrl.scheduling.core.samples import TrackedSample
from polyrl.wire import columns, frames, host_frames
from polyrl.wire.columns import TOKEN_IDS

log = logging.getLogger("polyrl.manager")

_ID_BYTES = TOKEN_IDS.itemsize
_MAX_PROMPT_TOKENS = 1 << 22
_CONTEXTS_GIVEN = 64
"""The new tokens that all prompts of an episode may bring together, in full contexts."""
_LEAST_CONTEXT = 4096


def said(lobby: Lobby, session: HostSession, link: Link, raw: bytes) -> None:
    """Hear a frame of a host's connection."""
    if not is_present(lobby, lobby.hosts.get(session.name), session, link):
        return
    try:
        _hear(lobby, session, raw)
    except Refused as refused:
        lobby.refused[refused.kind] += 1
        log.warning("host %s is refused: %s", session.name, refused)
        _lose(lobby, session, f"refused: {refused}", in_anger=True)


def _lose(lobby: Lobby, session: HostSession, why: str, *, in_anger: bool = False) -> None:
    lobby.tell(e.HostLeft(session.name, session.incarnation, why))
    lobby.forget_host(session.name, why, in_anger=in_anger)


def lose_silent(lobby: Lobby, timeout_s: Seconds) -> None:
    """Give up hosts that have not been heard of for too long."""
    for session in list(lobby.hosts.values()):
        if lobby.now() - session.heard_at >= timeout_s:
            _lose(lobby, session, "no heartbeat")


def _hear(lobby: Lobby, session: HostSession, raw: bytes) -> None:
    try:
        frame = host_frames.decode_from_host(raw)
    except NOT_DATA as error:
        raise Refused("frame", f"not a frame: {error}") from error
    if not session.greeted and not isinstance(frame, host_frames.HostHello):
        raise Refused("order", f"a {type(frame).__name__} before a HostHello")
    session.heard_at = lobby.now()
    run = lobby.run
    host = None if run is None else run.desk.hosts.find(session.name, session.incarnation)
    num_held = len(frame.held) if isinstance(frame, host_frames.HostHello) else 0
    if not session.may_say(session.heard_at, 0 if host is None else len(host.episodes), num_held):
        raise Refused("flood", f"too many frames, the last a {type(frame).__name__}")
    match frame:
        case host_frames.HostHello():
            _hello(lobby, session, frame)
        case host_frames.HostReport():
            pass
        case frames.Leaving():
            drain(lobby, session, frame.reason)
        case frames.Goodbye():
            _lose(lobby, session, frame.reason)
        case host_frames.MakeCall() if run is not None:
            _call(run, session, frame)
        case host_frames.EndEpisode() if run is not None:
            _end(run, session, frame)
        case host_frames.MakeCall() | host_frames.EndEpisode():
            session.stop(frame.sample, frame.attempt)
        case _:
            assert_never(frame)


def drain(lobby: Lobby, session: HostSession, reason: str) -> None:
    """Have a host play its episodes to their end, and leave."""
    if lobby.run is None:
        lobby.forget_host(session.name, reason)
        return
    host = lobby.run.desk.hosts.find(session.name, session.incarnation)
    if host is None or not host.draining:  # said again, it is nothing new
        lobby.run.tell(e.HostDrainRequested(session.name, session.incarnation, reason))


def _hello(lobby: Lobby, session: HostSession, hello: host_frames.HostHello) -> None:
    """Compare the episodes that a host plays with those that it should play, and send the difference."""
    if session.greeted:
        raise Refused("order", "a second HostHello on one connection")
    if len(hello.held) > session.facts.slots:
        raise Refused("episode", f"it plays {len(hello.held)} episodes, and has {session.facts.slots} places")
    session.greeted = lobby.is_urgent = True
    lobby.dirty_hosts[session.name] = session
    run = lobby.run
    host = None if run is None else run.desk.hosts.find(session.name, session.incarnation)
    if run is None or host is None:
        session.say(host_frames.HostWelcome(()))
        return
    samples = run.desk.samples
    ours, theirs = {host_frames.HeldEpisode(one, samples[one].attempt) for one in host.episodes}, set(hello.held)
    session.say(host_frames.HostWelcome(tuple(one for one in hello.held if one in ours)))
    for one in host.episodes:
        if host_frames.HeldEpisode(one, samples[one].attempt) not in theirs:
            to_hosts.play(run, session, one, samples[one].attempt)
    if hello.draining:
        drain(lobby, session, hello.draining)
    if host.draining and not host.episodes:
        session.say(frames.Release("its last episode is over"))


def _episode(
    run: Run, session: HostSession, frame: host_frames.MakeCall | host_frames.EndEpisode
) -> TrackedSample | None:
    """Return the frame's episode. If it is over, tell the host so and return None."""
    host = run.desk.hosts.find(session.name, session.incarnation)
    sample = None if host is None else run.desk.samples.get(frame.sample)  # type: ignore[call-overload]
    if host is None or sample is None or sample.host != host.seat or sample.attempt != frame.attempt:
        run.lobby.refused["late_episode"] += 1
        session.stop(frame.sample, frame.attempt)
        run.lobby.dirty_hosts[session.name] = session
        return None
    return sample


def _call(run: Run, session: HostSession, frame: host_frames.MakeCall) -> None:
    sample = _episode(run, session, frame)
    if sample is None:
        return
    tokens = run.payload.tokens_of(sample.id)
    prompt = _prompt(run, tokens, frame)
    if frame.number < len(tokens.calls):
        known = tokens.calls[frame.number]
        if prompt_of(tokens.calls, tokens.cells, frame.number) == prompt:
            _repeat(run, session, sample, known, frame)
            return
    if sample.state != "playing":
        raise Refused("call", f"call {frame.number} of episode {show_sample(sample.id)} while another is open")
    start = tokens.calls[frame.number - 1].end if frame.number else 0
    room, why = _room(run, start, len(prompt) // _ID_BYTES)
    if 0 < (most_calls := run.desk.config.environments.max_calls) <= frame.number:
        room, why = 0, f"all {most_calls} calls of the episode are made (environments.max_calls)"
    given = sum(len(one.tokens) for one in tokens.calls[: frame.number]) + len(frame.tokens)
    if room > 0 and given > _CONTEXTS_GIVEN * _ID_BYTES * _context(run):
        room, why = 0, f"the prompts of the episode have {given // _ID_BYTES} tokens in all"
    if room <= 0:
        session.say(host_frames.CallAnswer(sample.id, sample.attempt, frame.number, b"", "", why))
        run.lobby.dirty_hosts[session.name] = session
        run.lobby.is_urgent = True
        return
    if tokens.newest_call >= (frame.attempt, frame.number):
        raise Refused("call", f"call {frame.number} of episode {show_sample(sample.id)} was made with another prompt")
    tokens.newest_call = (frame.attempt, frame.number)
    most = min(room, frame.max_tokens) if frame.max_tokens else room
    _keep_call(run, tokens, frame, start, most)
    remember_prompt(tokens.calls, prompt)
    run.tell(e.CallMade(sample.id, sample.attempt, start, start, start + most))


def _keep_call(run: Run, tokens: SampleTokens, frame: host_frames.MakeCall, start: int, most: int) -> None:
    """Put a new call on file, in place of those from its number on."""
    is_cut = tokens.num_tokens > start
    if is_cut:
        log.info("episode %s takes another way at call %d", show_sample(SampleId(frame.sample)), frame.number)
        tokens.cut(frame.number, start)
    del tokens.calls[frame.number :]  # also one of which nothing was drawn yet
    record = (frame.base, frame.kept, frame.tokens, start, most, frame.stop_ids, frame.stop)
    tokens.calls.append(CallRecord(*record))
    run.note_grants()
    run.lobby.journal.add_note(CallKept(frame.sample, frame.number, start, is_cut, *record))


def _repeat(
    run: Run, session: HostSession, sample: TrackedSample, known: CallRecord, frame: host_frames.MakeCall
) -> None:
    """Answer a call that was made before, or go on with it."""
    tokens = run.payload.tokens_of(sample.id)
    is_new = (frame.attempt, frame.number) > tokens.newest_call
    tokens.newest_call = max(tokens.newest_call, (frame.attempt, frame.number))
    if known.end != OPEN:
        if is_new and sample.state == "playing":  # it was begun again, and comes this way once more
            run.tell(e.CallRepeated(sample.id, sample.attempt))
        to_hosts.answer(run, session, sample.id, sample.attempt, frame.number)
    elif sample.state == "playing":  # an attempt before this one got so far
        run.tell(e.CallMade(sample.id, sample.attempt, known.start, tokens.num_tokens, known.start + known.max_tokens))


def _prompt(run: Run, tokens: SampleTokens, frame: host_frames.MakeCall) -> bytes:
    """Return the call's whole prompt, checked."""
    name = f"call {frame.number} of episode {show_sample(SampleId(frame.sample))}"
    if frame.number > len(tokens.calls) or any(one.end == OPEN for one in tokens.calls[: frame.number]):
        raise Refused("call", f"{name}, and a call before it is not answered")
    if frame.base >= frame.number:
        raise Refused("call", f"{name} goes on from call {frame.base}, which is not before it")
    if len(frame.tokens) % _ID_BYTES:
        raise Refused("call", f"{name}: its tokens end inside a number")
    if frame.tokens and (why := columns.why_no_ids(columns.view_tokens(frame.tokens), run.vocabulary.size)):
        raise Refused("call", f"{name}: {why}")
    try:
        prompt = grown_prompt(tokens.calls, tokens.cells, frame.base, frame.kept, frame.tokens)
    except ValueError as error:
        raise Refused("call", f"{name}: {error}") from error
    if not 0 < len(prompt) <= _MAX_PROMPT_TOKENS * _ID_BYTES:
        raise Refused("call", f"{name} has a prompt of {len(prompt) // _ID_BYTES} tokens")
    return prompt


def _room(run: Run, start: int, num_prompt_tokens: int) -> tuple[int, str]:
    """Return how many tokens the answer may have; or none, and why."""
    budget, rules = run.desk.max_new_tokens, run.answers
    if start >= budget:
        return 0, f"all {budget} tokens of the episode are drawn (rollout.max_new_tokens)"
    if rules is not None and num_prompt_tokens >= rules.max_context:
        return 0, f"a prompt of {num_prompt_tokens} tokens fills the context of {rules.max_context}"
    return min(budget - start, (1 << 31) if rules is None else rules.max_context - num_prompt_tokens), ""


def _context(run: Run) -> int:
    return _MAX_PROMPT_TOKENS if run.answers is None else max(_LEAST_CONTEXT, run.answers.max_context)


def _end(run: Run, session: HostSession, frame: host_frames.EndEpisode) -> None:
    sample = _episode(run, session, frame)
    if sample is None:
        return
    for name, value in (("reward", frame.reward), *frame.parts.items()):
        if not abs(value) <= MAX_REWARD:  # so written, NaN is refused too
            raise Refused("reward", f"episode {show_sample(sample.id)}: {plain(name)} is {value}")
    tokens, outcome = run.payload.tokens_of(sample.id), frame.outcome
    num_calls = min(frame.num_calls, len(tokens.calls))
    num_tokens = num_received(tokens.calls, num_calls)
    why = frame.why
    if outcome == "scored" and not num_tokens:
        outcome, why = "failed", "it ended before the policy was asked"
    session.stop(frame.sample, frame.attempt)
    run.lobby.dirty_hosts[session.name] = session
    run.lobby.is_urgent = True
    if outcome == "failed":
        if (often := session.failures.again(why)) is not None:
            log.warning("episode %s on host %s failed: %s%s", show_sample(sample.id), session.name, why, often)
    else:
        run.tell_progress(sample)
        num_calls = sum(one.end != OPEN and one.end <= num_tokens for one in tokens.calls[:num_calls])
        to_hosts.keep_episode(run, sample.id, num_calls, num_tokens, frame.reward, dict(frame.parts), frame.untrained)
    run.tell(e.EpisodeEnded(sample.id, sample.attempt, outcome, num_tokens))


def gone(session: HostSession, link: Link) -> None:
    """Note that a host's connection broke. The host may dial again; if it does not, it is lost after its timeout."""
    if session.link is link:
        session.link, session.greeted = None, False
