"""The simulator's driver: a virtual clock, modelled machines, and the very scheduler that runs live.

It does what a manager does: tells the scheduler what happened, carries its commands out, and wakes it when it asked for
that. The machines, the network, the rewards and the trainer are models; every decision is the scheduler's. The same
scenario and seed give the same events, and the journal's digest shows it.

It leaves out payload: no token is ever made, only counted.
"""

import heapq
from collections.abc import Callable
from pathlib import Path
from typing import assert_never

import msgspec

from polyrl.errors import LawViolation, PolyrlError
from polyrl.ids import GroupId, Incarnation, LeaseId, SampleId, Seconds, Step, Version, WorkerName, group_of, index_of
from polyrl.scheduling import commands as c
from polyrl.scheduling import events as e
from polyrl.scheduling.invariants import check
from polyrl.scheduling.ledger import StepLine
from polyrl.scheduling.parameters import DomainData, SchedulerConfig
from polyrl.scheduling.records import JournalDigest, encode_record
from polyrl.scheduling.scheduler import Scheduler
from polyrl.sim.draws import unit
from polyrl.sim.engine_model import EngineModel
from polyrl.sim.machines import Machine, Timeline
from polyrl.sim.network_model import NetworkModel
from polyrl.sim.reward_model import RewardModel
from polyrl.sim.scenario import Scenario
from polyrl.sim.supply import WorldEvent, plan_supply, read_supply_trace, speed_of
from polyrl.sim.trainer_model import TrainerModel
from polyrl.sim.workload import Workload, read_trace

_LATE_STREAM = 0x40
_REPEAT_STREAM = 0x41
_PULL_STREAM = 0x42
_CHECK_EVERY = 2000
"""Events between two checks of all laws; a step's end is checked too."""
_NO_ANSWER_S = 0.01
"""Scoring an answer that was cut off at the cap: there is nothing to run."""
_GIGABYTE = 1e9

Watch = Callable[[bytes], None]


class StuckError(PolyrlError):
    """The run did not end within `run.max_time_s`: who waits for what is in the message."""


def scheduler_config(scenario: Scenario, seed: int) -> SchedulerConfig:
    """What the scenario says to the scheduler."""
    prompts = [domain.prompt_tokens for domain in scenario.domains]
    return SchedulerConfig(
        domains=tuple(
            DomainData(name=domain.name, prompts_per_step=domain.prompts_per_step, num_prompts=domain.num_prompts)
            for domain in scenario.domains
        ),
        seed=seed,
        max_new_tokens=scenario.run.max_new_tokens,
        max_staleness=scenario.run.max_staleness,
        streaming=scenario.run.mode == "streaming",
        trainer_usd_per_hour=scenario.trainer.price_usd_per_hour,
        prompt_tokens=max(1, sum(prompts) // len(prompts)),
        rounds=scenario.rounds,
        routing=scenario.routing,
        seeding=scenario.seeding,
        hand_back=scenario.hand_back,
        parallelism=scenario.parallelism,
        rewards=scenario.rewards,
        fleet_rules=scenario.fleet_rules,
        weight_delivery=scenario.weight_delivery,
        scaling=scenario.scaling,
    )


class Simulation:
    """One run of one scenario. `watch`, if given, gets every record of the journal."""

    def __init__(
        self, scenario: Scenario, seed: int = 0, *, folder: Path | None = None, watch: Watch | None = None
    ) -> None:
        self.scenario = scenario
        self.seed = seed
        self.now: Seconds = 0.0
        self.config = scheduler_config(scenario, seed)
        self.scheduler = Scheduler(self.config)
        self.digest = JournalDigest()
        self.num_events = 0
        self.law_violations: list[str] = []
        self.lines: list[StepLine] = []
        self.tokens_at_step: list[int] = []
        """Tokens trained, with prompts, up to each step's end."""
        self.timeline = Timeline()
        self.num_natural = 0
        self.natural_tokens = 0
        """Natural lengths of all samples started, for the bias."""
        self._watch = watch
        self._queue: list[tuple[Seconds, int, Callable[[], None]]] = []
        self._order = 0
        self._num_news = 0
        self._dirty: dict[WorkerName, Machine] = {}
        self._network_dirty = False
        self._network_stamp = 0
        self._machines: dict[WorkerName, Machine] = {}
        self._lives: dict[WorkerName, int] = {}
        self._groups: dict[GroupId, tuple[int, int, int, Step]] = {}
        """By group: domain, prompt, turn, step."""
        self._turns: dict[tuple[int, int], int] = {}
        self._lengths: dict[SampleId, int] = {}
        self._scoring: dict[SampleId, int] = {}
        self._pulls: dict[int, tuple[Machine, Version, str]] = {}
        self._num_pulls = 0
        self._parked: list[WorkerName] = []
        self._local_width = scenario.trainer.num_devices // max(1, scenario.trainer.local_workers)
        folder = Path() if folder is None else folder
        length_file, supply_file = scenario.workload.trace, scenario.supply.trace
        trace = None if length_file is None else read_trace(folder / length_file)
        self._supply_trace = None if supply_file is None else read_supply_trace(folder / supply_file)
        self._workload = Workload(
            scenario.domains, scenario.run.max_new_tokens, seed, scenario.workload.growth_per_step, trace
        )
        self._rewards = RewardModel(scenario.domains, seed)
        self._network = NetworkModel()
        self._network.set_node("trainer", scenario.network.trainer_egress_gbps, scenario.network.trainer_egress_gbps)
        self._trainer = TrainerModel(scenario, self._later, self.tell)

    # Playing

    @property
    def num_steps_done(self) -> int:
        return len(self.lines)

    def run(self, on_step: Callable[[int], None] | None = None) -> None:
        """Play the scenario to its end. Raises StuckError if it does not get there."""
        self._begin()
        shown = 0
        while not self._trainer.done:
            self._play_next()
            if on_step is not None and len(self.lines) > shown:
                shown = len(self.lines)
                on_step(shown)
        self.timeline.end(self.now)
        self._check_laws()

    def _begin(self) -> None:
        scenario = self.scenario
        horizon = min(scenario.run.max_time_s, 30 * 24 * 3600.0)
        supply = plan_supply(  # first: it refuses what it cannot play, and then nothing has been written yet
            scenario.fleet, scenario.supply, scenario.faults, self.seed, horizon, trace=self._supply_trace
        )
        self._trainer.start()
        for number in range(scenario.trainer.local_workers):
            self._join(WorkerName(f"local{number + 1}"), local=True, starting_s=0.0)
        for event in supply:
            self._at(event.at_s, lambda event=event: self._world(event))

    def _play_next(self) -> None:
        wakeup = self.scheduler.wakeup_at
        next_at = self._queue[0][0] if self._queue else None
        if wakeup is not None and (next_at is None or wakeup <= next_at):
            self.now = max(self.now, wakeup)
            self.tell(e.TimePassed())
        elif next_at is not None:
            self.now, _, action = heapq.heappop(self._queue)
            action()
        else:
            raise StuckError(f"nothing is left to happen at {self.now:.0f} s; {self._who_waits()}")
        if self.now > self.scenario.run.max_time_s:
            raise StuckError(f"not done after run.max_time_s = {self.scenario.run.max_time_s:g} s; {self._who_waits()}")
        self._find_changes()

    def _who_waits(self) -> str:
        state = self.scheduler.desk.state
        rounds = ", ".join(
            f"round {one.step}: {one.num_waiting} samples wait, {one.num_leased} run" for one in state.rounds.values()
        )
        return f"step {self._trainer.step}; {rounds or 'no round is open'}; {len(state.fleet.seats)} workers"

    def _at(self, at: Seconds, action: Callable[[], None]) -> None:
        self._order += 1
        heapq.heappush(self._queue, (at, self._order, action))

    def _later(self, seconds: Seconds, action: Callable[[], None]) -> None:
        self._at(self.now + seconds, action)

    def tell(self, event: e.Event) -> None:
        """Tell the scheduler, and carry out what it wants."""
        commands = self.scheduler.handle(event, self.now)
        self.num_events += 1
        record = encode_record(self.now, event, commands)
        self.digest.add_encoded(record)
        if self._watch is not None:
            self._watch(record)
        if self.num_events % _CHECK_EVERY == 0:
            self._check_laws()
        for command in commands:
            self._carry_out(command)

    def _check_laws(self) -> None:
        try:
            check(self.scheduler, self.now)
        except LawViolation as violation:
            self.law_violations.append(f"at {self.now:.1f} s: {violation}")

    # Machines

    def _join(self, name: WorkerName, *, local: bool, starting_s: Seconds) -> None:
        scenario = self.scenario
        life = self._lives.get(name, 0) + 1
        self._lives[name] = life
        speed = 1.0 if local else scenario.fleet.speed * speed_of(name, scenario.faults, self.seed)
        spot = scenario.fleet.spot and not local
        price = 0.0 if local else scenario.fleet.price_usd_per_hour
        engine, kv_tokens = EngineModel(scenario.engine, speed), scenario.engine.kv_tokens
        if local:
            engine, kv_tokens = self._local_engine()
        machine = Machine(name, Incarnation(life), engine, local=local, spot=spot, price=price)
        self._machines[name] = machine
        if not local:
            self._network.set_node(name, scenario.network.worker_egress_gbps, scenario.network.worker_ingress_gbps)
        devices = self._local_width if local else scenario.fleet.devices_per_worker
        self.timeline.mark(name, "idle" if local else "pulling", self.now)
        self.tell(
            e.WorkerJoined(
                name,
                machine.incarnation,
                slots=scenario.engine.slots,
                spot=spot,
                local=local,
                num_devices=max(1, devices),
                price_usd_per_hour=price,
                kv_tokens=kv_tokens,
                starting_s=starting_s,
            )
        )
        self._later(scenario.fleet.heartbeat_s, lambda: self._heartbeat(machine))
        self._later(scenario.engine.flush_s, lambda: self._flush(machine))

    def _heartbeat(self, machine: Machine) -> None:
        if machine.alive:
            engine = machine.engine
            report = e.WorkerReported(machine.name, machine.incarnation, engine.num_waiting, engine.num_preemptions)
            self._send(machine, report)
            self._later(self.scenario.fleet.heartbeat_s, lambda: self._heartbeat(machine))

    def _flush(self, machine: Machine) -> None:
        if not machine.alive:
            return
        if not machine.engine.is_idle:
            leases, tokens = machine.engine.progress(self.now)
            columns = tuple(map(LeaseId, leases)), tuple(tokens)
            self._send(machine, e.TokensArrived(machine.name, machine.incarnation, *columns))
        self._later(self.scenario.engine.flush_s, lambda: self._flush(machine))

    def _send(self, machine: Machine, event: e.Event) -> None:
        """A machine's news goes out; it may be held back, late, or arrive twice. The dead say nothing."""
        if not machine.alive:
            return
        if machine.cut:
            machine.held_back.append(event)
            return
        faults = self.scenario.faults
        self._num_news += 1
        late = faults.late_s * unit(self.seed, _LATE_STREAM, self._num_news) if faults.late_s else 0.0
        if late == 0.0:
            self.tell(event)
        else:
            self._later(late, lambda: self.tell(event))
        if faults.repeat_share and unit(self.seed, _REPEAT_STREAM, self._num_news) < faults.repeat_share:
            self._later(late + 0.5, lambda: self.tell(event))

    def _die(self, machine: Machine) -> None:
        """A machine ends without a word."""
        if not machine.alive:
            return
        machine.alive = False
        if self._machines.get(machine.name) is machine:
            del self._machines[machine.name]
        self._cancel_pull(machine)
        self._fail_pulls_from(machine.name)
        self._trainer.take_devices(machine.name)
        self.timeline.mark(machine.name, None, self.now)

    def _world(self, event: WorldEvent) -> None:
        machine = self._machines.get(event.worker)
        match event.kind:
            case "grant":
                joins_at = self.now if event.joins_at_s is None else event.joins_at_s
                paid = joins_at - self.now
                if paid > 0:
                    self.timeline.mark(event.worker, "starting", self.now)
                self._at(joins_at, lambda: self._join(event.worker, local=False, starting_s=paid))
            case "restart":
                if machine is None:
                    self._join(event.worker, local=False, starting_s=0.0)
            case "notice":
                if machine is not None:
                    self._drain(machine, "the market takes it back")
            case "take" | "die":
                if machine is not None:
                    self._die(machine)
            case "cut":
                if machine is not None:
                    machine.cut = True
            case "heal":
                if machine is not None:
                    self._heal(machine)
            case _:
                assert_never(event.kind)

    def _drain(self, machine: Machine, reason: str) -> None:
        self.timeline.mark(machine.name, "draining", self.now)
        self.tell(e.DrainRequested(machine.name, machine.incarnation, reason))

    def _heal(self, machine: Machine) -> None:
        machine.cut = False
        held, machine.held_back = machine.held_back, []
        known = self.scheduler.desk.state.fleet.find(machine.name, machine.incarnation)
        for event in held:
            self.tell(event)
        if known is None:
            self._die(machine)  # given up meanwhile: its process starts again
            self._join(machine.name, local=False, starting_s=0.0)

    # Engines and network: when does something change next

    def _touch(self, machine: Machine) -> None:
        self._dirty[machine.name] = machine

    def _find_changes(self) -> None:
        """Set the alarms of every engine, and of the network, that the last event touched."""
        while self._dirty:
            dirty, self._dirty = self._dirty, {}
            for machine in dirty.values():
                self._alarm(machine)
        if self._network_dirty:
            self._network_dirty = False
            self._network_stamp += 1
            at = self._network.next_change()
            if at is not None:
                stamp = self._network_stamp
                self._at(max(at, self.now), lambda: self._network_changed(stamp))

    def _alarm(self, machine: Machine) -> None:
        machine.change_stamp += 1
        stamp = machine.change_stamp
        at = machine.engine.next_change() if machine.alive else None
        if at is not None:
            self._at(max(at, self.now), lambda: self._engine_changed(machine, stamp))

    def _engine_changed(self, machine: Machine, stamp: int) -> None:
        if machine.alive and machine.change_stamp == stamp:
            self._touch(machine)
            self._finish_samples(machine)

    def _finish_samples(self, machine: Machine) -> None:
        for lease, tokens, _ in machine.engine.advance(self.now):
            self._send(machine, e.SampleFinished(LeaseId(lease), tokens))
        if machine.engine.is_idle and not machine.cut:
            self._mark_idle(machine)

    def _mark_idle(self, machine: Machine) -> None:
        worker = self.scheduler.desk.state.fleet.find(machine.name, machine.incarnation)
        if worker is not None:
            self.timeline.mark(machine.name, worker.activity, self.now)

    def _network_changed(self, stamp: int) -> None:
        if stamp != self._network_stamp:
            return
        self._network_dirty = True
        for flow, _ in self._network.advance(self.now):
            machine, version, _ = self._pulls.pop(flow)
            machine.pull = 0
            failed = unit(self.seed, _PULL_STREAM, flow) < self.scenario.faults.pull_failure_share
            self._later(
                self.scenario.network.install_s,
                lambda machine=machine, version=version, failed=failed: self._pulled(machine, version, failed=failed),
            )

    def _pulled(self, machine: Machine, version: Version, *, failed: bool) -> None:
        if not machine.alive:
            return
        if failed:
            self._send(machine, e.WeightsFailed(machine.name, machine.incarnation, version, "a chunk does not verify"))
        else:
            self._send(machine, e.WeightsInstalled(machine.name, machine.incarnation, version))
        self._mark_idle(machine)

    def _cancel_pull(self, machine: Machine) -> None:
        if machine.pull:
            self._network.cancel(machine.pull, self.now)
            self._pulls.pop(machine.pull, None)
            machine.pull = 0
            self._network_dirty = True

    def _fail_pulls_from(self, source: str) -> None:
        for machine, version, its_source in list(self._pulls.values()):
            if its_source == source:
                self._cancel_pull(machine)
                failed = e.WeightsFailed(machine.name, machine.incarnation, version, f"{source} went away")
                self._later(0.0, lambda machine=machine, failed=failed: self._send(machine, failed))

    # Commands

    def _carry_out(self, command: c.Command) -> None:
        match command:
            case c.Generate():
                self._generate(command)
            case c.Abort():
                machine = self._machines.get(command.worker)
                if machine is not None:
                    machine.engine.stop(command.lease, self.now)
                    self._touch(machine)
            case c.HandOver():
                self._hand_over(command)
            case c.PullWeights():
                self._pull(command)
            case c.ReleaseWorker():
                self._release(command.worker)
            case c.ForgetWorker():
                self._forget(command.worker)
            case c.StartTraining():
                self._switch(command.worker, "training")
            case c.StartGenerating():
                self._trainer.take_devices(command.worker)
                self._switch(command.worker, "generating")
            case c.OpenRound():
                self._open_round(command)
            case c.AddGroup():
                self._add_group(command.step, command.group)
            case c.Score():
                self._score(command)
            case c.CancelScore():
                self._scoring.pop(command.sample, None)
            case c.DeliverGroup():
                self._deliver(command)
            case c.CloseRound():
                self._trainer.close(command.step, command.num_groups)
            case c.EndData():
                self._trainer.end_data(command.step)
            case c.ReportStep():
                self.lines.append(command.line)
                self.tokens_at_step.append(self._trainer.tokens_trained)
            case c.AdviseFleet():
                self._hold(command.num_workers)
            case c.DropGroup():
                self._groups.pop(command.group, None)
            case c.Reshape():
                self._reshape(command)
            case _:
                assert_never(command)

    def _generate(self, command: c.Generate) -> None:
        machine = self._machines.get(command.worker)
        if machine is None:
            return
        group = group_of(command.sample)
        domain, prompt, turn, step = self._groups[group]
        total = self._lengths.get(command.sample)
        if total is None:
            total = self._workload.answer_tokens(domain, prompt, turn, index_of(command.sample), step)
            self._lengths[command.sample] = total
            self.num_natural += 1
            self.natural_tokens += total
        machine.engine.start(
            command.lease,
            self.now,
            prompt_tokens=self._workload.prompt_tokens(domain, prompt),
            from_token=command.from_token,
            total_tokens=max(total, command.from_token),
            prefix=group,
        )
        self.timeline.mark(machine.name, "generating", self.now)
        self._touch(machine)

    def _hand_over(self, command: c.HandOver) -> None:
        machine = self._machines.get(command.worker)
        if machine is None:
            return
        tokens = machine.engine.stop(command.lease, self.now)
        self._touch(machine)
        if tokens is not None:
            ended = e.LeaseEnded(command.lease, tokens, "handed_over")
            self._later(self.scenario.network.latency_s, lambda: self._send(machine, ended))

    def _pull(self, command: c.PullWeights) -> None:
        machine = self._machines.get(command.worker)
        if machine is None:
            return
        self._cancel_pull(machine)
        network = self.scenario.network
        size = network.weights_gb
        if network.delta_gb is not None and command.held is not None:
            size = min(size, network.delta_gb * (command.version - command.held))
        source = "trainer" if command.source is None else command.source
        self._num_pulls += 1
        machine.pull = self._num_pulls
        self._pulls[machine.pull] = (machine, command.version, source)
        self._network.start(machine.pull, self.now, source, machine.name, size * _GIGABYTE)
        self._network_dirty = True
        if machine.engine.is_idle:
            self.timeline.mark(machine.name, "pulling", self.now)

    def _release(self, name: WorkerName) -> None:
        machine = self._machines.get(name)
        if machine is not None:
            self._die(machine)
            left = e.WorkerLeft(machine.name, machine.incarnation, "drained")
            self._later(self.scenario.network.latency_s, lambda: self.tell(left))

    def _forget(self, name: WorkerName) -> None:
        """The manager closed its connection: if the machine is alive, its process starts again and joins anew."""
        machine = self._machines.get(name)
        known = self.scheduler.desk.state.fleet.by_name.get(name)
        if machine is None or machine.cut or known is not None:
            return
        self._die(machine)
        self._later(self.scenario.faults.restart_s, lambda: self._rejoin(name, local=machine.local))

    def _rejoin(self, name: WorkerName, *, local: bool) -> None:
        if name not in self._machines:
            self._join(name, local=local, starting_s=0.0)

    def _switch(self, name: WorkerName, duty: e.Duty) -> None:
        self._later(self.scenario.trainer.switch_s, lambda: self._switched(name, duty))
        self.timeline.mark(name, "switching", self.now)

    def _switched(self, name: WorkerName, duty: e.Duty) -> None:
        machine = self._machines.get(name)
        if machine is None:
            return
        self.timeline.mark(name, "training" if duty == "training" else "idle", self.now)
        self.tell(e.DutyChanged(machine.name, machine.incarnation, duty))
        if duty == "training":
            self._trainer.give_devices(name)

    def _open_round(self, command: c.OpenRound) -> None:
        for group in command.groups:
            self._add_group(command.step, group)
        faults = self.scenario.faults
        if faults.kill_workers and command.step == faults.kill_step:
            for seconds in faults.kill_at_s:
                self._later(seconds, self._kill_some)

    def _kill_some(self) -> None:
        faults = self.scenario.faults
        remote = [machine for machine in self._machines.values() if not machine.local]
        for machine in remote[-faults.kill_workers :]:
            if faults.kill_notice_s:
                self._drain(machine, "a notice")
                self._later(faults.kill_notice_s, lambda machine=machine: self._die(machine))
            else:
                self._die(machine)
            if faults.kill_back_after_s is not None:
                self._later(faults.kill_back_after_s, lambda name=machine.name: self._rejoin(name, local=False))

    def _add_group(self, step: Step, group: c.PlannedGroup) -> None:
        key = (group.domain, group.prompt)
        turn = self._turns.get(key, 0)
        self._turns[key] = turn + 1
        self._groups[group.group] = (group.domain, group.prompt, turn, step)

    def _score(self, command: c.Score) -> None:
        domain, prompt, turn, _ = self._groups[group_of(command.sample)]
        index = index_of(command.sample)
        if self._lengths[command.sample] >= self.scenario.run.max_new_tokens:
            outcome, seconds, correct = "scored", _NO_ANSWER_S, False
        else:
            outcome, seconds, correct = self._rewards.outcome(
                domain, prompt, turn, index, command.attempt, command.timeout_s
            )
        self._scoring[command.sample] = command.attempt
        event = e.RewardFinished(command.sample, command.attempt, outcome, correct, seconds)
        self._later(seconds, lambda: self._scored(event))

    def _scored(self, event: e.RewardFinished) -> None:
        if self._scoring.get(event.sample) == event.attempt:
            del self._scoring[event.sample]
            self.tell(event)

    def _deliver(self, command: c.DeliverGroup) -> None:
        domain, prompt, _, _ = self._groups.pop(command.group)
        prompt_tokens = self._workload.prompt_tokens(domain, prompt)
        tokens = sum(self._lengths[sample] + prompt_tokens for sample in command.samples)
        self._trainer.deliver(command.step, command.group, len(command.samples), tokens)

    def _reshape(self, command: c.Reshape) -> None:
        """The local engines end; those of the new width join once their weights are loaded."""
        for machine in [machine for machine in self._machines.values() if machine.local]:
            self._die(machine)
        self._trainer.num_local = command.replicas
        self._local_width = command.tensor_parallel
        for number in range(command.replicas):
            name = WorkerName(f"local{number + 1}")
            self.timeline.mark(name, "switching", self.now)
            self._later(self.scenario.trainer.switch_s, lambda name=name: self._rejoin(name, local=True))

    def _local_engine(self) -> tuple[EngineModel, int]:
        """An engine of the width in force, and the tokens its cache holds. The scenario describes the first width."""
        trainer, speed = self.scenario.trainer, self.scenario.parallelism.speed
        wider = self._local_width / max(1, trainer.num_devices // trainer.local_workers)
        engine = msgspec.structs.replace(self.scenario.engine, kv_tokens=int(self.scenario.engine.kv_tokens * wider))
        return EngineModel(engine, 1.0 if speed is None else wider**speed.tp_exponent), engine.kv_tokens

    def _hold(self, num_workers: int) -> None:
        """Hold as many remote workers as advised: give the newest back, or take back who was parked."""
        if not self.scenario.fleet.held_by_advice:
            return
        remote = [machine for machine in self._machines.values() if not machine.local]
        for machine in remote[num_workers:]:
            self._parked.append(machine.name)
            self._drain(machine, f"only {num_workers} workers are worth holding")
        for _ in range(num_workers - len(remote)):
            if self._parked:
                name = self._parked.pop()
                self._later(self.scenario.fleet.start_s, lambda name=name: self._rejoin(name, local=False))
