"""Opening the run: a trainer does, and comes back to it later; `--serve` opens one without a trainer.

Rules kept here: a run keeps the configuration that it was opened with, but for the rules that may change under way. The
newest trainer to open it is the trainer; the one before it is cut off.
"""

import secrets

from polyrl.errors import Refused
from polyrl.ids import Version
from polyrl.manager import frames_out
from polyrl.manager.frames_in import reward_joining
from polyrl.manager.frames_in.host_joining import seat_all
from polyrl.manager.frames_in.joining import NO_MODEL, is_key, tell_joined
from polyrl.manager.lobby import Lobby
from polyrl.manager.peers.sessions import TrainerSession
from polyrl.manager.run import Run
from polyrl.manager.settings import MISSED_BEATS
from polyrl.scheduling.core import events as e
from polyrl.scheduling.core.parameters import SchedulerConfig
from polyrl.scheduling.scheduler import Scheduler
from polyrl.wire.control import EMULATED, RunReply, RunRequest


def open_run(lobby: Lobby, request: RunRequest) -> RunReply:
    """Open the run, or go on with it. Raises Refused for a configuration that is impossible, or not the run's."""
    _check_heartbeats(lobby, request.config)
    fresh = lobby.run is None
    run = _begin_checked(lobby, request) if lobby.run is None else _go_on(lobby.run, request)
    run.trainer = TrainerSession(
        secrets.token_hex(16),
        has_reward=request.has_reward,
        has_weights=request.has_weights,
        trains=request.trains,
        answers=request.answers,
    )
    lobby.journal.add_note(run.opened_by(run.trainer))
    if fresh:
        _seat_all(run)
    state = run.desk.state
    return RunReply(
        session=run.trainer.key,
        fresh=fresh,
        published=state.published,
        last_requested=state.last_requested,
        open_steps=tuple(state.rounds),
        weights_key=lobby.weights_key,
    )


def open_run_without_trainer(lobby: Lobby, config: SchedulerConfig) -> None:
    """Open a run that only answers questions. Its version 0 is the weights that workers were started with."""
    run = lobby.run
    if run is None:
        run = _begin(lobby, config)
    elif run.trainer is not None or run.is_without_trainer:
        return  # it goes on. Otherwise the manager was killed before it had written what follows
    run.tell(e.VersionPublished(Version(0)))
    _seat_all(run)


def find_trainer(lobby: Lobby, key: str) -> TrainerSession | None:
    trainer = None if lobby.run is None else lobby.run.trainer
    return None if trainer is None or not is_key(trainer.key, key) else trainer


def _begin_checked(lobby: Lobby, request: RunRequest) -> Run:
    planned = request.config.parallelism
    if planned.enabled and planned.engines == "local":  # frames_out.py could not carry it out
        raise Refused(
            "run",
            'parallelism.engines: got "local", expected "fleet": a simulator can change how wide the trainer\'s own '
            "engines are, a live trainer cannot",
        )
    lobby.set_caveat(request.caveat)
    return _begin(lobby, request.config)


def _begin(lobby: Lobby, config: SchedulerConfig) -> Run:
    lobby.journal.begin_events(config, lobby.about)
    lobby.set_clock(0.0)
    run = lobby.run = Run(lobby, Scheduler(config), frames_out.carry_out)
    return run


def _go_on(run: Run, request: RunRequest) -> Run:
    """Replace the trainer of a run that is open."""
    ours, former = run.desk.config, run.trainer
    expected = ours.with_rules_of(request.config)
    if expected != request.config:
        differs = _difference(request.config, expected)
        raise Refused("run", f"the run is open with another configuration: {differs}")
    if former is not None and former.has_weights != request.has_weights:
        raise Refused("run", f"the run is open {'without' if request.has_weights else 'with'} weights, and stays so")
    if request.config != ours:
        run.tell(e.RulesChanged(request.config))
    if former is not None:
        run.tell(e.TrainerReplaced())
        run.rewards = None
        if former.link is not None:
            former.link.close("another trainer opened the run")
    return run


def _difference(config: SchedulerConfig, ours: SchedulerConfig) -> str:
    """Return the first key in which a configuration differs from the run's."""
    for name in config.__struct_fields__:
        if getattr(config, name) != getattr(ours, name):
            return f"{name} is {getattr(ours, name)!r}, not {getattr(config, name)!r}"
    return "nothing"


def _check_heartbeats(lobby: Lobby, config: SchedulerConfig) -> None:
    """Refuse a timeout that ends before the next report is due: workers would be given up and join for ever."""
    interval_s, timeout_s = lobby.settings.stream.heartbeat_interval_s, config.fleet_rules.heartbeat_timeout_s
    if timeout_s < MISSED_BEATS * interval_s:
        raise Refused(
            "run",
            f"fleet_rules.heartbeat_timeout_s: got {timeout_s:g}, expected at least {MISSED_BEATS * interval_s:g}: "
            f"workers report every {interval_s:g} s (the manager's stream.heartbeat_interval_s)",
        )


def _seat_all(run: Run) -> None:
    """Give the workers that joined before the run their seats. A worker that the run cannot use is sent away."""
    lobby = run.lobby
    if run.is_of_a_model:
        for name in [one.name for one in lobby.workers.values() if one.facts.engine == EMULATED]:
            lobby.forget(name, NO_MODEL, in_anger=True)
    for session in lobby.workers.values():
        session.heard_at = session.told_at = session.told_heard_at = lobby.now()
        tell_joined(run, session)
    seat_all(run)
    for reward_worker in lobby.reward_relay.workers.values():
        reward_joining.tell_joined(run, reward_worker)
