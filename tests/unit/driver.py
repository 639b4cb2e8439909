"""Scripts for the scheduler, a line an event: who joins, who brings how many tokens, who dies.

Samples are named as a person writes them ("1/0" is the first sample of group 1). All laws are checked after every
event. Workers that joined keep sending heartbeats while time passes, until they are silenced.
"""

from typing import TypeVar

from polyrl.ids import GroupId, Incarnation, LeaseId, Step, Version, WorkerName, parse_sample, show_sample
from polyrl.scheduling.core import commands as c
from polyrl.scheduling.core import events as e
from polyrl.scheduling.core.ledger import Ledger
from polyrl.scheduling.core.parameters import DomainData, FleetRules, RoundsConfig, RoutingConfig, SchedulerConfig
from polyrl.scheduling.core.samples import TrackedSample
from polyrl.scheduling.invariants import check
from polyrl.scheduling.scheduler import Scheduler

HEARTBEAT_S = 1.0
Wanted = TypeVar("Wanted", bound=c.Command)


def small_config(
    *,
    prompts: int = 2,
    samples: int = 2,
    num_prompts: int = 100,
    rounds: RoundsConfig | None = None,
    balance: bool = False,
    migrate: bool = True,
    **others,
) -> SchedulerConfig:
    """`prompts` groups of `samples` samples a step, no extras, nothing moved for balance."""
    return SchedulerConfig(
        domains=(DomainData(name="math", prompts_per_step=prompts, num_prompts=num_prompts),),
        rounds=rounds or RoundsConfig(samples_per_prompt=samples),
        routing=RoutingConfig(balance=balance),
        **{"max_new_tokens": 1000, "fleet_rules": FleetRules(migrate=migrate), **others},
    )


class Driver:
    def __init__(self, config: SchedulerConfig | None = None) -> None:
        self.scheduler = Scheduler(config or small_config())
        self.now = 0.0
        self.lives: dict[WorkerName, Incarnation] = {}
        self.beating: list[WorkerName] = []
        self.said: list[c.Command] = []
        """All commands so far."""
        self.leases: dict[str, LeaseId] = {}
        """The newest lease of each sample."""
        self.workers: dict[str, WorkerName] = {}
        """And who got it."""
        self.attempts: dict[str, int] = {}

    # Telling

    def tell(self, event: e.Event) -> list[c.Command]:
        commands = self.scheduler.handle(event, self.now)
        check(self.scheduler, self.now)
        for command in commands:
            if isinstance(command, c.Generate):
                self.leases[show_sample(command.sample)] = command.lease
                self.workers[show_sample(command.sample)] = command.worker
            elif isinstance(command, c.Score):
                self.attempts[show_sample(command.sample)] = command.attempt
        self.said += commands
        return commands

    def wait(self, seconds: float) -> list[c.Command]:
        """Let time pass; heartbeats and wake-ups happen when they are due. Returns what was said meanwhile."""
        end = self.now + seconds
        num_said = len(self.said)
        next_beat = self.now
        while True:
            at = min(next_beat, self.scheduler.wakeup_at or end, end)
            self.now = max(self.now, at)
            if self.now >= next_beat:
                for name in self.beating:
                    self.tell(e.WorkerReported(name, self.lives[name]))
                next_beat = self.now + HEARTBEAT_S
            self.tell(e.TimePassed())
            if self.now >= end:
                return self.said[num_said:]

    # The fleet

    def join(self, name: str, *, slots: int = 8, local: bool = False, ready: bool = True, **others) -> list[c.Command]:
        """A worker joins; `ready`: and has the newest weights (or, local, generates) at once."""
        worker = WorkerName(name)
        self.lives[worker] = Incarnation(self.lives.get(worker, 0) + 1)
        if worker not in self.beating:
            self.beating.append(worker)
        said = self.tell(e.WorkerJoined(worker, self.lives[worker], slots, local=local, **others))
        if ready and local:
            said += self.turn(name, "generating")
        elif ready:
            said += self.install(name)
        return said

    def install(self, name: str, version: int | None = None) -> list[c.Command]:
        newest = self.scheduler.desk.state.published if version is None else Version(version)
        return self.tell(e.WeightsInstalled(WorkerName(name), self.lives[WorkerName(name)], newest))

    def turn(self, name: str, duty: e.Duty) -> list[c.Command]:
        return self.tell(e.DutyChanged(WorkerName(name), self.lives[WorkerName(name)], duty))

    def drain(self, name: str, notice_s: float = 0.0) -> list[c.Command]:
        return self.tell(e.DrainRequested(WorkerName(name), self.lives[WorkerName(name)], "a spot notice", notice_s))

    def leave(self, name: str) -> list[c.Command]:
        self.beating.remove(WorkerName(name))
        return self.tell(e.WorkerLeft(WorkerName(name), self.lives[WorkerName(name)], "it died"))

    def silence(self, name: str) -> None:
        """It dies, and nobody says so."""
        self.beating.remove(WorkerName(name))

    # Samples

    def bring(self, name: str, **tokens: int) -> list[c.Command]:
        """`bring("a", s1_0=20)`: worker a is at token 20 of sample 1/0."""
        samples = {key[1:].replace("_", "/"): num for key, num in tokens.items()}
        leases = tuple(self.leases[sample] for sample in samples)
        worker = WorkerName(name)
        return self.tell(e.TokensArrived(worker, self.lives[worker], leases, tuple(samples.values())))

    def finish(self, *samples: str, at: int = 10) -> list[c.Command]:
        said: list[c.Command] = []
        for sample in samples:
            said += self.tell(e.SampleFinished(self.leases[sample], at))
        return said

    def end(self, sample: str, *, at: int, reason: e.LeaseEnd = "handed_over") -> list[c.Command]:
        return self.tell(e.LeaseEnded(self.leases[sample], at, reason))

    def reward(self, *samples: str, outcome: e.RewardOutcome = "scored") -> list[c.Command]:
        said: list[c.Command] = []
        for sample in samples:
            said += self.tell(e.RewardFinished(parse_sample(sample), self.attempts[sample], outcome))
        return said

    def complete(self, *groups: int, samples: int = 2, at: int = 10) -> list[c.Command]:
        """All samples of these groups are generated and scored."""
        names = [f"{group}/{index}" for group in groups for index in range(samples)]
        return self.finish(*names, at=at) + self.reward(*names)

    # The trainer

    def begin(self, *, steps: int = 1) -> list[c.Command]:
        """Version 0 is there and rounds are requested."""
        said = self.tell(e.VersionPublished(Version(0)))
        for step in range(steps):
            said += self.request(step)
        return said

    def request(self, step: int) -> list[c.Command]:
        return self.tell(e.RoundRequested(Step(step)))

    def take(self, step: int, *groups: int) -> list[c.Command]:
        return self.tell(e.GroupsTaken(Step(step), tuple(map(GroupId, groups))))

    def trained(self, step: int) -> list[c.Command]:
        """The step is trained; its version is published and the next round requested."""
        said = self.tell(e.StepTrained(Step(step)))
        said += self.tell(e.VersionPublished(Version(step + 1)))
        return said + self.request(step + 1)

    # Looking

    @property
    def ledger(self) -> Ledger:
        return self.scheduler.ledger

    def sample(self, name: str) -> TrackedSample:
        return self.scheduler.desk.samples[parse_sample(name)]

    def duty(self, name: str) -> str:
        fleet = self.scheduler.desk.state.fleet
        return fleet.seats[fleet.by_name[WorkerName(name)]].duty

    def state(self, name: str) -> str:
        fleet = self.scheduler.desk.state.fleet
        return fleet.seats[fleet.by_name[WorkerName(name)]].state


def only(commands: list[c.Command], kind: type[Wanted]) -> list[Wanted]:
    return [one for one in commands if isinstance(one, kind)]


def leased(commands: list[c.Command]) -> dict[str, tuple[str, int]]:
    """Who was given which sample, and from which token."""
    return {show_sample(one.sample): (one.worker, one.from_token) for one in only(commands, c.Generate)}
