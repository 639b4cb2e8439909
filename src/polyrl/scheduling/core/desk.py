"""The desk, on which the parts of the scheduler work: its state, indexes over it, commands of the event in hand.

`State` is everything that is saved. The rest of `Desk` is derived from it and rebuilt on load: which sample a lease is
for, which worker has credit, which deadline is next. The parts (leases, scoring, rounds, membership, devices, steps)
are modules of functions that take the desk; scheduler.py calls them. They note what has become possible in the `*_due`
flags, and scheduler.py acts on those once, at the end of the event.
"""

import math

from msgspec import Struct, field

from polyrl.ids import GroupId, LeaseId, SampleId, Seconds, Step, Version, WorkerName
from polyrl.scheduling.core.commands import Command, RoundKind
from polyrl.scheduling.core.deadlines import Deadlines, Wait
from polyrl.scheduling.core.fleet import FleetState
from polyrl.scheduling.core.hosts import HostsState
from polyrl.scheduling.core.ledger import Ledger, StepLine
from polyrl.scheduling.core.parameters import SchedulerConfig
from polyrl.scheduling.core.reward_workers import RewardWorkersState
from polyrl.scheduling.core.samples import NO_LEASE, NO_VERSION, Playtime, Round, TrackedGroup, TrackedSample
from polyrl.scheduling.rules import seeding, tail_batching
from polyrl.scheduling.rules.lengths import LengthModel
from polyrl.scheduling.rules.parallelism import ParallelismState
from polyrl.scheduling.rules.play_limits import PlayTimes
from polyrl.scheduling.rules.reward_budgets import RewardBudgets
from polyrl.scheduling.rules.routing import Router
from polyrl.scheduling.rules.scaling import ScalingState
from polyrl.scheduling.rules.seeding import SeedingState
from polyrl.scheduling.rules.tail_batching import Planner, TailBatching

RULES = 11
"""The rules that a new run decides by. A journal of earlier rules is replayed by its own, so that its run can go on.

    0    a worker has all slots that it claims; an unrequested hand-over and refused tokens count as no failure; one
         failed pull from a peer keeps all workers from it; a time in which both trainer and driver were gone is left
         out of the step twice
    1    credit is earned (credit.py), both count as failures (failures.py), two workers have to fail with a peer
         (membership.py), and no second is left out twice (steps.py)
    2    the trainer's devices come back to samples that wait where every worker that generates is about to leave
         (devices.py); no worker is advised for work that is done before it could begin (scaling.py); a worker whose
         engine dies many times without an answer between is given up (membership.py)
    3    workers that have answered nothing cost no prompt and no sample while one that has is still to try it
         (failures.py), and the trainer's devices come back for what only they may write (devices.py); samples that a
         worker keeps without progress are taken from it (balancing.py, membership.py)
    4    limits of environments' turns are learned, a hanging host is told from a hanging episode, and
         `episode_timeout_s` counts the environment's turns alone (episodes.py)
    5    replicas train at different times: a replica without a micro-batch generates again while others train, or while
         others generate and it would speed up their samples (devices.py)
    6    limits of episodes are learned too (turns.py)
    7    samples that a worker without any answer loses or lets stall, without a token, go to workers that have answered
         (membership.py)
    8    when several replicas turn to generating, the first takes only its share of the waiting samples (leases.py); no
         device is given back before the speed of the others is known (devices.py); late news starts no new search for
         workers of failed samples (scheduler.py)
    9    a step's line tells adaptive factors (steps.py)
    10   hosts that never played an episode to its end cost none while another may play it (episodes.py); of places that
         samples of a round wait for, every second one at most goes to what was asked (leases.py)
    11   a prompt whose group is rejected for what a worker wrote is written again up to `max_failures` times, and
         costs no refill (rejecting.py)
"""

ON_DESK = ("samples", "groups", "rounds", "asked", "ledger", "scoring", "budgets", "lengths", "hosts", "reward_workers")
"""Fields of the state that are attributes of the desk too, as the same objects: code reaches them through the desk."""


class TrainerClock(Struct):
    """How the trainer and the fleet spent the step so far."""

    step_began_at: Seconds = 0.0
    busy_since: Seconds | None = None
    """Since when something is trained, on any of its devices."""
    busy: list[WorkerName] = []
    """The local workers whose devices train a micro-batch; the empty name stands for all."""
    idle_since: Seconds | None = None
    """Since when its devices are there to train and nothing is."""
    wait_train_s: Seconds = 0.0
    train_s: Seconds = 0.0
    first_remote_at: Seconds | None = None
    last_remote_at: Seconds | None = None
    seeded_s: Seconds = 0.0
    """How long the local workers generated in this step."""
    seeding_since: Seconds | None = None
    validating_since: Seconds | None = None

    def skip(self, seconds: Seconds, now: Seconds) -> None:
        """Skip the time in which the driver stood still: activities go on as before."""

        def later(moment: Seconds | None) -> Seconds | None:
            return None if moment is None else min(now, moment + seconds)

        self.step_began_at = min(now, self.step_began_at + seconds)
        self.busy_since, self.idle_since = later(self.busy_since), later(self.idle_since)
        self.seeding_since, self.validating_since = later(self.seeding_since), later(self.validating_since)
        self.first_remote_at, self.last_remote_at = later(self.first_remote_at), later(self.last_remote_at)


class Scoring(Struct):
    queue: list[tuple[float, SampleId]] = []
    """Heap of generated samples that wait for a place in the reward pool: cheapest expected first."""
    running: dict[SampleId, Seconds] = {}
    """Samples being scored: when the attempt is given up."""


class State(Struct):
    tail: TailBatching
    seeding: dict[RoundKind, SeedingState]
    """A window for each kind of round: what is right for a short one is wrong for a long one."""
    budgets: RewardBudgets
    parallelism: ParallelismState = field(default_factory=ParallelismState)
    scaling: ScalingState = field(default_factory=ScalingState)
    fleet: FleetState = field(default_factory=FleetState)
    hosts: HostsState = field(default_factory=HostsState)
    reward_workers: RewardWorkersState = field(default_factory=RewardWorkersState)
    playtimes: dict[SampleId, Playtime] = {}
    """Of episodes that were begun and have not ended."""
    turns: dict[int, PlayTimes] = {}
    """By domain, how long its environment's turns take."""
    plays: dict[int, PlayTimes] = {}
    """By domain, how long all turns of an episode take together."""
    durations: LengthModel = field(default_factory=LengthModel)
    """How long episodes take, ended or stopped, in hundredths of a second. Only kept for `episode_length` in seconds
    with adaptive factors."""
    samples: dict[SampleId, TrackedSample] = {}
    groups: dict[GroupId, TrackedGroup] = {}
    rounds: dict[Step, Round] = {}
    asked: Round = field(default_factory=Round.of_asked)
    """Groups that no step trains on (asking.py)."""
    requested: list[Step] = []
    last_requested: Step = Step(-1)
    published: Version = NO_VERSION
    paused: bool = False
    """No lease is given until the run is resumed."""
    trainer_away_since: Seconds | None = None
    absence_skipped_s: Seconds = 0.0
    """How much of the trainer's absence the clock has left out already."""
    data_ended_at: Step | None = None
    """The first step for which there was no prompt left."""
    next_lease: LeaseId = LeaseId(1)
    next_group: int = 1
    lengths: LengthModel = field(default_factory=LengthModel)
    lengths_by_kind: dict[RoundKind, LengthModel] = field(
        default_factory=lambda: {"short": LengthModel(), "long": LengthModel()}
    )
    """How far samples ran, ended or stopped. Only kept when parallelism is planned, as is the next one."""
    round_lengths: dict[RoundKind, LengthModel] = field(
        default_factory=lambda: {"short": LengthModel(), "long": LengthModel()}
    )
    """How far the last sample of each round ran."""
    scoring: Scoring = field(default_factory=Scoring)
    clock: TrainerClock = field(default_factory=TrainerClock)
    ledger: Ledger = field(default_factory=Ledger)
    rules: int = 0
    """The number of the rules (`RULES`) that it is made by."""
    last_line: StepLine | None = None
    """The line of the step trained last, kept for a trainer that was away and has not received it."""
    deadlines: dict[Wait, Seconds] = {}


def new_state(config: SchedulerConfig, rules: int = RULES) -> State:
    return State(
        rules=rules,
        tail=tail_batching.start(config.rounds, len(config.domains)),
        seeding={"short": seeding.start(config.seeding), "long": seeding.start(config.seeding)},
        budgets=RewardBudgets(config=config.rewards),
        ledger=Ledger(trainer_usd_per_hour=config.trainer_usd_per_hour),
    )


class Desk:
    def __init__(self, config: SchedulerConfig, state: State) -> None:
        self.config = config
        self.state = state
        self.planner = Planner(config.rounds, config.domains, config.seed, config.num_epochs)
        self.deadlines = Deadlines(state.deadlines)
        self.leases: dict[LeaseId, TrackedSample] = {
            sample.lease: sample for sample in state.samples.values() if sample.lease != NO_LEASE
        }
        self.router = Router(config.routing, state.fleet.seats)
        self.commands: list[Command] = []
        self.before: Seconds = -math.inf
        """When the event before the one in hand came."""
        # Objects that every event touches, one look-up nearer: reached here, and never through the state (ON_DESK).
        self.samples, self.groups, self.rounds = state.samples, state.groups, state.rounds
        self.asked, self.seats, self.ledger = state.asked, state.fleet.seats, state.ledger
        self.scoring, self.budgets, self.lengths = state.scoring, state.budgets, state.lengths
        self.hosts = state.hosts
        self.reward_workers = state.reward_workers
        self.num_domains = len(config.domains)
        self.plans_parallelism, self.num_rewards = config.parallelism.enabled, config.rewards.slots
        self.times_episodes = config.rounds.adaptive and all(
            tail_batching.is_timed(config.rounds, domain) for domain in config.domains
        )
        """Factors are chosen from how long episodes take."""
        self.max_new_tokens, self.as_finished = config.max_new_tokens, config.rewards.as_finished
        self.scores_due = False
        """Answers wait for their rewards and a place is free."""
        self.failed_wait = any(round_.failed for round_ in (state.asked, *state.rounds.values()))
        """Samples that a worker failed wait: who may have them can change with any event."""
        self.hosts_due = False
        """Episodes wait and a host may have room."""
        self.place_due = False
        """Samples may be waiting while a worker has credit."""
        self.rounds_due = False
        """A requested round may be able to open."""
        self.pulls_due = False
        """A worker may need weights, or a source became free."""
        self.pulls_wait = True
        """Workers may be waiting for a source; not so if all had one when pulls were started last."""
        self.devices_due = False
        """The right duty of the trainer's own devices may have changed."""

    def change_rules(self, config: SchedulerConfig) -> None:
        """Go on with the rules of another configuration; what rounds are made of stays."""
        self.config = self.config.with_rules_of(config)
        self.budgets.config, self.num_rewards = self.config.rewards, self.config.rewards.slots
        self.router.config = self.config.routing

    def environment_of(self, domain: int) -> str:
        """Return the environment whose episodes the samples of a domain are; empty for single answers."""
        return self.config.domains[domain].environment

    def round_of(self, sample: TrackedSample) -> Round:
        """Return the round, or the asked groups, that a sample belongs to."""
        return self.asked if sample.group in self.asked.groups else self.rounds[self.groups[sample.group].step]
