"""Frames of the trainer: statements become events; its payload (prompts, rewards) is kept and put into the journal.

Rules kept here: a trainer that connects, for the first time or again, is sent all that it needs to go on. A trainer
that claims the impossible is cut off and counted, and may come back. Every statement may be repeated.
"""

import logging
import math
from typing import assert_never

from polyrl.errors import Refused
from polyrl.ids import GroupId, SampleId, Step, Version, WorkerName
from polyrl.manager import frames_out, to_hosts
from polyrl.manager.frames_in.presence import is_present
from polyrl.manager.lobby import Lobby
from polyrl.manager.notes import PromptsSupplied, RewardKept, VersionOffered
from polyrl.manager.peers.link import Link
from polyrl.manager.peers.sessions import TrainerSession
from polyrl.manager.run import Run
from polyrl.not_data import NOT_DATA
from polyrl.scheduling.core import commands as c
from polyrl.scheduling.core import events as e
from polyrl.wire import frames
from polyrl.wire.host_frames import MAX_TASK_BYTES

log = logging.getLogger("polyrl.manager")

_MAX_PROMPT_TOKENS = 1 << 24


def said(lobby: Lobby, session: TrainerSession, link: Link, raw: bytes) -> None:
    """Hear a frame of the trainer's connection."""
    run = lobby.run
    if not is_present(lobby, None if run is None else run.trainer, session, link) or run is None:
        return
    try:
        _hear(run, session, raw)
    except Refused as refused:
        lobby.refused[refused.kind] += 1
        log.warning("the trainer is refused: %s", refused)
        link.send(frames.Release(f"refused: {refused}"))
        link.close(str(refused), code=1008)
        gone(lobby, session, link)


def _hear(run: Run, session: TrainerSession, raw: bytes) -> None:
    try:
        frame = frames.decode_from_trainer(raw)
    except NOT_DATA as error:
        raise Refused("frame", f"not a frame: {error}") from error
    if isinstance(frame, frames.TrainerHello):
        _greet(run, session)
        return
    if not session.greeted:
        raise Refused("order", f"a {type(frame).__name__} before a TrainerHello")
    _state(run, frame)
    session.acknowledge(frame.seq)


def _state(run: Run, frame: frames.Statement) -> None:  # noqa: C901 (a case for each kind)
    match frame:
        case frames.RequestRound():
            _request_round(run, Step(frame.step))
        case frames.SupplyPrompts():
            _supply(run, frame)
        case frames.Scored():
            _scored(run, frame)
        case frames.Took():
            run.tell(e.GroupsTaken(Step(frame.step), tuple(map(GroupId, frame.groups)), WorkerName(frame.worker)))
        case frames.Rejected():
            _rejected(run, frame)
        case frames.Unscored():
            run.tell(e.GroupUnscored(GroupId(frame.group), tuple(map(SampleId, frame.samples)), frame.reason))
        case frames.MicroBatchDone():
            run.tell(e.MicroBatchTrained(Step(frame.step), WorkerName(frame.worker)))
        case frames.RestartStep():
            run.tell(e.StepRestarted(Step(frame.step)))
        case frames.StepDone():
            run.tell(e.StepTrained(Step(frame.step), tuple(map(WorkerName, frame.left_out))))
        case frames.Validating():
            run.tell(e.ValidationBegan() if frame.begins else e.ValidationEnded())
        case frames.RewardsTold():
            run.rewards = frame, run.lobby.now()
        case frames.Offered():
            run.tell(e.SupplyOffered(frame.num_workers, frame.usd_per_hour, tuple(map(WorkerName, frame.workers))))
        case frames.Published():
            _published(run, frame)
        case _:
            assert_never(frame)


def _rejected(run: Run, frame: frames.Rejected) -> None:
    if frame.workers:
        log.warning("group %d is rejected for what %s wrote: %s", frame.group, ", ".join(frame.workers), frame.reason)
    run.tell(e.GroupRejected(GroupId(frame.group), frame.reason, tuple(map(WorkerName, frame.workers))))


def _published(run: Run, frame: frames.Published) -> None:
    if run.has_weights != bool(frame.digest):
        raise Refused("digest", f"version {frame.version}: a digest is expected if, and only if, the run has weights")
    known = run.payload.digest_of(frame.version)
    is_another = bool(known) and frame.digest != known
    if is_another and known not in frame.replaces:
        raise Refused("digest", f"version {frame.version} is {known}, not {frame.digest}; a version never changes")
    if is_another:
        log.warning(
            "version %d is published anew, with another digest: workers that hold it fetch it again", frame.version
        )
        run.note_grants()  # the order in the journal tells which digest generated what
    if frame.digest:  # also when it is known: a trainer that comes back serves from elsewhere
        offer = VersionOffered(frame.version, frame.digest, frame.addresses)
        run.payload.offer(offer)
        run.lobby.journal.add_note(offer)
    if is_another:
        run.tell(e.VersionReplaced(Version(frame.version)))
    run.tell(e.VersionPublished(Version(frame.version)))


def _request_round(run: Run, step: Step) -> None:
    run.tell(e.RoundRequested(step))
    ended_at = run.desk.state.data_ended_at
    if ended_at is not None and step >= ended_at:
        run.say_to_trainer(frames.DataEnded(step))


def _supply(run: Run, frame: frames.SupplyPrompts) -> None:
    groups = run.desk.groups
    wanted = tuple(one for one in frame.prompts if one.group in groups and one.group not in run.payload.prompts)
    for prompt in wanted:
        is_episode = bool(run.desk.environment_of(groups[GroupId(prompt.group)].domain))
        least = 0 if is_episode else 1  # environments make their prompts
        if len(prompt.tokens) % 4 or not least <= len(prompt.tokens) <= 4 * _MAX_PROMPT_TOKENS:
            raise Refused("prompt", f"group {prompt.group}: a prompt of {len(prompt.tokens) / 4:g} tokens")
        if len(prompt.task) > MAX_TASK_BYTES:
            raise Refused("task", f"group {prompt.group}: a task of {len(prompt.task)} bytes")
    if wanted:
        run.note_grants()
        run.lobby.journal.add_note(PromptsSupplied(wanted))
    for prompt in wanted:
        group = GroupId(prompt.group)
        run.payload.prompts[group] = prompt
        for lease in run.no_prompt_yet.pop(group, ()):
            frames_out.order(run, lease)
        to_hosts.play_waiting(run, group)


def _scored(run: Run, frame: frames.Scored) -> None:
    if not math.isfinite(frame.value):
        raise Refused("reward", f"sample {frame.sample}: a reward of {frame.value}")
    for name, value in frame.parts.items():
        if not math.isfinite(value):
            raise Refused("reward", f"sample {frame.sample}: a part of its reward is {value}: {name!r}")
    desk, sample = run.desk, SampleId(frame.sample)
    is_awaited = sample in desk.scoring.running and desk.samples[sample].attempt == frame.attempt
    if is_awaited and frame.outcome not in ("infrastructure_failed", "no_reward"):
        tokens = run.payload.tokens_of(sample)
        tokens.reward, tokens.parts = frame.value, frame.parts
        run.lobby.journal.add_note(RewardKept(frame.sample, frame.value, frame.parts))
    run.tell(e.RewardFinished(sample, frame.attempt, frame.outcome, frame.correct, frame.cpu_s))


def _greet(run: Run, session: TrainerSession) -> None:
    """Send the trainer all that it needs to go on, whatever it has heard before."""
    session.greeted = run.lobby.is_urgent = True
    session.away_since = None
    run.tell(e.TrainerReturned())
    desk = run.desk
    if desk.state.last_line is not None:
        session.say(frames.StepReported(desk.state.last_line))
    if desk.state.data_ended_at is not None:
        session.say(frames.DataEnded(desk.state.data_ended_at))
    width = desk.state.parallelism.width
    if width:
        num = max(1, desk.config.parallelism.num_devices // width)
        session.say(frames.WidthPlanned(width, num, "as was planned before"))
    for round_ in desk.rounds.values():
        missing = [desk.groups[one] for one in round_.groups if one not in run.payload.prompts]
        plans = tuple(c.PlannedGroup(one.id, one.domain, one.prompt, one.epoch, one.num_samples) for one in missing)
        session.say(frames.Opened(round_.step, round_.kind, plans, "it is open"))
        for group_id in round_.groups:
            group = desk.groups[group_id]
            if group.state == "delivered":
                kept = [one for one in group.sample_ids() if desk.samples[one].state == "scored"]
                frames_out.deliver(run, round_.step, group_id, tuple(kept))
        if round_.closed_at is not None:
            session.say(frames_out.closed(run, round_.step))
    for sample in list(desk.scoring.running):  # without a reward function, each ends at once
        if sample in desk.scoring.running:
            frames_out.score(run, sample, desk.samples[sample].attempt, desk.config.rewards.t_max_s)


def gone(lobby: Lobby, session: TrainerSession, link: Link) -> None:
    """Note that the trainer's connection broke: the run waits until a trainer dials."""
    if session.link is link:
        session.link, session.greeted = None, False
        session.away_since = lobby.now()
        run = lobby.run
        if run is not None and run.trainer is session:  # not when another trainer has opened the run
            run.rewards = None
            run.tell(e.TrainerLeft())
