"""Reward workers join under a name, and are given up.

Rules kept here: a name belongs to one process while it is connected or was heard of a moment ago; until then only that
same process gets it again, which its secret shows. The journal has their comings and goings, for the ledger, and none
of their jobs: after a restart of the manager they join anew, with what they are scoring.
"""

import hmac
import logging
import secrets
import time

from polyrl.errors import Refused
from polyrl.ids import WorkerName
from polyrl.manager.frames_in.joining import is_key
from polyrl.manager.lobby import Lobby
from polyrl.manager.peers.reward_sessions import RewardSession, life_of
from polyrl.manager.run import Run
from polyrl.scheduling.core import events as e
from polyrl.scheduling.core.parameters import FleetRules
from polyrl.wire import frames
from polyrl.wire import reward_frames as r
from polyrl.wire.control import RewardJoinReply, RewardJoinRequest

log = logging.getLogger("polyrl.manager")

MAX_REWARD_WORKERS = 1024
_MAX_SENT_AWAY = 1024


def join(lobby: Lobby, request: RewardJoinRequest) -> RewardJoinReply:
    """Let a reward worker in. Raises Refused for a name that another one has, and where there is no room."""
    name, workers = request.name, lobby.reward_relay.workers
    if (why := lobby.reward_relay.sent_away.get(life_of(request))) is not None:
        raise Refused("sent_away", f"reward worker {name!r} was sent away: {why}")
    _check_price(lobby, request)
    former = workers.get(name)
    if former is None and len(workers) >= MAX_REWARD_WORKERS:
        raise Refused("full", f"{len(workers)} reward workers are here; expected fewer than {MAX_REWARD_WORKERS}")
    if former is not None and not _is_same(former, request) and _is_there(lobby, former):
        raise Refused(
            "name", f"a reward worker {name!r} is connected already, or was a moment ago: take another --name"
        )
    if former is not None:
        forget(lobby, former, "another process joined under its name", is_told=not _is_same(former, request))
    session = workers[name] = RewardSession(secrets.token_hex(16), request)
    if former is not None and _is_same(former, request):  # its life goes on
        session.num_jobs, session.told = former.num_jobs, former.told
    if lobby.run is not None:
        tell_joined(lobby.run, session)
        lobby.run.has_told = True  # it is to be missed in time
    log.info("reward worker %s joined: %d places", name, session.places)
    return RewardJoinReply(session=session.key, heartbeat_interval_s=lobby.settings.stream.heartbeat_interval_s)


def _check_price(lobby: Lobby, request: RewardJoinRequest) -> None:
    price, most = request.price_usd_per_hour, lobby.settings.limits.max_price_usd_per_hour
    if price > most:
        expected = f"expected at most {most:,.2f} (limits.max_price_usd_per_hour)"
        raise Refused("price", f"reward worker {request.name!r}: {price:,.2f} US dollars an hour; {expected}")


def tell_joined(run: Run, session: RewardSession) -> None:
    """Tell the ledger that a reward worker is there. A worker that joins again and again fills no journal."""
    if run.desk.reward_workers.find(session.name, session.life) is None:
        run.tell(e.RewardWorkerJoined(session.name, session.life, session.facts.price_usd_per_hour))


def tell_work(lobby: Lobby, session: RewardSession) -> None:
    """Tell the ledger what a reward worker has done, if it is news."""
    done = session.num_jobs, session.report.cpu_s
    if lobby.run is not None and done != session.told:
        session.told = done
        lobby.run.tell(e.RewardWorkerReported(session.name, session.life, *done))


def _is_same(former: RewardSession, request: RewardJoinRequest) -> bool:
    return hmac.compare_digest(former.facts.secret, request.secret)


def _is_there(lobby: Lobby, session: RewardSession) -> bool:
    return session.link is not None or time.monotonic() - session.heard_at < timeout_s(lobby)


def timeout_s(lobby: Lobby) -> float:
    rules = FleetRules() if lobby.run is None else lobby.run.desk.config.fleet_rules
    return rules.heartbeat_timeout_s


def find(lobby: Lobby, key: str) -> RewardSession | None:
    return next((one for one in lobby.reward_relay.workers.values() if is_key(one.key, key)), None)


def forget(
    lobby: Lobby,
    session: RewardSession,
    why: str,
    *,
    in_anger: bool = False,
    rejoin: bool = False,
    is_told: bool = True,
    is_lost: bool = False,
) -> None:
    """End a reward worker's session, and tell the worker, the trainer and the ledger so."""
    relay = lobby.reward_relay
    if relay.workers.get(session.name) is not session:
        return
    del relay.workers[session.name]
    log.log(logging.WARNING if in_anger else logging.INFO, "reward worker %s is given up: %s", session.name, why)
    if session.link is not None:
        session.link.send(frames.Release(why, rejoin, in_anger))
        session.link.close(why)
    if is_told:
        tell_work(lobby, session)
        if lobby.run is not None:
            lobby.run.tell(e.RewardWorkerLeft(session.name, session.life, why, is_lost or in_anger))
        relay.tell_fleet()


def refuse(lobby: Lobby, session: RewardSession, kind: str, why: str) -> None:
    """Send a reward worker away that claimed the impossible, or does not answer."""
    lobby.refused[kind] += 1
    log.warning("reward worker %s is refused: %s", session.name, why)
    lobby.turn_away(WorkerName(session.name), f"refused: {why}")
    away = lobby.reward_relay.sent_away
    away[session.life] = why
    if len(away) > _MAX_SENT_AWAY:
        del away[next(iter(away))]
    forget(lobby, session, f"refused: {why}", in_anger=True)


def lose_silent(lobby: Lobby) -> None:
    """Give up reward workers that have not been heard of for too long."""
    now, allowed_s = time.monotonic(), timeout_s(lobby)
    for session in list(lobby.reward_relay.workers.values()):
        if now - session.heard_at >= allowed_s:
            forget(lobby, session, "no heartbeat", rejoin=True, is_lost=True)
    _lose_unseen(lobby, now - lobby.reward_relay.started_at >= allowed_s)


def _lose_unseen(lobby: Lobby, is_time: bool) -> None:
    """Write off reward workers that were there before this manager was started anew, and did not come back."""
    run, workers = lobby.run, lobby.reward_relay.workers
    for one in list(run.desk.reward_workers.seats.values()) if run is not None and is_time else ():
        if one.name not in workers and run is not None:
            run.tell(e.RewardWorkerLeft(one.name, one.life, "it did not come back to the manager", is_lost=True))


def drain(lobby: Lobby, name: str, reason: str) -> bool:
    """Have a reward worker finish its jobs or hand them back, and leave. Returns False if there is none of that
    name."""
    session = lobby.reward_relay.workers.get(name)
    if session is None:
        return False
    session.is_draining = True
    if session.link is None:
        forget(lobby, session, reason)
        return True
    session.link.send(r.LeaveSoon(reason))
    lobby.reward_relay.tell_fleet()
    return True
