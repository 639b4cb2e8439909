"""The hosts of environments: which episodes each one plays, and what it costs.

A host takes a *seat* when it joins: a number never used again. It has places for as many episodes as its `slots`, holds
no weights, and is paid from joining to leaving. Its driver says when it is gone.

A host's claim of slots is not taken at its word: a host begins with few episodes, gets one more with every call that it
makes, and half as many after every failure. A host that fails episodes which others play to their end is given up.
Until a host has played one episode to its end, its word that an episode cannot be played costs nothing while another
host may play it: a host's token allows joining under many names.
"""

from msgspec import Struct

from polyrl.ids import HostName, Incarnation, SampleId, Seconds
from polyrl.scheduling.core.ledger import HostLine, Ledger

FIRST_EPISODES = 8


class Host(Struct):
    seat: int
    name: HostName
    incarnation: Incarnation
    environment: str
    slots: int
    since: Seconds
    """Up to here its time is in the ledger."""
    episodes: dict[SampleId, None] = {}
    draining: bool = False
    earned: int = FIRST_EPISODES
    """Episodes that it is trusted with."""
    moved_at: Seconds | None = None
    """When an episode of it last made a call or ended; None: none has."""
    joined_at: Seconds = 0.0
    num_faults: int = 0
    """Episodes that it failed and another host played to their end, since it last did so itself."""
    is_proven: bool = False
    """Whether it has played an episode to its end."""
    num_failed: int = 0
    """Episodes that it failed since it last played one to its end."""

    @property
    def capacity(self) -> int:
        return min(self.slots, self.earned)

    @property
    def has_room(self) -> bool:
        return not self.draining and len(self.episodes) < self.capacity


class HostsState(Struct):
    seats: dict[int, Host] = {}
    by_name: dict[HostName, int] = {}
    last_incarnations: dict[HostName, Incarnation] = {}
    """The newest life of every name that is remembered: those that are there, and many that left."""
    next_seat: int = 1

    def find(self, name: HostName, incarnation: Incarnation) -> Host | None:
        """Return the host in that very life; None for news of the dead."""
        seat = self.by_name.get(name)
        if seat is None or self.seats[seat].incarnation != incarnation:
            return None
        return self.seats[seat]

    def choose(self, environment: str, failed_at: int = -1, *, sound: bool = False) -> Host | None:
        """Return the host with the smallest share of its places taken, if possible not the one where the episode
        failed; None when all are full. `sound`: one of those whose word counts most, as far as it is known."""
        there = [one for one in self.seats.values() if one.environment == environment and not one.draining]
        if sound:
            proven = [one for one in there if one.is_proven]
            there = (
                [one for one in proven if not one.num_failed]
                or proven
                or [one for one in there if not one.num_failed]
                or there
            )
        able = [one for one in there if one.has_room]
        return min(
            able, key=lambda one: (one.seat == failed_at, len(one.episodes) / one.capacity, one.seat), default=None
        )

    def is_believed(self, host: Host) -> bool:
        """Return whether it counts that the host failed an episode, or was lost with it: it has played one to its end,
        or there is no other that may."""
        return host.is_proven or not any(
            one.environment == host.environment and (one.is_proven or not one.num_failed)
            for one in self.seats.values()
            if one is not host and not one.draining
        )


def settle_host(host: Host, ledger: Ledger, now: Seconds) -> None:
    """Write the seconds since the last time into the ledger. Call it before the number of its episodes changes."""
    seconds = now - host.since
    if seconds <= 0.0:
        return
    line = ledger.hosts[host.name]
    line.seconds += seconds
    line.episode_seconds += seconds * len(host.episodes)
    line.usd += seconds * line.price_usd_per_hour / 3600
    host.since = now


def host_line(ledger: Ledger, name: HostName, price_usd_per_hour: float) -> HostLine:
    line = ledger.hosts.get(name)
    if line is None:
        line = ledger.hosts[name] = HostLine(price_usd_per_hour)
    line.price_usd_per_hour = price_usd_per_hour
    return line
