"""The machines as a fleet: they join, report, generate, drain, die, are cut off and come back.

It does to machines what the market, the faults and the scheduler's commands ask, and sends what they have to say. News
may be late, repeated, or held back by a partition until that heals; a dead machine says nothing, and what it had not
flushed is lost.
"""

from collections.abc import Callable, Sequence
from typing import assert_never

from polyrl.engines.lockstep import EngineModel
from polyrl.ids import Incarnation, LeaseId, Seconds, WorkerName
from polyrl.scheduling.core import commands as c
from polyrl.scheduling.core import events as e
from polyrl.scheduling.core.fleet import Worker
from polyrl.sim.deliveries import Deliveries
from polyrl.sim.draws import unit
from polyrl.sim.holding import Holding
from polyrl.sim.machines import Agenda, Machine
from polyrl.sim.scenario import Scenario
from polyrl.sim.supply import WorldEvent, speed_of
from polyrl.sim.trainer_model import TrainerModel
from polyrl.telemetry.timeline import Timeline

_LATE_STREAM = 0x40
_REPEAT_STREAM = 0x41
_REPEATED_AFTER_S = 0.5

Tell = Callable[[e.Event], None]
Find = Callable[[WorkerName], Worker | None]
"""Looks up the scheduler's own entry of a worker, by name."""


class FleetModel:
    def __init__(
        self, scenario: Scenario, seed: int, agenda: Agenda, trainer: TrainerModel, tell: Tell, find: Find
    ) -> None:
        self._scenario = scenario
        self._seed = seed
        self._agenda = agenda
        self._trainer = trainer
        self._tell = tell
        self._find = find
        self.timeline = Timeline()
        self._deliveries = Deliveries(scenario, seed, agenda, self._send)
        self._machines: dict[WorkerName, Machine] = {}
        self._lives: dict[WorkerName, int] = {}
        self._taken: dict[WorkerName, None] = {}
        """Machines that the market took back for good."""
        self._goes_at: dict[WorkerName, Seconds] = {}
        """Departure times of machines that were given notice. Their workers may join, or start again, after that."""
        self._holding = Holding(_first_target(scenario))
        self._price = scenario.fleet.price_usd_per_hour
        """The present price of a machine an hour."""
        self._regions: dict[WorkerName, int] = {}
        """How many remote machines had joined before each."""
        self._touched: dict[WorkerName, Machine] = {}
        self._num_news = 0
        self._local_width = scenario.first_width

    def _remote(self) -> list[Machine]:
        return [machine for machine in self._machines.values() if not machine.local]

    @property
    def gb_between_regions(self) -> float:
        return self._deliveries.gb_between_regions

    # Joining and reporting

    def join(self, name: WorkerName, *, local: bool, starting_s: Seconds = 0.0) -> None:
        """Start a machine's process, which joins, unless it runs already or the machine was taken or given back."""
        if name in self._machines or name in self._taken or not (local or self._holding.is_held(name)):
            return
        scenario = self._scenario
        life = self._lives.get(name, 0) + 1
        self._lives[name] = life
        engine, kv_tokens = self._engine(name, local=local)
        machine = Machine(name, Incarnation(life), engine, kv_tokens, local=local)
        self._machines[name] = machine
        if not local:
            self._deliveries.add(name, self._region(name))
        self.timeline.mark(name, "idle" if local else "pulling", self._agenda.now)
        self._tell(
            e.WorkerJoined(
                name,
                machine.incarnation,
                slots=scenario.engine.slots,
                spot=scenario.fleet.spot and not local,
                local=local,
                num_devices=max(1, self._local_width if local else scenario.fleet.devices_per_worker),
                price_usd_per_hour=0.0 if local else self._price,
                kv_tokens=kv_tokens,
                starting_s=starting_s,
                region="" if local else self._region(name),
            )
        )
        self._agenda.later(scenario.fleet.heartbeat_s, lambda: self._heartbeat(machine))
        self._agenda.later(scenario.engine.flush_s, lambda: self._flush(machine))
        if name in self._goes_at:
            self._warn(machine)

    def _region(self, name: WorkerName) -> str:
        """Return the region of a remote machine; a machine that comes back is where it was."""
        regions = self._scenario.fleet.regions
        return regions[self._regions.setdefault(name, len(self._regions)) % len(regions)] if regions else ""

    def _engine(self, name: WorkerName, *, local: bool) -> tuple[EngineModel, int]:
        """Make an engine; return it and the tokens that its cache holds. The scenario describes the first width of the
        local ones."""
        scenario = self._scenario
        if local:
            width = self._local_width
            speed = (width / scenario.first_width) ** scenario.engine.tp_exponent
        else:
            width = scenario.fleet.devices_per_worker
            speed = scenario.fleet.speed * speed_of(name, scenario.faults, self._seed)
        kv_tokens = scenario.kv_tokens(width)
        return EngineModel(scenario.engine.times(kv_tokens), speed), kv_tokens

    def _heartbeat(self, machine: Machine) -> None:
        if machine.alive:
            engine = machine.engine
            report = e.WorkerReported(machine.name, machine.incarnation, engine.num_waiting, engine.num_preemptions)
            self._send(machine, report)
            self._agenda.later(self._scenario.fleet.heartbeat_s, lambda: self._heartbeat(machine))

    def _flush(self, machine: Machine) -> None:
        if not machine.alive:
            return
        if not machine.engine.is_idle:
            leases, tokens = machine.engine.progress(self._agenda.now)
            columns = tuple(map(LeaseId, leases)), tuple(tokens)
            self._send(machine, e.TokensArrived(machine.name, machine.incarnation, *columns))
        self._agenda.later(self._scenario.engine.flush_s, lambda: self._flush(machine))

    def _send(self, machine: Machine, event: e.Event) -> None:
        """Send a machine's news. The dead say nothing."""
        if not machine.alive:
            return
        if isinstance(event, e.WeightsInstalled):
            machine.kept.clear()  # computed with other weights
        if machine.cut:
            machine.held_back.append(event)
            return
        faults = self._scenario.faults
        self._num_news += 1
        late = faults.late_s * unit(self._seed, _LATE_STREAM, self._num_news) if faults.late_s else 0.0
        if late == 0.0:
            self._tell(event)
        else:
            self._agenda.later(late, lambda: self._tell(event))
        if faults.repeat_share and unit(self._seed, _REPEAT_STREAM, self._num_news) < faults.repeat_share:
            self._agenda.later(late + _REPEATED_AFTER_S, lambda: self._tell(event))
        self._show(machine)

    def _show(self, machine: Machine) -> None:
        """Put down what a machine does, once its engine has nothing to do."""
        worker = self._find(machine.name) if machine.engine.is_idle and machine.alive else None
        if worker is not None and worker.duty in ("generating", "stopping", "training"):
            self.timeline.mark(machine.name, worker.activity, self._agenda.now)

    # What the world does

    def happen(self, event: WorldEvent) -> None:  # noqa: C901 (a case for each kind)
        machine = self._machines.get(event.worker)
        match event.kind:
            case "price":
                assert event.usd_per_hour is not None
                self._price = event.usd_per_hour
                self._tell_offer()
            case "grant":
                self._grant(event)
            case "restart":
                self.join(event.worker, local=False)
            case "notice":
                assert event.goes_at_s is not None
                self._goes_at[event.worker] = event.goes_at_s
                self._holding.close(event.worker)
                if machine is not None:
                    self._warn(machine)
            case "take":
                self._taken[event.worker] = None
                self._holding.withdraw(event.worker)
                self.timeline.mark(event.worker, None, self._agenda.now)
                if machine is not None:
                    self._die(machine)
                if self._scenario.fleet.is_held:
                    self._tell_offer()
                    self._start_more()
            case "die":
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

    def _grant(self, event: WorldEvent) -> None:
        self._holding.offer(event.worker)
        if self._scenario.fleet.is_held:
            self._tell_offer()
            self._start_more()
            return
        self._holding.take_more()
        now = self._agenda.now
        joins_at = now if event.joins_at_s is None else event.joins_at_s
        if joins_at > now:
            self.timeline.mark(event.worker, "starting", now)
        self._agenda.at(joins_at, lambda: self.join(event.worker, local=False, starting_s=joins_at - now))

    def _heal(self, machine: Machine) -> None:
        machine.cut = False
        held, machine.held_back = machine.held_back, []
        worker = self._find(machine.name)
        for event in held:
            self._tell(event)
        if worker is None or worker.incarnation != machine.incarnation:
            self._die(machine)  # given up meanwhile: its process starts again
            self.join(machine.name, local=machine.local)

    def _die(self, machine: Machine) -> None:
        """End a machine without a word."""
        if not machine.alive:
            return
        machine.alive = False
        if self._machines.get(machine.name) is machine:
            del self._machines[machine.name]
        self._deliveries.cancel(machine)
        self._deliveries.fail_from(machine.name)
        self._trainer.take_devices(machine.name)
        self.timeline.mark(machine.name, None, self._agenda.now)

    def _warn(self, machine: Machine) -> None:
        self._drain(machine, "the market takes it back", self._goes_at[machine.name] - self._agenda.now)

    def _drain(self, machine: Machine, reason: str, notice_s: Seconds = 0.0) -> None:
        self._tell(e.DrainRequested(machine.name, machine.incarnation, reason, notice_s))

    def kill_some(self) -> None:
        """Play the fault of the scenario's kill step: the newest machines die, or are taken with notice."""
        faults = self._scenario.faults
        for machine in self._remote()[-faults.kill_workers :]:
            if faults.kill_notice_s:
                self._drain(machine, "a notice", faults.kill_notice_s)
                self._agenda.later(faults.kill_notice_s, lambda machine=machine: self._die(machine))
            else:
                self._die(machine)
            if faults.kill_back_after_s is not None:
                name = machine.name
                self._agenda.later(faults.kill_back_after_s, lambda name=name: self.join(name, local=False))

    # When engines change next

    def set_alarms(self) -> None:
        """Compute again, after an event, when the engines and the network that it touched change next."""
        touched, self._touched = self._touched, {}
        for machine in touched.values():
            machine.change_stamp += 1
            at = machine.engine.next_change() if machine.alive else None
            if at is not None:
                stamp = machine.change_stamp
                self._agenda.at(at, lambda machine=machine, stamp=stamp: self._advance(machine, stamp))
        self._deliveries.set_alarm()

    def _advance(self, machine: Machine, stamp: int) -> None:
        if not machine.alive or machine.change_stamp != stamp:
            return
        self._touched[machine.name] = machine
        for lease, tokens, _ in machine.engine.advance(self._agenda.now):
            self._keep(machine, LeaseId(lease), tokens)
            self._send(machine, e.SampleFinished(LeaseId(lease), tokens))

    # What the scheduler asks for

    def generate(
        self, command: c.Generate, *, prompt_tokens: int, total_tokens: int, prefix: int | None, is_call: bool = False
    ) -> int:
        """Give a machine a sample, or an episode's call. Returns the tokens of a call's context that it still has."""
        machine = self._machines.get(command.worker)
        if machine is None:
            return 0
        cached = 0
        if is_call:
            room = machine.kv_tokens - machine.engine.kv_used(self._agenda.now)
            cached = min(machine.kept.take(command.sample, room), prompt_tokens + command.from_token)
            machine.calls[command.lease] = (command.sample, prompt_tokens)
        machine.engine.start(
            command.lease,
            self._agenda.now,
            prompt_tokens=prompt_tokens,
            from_token=command.from_token,
            total_tokens=max(total_tokens, command.from_token),
            prefix=prefix,
            cached_tokens=cached,
        )
        self.timeline.mark(machine.name, "generating", self._agenda.now)
        self._touched[machine.name] = machine
        return cached

    def _keep(self, machine: Machine, lease: LeaseId, num_tokens: int) -> None:
        """Keep the context of a call that has left the batch in the cache for a while."""
        call = machine.calls.pop(lease, None)
        if call is not None:
            machine.kept.keep(call[0], call[1] + num_tokens)

    def stop(self, command: c.Abort | c.HandOver) -> None:
        """Stop a sample; if it is handed over, tell how far it came."""
        machine = self._machines.get(command.worker)
        if machine is None:
            return
        tokens = machine.engine.stop(command.lease, self._agenda.now)
        self._touched[machine.name] = machine
        if tokens is not None:
            self._keep(machine, command.lease, tokens)
        if tokens is not None and isinstance(command, c.HandOver):
            ended = e.LeaseEnded(command.lease, tokens, "handed_over")
            self._agenda.later(self._scenario.network.latency_s, lambda: self._send(machine, ended))

    def pull(self, command: c.PullWeights) -> None:
        machine = self._machines.get(command.worker)
        if machine is not None:
            self._deliveries.start(machine, command)
            if machine.engine.is_idle:
                self.timeline.mark(machine.name, "pulling", self._agenda.now)

    def release(self, name: WorkerName) -> None:
        machine = self._machines.get(name)
        if machine is not None:
            self._die(machine)
            left = e.WorkerLeft(machine.name, machine.incarnation, "drained")
            self._agenda.later(self._scenario.network.latency_s, lambda: self._tell(left))

    def forget(self, name: WorkerName) -> None:
        """Close a machine's connection. If it is alive, it starts its process again and joins anew."""
        machine = self._machines.get(name)
        if machine is None or machine.cut or self._find(name) is not None:
            return
        self._die(machine)
        self._agenda.later(self._scenario.faults.restart_s, lambda: self.join(name, local=machine.local))

    def switch(self, name: WorkerName, duty: e.Duty) -> None:
        """Turn a local worker's devices to the other duty."""
        if duty == "generating":
            self._trainer.take_devices(name)
        self.timeline.mark(name, "switching", self._agenda.now)
        self._agenda.later(self._scenario.trainer.switch_s, lambda: self._switched(name, duty))

    def _switched(self, name: WorkerName, duty: e.Duty) -> None:
        machine = self._machines.get(name)
        if machine is None:
            return
        self.timeline.mark(name, "training" if duty == "training" else "idle", self._agenda.now)
        machine.kept.clear()  # the memory was the trainer's, or is now
        self._tell(e.DutyChanged(machine.name, machine.incarnation, duty))
        if duty == "training":
            self._trainer.give_devices(name)

    def reshape(self, command: c.Reshape) -> None:
        """End the local engines; those of the new width join once their weights are loaded."""
        for machine in [machine for machine in self._machines.values() if machine.local]:
            self._die(machine)
        self._trainer.num_local = command.replicas
        self._local_width = command.tensor_parallel
        for number in range(command.replicas):
            name = WorkerName(f"local{number + 1}")
            self.timeline.mark(name, "switching", self._agenda.now)
            takes_s = self._scenario.parallelism.reshape_s / 2.0  # it is the cost of going there and back
            self._agenda.later(takes_s, lambda name=name: self.join(name, local=True))

    # Which machines are held

    def hold(self, num_workers: int, least_useful: Sequence[WorkerName] = ()) -> None:
        """Hold as many remote workers as advised."""
        if not self._scenario.fleet.held_by_advice:
            return
        for name in self._holding.aim(num_workers, least_useful):
            machine = self._machines.get(name)
            if machine is not None:
                self._drain(machine, f"only {num_workers} workers are worth holding")
        self._start_more()

    def _start_more(self) -> None:
        """Start machines that are offered, as long as more are wanted."""
        paid = self._scenario.fleet.start_s
        for name in self._holding.take_more(self._machines):
            self.timeline.mark(name, "starting", self._agenda.now)
            self._agenda.later(paid, lambda name=name: self.join(name, local=False, starting_s=paid))

    def _tell_offer(self) -> None:
        """Say how many machines there are, and what each of them costs from now on."""
        remote = tuple(machine.name for machine in self._remote())
        self._tell(e.SupplyOffered(self._holding.num_offered, self._price, remote))


def _first_target(scenario: Scenario) -> int | None:
    fleet = scenario.fleet
    return fleet.hold_at_most if fleet.hold_at_most is not None else fleet.workers if fleet.held_by_advice else None
