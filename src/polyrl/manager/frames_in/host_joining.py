"""Hosts join under a name.

Rules kept here: a name belongs to one host while it is connected or was heard of a moment ago; until then only a
process that shows the host's session gets the name. A process that joins under a free name takes it over, and the
episodes of the former one begin again.
"""

import logging
import secrets

from polyrl.errors import Refused
from polyrl.ids import HostName
from polyrl.manager.frames_in.joining import is_key
from polyrl.manager.lobby import Lobby
from polyrl.manager.notes import HostOpened
from polyrl.manager.peers.sessions import HostSession
from polyrl.manager.run import Run
from polyrl.scheduling.core import events as e
from polyrl.scheduling.core.parameters import EnvironmentRules
from polyrl.wire.control import HostJoinReply, HostJoinRequest

log = logging.getLogger("polyrl.manager")


def join(lobby: Lobby, request: HostJoinRequest, session_before: str = "") -> HostJoinReply:
    """Let a host in. Raises Refused for a name that another host has, and for an environment that is not the run's."""
    name, limits = HostName(request.name), lobby.settings.limits
    _check_environment(lobby, request)
    if request.price_usd_per_hour > limits.max_price_usd_per_hour:
        most = f"expected at most {limits.max_price_usd_per_hour:,.2f} (limits.max_price_usd_per_hour)"
        raise Refused("price", f"host {name!r}: {request.price_usd_per_hour:,.2f} US dollars an hour; {most}")
    if name not in lobby.hosts and len(lobby.hosts) >= limits.max_workers:
        raise Refused("full", f"{len(lobby.hosts)} hosts are here; expected fewer than {limits.max_workers}")
    former = lobby.hosts.get(name)
    if former is not None and not is_key(former.key, session_before) and _is_there(lobby, former):
        raise Refused("name", f"a host {name!r} is connected already, or was a moment ago: take another --name")
    lobby.forget_host(name, "another process joined under its name")
    session = HostSession(secrets.token_hex(16), lobby.next_host_life(name), request)
    session.heard_at = lobby.now()
    lobby.hosts[name] = session
    lobby.journal.add_note(HostOpened(session.key, session.incarnation, request))
    log.info("host %s joined: %s, %d episodes at once", name, request.environment, request.slots)
    if lobby.run is not None:
        tell_joined(lobby.run, session)
    return HostJoinReply(
        host=name, session=session.key, heartbeat_interval_s=lobby.settings.stream.heartbeat_interval_s
    )


def _check_environment(lobby: Lobby, request: HostJoinRequest) -> None:
    if lobby.run is None:
        return
    wanted = dict.fromkeys(one.environment for one in lobby.run.desk.config.domains if one.environment)
    if request.environment not in wanted:
        expected = ", ".join(map(repr, wanted)) or "none: the run has no environment"
        raise Refused("environment", f"host {request.name!r} plays {request.environment!r}; expected {expected}")


def _is_there(lobby: Lobby, session: HostSession) -> bool:
    rules = EnvironmentRules() if lobby.run is None else lobby.run.desk.config.environments
    return session.link is not None or lobby.now() - session.heard_at < rules.host_timeout_s


def tell_joined(run: Run, session: HostSession) -> None:
    """Tell the scheduler that a host is there."""
    facts = session.facts
    run.tell(e.HostJoined(session.name, session.incarnation, facts.environment, facts.slots, facts.price_usd_per_hour))


def seat_all(run: Run) -> None:
    """Give the hosts that joined before the run their seats. A host of another environment is sent away."""
    wanted = {one.environment for one in run.desk.config.domains}
    for session in list(run.lobby.hosts.values()):
        session.heard_at = run.lobby.now()
        if session.facts.environment in wanted:
            tell_joined(run, session)
        else:
            why = f"the run has no environment {session.facts.environment!r}"
            run.lobby.forget_host(session.name, why, in_anger=True)


def find_host(lobby: Lobby, key: str) -> HostSession | None:
    return next((one for one in lobby.hosts.values() if is_key(one.key, key)), None)
