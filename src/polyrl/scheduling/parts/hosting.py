"""An episode's place at its host: taken, left, waited for.

Rules kept here: an episode has at most one host. From the moment a host is told to stop an episode, its messages about
it are late. A drained host is released when its last episode is over.
"""

from polyrl.ids import Seconds
from polyrl.scheduling.core.commands import ReleaseHost, StopEpisode
from polyrl.scheduling.core.desk import Desk
from polyrl.scheduling.core.hosts import settle_host
from polyrl.scheduling.core.samples import Round, TrackedSample
from polyrl.scheduling.parts import turns

WAITS = ("turn", "episode")


def queue(desk: Desk, sample: TrackedSample, round_: Round) -> None:
    """Have an episode wait for a host, before those that were not begun yet."""
    sample.state = "unhosted"
    round_.unhosted.setdefault(desk.groups[sample.group].domain, []).append(sample.id)
    round_.num_unhosted += 1
    desk.hosts_due = True


def leave(desk: Desk, sample: TrackedSample, now: Seconds, *, stop: str = "", num_tokens: int = -1) -> None:
    """Take an episode from its host, if it has one. `stop` says why the host is to give it up, if it does not know."""
    if sample.host < 0:
        return
    host = desk.hosts.seats[sample.host]
    if stop:
        desk.commands.append(StopEpisode(host.name, sample.id, sample.attempt, stop, num_tokens))
    settle_host(host, desk.ledger, now)
    del host.episodes[sample.id]
    sample.host = -1
    for name in WAITS:
        desk.deadlines.clear((name, sample.id))
    desk.hosts_due = True
    if host.draining and not host.episodes:
        desk.commands.append(ReleaseHost(host.name, "its last episode is over"))


def stop(desk: Desk, sample: TrackedSample, round_: Round, why: str, now: Seconds) -> None:
    """End an episode that is no longer wanted, as far as its host is concerned."""
    if sample.state == "unhosted":
        round_.num_unhosted -= 1
    elif sample.state == "playing":
        round_.num_playing -= 1
    if sample.host >= 0:
        turns.end_episode(desk, sample, now, finished=False)
    leave(desk, sample, now, stop=why)
