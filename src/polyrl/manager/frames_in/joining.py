"""Workers join under a name, and are drained.

Rules kept here: a name belongs to one worker while the worker is heard, and for three heartbeats after that; after a
restart of the manager, and when the worker was given up and may come back, for `restart_grace_s` more. Until then only
a process that shows the worker's session gets the name: the worker itself, or its replacement. After that, any worker
that joins under the name takes it over, and the former session ends. The trainer's own worker takes its name from any
other. Before a run is open no heartbeat is missed: a worker that joined and is gone is forgotten after a minute.

Sessions are in peers/sessions.py; the run is opened in opening.py.
"""

import logging
import secrets
import time

from polyrl.errors import Refused
from polyrl.ids import Seconds, Version, WorkerName
from polyrl.manager.lobby import Lobby
from polyrl.manager.notes import SessionOpened
from polyrl.manager.peers.sessions import WorkerSession
from polyrl.manager.run import Run
from polyrl.scheduling.core import events as e
from polyrl.wire.control import EMULATED, MAX_SLOTS, JoinReply, JoinRequest, NameReply

log = logging.getLogger("polyrl.manager")

_COMPANY = 32
"""How many workers send at the same moments."""
_PHASES = 8
_SILENT_HEARTBEATS = 3
_GONE_S = 60.0
_FOLLOWED = "another process joined under its name"
NO_MODEL = (
    "the run is of a model, and the emulated engine has none: it makes up its tokens. Start the worker with --engine "
    "builtin, vllm or sglang"
)


def join(lobby: Lobby, request: JoinRequest, session_before: str = "", address: str = "") -> JoinReply:
    """Let a worker in. Raises Refused for a name that another worker has, and for one that the run cannot use.

    `session_before`: the session that the worker had when it joined under the name before.
    """
    name = WorkerName(request.name)
    if request.engine == EMULATED and lobby.run is not None and lobby.run.is_of_a_model:
        raise Refused("engine", NO_MODEL)
    _check_price(lobby, request)
    if request.slots > MAX_SLOTS:
        raise Refused("slots", f"worker {name}: slots: got {request.slots}, expected at most {MAX_SLOTS}")
    if not _outranks(lobby, request) and _reserved_s(lobby, name, session_before) > 0.0:
        raise Refused("name", _taken(name))
    if lobby.run is None:
        _forget_who_is_gone(lobby)
    _check_room(lobby, name, address)
    lobby.absent.pop(name, None)
    if (former := lobby.workers.get(name)) is not None:  # while what it brought last can still be told
        lobby.tell(e.WorkerLeft(name, former.incarnation, _FOLLOWED))
    lobby.forget(name, _FOLLOWED, in_anger=True)
    incarnation = lobby.next_life(name)
    session = WorkerSession(secrets.token_hex(16), incarnation, request, address)
    session.begin(lobby.now(), lobby.settings.stream.heartbeat_interval_s)
    lobby.workers[name] = session
    lobby.journal.add_note(SessionOpened(session.key, incarnation, request))
    log.info("worker %s joined: %s, %d slots", name, request.engine, request.slots)
    if lobby.run is not None:
        tell_joined(lobby.run, session)
    stream = lobby.settings.stream
    return JoinReply(
        worker=name,
        session=session.key,
        heartbeat_interval_s=stream.heartbeat_interval_s,
        flush_interval_s=stream.flush_interval_s,
        flush_phase_s=_next_phase(lobby) * stream.flush_interval_s,
        weights_key=lobby.weights_key,
    )


def _check_room(lobby: Lobby, name: WorkerName, address: str) -> None:
    limits = lobby.settings.limits
    others = [one for one in lobby.workers.values() if one.name != name]
    if len(others) >= limits.max_workers:
        raise Refused("full", f"{len(others)} workers are here; expected fewer than {limits.max_workers} for one more")
    num_there = sum(one.joined_from == address for one in others)
    if address and num_there >= limits.max_workers_per_address:
        most = f"{limits.max_workers_per_address} (limits.max_workers_per_address)"
        raise Refused(
            "full", f"worker {name!r}: {num_there} workers have joined from {address}; expected fewer than {most}"
        )


def _check_price(lobby: Lobby, request: JoinRequest) -> None:
    limits, name = lobby.settings.limits, request.name
    price, most = request.price_usd_per_hour, limits.max_price_usd_per_hour
    if price > most:
        dollars = f"{price:,.2f} US dollars an hour; expected at most {most:,.2f}"
        raise Refused("price", f"worker {name!r} says that it costs {dollars} (limits.max_price_usd_per_hour)")
    if request.starting_s > limits.max_starting_s and WorkerName(name) not in lobby.lives:
        paid = f"{limits.max_starting_s:g} are in the ledger (limits.max_starting_s)"
        log.warning("worker %s says that it took %g s to start; %s", name, request.starting_s, paid)


def look_up(lobby: Lobby, name: WorkerName, session_before: str = "") -> NameReply:
    """Return whether a worker would be let in under the name, before it spends minutes on starting its engine."""
    reserved_s = _reserved_s(lobby, name, session_before)
    session = lobby.workers.get(name)
    seat = None if session is None or lobby.run is None else lobby.run.seat_of(session)
    if reserved_s <= 0.0 or (seat is not None and seat.state == "draining"):
        return NameReply()
    return NameReply(refusal=_taken(name), missed_in_s=reserved_s)


def _taken(name: WorkerName) -> str:
    return (
        f"a worker {name!r} is connected already, or was a moment ago: stop it, take another name, or give the new one "
        "the former one's --session-file"
    )


def _outranks(lobby: Lobby, request: JoinRequest) -> bool:
    """Return whether this is the trainer's own worker, and the name's present holder is another process or
    disconnected."""
    former = lobby.workers.get(WorkerName(request.name))
    return request.local and (former is None or not former.facts.local or former.link is None)


def _reserved_s(lobby: Lobby, name: WorkerName, session_before: str) -> float:
    """Return how long the name stays reserved for another worker than the one with that session; 0: it is free."""
    session = lobby.workers.get(name)
    if session is None:
        key, until = lobby.absent.get(name, ("", 0.0))
        return 0.0 if is_key(key, session_before) else max(0.0, until - time.monotonic())
    if is_key(session.key, session_before):
        return 0.0
    beats_s = _SILENT_HEARTBEATS * lobby.settings.stream.heartbeat_interval_s
    grace_s = lobby.settings.restart_grace_s if session.is_expected else 0.0
    return max(0.0, session.heard_at + beats_s + grace_s - lobby.now())


def _forget_who_is_gone(lobby: Lobby) -> None:
    """Forget workers that left before a run was open. No scheduler knows them, so their names begin anew."""
    now = lobby.now()
    for name, session in list(lobby.workers.items()):
        if session.link is None and now - session.heard_at > _GONE_S:
            lobby.forget(name, "it joined and went away before there was a run", rejoin=True)
            del lobby.lives[name]


def _next_phase(lobby: Lobby) -> float:
    """Return when in its interval the next worker sends: with others, since a lone frame costs twice as much."""
    company = len(lobby.workers) // _COMPANY
    return (company % _PHASES) / _PHASES


def tell_joined(run: Run, session: WorkerSession) -> None:
    """Tell the scheduler that a worker has joined its fleet."""
    facts = session.facts
    fetches = run.has_weights  # then the version it started with is not one of this run
    run.tell(
        e.WorkerJoined(
            session.name,
            session.incarnation,
            slots=facts.slots,
            spot=facts.spot,
            local=facts.local,
            num_devices=facts.num_devices,
            planned=facts.planned,
            price_usd_per_hour=facts.price_usd_per_hour,
            kv_tokens=facts.kv_tokens,
            version=None if facts.version is None or fetches else Version(facts.version),
            starting_s=min(facts.starting_s, run.lobby.settings.limits.max_starting_s),
            relays=not fetches or facts.relays,
            region="" if facts.local else facts.region,
        )
    )


def find_worker(lobby: Lobby, key: str) -> WorkerSession | None:
    return next((one for one in lobby.workers.values() if is_key(one.key, key)), None)


def is_key(ours: str, given: str) -> bool:
    """Compare two sessions' keys in constant time."""
    return secrets.compare_digest(ours.encode(), given.encode(errors="replace"))  # it takes no text beyond ASCII


def drain(lobby: Lobby, name: WorkerName, reason: str, notice_s: Seconds = 0.0) -> bool:
    """Have a worker hand its samples over and leave within `notice_s`. Returns whether there is such a worker."""
    session = lobby.workers.get(name)
    if session is None:
        return False
    if lobby.run is None or lobby.run.seat_of(session) is None:
        lobby.forget(name, reason)
    else:
        lobby.run.tell(e.DrainRequested(name, session.incarnation, reason, notice_s))
    return True
