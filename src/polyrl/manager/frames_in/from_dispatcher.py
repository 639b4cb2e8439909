"""Frames of the trainer's dispatcher: jobs are passed on to the reward workers that they are for.

Rules kept here: no job is kept. A job for a worker that is not there is dropped, since the trainer is told which
workers are there, and sends it again. Only the newest connection of the trainer counts.
"""

import logging
from typing import assert_never

from polyrl.errors import plain
from polyrl.manager.frames_in import reward_joining
from polyrl.manager.lobby import Lobby
from polyrl.manager.peers.link import Link
from polyrl.manager.peers.reward_sessions import DispatcherSession, RewardSession
from polyrl.not_data import NOT_DATA
from polyrl.wire import frames
from polyrl.wire import reward_frames as r

log = logging.getLogger("polyrl.manager")


def said(lobby: Lobby, session: DispatcherSession, link: Link, raw: bytes) -> None:
    """Hear a frame of the dispatcher's connection."""
    lobby.num_frames += 1
    try:
        frame = r.decode_from_dispatcher(raw)
    except NOT_DATA as error:
        _refuse(lobby, link, "frame", f"not a frame: {error}")
        return
    if isinstance(frame, r.DispatcherHello):
        _greet(lobby, session, frame)
        return
    if lobby.reward_relay.dispatcher is not session:
        _refuse(lobby, link, "order", f"a {type(frame).__name__} of a connection that is not the trainer's present one")
        return
    worker = _find(lobby, frame.worker, frame.life)
    match frame:
        case r.SendJob():
            if worker is not None:
                worker.give(r.GiveJob(frame.job, frame.body))
        case r.Accuse():
            if worker is not None:
                reward_joining.refuse(lobby, worker, "result", plain(frame.why))
        case _:
            assert_never(frame)


def _find(lobby: Lobby, name: str, life: str) -> RewardSession | None:
    found = lobby.reward_relay.workers.get(name)
    return found if found is not None and found.life == life else None


def _greet(lobby: Lobby, session: DispatcherSession, hello: r.DispatcherHello) -> None:
    relay = lobby.reward_relay
    if relay.dispatcher not in (None, session) and relay.dispatcher.link is not None:
        relay.dispatcher.link.close("the trainer connected again")
    is_another = relay.rules is None or relay.rules.era != hello.rules.era
    relay.dispatcher, relay.rules, relay.num_local = session, hello.rules, hello.num_local
    session.greeted = True
    for worker in relay.workers.values():
        if is_another and worker.greeted and worker.link is not None:
            worker.is_ready, worker.connection = False, 0
            worker.link.send(hello.rules)
    relay.tell_fleet()


def _refuse(lobby: Lobby, link: Link, kind: str, why: str) -> None:
    lobby.refused[kind] += 1
    log.warning("the trainer's dispatcher is refused: %s", why)
    link.send(frames.Release(f"refused: {why}"))
    link.close(why, code=1008)


def gone(lobby: Lobby, session: DispatcherSession) -> None:
    """Note that the dispatcher's connection is over: results are dropped until the trainer dials again, and asks for
    them."""
    if lobby.reward_relay.dispatcher is session:
        lobby.reward_relay.dispatcher = None
