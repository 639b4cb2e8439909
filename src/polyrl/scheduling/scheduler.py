"""The scheduler: events (facts) in, commands (wishes) out.

    handle(event, now) -> commands        one task calls it; `now` never goes back
    wakeup_at                             when to send TimePassed if nothing else happens

The handler of the event (handlers.py) hands it to the part that it concerns. Then, once, in this order: rounds that may
open are opened, waiting samples are placed, the devices of the trainer are reviewed, pulls are started. So a
decision sees all that the event changed. The result depends on the state and the event alone: the same journal gives
the same commands, byte for byte.
"""

import math

import msgspec

from polyrl.errors import LawViolation
from polyrl.ids import Seconds
from polyrl.scheduling.core.commands import Command
from polyrl.scheduling.core.desk import RULES, Desk, State, new_state
from polyrl.scheduling.core.events import Event
from polyrl.scheduling.core.ledger import Ledger
from polyrl.scheduling.core.parameters import SchedulerConfig
from polyrl.scheduling.handlers import HANDLERS
from polyrl.scheduling.parts import devices, episodes, leases, membership, rounds, scoring, steps, turns

_LATE_IS_NOTHING = 8
"""The first rules by which late news starts no new search for workers of failed samples."""


class Saved(msgspec.Struct, frozen=True):
    config: SchedulerConfig
    state: State
    now: Seconds
    """The last moment heard of: time does not go back after a load either."""


class Scheduler:
    def __init__(self, config: SchedulerConfig, state: State | None = None, rules: int = RULES) -> None:
        """Begin a run by the present rules; or go on from a state by the rules of that state."""
        self.desk = Desk(config, new_state(config, rules) if state is None else state)
        self._now: Seconds = -math.inf

    @property
    def ledger(self) -> Ledger:
        return self.desk.ledger

    @property
    def rules(self) -> int:
        """The version of the rules that it decides by; journals of older versions are replayed with theirs."""
        return self.desk.state.rules

    def adopt(self, rules: int) -> None:
        """Decide by newer rules from now on. Earlier decisions stay."""
        if self.rules < turns.LEARNED_SINCE <= rules:
            turns.adopt(self.desk, self._now)
        self.desk.state.rules = max(self.rules, rules)

    @property
    def now(self) -> Seconds:
        """The last moment heard of; minus infinity before the first."""
        return self._now

    @property
    def wakeup_at(self) -> Seconds | None:
        return self.desk.deadlines.earliest()

    def is_due(self, now: Seconds) -> bool:
        """Return whether it wants to hear that time has passed."""
        at = self.wakeup_at
        return at is not None and at <= now

    def save(self) -> bytes:
        """Return everything that a scheduler needs to go on from here."""
        return msgspec.msgpack.encode(Saved(self.desk.config, self.desk.state, self._now))

    @classmethod
    def load(cls, saved: bytes) -> "Scheduler":
        """Go on from what `save` gave. Raises msgspec.DecodeError if it is not that."""
        loaded = msgspec.msgpack.decode(saved, type=Saved)
        scheduler = cls(loaded.config, loaded.state)
        scheduler._now = loaded.now
        return scheduler

    def handle(self, event: Event, now: Seconds) -> list[Command]:
        if not now >= self._now:  # so written, NaN is refused too
            raise LawViolation(f"time went back from {self._now} to {now} at {event}")
        desk = self.desk
        desk.before, self._now = self._now, now
        desk.commands = []
        if desk.ledger.started_at is None:
            desk.ledger.started_at = now
        num_late = desk.ledger.late_news
        HANDLERS[type(event)](desk, event, now)
        if desk.scores_due:
            desk.scores_due = False
            scoring.start_waiting(desk, now)
        if desk.failed_wait and (desk.ledger.late_news == num_late or desk.state.rules < _LATE_IS_NOTHING):
            desk.place_due = True
        if desk.place_due or desk.rounds_due or desk.devices_due or desk.pulls_due or desk.hosts_due:
            self._pursue(now)
        return desk.commands

    def _pursue(self, now: Seconds) -> None:
        """Take the actions that the event made possible."""
        desk = self.desk
        while desk.rounds_due or desk.place_due or desk.devices_due or desk.pulls_due or desk.hosts_due:
            if desk.rounds_due:
                desk.rounds_due = False
                opened = rounds.open_requested(desk, now)
                if opened:
                    steps.rounds_opened(desk, opened, now)
            if desk.hosts_due:
                desk.hosts_due = False
                episodes.host_waiting(desk, now)
                desk.rounds_due = bool(desk.state.requested) and rounds.may_open_next(desk)
            if desk.place_due:
                desk.place_due = False
                leases.place_waiting(desk, now)
                desk.rounds_due = bool(desk.state.requested) and rounds.may_open_next(desk)
            if desk.devices_due:
                desk.devices_due = False
                num_before = len(desk.commands)
                devices.review(desk, now)
                if len(desk.commands) > num_before and desk.failed_wait and desk.state.rules >= 7:
                    desk.place_due = True  # it may have waited for devices that train now
            if desk.pulls_due:
                desk.pulls_due = False
                membership.start_pulls(desk, now)
