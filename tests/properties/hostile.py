"""A hostile world for the scheduler: news is late, repeated, reordered or lost; workers die and come back at any point;
weights, rewards and hand-overs fail or stay unanswered; the fleet goes to zero. Some workers lie: they claim absurd
slots, hand over what nobody asked for, forge ends, flood, and are blamed by the trainer. After every event all laws are
checked: those of the state (polyrl.scheduling.invariants) and those of what was said (books.py).

Then the world turns fair, and the run must go on: a scheduler that keeps all laws by standing still is caught here.
Half of the worlds are fair with a fleet, half with nothing but the trainer's own devices. Everything follows from one
seed.
"""

import math
import random
from collections.abc import Callable
from typing import Literal

from polyrl.errors import LawViolation
from polyrl.ids import GroupId, Incarnation, LeaseId, SampleId, Step, Version, WorkerName, sample_id
from polyrl.scheduling.core import commands as c
from polyrl.scheduling.core import events as e
from polyrl.scheduling.core.parameters import (
    DomainData,
    FleetRules,
    HandBackConfig,
    RewardConfig,
    RoundsConfig,
    RoutingConfig,
    SchedulerConfig,
    SeedingConfig,
    WeightDeliveryConfig,
)
from polyrl.scheduling.invariants import check
from polyrl.scheduling.scheduler import Scheduler
from tests.properties.books import Books

TailMode = Literal["off", "race", "prompts", "designated", "predicted"]
FAIR_SECONDS = 6000
FAIR_STEPS = 2
FAIR_OUTCOMES: tuple[e.RewardOutcome, ...] = ("scored", "timed_out")
OUTCOMES: tuple[e.RewardOutcome, ...] = ("scored", "scored", "crashed", "infrastructure_failed", "no_reward")


def random_config(rng: random.Random) -> SchedulerConfig:
    """Any mode, small enough that every corner is reached within a few hundred events."""
    domains = tuple(
        DomainData(name=f"d{i}", prompts_per_step=rng.randint(1, 4), num_prompts=rng.choice([3, 7, 20, 500]))
        for i in range(rng.choice([1, 1, 2]))
    )
    mode: TailMode = rng.choice(["off", "race", "race", "prompts", "designated", "predicted"])
    return SchedulerConfig(
        domains=domains,
        seed=rng.randrange(1000),
        max_new_tokens=rng.choice([1, 8, 40]),
        max_staleness=rng.choice([0, 0, 0, 1, 2]),
        streaming=rng.random() < 0.8,
        trainer_usd_per_hour=10.0,
        rounds=RoundsConfig(
            tail_batching=mode,
            samples_per_prompt=rng.randint(1, 4),
            prompt_factor=rng.choice([1.0, 1.25, 1.5, 2.0]),
            sample_factor=rng.choice([1.0, 1.25, 1.5]),
            adaptive=rng.random() < 0.2 and mode not in ("designated", "predicted"),
            refill=rng.random() < 0.6,
            min_group_samples=rng.randint(1, 2),
        ),
        routing=RoutingConfig(balance_interval_s=rng.choice([0.5, 5.0]), move_every_tokens=2, move_gain_s=0.0),
        seeding=SeedingConfig(mode=rng.choice(["learned", "fixed", "whole_round", "off"]), fixed_s=5.0, initial_s=5.0),
        hand_back=HandBackConfig(enabled=rng.random() < 0.3, first_share=0.1, last_share=0.9),
        rewards=RewardConfig(slots=rng.choice([1, 3, 64]), as_finished=rng.random() < 0.8, max_attempts=2),
        fleet_rules=FleetRules(stall_timeout_s=20.0, migrate=rng.random() < 0.8),
        weight_delivery=WeightDeliveryConfig(relay=rng.random() < 0.7, trainer_uploads=rng.choice([1, 4])),
    )


class Machine:
    """A worker's process, as the world knows it."""

    def __init__(self, name: WorkerName, incarnation: Incarnation, *, local: bool) -> None:
        self.name = name
        self.incarnation = incarnation
        self.local = local
        self.running: dict[LeaseId, tuple[SampleId, int]] = {}
        self.stuck: set[LeaseId] = set()
        """What its engine will never go on with, however fair the world."""


class HostileWorld:
    def __init__(self, seed: int, make: Callable[[SchedulerConfig], Scheduler] = Scheduler) -> None:
        self.rng = random.Random(seed)
        self.config = random_config(self.rng)
        self.driver_rng = random.Random(seed + 77)
        self.engine_rng = random.Random(seed + 78)
        self.news_rng = random.Random(seed + 81)
        self.asker_rng = random.Random(seed + 79)
        self.liar_rng = random.Random(seed + 80)
        self.judge_rng = random.Random(seed + 82)
        self.num_askers = self.asker_rng.choice([0, 0, 3])
        """How much is asked at once, beside the trainer."""
        self.asked: dict[GroupId, int] = {}
        self.scheduler = make(self.config)
        self.books = Books(self.scheduler)
        self.now = 0.0
        self.fair = False
        self.machines: dict[WorkerName, Machine] = {}
        self.lives: dict[WorkerName, int] = {}
        self.news: list[e.Event] = []
        self.old_news: list[e.Event] = []
        self.lengths: dict[SampleId, int] = {}
        self.leases_seen = 0
        self.delivered: dict[GroupId, Step] = {}
        self.to_take: dict[Step, list[GroupId]] = {}
        self.taken: dict[Step, list[GroupId]] = {}
        self.closed: dict[Step, int] = {}
        self.steps_trained = 0
        self.data_ended = False
        self.training_step = 0
        self.asked_ahead = self.rng.choice([0, 0, 2])
        """Rounds that the trainer requests before their time has come."""
        self.log: list[tuple[float, e.Event, list[c.Command]]] = []

    # Playing

    def play(self, num_events: int) -> None:
        """`num_events` of malice, then enough fairness to train a few steps."""
        self.tell(e.VersionPublished(Version(0)))
        for step in range(self.config.max_staleness + 1 + self.asked_ahead):
            self.tell(e.RoundRequested(Step(step)))
        if self.rng.random() < 0.7:
            self.join_machine(local=True)
        for _ in range(num_events):
            self.malice()
        self.be_fair()

    def tell(self, event: e.Event) -> None:
        if self.rng.random() < 0.1:
            self.old_news.append(event)
            if len(self.old_news) > 50:
                del self.old_news[self.rng.randrange(50)]
        if isinstance(event, e.StepRestarted):  # also when it is told again: what was taken comes once more
            taken = [group for group in self.delivered if self.is_taken(group, event.step)]
            self.delivered = {group: of for group, of in self.delivered.items() if group not in taken}
        self.books.before(self.scheduler, event, self.now, self.machines.values())
        commands = self.scheduler.handle(event, self.now)
        self.log.append((self.now, event, list(commands)))
        check(self.scheduler, self.now)
        self.books.after(self.scheduler, event, commands)
        for command in commands:
            self.carry_out(command)

    def pass_time(self, seconds: float) -> None:
        end = self.now + seconds
        while (at := self.scheduler.wakeup_at) is not None and at <= end:
            self.now = max(self.now, at)
            self.tell(e.TimePassed())
        self.now = end

    def trouble_with_the_driver(self) -> None:
        """A person pauses and resumes; the driver dies and comes back with its journal; a version is replaced; a
        trainer comes back with other rules."""
        draw = self.driver_rng.random()
        if draw < 0.005:
            self.tell(e.PlacingPaused())
        elif draw < 0.02 and self.scheduler.desk.state.paused:
            self.tell(e.PlacingResumed())
        elif draw < 0.025:
            away_s = self.driver_rng.choice([0.5, 20.0])
            self.now += away_s
            self.tell(e.DriverResumed(away_s, 5.0))
        elif draw < 0.03:
            self.tell(e.TrainerLeft(self.driver_rng.choice([0.0, 2.0])))
        elif draw < 0.05 and self.scheduler.desk.state.trainer_away_since is not None:
            if self.driver_rng.random() < 0.5:
                self.tell(e.TrainerReplaced())
            self.tell(e.TrainerReturned())
        elif draw < 0.053:
            self.tell(e.ValidationBegan())
        elif draw < 0.0535 or (draw < 0.07 and self.scheduler.desk.state.clock.validating_since is not None):
            self.tell(e.ValidationEnded())
        elif draw < 0.075:
            published = self.scheduler.desk.state.published
            self.tell(e.VersionReplaced(Version(max(0, published - self.driver_rng.choice([0, 0, 1])))))
        elif draw < 0.08:
            self.tell(e.RulesChanged(random_config(self.driver_rng)))

    def trouble_with_engines(self) -> None:
        """One dies under its worker, with or without ending what ran; one comes back, with whatever version."""
        draw = self.engine_rng.random()
        if draw > 0.03 or not self.machines:
            return
        machine = self.engine_rng.choice(list(self.machines.values()))
        if draw < 0.01:
            version = self.engine_rng.choice([None, Version(0), Version(99)])
            self.tell(e.EngineBack(machine.name, machine.incarnation, version))
            return
        self.tell(e.EngineDown(machine.name, machine.incarnation, "it was killed"))
        for lease, (_, num) in machine.running.items():
            if self.engine_rng.random() < 0.8:
                self.news.append(e.LeaseEnded(lease, num, "engine_failed"))
        machine.running.clear()

    def liars(self) -> None:
        """Somebody returns what nobody asked for, forges an end, floods, or is blamed for what it wrote."""
        rng = self.liar_rng
        draw = rng.random()
        if draw > 0.12 or not self.machines:
            return
        machine = rng.choice(list(self.machines.values()))
        if draw < 0.05:
            self.hand_over_unasked(machine, rng.choice([1, 1, 99]))
        elif draw < 0.07 and machine.running:
            lease = rng.choice(list(machine.running))
            del machine.running[lease]
            num = rng.choice([-1, 0, 1, self.config.max_new_tokens + 1, 1 << 62])
            self.tell(rng.choice([e.SampleFinished(lease, num), e.LeaseEnded(lease, num, "refused")]))
        elif draw < 0.09:
            leases = tuple(LeaseId(one) for one in range(max(0, self.leases_seen - 500), self.leases_seen + 3))
            self.tell(e.TokensArrived(machine.name, machine.incarnation, leases, (1 << 40,) * len(leases)))
        elif draw < 0.10:
            for _ in range(20):
                self.tell(e.WorkerReported(machine.name, machine.incarnation, rng.choice([-1, 1 << 40]), 1 << 60))
        elif self.delivered:
            blamed = tuple(rng.choices([*self.machines, WorkerName("nobody")], k=rng.randint(1, 3)))
            group = rng.choice(list(self.delivered))
            self.to_take = {step: [one for one in some if one != group] for step, some in self.to_take.items()}
            self.tell(e.GroupRejected(group, "its tokens are not of this model", blamed))

    def hand_over_unasked(self, machine: Machine, most: int) -> None:
        for lease in list(machine.running)[:most]:
            if lease in machine.running:  # the end before may have ended this one too
                _, num = machine.running.pop(lease)
                self.tell(e.LeaseEnded(lease, num, "handed_over"))

    def askers(self) -> None:
        """Somebody asks, has enough, or hangs up; now and then of what is long over."""
        rng = self.asker_rng
        draw = rng.random()
        if draw < 0.06 and len(self.asked) < self.num_askers:
            self.tell(e.GroupAsked(rng.randint(1, 3)))
        elif draw < 0.08 and self.asked:
            group = rng.choice(list(self.asked))
            self.tell(e.SampleStopped(sample_id(group, rng.randrange(self.asked[group])), rng.randint(0, 9)))
        elif draw < 0.10 and self.num_askers:
            self.tell(e.GroupWithdrawn(rng.choice([*self.asked, GroupId(rng.randint(1, 30))]), "they hung up"))

    def judges(self) -> None:
        """A judge of whole groups has no reward for some samples, for all, or for what it was never given."""
        rng = self.judge_rng
        if rng.random() > 0.04 or not self.delivered:
            return
        group = rng.choice([*self.delivered, GroupId(rng.randint(1, 30))])
        samples = tuple(sample_id(group, at) for at in range(6) if rng.random() < rng.choice([0.3, 1.0]))
        self.tell(e.GroupUnscored(group, samples, "the judge is away"))

    def malice(self) -> None:
        self.trouble_with_the_driver()
        self.trouble_with_engines()
        self.liars()
        self.judges()
        self.gathered_news()
        self.askers()
        rng = self.rng
        draw = rng.random()
        if draw < 0.35 and self.news:
            self.tell(self.news.pop(rng.randrange(len(self.news))))
        elif draw < 0.40 and self.old_news:
            self.tell(rng.choice(self.old_news))
        elif draw < 0.60 and self.machines:
            self.progress(rng.choice(list(self.machines.values())))
        elif draw < 0.66:
            self.join_machine(local=rng.random() < 0.2)
        elif draw < 0.70 and self.machines:
            self.kill(rng.choice(list(self.machines)), noticed=rng.random() < 0.5)
        elif draw < 0.72 and self.machines:
            machine = rng.choice(list(self.machines.values()))
            notice_s = rng.choice([0.0, 0.0, -5.0, 1.0, 6.0, 40.0, 500.0, math.inf, math.nan])
            self.tell(e.DrainRequested(machine.name, machine.incarnation, "a notice", notice_s))
        elif draw < 0.74 and self.news:
            self.news.pop(rng.randrange(len(self.news)))  # lost for ever
        elif draw < 0.80:
            self.heartbeats()
        elif draw < 0.82:
            self.pass_time(rng.choice([1.0, 4.0, 30.0, 400.0]))
        elif draw < 0.94:
            self.train()
        else:
            self.pass_time(rng.random() * 0.5)
        self.now += rng.random() * 0.05

    def be_fair(self) -> None:
        """No more faults: whoever is there works, and somebody is always there."""
        self.fair = True
        self.tell(e.PlacingResumed())
        self.tell(e.TrainerReturned())
        for machine in list(self.machines.values()):
            self.tell(e.EngineBack(machine.name, machine.incarnation, None))
        without_fleet = self.rng.random() < 0.5
        if without_fleet:
            for machine in [one for one in self.machines.values() if not one.local]:
                self.kill(machine.name, noticed=False)
        target = self.steps_trained + FAIR_STEPS
        deadline = self.now + FAIR_SECONDS
        while (self.steps_trained < target and not self.data_ended) or (self.asked and not without_fleet):
            if self.now > deadline:
                raise LawViolation(f"stuck: {self.steps_trained} steps trained, wanted {target}; {self.waits()}")
            if not any(machine.local == without_fleet for machine in self.machines.values()):
                self.join_machine(local=without_fleet)
            news, self.news = self.news, []
            for event in news:
                self.tell(event)
            for machine in list(self.machines.values()):
                self.progress(machine)
            self.heartbeats()
            self.train()
            self.pass_time(1.0)

    def waits(self) -> str:
        state = self.scheduler.desk.state
        workers = [(w.name, w.state, w.duty, len(w.leases), w.version) for w in state.fleet.seats.values()]
        groups = [(g.id, g.state, g.num_generated, g.need, g.num_scored) for g in state.groups.values()]
        rounds = [(r.step, r.kind, r.num_waiting, r.num_leased, r.closed_at) for r in state.rounds.values()]
        return f"{workers} {groups} {rounds} published {state.published} requested {state.requested}"

    # The machines

    def join_machine(self, *, local: bool) -> None:
        name = WorkerName(f"{'local' if local else 'w'}{self.rng.randrange(5)}")
        life = self.lives.get(name, 0) + 1
        self.lives[name] = life
        machine = Machine(name, Incarnation(life), local=local)
        self.machines[name] = machine
        event = e.WorkerJoined(
            name,
            machine.incarnation,
            slots=self.claimed_slots(),
            spot=self.rng.random() < 0.5,
            local=local,
            price_usd_per_hour=1.0,
            kv_tokens=self.rng.choice([0, 2000]),
            version=Version(self.rng.choice([0, 0, 1, 99])) if self.rng.random() < 0.2 else None,
            starting_s=self.rng.choice([0.0, 7.0]),
        )
        self.tell(event)

    def claimed_slots(self) -> int:
        honest = self.rng.randint(1, 6)
        return self.liar_rng.choice([-1, 0, 40, 1 << 20, 1 << 62]) if self.liar_rng.random() < 0.15 else honest

    def kill(self, name: WorkerName, *, noticed: bool) -> None:
        machine = self.machines.pop(name)
        if noticed:
            self.news.append(e.WorkerLeft(name, machine.incarnation, "died"))

    def heartbeats(self) -> None:
        for machine in list(self.machines.values()):
            if self.fair or self.rng.random() < 0.9:
                self.tell(
                    e.WorkerReported(machine.name, machine.incarnation, 0 if self.fair else self.rng.randint(0, 3))
                )

    def gathered_news(self) -> None:
        """A driver that held heartbeats back tells them at once, with nonsense about engines among them."""
        rng = self.news_rng
        seats = [one for one in sorted(self.scheduler.desk.seats) if rng.random() < 0.7]
        if rng.random() < 0.03 and seats:
            steps = (seat - before for before, seat in zip([0, *seats], seats, strict=False))
            ago = (rng.choice([-1, 0, 50, 200]) for _ in seats)
            engines = ((rng.randint(0, len(seats)), rng.randint(0, 3), rng.randint(0, 9)) for _ in range(2))
            self.tell(e.FleetReported(tuple(steps), tuple(ago), (), tuple(engines)))

    def progress(self, machine: Machine) -> None:
        """Some samples advance, some finish; now and then the engine fails, or reports nonsense."""
        leases: list[LeaseId] = []
        counts: list[int] = []
        for lease, (sample, num) in list(machine.running.items()):
            if lease in machine.stuck:
                continue
            total = self.lengths[sample]
            num = min(total, num + self.rng.randint(1, max(1, total)))
            machine.running[lease] = (sample, num)
            if not self.fair and self.rng.random() < 0.05:
                del machine.running[lease]
                self.news.append(e.LeaseEnded(lease, num, self.rng.choice(["engine_failed", "refused"])))
            elif num >= total:
                del machine.running[lease]
                self.news.append(e.SampleFinished(lease, num))
            else:
                leases.append(lease)
                counts.append(num)
        if not self.fair and self.rng.random() < 0.1:
            leases.append(LeaseId(self.rng.randint(0, self.leases_seen + 3)))
            counts.append(self.rng.choice([-5, 0, 3, 10**9]))
        self.news.append(e.TokensArrived(machine.name, machine.incarnation, tuple(leases), tuple(counts)))

    # The trainer

    def train(self) -> None:
        step = Step(self.training_step)
        waiting = self.to_take.get(step, [])
        if waiting and self.may_train():
            batch, self.to_take[step] = tuple(waiting), []
            rejected = self.rng.choice(batch) if not self.fair and self.rng.random() < 0.25 else None
            if rejected is not None and self.rng.random() < 0.5:
                self.tell(e.GroupRejected(rejected, "all rewards are equal"))
                batch = tuple(group for group in batch if group != rejected)
            self.tell(e.GroupsTaken(step, batch))
            if rejected is not None and rejected in batch:
                self.tell(e.GroupRejected(rejected, "its losses are not numbers"))
            self.now += 0.1
            if not self.fair and self.rng.random() < 0.05:  # it was killed, and has lost what it made of the step
                self.tell(e.StepRestarted(step))
            else:
                self.tell(e.MicroBatchTrained(step))
        # A rejected group may have reopened the round: then it is closed again later.
        round_ = self.scheduler.desk.rounds.get(step)
        if step in self.closed and round_ is not None and round_.closed_at is not None and not self.to_take.get(step):
            del self.closed[step]
            self.steps_trained += 1
            self.training_step += 1
            self.tell(e.StepTrained(step))
            self.tell(e.VersionPublished(Version(step + 1)))
            self.tell(e.RoundRequested(Step(step + 1 + self.config.max_staleness + self.asked_ahead)))

    def is_taken(self, group: GroupId, step: Step) -> bool:
        known = self.scheduler.desk.groups.get(group)
        return known is not None and known.step == step and known.state == "taken"

    def may_train(self) -> bool:
        local = self.scheduler.desk.state.fleet.local()
        return not local or any(worker.duty == "training" for worker in local)

    # Carrying out commands

    def carry_out(self, command: c.Command) -> None:  # noqa: C901 (a case for each kind)
        rng = self.rng
        answered = self.fair or rng.random() < 0.9
        match command:
            case c.Generate():
                self.carry_out_generate(command)
            case c.Abort():
                machine = self.machines.get(command.worker)
                told = machine.running.pop(command.lease, None) if machine is not None else None
                if told is not None and command.discarded_for is not None and rng.random() < 0.5:
                    self.news.append(e.TokensDiscarded(command.discarded_for, rng.randint(-1, 4)))
            case c.HandOver():
                machine = self.machines.get(command.worker)
                if machine is not None and answered and command.lease in machine.running:
                    _, num = machine.running.pop(command.lease)
                    self.news.append(e.LeaseEnded(command.lease, num, "handed_over"))
            case c.PullWeights():
                machine = self.machines.get(command.worker)
                if machine is not None and answered:
                    ok = self.fair or rng.random() < 0.8
                    who = (machine.name, machine.incarnation, command.version)
                    self.news.append(e.WeightsInstalled(*who) if ok else e.WeightsFailed(*who, "a bad chunk"))
            case c.ReleaseWorker():
                if command.worker in self.machines:
                    self.kill(command.worker, noticed=answered)
            case c.ForgetWorker():
                self.machines.pop(command.worker, None)
            case c.StartTraining() | c.StartGenerating():
                machine = self.machines.get(command.worker)
                if machine is not None and (self.fair or rng.random() < 0.97):
                    duty = "training" if isinstance(command, c.StartTraining) else "generating"
                    self.news.append(e.DutyChanged(machine.name, machine.incarnation, duty))
            case c.Score():
                if answered:
                    self.news.append(self.reward(command))
            case c.DeliverGroup():
                if command.group in self.delivered:
                    raise LawViolation(f"group {command.group} was delivered twice")
                if len(command.samples) == 0:
                    raise LawViolation(f"group {command.group} was delivered empty")
                self.delivered[command.group] = command.step
                self.to_take.setdefault(command.step, []).append(command.group)
            case c.AddAsked():
                self.asked[command.group] = command.num_samples
            case c.CloseAsked():
                del self.asked[command.group]
            case c.CloseRound():
                self.closed[command.step] = command.num_groups
            case c.EndData():
                self.data_ended = True
            case _:
                pass

    def reward(self, command: c.Score) -> e.RewardFinished:
        rng = self.rng
        outcome: e.RewardOutcome = rng.choice(FAIR_OUTCOMES if self.fair else OUTCOMES)
        lies = not self.fair and rng.random() < 0.05
        cpu_s = rng.choice([-1.0, float("nan"), float("inf")]) if lies else rng.random()
        return e.RewardFinished(command.sample, command.attempt, outcome, rng.random() < 0.5, cpu_s)

    def carry_out_generate(self, command: c.Generate) -> None:
        if command.lease <= self.leases_seen:
            raise LawViolation(f"lease {command.lease} was given before")
        self.leases_seen = command.lease
        total = self.lengths.setdefault(command.sample, self.rng.randint(1, command.max_tokens))
        if command.from_token > total:  # a machine's nonsense was believed
            self.lengths[command.sample] = command.from_token
        machine = self.machines.get(command.worker)
        if machine is not None:
            machine.running[command.lease] = (command.sample, command.from_token)
            if not self.fair and self.rng.random() < 0.03:
                machine.stuck.add(command.lease)


def play(seed: int, num_events: int = 250, make: Callable[[SchedulerConfig], Scheduler] = Scheduler) -> HostileWorld:
    world = HostileWorld(seed, make)
    world.play(num_events)
    return world
