"""Where episodes and engines spend their time, in sums over a run: what `polyrl simulate` says about environments.

Between two events nothing changes, so a sum over time is exact: the numbers before an event times the seconds since the
last one. The sums are kept at every step's end too, so that any window of steps can be had by a subtraction.
"""

from msgspec import Struct

from polyrl.ids import Seconds
from polyrl.scheduling.core.desk import Desk


class EpisodeSums(Struct, frozen=True):
    """Sums from the run's beginning on, or of a window. Seconds are times the number of episodes, hosts or engines."""

    waiting_for_host_s: Seconds = 0.0
    playing_s: Seconds = 0.0
    """The environment has the move."""
    waiting_for_worker_s: Seconds = 0.0
    generating_s: Seconds = 0.0
    engine_s: Seconds = 0.0
    """Engines that could generate."""
    busy_s: Seconds = 0.0
    """Of them, those that had a call."""
    starved_s: Seconds = 0.0
    """Of them, those that had none while episodes were with an environment or waited for a host."""
    host_s: Seconds = 0.0
    place_s: Seconds = 0.0
    """Places at hosts, taken or not."""
    taken_s: Seconds = 0.0
    """Places at hosts that were taken."""
    usd: float = 0.0

    def __sub__(self, earlier: "EpisodeSums") -> "EpisodeSums":
        names = EpisodeSums.__struct_fields__
        return EpisodeSums(**{name: getattr(self, name) - getattr(earlier, name) for name in names})


class EpisodeTimes:
    def __init__(self, desk: Desk) -> None:
        self._desk = desk
        self._sums = dict.fromkeys(EpisodeSums.__struct_fields__, 0.0)
        self._since: Seconds = 0.0
        self.at_step: list[EpisodeSums] = []
        self.most_waiting_for_host = 0
        self.most_hosted = 0

    def add(self, now: Seconds) -> None:
        """Add the time since the last event. Call it before the scheduler hears of the next one."""
        seconds, self._since = now - self._since, now
        if seconds <= 0.0:
            return
        rounds = self._desk.rounds.values()
        unhosted = sum(one.num_unhosted for one in rounds)
        playing = sum(one.num_playing for one in rounds)
        self.most_waiting_for_host = max(self.most_waiting_for_host, unhosted)
        sums = self._sums
        sums["waiting_for_host_s"] += seconds * unhosted
        sums["playing_s"] += seconds * playing
        sums["waiting_for_worker_s"] += seconds * sum(one.num_waiting for one in rounds)
        sums["generating_s"] += seconds * sum(one.num_leased for one in rounds)
        self._add_engines(seconds, are_away=unhosted + playing > 0)
        self._add_hosts(seconds)

    def _add_engines(self, seconds: Seconds, *, are_away: bool) -> None:
        able = busy = 0
        for worker in self._desk.seats.values():
            if worker.leases:
                able += 1
                busy += 1
            elif worker.may_take:
                able += 1
        self._sums["engine_s"] += seconds * able
        self._sums["busy_s"] += seconds * busy
        if are_away:
            self._sums["starved_s"] += seconds * (able - busy)

    def _add_hosts(self, seconds: Seconds) -> None:
        hosts, lines = self._desk.hosts.seats.values(), self._desk.ledger.hosts
        num_hosted = sum(len(host.episodes) for host in hosts)
        self.most_hosted = max(self.most_hosted, num_hosted)
        self._sums["host_s"] += seconds * len(hosts)
        self._sums["place_s"] += seconds * sum(host.slots for host in hosts)
        self._sums["taken_s"] += seconds * num_hosted
        self._sums["usd"] += seconds * sum(lines[host.name].price_usd_per_hour for host in hosts) / 3600

    def end_step(self) -> None:
        self.at_step.append(EpisodeSums(**self._sums))

    def within(self, first: int, num_steps: int) -> EpisodeSums:
        """Return the sums of so many steps, from the one of that index on."""
        before = self.at_step[first - 1] if first else EpisodeSums()
        return self.at_step[first + num_steps - 1] - before
