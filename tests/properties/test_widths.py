"""The laws hold, and a run goes on, where engines become wider and narrower while the world is hostile."""

import random

import pytest
from msgspec.structs import replace

from polyrl.scheduling.core import commands as c
from polyrl.scheduling.core import events as e
from polyrl.scheduling.core.parameters import ParallelismConfig
from polyrl.scheduling.rules.parallelism import DecodeSpeed, ModelShape
from polyrl.scheduling.scheduler import Scheduler
from tests.properties.books import Books
from tests.properties.halves import first_seeds
from tests.properties.hostile import HostileWorld

CHUNK = 2
NUM_DEVICES = 4
NUM_EVENTS = 120
NUM_PERIODS = 10
"""Of malice, with a few steps of fairness after each: a plan needs 256 samples that have run."""
MODEL = ModelShape(
    num_layers=4, num_kv_heads=4, head_dim=64, dtype_bytes=2, weight_bytes=4 << 30, activation_bytes=1 << 30
)


class WorldOfWidths(HostileWorld):
    """Widths are planned, for the trainer's own engines or for those of the fleet that the run starts."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.width_rng = random.Random(seed + 83)
        self.config = replace(
            self.config,
            domains=tuple(replace(one, prompts_per_step=8, num_prompts=500) for one in self.config.domains),
            max_new_tokens=40,
            rounds=replace(self.config.rounds, samples_per_prompt=4),
            parallelism=ParallelismConfig(
                enabled=True,
                engines=self.width_rng.choice(["local", "fleet"]),
                num_devices=NUM_DEVICES,
                min_gain=0.0,
                reshape_s=0.0,
                model=MODEL,
                speed=DecodeSpeed(fixed_s=0.5, per_sample_s=0.01, per_context_token_s=0.0, tp_exponent=0.9),
                memory_gb=self.width_rng.choice([6.0, 12.0, 80.0]),
            ),
        )
        self.scheduler = Scheduler(self.config)
        self.books = Books(self.scheduler)
        self.width = 1
        self.num_reshaped = 0

    def play(self, num_events: int) -> None:
        super().play(num_events)
        for _ in range(NUM_PERIODS):
            self.fair = False
            for _ in range(num_events):
                self.malice()
            self.be_fair()

    def is_planned(self, name: str) -> bool:
        return name.startswith("local" if self.config.parallelism.engines == "local" else "w")

    def tell(self, event: e.Event) -> None:
        if isinstance(event, e.WorkerJoined) and self.is_planned(event.worker):
            event = replace(event, num_devices=self.width, planned=not event.local)
        if isinstance(event, e.RulesChanged):
            event = replace(event, config=replace(self.config, routing=event.config.routing))
        super().tell(event)

    def carry_out(self, command: c.Command) -> None:
        super().carry_out(command)
        if not isinstance(command, c.Reshape) or not (self.fair or self.width_rng.random() < 0.8):
            return
        assert command.tensor_parallel * command.replicas <= NUM_DEVICES
        self.width, self.num_reshaped = command.tensor_parallel, self.num_reshaped + 1
        local = self.config.parallelism.engines == "local"
        for machine in [one for one in self.machines.values() if self.is_planned(one.name)]:
            if local:  # the scheduler has let it go
                del self.machines[machine.name]
            else:
                self.tell(e.DrainRequested(machine.name, machine.incarnation, "another width", 0.0))
        for _ in range(command.replicas):
            self.join_machine(local=local)

    def heartbeats(self) -> None:
        """Engines that throw samples out of their cache ask for wider ones."""
        super().heartbeats()
        for machine in list(self.machines.values()):
            if not self.fair and self.width_rng.random() < 0.3:
                self.tell(e.WorkerReported(machine.name, machine.incarnation, 0, self.width_rng.choice([0, 5, 100])))


@pytest.mark.parametrize("first", first_seeds(8, CHUNK))
def test_all_laws_hold_and_the_run_goes_on_where_engines_change_their_width(first: int):
    worlds = [WorldOfWidths(seed) for seed in range(first, first + CHUNK)]
    for world in worlds:
        world.play(NUM_EVENTS)
    assert any(world.num_reshaped for world in worlds), "no plan was put into force"


def test_widths_are_planned_for_both_kinds_of_engines():
    assert {WorldOfWidths(seed).config.parallelism.engines for seed in range(4)} == {"local", "fleet"}
