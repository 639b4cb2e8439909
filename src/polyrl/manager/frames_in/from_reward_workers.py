"""Frames of reward workers: results are passed on to the trainer, with the name of their worker.

Rules kept here: a result is not read here, and not kept. A reward worker that sends broken frames, too many, or frames
out of order, is sent away and counted; the trainer hears that it is gone, and scores its answers elsewhere.
"""

import time
from typing import assert_never

from polyrl.errors import Refused
from polyrl.ids import WorkerName
from polyrl.manager.frames_in import reward_joining
from polyrl.manager.frames_in.presence import is_present
from polyrl.manager.lobby import Lobby
from polyrl.manager.peers.link import Link
from polyrl.manager.peers.reward_sessions import RewardSession
from polyrl.not_data import NOT_DATA
from polyrl.wire import frames
from polyrl.wire import reward_frames as r

_TELL_EVERY_S = 15.0
"""How often the ledger is told what a reward worker has done; it is told at its end too."""


def said(lobby: Lobby, session: RewardSession, link: Link, raw: bytes) -> None:
    """Hear a frame of a reward worker's connection."""
    if not is_present(lobby, lobby.reward_relay.workers.get(session.name), session, link):
        return
    try:
        _hear(lobby, session, raw)
    except Refused as refused:
        reward_joining.refuse(lobby, session, refused.kind, str(refused))


def _hear(lobby: Lobby, session: RewardSession, raw: bytes) -> None:
    try:
        frame = r.decode_from_reward_worker(raw)
    except NOT_DATA as error:
        raise Refused("frame", f"not a frame: {error}") from error
    if session.greeted is isinstance(frame, r.RewardHello):
        raise Refused("order", f"a {type(frame).__name__} {'after' if session.greeted else 'before'} a RewardHello")
    session.heard_at = time.monotonic()
    if not session.may_say(frame, session.heard_at):
        raise Refused("flood", f"too many frames, the last a {type(frame).__name__}")
    relay = lobby.reward_relay
    match frame:
        case r.RewardHello():
            _greet(lobby, session, frame)
        case r.RewardReady():
            _ready(lobby, session, frame)
        case r.RewardReport():
            _reported(lobby, session, frame)
        case r.JobDone() | r.JobsReturned():
            if relay.dispatcher is not None:
                relay.dispatcher.say(r.WorkerAnswered(session.name, session.life, frame))
        case frames.Leaving():
            _leaving(lobby, session)
        case frames.Goodbye():
            if frame.is_misfit:
                lobby.turn_away(WorkerName(session.name), frame.reason)
            reward_joining.forget(lobby, session, frame.reason, in_anger=frame.is_misfit)
        case _:
            assert_never(frame)


def _leaving(lobby: Lobby, session: RewardSession) -> None:
    if not session.is_draining:  # said again, it is nothing new
        session.is_draining = True
        lobby.reward_relay.tell_fleet()


def _reported(lobby: Lobby, session: RewardSession, report: r.RewardReport) -> None:
    session.report = report
    if session.heard_at - session.told_at >= _TELL_EVERY_S:
        session.told_at = session.heard_at
        reward_joining.tell_work(lobby, session)


def _greet(lobby: Lobby, session: RewardSession, hello: r.RewardHello) -> None:
    session.greeted = True
    session.is_draining = session.is_draining or bool(hello.draining)
    if lobby.reward_relay.rules is not None and session.link is not None:
        session.link.send(lobby.reward_relay.rules)


def _ready(lobby: Lobby, session: RewardSession, frame: r.RewardReady) -> None:
    """Let it have jobs, unless it was told of an earlier trainer: it will hear of the present one."""
    relay = lobby.reward_relay
    if session.is_ready or relay.rules is None or frame.era != relay.rules.era:
        return
    relay.num_connections += 1
    session.is_ready, session.connection = True, relay.num_connections
    relay.tell_fleet()


def gone(lobby: Lobby, session: RewardSession, link: Link) -> None:
    """Note that a reward worker's connection broke. It may dial again; if it does not, it is given up after its
    timeout."""
    if session.link is not link:
        return
    session.link = None
    session.greeted = session.is_ready = False
    if lobby.run is None:  # nobody would miss it, and it may join anew at any time
        reward_joining.forget(lobby, session, "its connection broke")
    else:
        lobby.reward_relay.tell_fleet()
