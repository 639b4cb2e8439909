"""Weights on their way to machines: each pull a flow in the network model, then an install, then the news of it.

A pull that is asked for again is replaced. When its source goes away the pull fails, and its machine says so.
"""

from polyrl.ids import Version, WorkerName
from polyrl.scheduling.core import events as e
from polyrl.scheduling.core.commands import PullWeights
from polyrl.sim.draws import unit
from polyrl.sim.machines import Agenda, Machine, Send
from polyrl.sim.network_model import NetworkModel
from polyrl.sim.scenario import Scenario

_FAILURE_STREAM = 0x42
_GIGABYTE = 1e9
_TRAINER = "trainer"


class Deliveries:
    def __init__(self, scenario: Scenario, seed: int, agenda: Agenda, send: Send) -> None:
        self._network = scenario.network
        self._failure_share = scenario.faults.pull_failure_share
        self._seed = seed
        self._agenda = agenda
        self._send = send
        self._flows = NetworkModel()
        self._flows.set_node(_TRAINER, self._network.trainer_egress_gbps, self._network.trainer_egress_gbps)
        self._regions: dict[str, str] = {}
        if self._network.region_gbps is not None:
            for region in scenario.fleet.regions:
                self._flows.set_link(region, self._network.region_gbps)
        self.gb_between_regions = 0.0
        """Of all pulls that were begun: what they were to bring over a region's link."""
        self._pulls: dict[int, tuple[Machine, Version, str]] = {}
        self._num_pulls = 0
        self._changed = False
        self._stamp = 0

    def add(self, name: WorkerName, region: str) -> None:
        """Put a remote machine on the network."""
        self._regions[name] = region
        self._flows.set_node(name, self._network.worker_egress_gbps, self._network.worker_ingress_gbps, region)

    def start(self, machine: Machine, command: PullWeights) -> None:
        self.cancel(machine)
        size = self._network.weights_gb
        if self._network.delta_gb is not None and command.held is not None:
            size = min(size, self._network.delta_gb * (command.version - command.held))
        source = _TRAINER if command.source is None else command.source
        if self._regions.get(source, "") != self._regions[machine.name]:
            self.gb_between_regions += size
        self._num_pulls += 1
        machine.pull = self._num_pulls
        self._pulls[machine.pull] = (machine, command.version, source)
        self._flows.start(machine.pull, self._agenda.now, source, machine.name, size * _GIGABYTE)
        self._changed = True

    def cancel(self, machine: Machine) -> None:
        if machine.pull:
            self._flows.cancel(machine.pull, self._agenda.now)
            self._pulls.pop(machine.pull, None)
            machine.pull = 0
            self._changed = True

    def fail_from(self, source: WorkerName) -> None:
        """Tell all that pulled from a machine that it went away."""
        for machine, version, its_source in list(self._pulls.values()):
            if its_source == source:
                self.cancel(machine)
                failed = e.WeightsFailed(machine.name, machine.incarnation, version, f"{source} went away")
                self._agenda.later(0.0, lambda machine=machine, failed=failed: self._send(machine, failed))

    def set_alarm(self) -> None:
        """Compute again, after a change, when the next pull ends."""
        if not self._changed:
            return
        self._changed = False
        self._stamp += 1
        stamp, at = self._stamp, self._flows.next_change()
        if at is not None:
            self._agenda.at(at, lambda: self._advance(stamp))

    def _advance(self, stamp: int) -> None:
        if stamp != self._stamp:
            return
        self._changed = True
        for flow, _ in self._flows.advance(self._agenda.now):
            machine, version, _ = self._pulls.pop(flow)
            machine.pull = 0
            news = e.WeightsInstalled(machine.name, machine.incarnation, version)
            if unit(self._seed, _FAILURE_STREAM, flow) < self._failure_share:
                news = e.WeightsFailed(machine.name, machine.incarnation, version, "a chunk does not verify")
            self._agenda.later(self._network.install_s, lambda machine=machine, news=news: self._send(machine, news))
