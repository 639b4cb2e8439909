"""Who takes part: workers join under a name and are drained, a trainer opens the run or comes back to it.

Rules kept here: a name is one worker's as long as it is heard of, and for three heartbeats more; after a restart of the
manager, and once the worker was given up and may come back, for `restart_grace_s` more. Until then nobody gets the name
but who shows the session that the worker was given: itself, or a process started in its place. After that, who joins
under the name takes it over, and the former session is over. The trainer's own worker takes its name from anybody.
Before there is a run, nobody misses a heartbeat: who joined and is gone is forgotten after a minute.

What a session is for is in sessions.py; what is said on its connections in from_workers.py and from_trainer.py.
"""

import logging
import secrets
import time

from polyrl.ids import Seconds, Version, WorkerName
from polyrl.manager.journal import SessionOpened
from polyrl.manager.peers.sessions import TrainerSession, WorkerSession
from polyrl.manager.refusals import Refused
from polyrl.manager.run import Executor
from polyrl.manager.settings import MISSED_BEATS
from polyrl.scheduling.core import events as e
from polyrl.scheduling.core.parameters import SchedulerConfig
from polyrl.scheduling.scheduler import Scheduler
from polyrl.wire.control import EMULATED, MAX_SLOTS, JoinReply, JoinRequest, NameReply, RunReply, RunRequest

log = logging.getLogger("polyrl.manager")

_COMPANY = 32
"""So many workers send at the same moments."""
_PHASES = 8
_SILENT_HEARTBEATS = 3
_GONE_S = 60.0
_FOLLOWED = "another process joined under its name"
_NO_MODEL = (
    "the run is of a model, and the emulated engine has none: it makes up its tokens. Start the worker with --engine "
    "builtin, vllm or sglang"
)


def join(executor: Executor, request: JoinRequest, session_before: str = "", address: str = "") -> JoinReply:
    """Raises Refused for a name that is somebody else's, and for an engine or a price that the run cannot use.

    `session_before`: what it was given when it joined under the name before.
    """
    name = WorkerName(request.name)
    if request.engine == EMULATED and _is_of_a_model(executor):
        raise Refused("engine", _NO_MODEL)
    _check_price(executor, request)
    if request.slots > MAX_SLOTS:
        raise Refused("slots", f"worker {name}: slots: got {request.slots}, expected at most {MAX_SLOTS}")
    if not _outranks(executor, request) and _reserved_s(executor, name, session_before) > 0.0:
        raise Refused("name", _taken(name))
    if executor.scheduler is None:
        _forget_who_is_gone(executor)
    _check_room(executor, name, address)
    executor.absent.pop(name, None)
    if (former := executor.workers.get(name)) is not None:  # while what it brought last can still be told
        executor.tell(e.WorkerLeft(name, former.incarnation, _FOLLOWED))
    executor.forget(name, _FOLLOWED, in_anger=True)
    incarnation = executor.next_life(name)
    session = WorkerSession(secrets.token_hex(16), incarnation, request, address)
    session.heard_at = session.told_at = session.told_heard_at = executor.now()
    executor.workers[name] = session
    executor.journal.add_note(SessionOpened(session.key, incarnation, request))
    log.info("worker %s joined: %s, %d slots", name, request.engine, request.slots)
    if executor.scheduler is not None:
        _tell_joined(executor, session)
    stream = executor.settings.stream
    return JoinReply(
        worker=name,
        session=session.key,
        heartbeat_interval_s=stream.heartbeat_interval_s,
        flush_interval_s=stream.flush_interval_s,
        flush_phase_s=_next_phase(executor) * stream.flush_interval_s,
        weights_key=executor.weights_key,
    )


def _check_room(executor: Executor, name: WorkerName, address: str) -> None:
    limits = executor.settings.limits
    others = [one for one in executor.workers.values() if one.name != name]
    if len(others) >= limits.max_workers:
        raise Refused("full", f"{len(others)} workers are here; expected fewer than {limits.max_workers} for one more")
    num_there = sum(one.joined_from == address for one in others)
    if address and num_there >= limits.max_workers_per_address:
        most = f"{limits.max_workers_per_address} (limits.max_workers_per_address)"
        raise Refused(
            "full", f"worker {name!r}: {num_there} workers have joined from {address}; expected fewer than {most}"
        )


def _check_price(executor: Executor, request: JoinRequest) -> None:
    limits, name = executor.settings.limits, request.name
    price, most = request.price_usd_per_hour, limits.max_price_usd_per_hour
    if price > most:
        dollars = f"{price:,.2f} US dollars an hour; expected at most {most:,.2f}"
        raise Refused("price", f"worker {name!r} says that it costs {dollars} (limits.max_price_usd_per_hour)")
    if request.starting_s > limits.max_starting_s and WorkerName(name) not in executor.lives:
        paid = f"{limits.max_starting_s:g} are in the ledger (limits.max_starting_s)"
        log.warning("worker %s says that it took %g s to start; %s", name, request.starting_s, paid)


def look_up(executor: Executor, name: WorkerName, session_before: str = "") -> NameReply:
    """For who has not started its engine yet, which may take longer than whoever leaves needs to be gone."""
    reserved_s = _reserved_s(executor, name, session_before)
    session = executor.workers.get(name)
    seat = None if session is None else executor.seat_of(session)
    if reserved_s <= 0.0 or (seat is not None and seat.state == "draining"):
        return NameReply()
    return NameReply(refusal=_taken(name), missed_in_s=reserved_s)


def _taken(name: WorkerName) -> str:
    return (
        f"a worker {name!r} is connected already, or was a moment ago: stop it, take another name, or give the new one "
        "the former one's --session-file"
    )


def _outranks(executor: Executor, request: JoinRequest) -> bool:
    """The trainer's own worker is let in in place of a stranger, and of one that is not connected."""
    former = executor.workers.get(WorkerName(request.name))
    return request.local and (former is None or not former.facts.local or former.link is None)


def _reserved_s(executor: Executor, name: WorkerName, session_before: str) -> float:
    """For how long the name is still somebody else's than who shows that session; 0: it is free."""
    session = executor.workers.get(name)
    if session is None:
        key, until = executor.absent.get(name, ("", 0.0))
        return 0.0 if _is_key(key, session_before) else max(0.0, until - time.monotonic())
    if _is_key(session.key, session_before):
        return 0.0
    beats_s = _SILENT_HEARTBEATS * executor.settings.stream.heartbeat_interval_s
    grace_s = executor.settings.restart_grace_s if session.is_expected else 0.0
    return max(0.0, session.heard_at + beats_s + grace_s - executor.now())


def _forget_who_is_gone(executor: Executor) -> None:
    """No scheduler has heard of them yet, so that their names may begin anew."""
    now = executor.now()
    for name, session in list(executor.workers.items()):
        if session.link is None and now - session.heard_at > _GONE_S:
            executor.forget(name, "it joined and went away before there was a run", rejoin=True)
            del executor.lives[name]


def _next_phase(executor: Executor) -> float:
    """Workers send in companies: a frame that comes alone finds the manager cold and costs twice as much."""
    company = len(executor.workers) // _COMPANY
    return (company % _PHASES) / _PHASES


def _tell_joined(executor: Executor, session: WorkerSession) -> None:
    facts = session.facts
    fetches = executor.trainer is not None and executor.trainer.has_weights  # what it started with is not ours
    executor.tell(
        e.WorkerJoined(
            session.name,
            session.incarnation,
            slots=facts.slots,
            spot=facts.spot,
            local=facts.local,
            num_devices=facts.num_devices,
            price_usd_per_hour=facts.price_usd_per_hour,
            kv_tokens=facts.kv_tokens,
            version=None if facts.version is None or fetches else Version(facts.version),
            starting_s=min(facts.starting_s, executor.settings.limits.max_starting_s),
            relays=not fetches or facts.relays,
        )
    )


def find_worker(executor: Executor, key: str) -> WorkerSession | None:
    return next((one for one in executor.workers.values() if _is_key(one.key, key)), None)


def find_trainer(executor: Executor, key: str) -> TrainerSession | None:
    return None if executor.trainer is None or not _is_key(executor.trainer.key, key) else executor.trainer


def _is_key(ours: str, given: str) -> bool:
    return secrets.compare_digest(ours.encode(), given.encode(errors="replace"))  # it takes no text beyond ASCII


def open_run(executor: Executor, request: RunRequest) -> RunReply:
    """Open the run, or go on with it. Raises Refused for a configuration that cannot be, or is not the run's."""
    fresh = executor.scheduler is None
    _check_heartbeats(executor, request.config)
    if executor.scheduler is None:
        _check_carried_out(request.config)
        executor.set_caveat(request.caveat)
        _begin(executor, request.config)
    elif (ours := executor.scheduler.desk.config).with_rules_of(request.config) != request.config:
        differs = _difference(request.config, ours.with_rules_of(request.config))
        raise Refused("run", f"the run is open with another configuration: {differs}")
    elif executor.trainer is not None and executor.trainer.has_weights != request.has_weights:
        raise Refused("run", f"the run is open {'without' if request.has_weights else 'with'} weights, and stays so")
    if executor.scheduler is not None and request.config != executor.scheduler.desk.config:
        executor.tell(e.RulesChanged(request.config))
    if executor.trainer is not None:
        executor.tell(e.TrainerReplaced())
        if executor.trainer.link is not None:
            executor.trainer.link.close("another trainer opened the run")
    trainer = TrainerSession(
        secrets.token_hex(16),
        has_reward=request.has_reward,
        has_weights=request.has_weights,
        trains=request.trains,
        answers=request.answers,
    )
    executor.trainer = trainer
    executor.journal.add_note(executor.opened_by(trainer))
    if fresh:
        _seat_all(executor)
    assert executor.scheduler is not None
    state = executor.scheduler.desk.state
    return RunReply(
        session=trainer.key,
        fresh=fresh,
        published=state.published,
        last_requested=state.last_requested,
        open_steps=tuple(state.rounds),
        weights_key=executor.weights_key,
    )


def _check_heartbeats(executor: Executor, config: SchedulerConfig) -> None:
    """A worker that is given up before its next report is due joins again for ever."""
    interval_s, timeout_s = executor.settings.stream.heartbeat_interval_s, config.fleet_rules.heartbeat_timeout_s
    if timeout_s < MISSED_BEATS * interval_s:
        raise Refused(
            "run",
            f"fleet_rules.heartbeat_timeout_s: got {timeout_s:g}, expected at least {MISSED_BEATS * interval_s:g}: "
            f"workers report every {interval_s:g} s (the manager's stream.heartbeat_interval_s)",
        )


def _check_carried_out(config: SchedulerConfig) -> None:
    """What the scheduler would ask for and nobody here does (frames_out.py) is refused before it is asked for."""
    if config.parallelism.enabled:
        raise Refused(
            "run",
            "parallelism.enabled: got true, expected false: a simulated fleet can change how wide its engines are, "
            "a live one cannot",
        )


def open_run_without_trainer(executor: Executor, config: SchedulerConfig) -> None:
    """For those who ask (asking.py): workers have the weights that they were started with, which are version 0."""
    if executor.scheduler is None:
        _begin(executor, config)
    elif executor.trainer is not None or _is_for_those_who_ask(executor):
        return  # it goes on. Otherwise a manager was killed before it had written down what follows
    executor.tell(e.VersionPublished(Version(0)))
    _seat_all(executor)


def _is_for_those_who_ask(executor: Executor) -> bool:
    """Nobody but a trainer publishes, where there is one: it has opened the run before."""
    scheduler = executor.scheduler
    return executor.trainer is None and scheduler is not None and scheduler.desk.state.published >= 0


def _is_of_a_model(executor: Executor) -> bool:
    """Somebody trains on what is written, or reads it."""
    trains = executor.trainer is not None and executor.trainer.trains
    return trains or _is_for_those_who_ask(executor)


def _begin(executor: Executor, config: SchedulerConfig) -> None:
    executor.journal.begin_events(config, executor.about)
    executor.scheduler = Scheduler(config)
    executor.set_clock(0.0)


def _seat_all(executor: Executor) -> None:
    """Those who joined before there was a run; whoever is of no use to it is sent away."""
    if _is_of_a_model(executor):
        for name in [one.name for one in executor.workers.values() if one.facts.engine == EMULATED]:
            executor.forget(name, _NO_MODEL, in_anger=True)
    for session in executor.workers.values():
        session.heard_at = session.told_at = session.told_heard_at = executor.now()
        _tell_joined(executor, session)


def drain(executor: Executor, name: WorkerName, reason: str, notice_s: Seconds = 0.0) -> bool:
    """Have a worker hand over and leave, at the latest in `notice_s`. Whether there is such a worker."""
    session = executor.workers.get(name)
    if session is None:
        return False
    if executor.seat_of(session) is None:
        executor.forget(name, reason)
    else:
        executor.tell(e.DrainRequested(name, session.incarnation, reason, notice_s))
    return True


def _difference(config: SchedulerConfig, ours: SchedulerConfig) -> str:
    """The first key in which a configuration is not the run's."""
    for name in config.__struct_fields__:
        if getattr(config, name) != getattr(ours, name):
            return f"{name} is {getattr(ours, name)!r}, not {getattr(config, name)!r}"
    return "nothing"
