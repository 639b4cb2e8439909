"""A run's configuration comes from a peer: each number in it is bounded, and none that is within ends the manager."""

import math
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import inspect, structs
from tests.unit.played import CONFIG, Manager, Worker

from polyrl.errors import Refused
from polyrl.manager import frames_out, opening
from polyrl.manager.run import Run
from polyrl.manager.service import Service
from polyrl.manager.settings import JournalSettings, ManagerSettings
from polyrl.scheduling.core.parameters import ParallelismConfig, SchedulerConfig
from polyrl.scheduling.invariants import check
from polyrl.scheduling.rules.parallelism import DecodeSpeed, ModelShape
from polyrl.scheduling.scheduler import Scheduler
from polyrl.wire.control import RunReply, RunRequest
from polyrl.wire.frames import PROTOCOL

SETTINGS = ManagerSettings(journal=JournalSettings(fsync="never"))
SMALL = {
    "prompts_per_step": st.integers(1, 3),
    "num_prompts": st.integers(1, 40),
    "samples_per_prompt": st.integers(1, 4),
    "max_new_tokens": st.integers(1, 8),
    "heartbeat_timeout_s": st.sampled_from([5.0, 1e3, 1e9]),
    "enabled": st.just(False),  # of parallelism: refused, see below
}
"""What a test can play to its end."""


def numbers_in(kind: inspect.Type, path: str = "") -> list[tuple[str, inspect.IntType | inspect.FloatType]]:
    """Every number of a configuration, with its path."""
    match kind:
        case inspect.IntType() | inspect.FloatType():
            return [(path, kind)]
        case inspect.StructType():
            return [found for one in kind.fields for found in numbers_in(one.type, f"{path}.{one.name}")]
        case inspect.UnionType():
            return [found for one in kind.types for found in numbers_in(one, path)]
        case inspect.VarTupleType():
            return numbers_in(kind.item_type, f"{path}[]")
        case inspect.Metadata():
            return numbers_in(kind.type, path)
        case _:
            return []


def least_of(kind: inspect.IntType | inspect.FloatType) -> float | None:
    return kind.gt if kind.ge is None else kind.ge


@pytest.mark.parametrize(("path", "kind"), numbers_in(inspect.type_info(SchedulerConfig)))
def test_every_number_of_a_run_is_bounded_on_both_sides(path: str, kind: inspect.IntType | inspect.FloatType):
    most = kind.lt if kind.le is None else kind.le
    assert least_of(kind) is not None, path
    assert most is not None, path
    assert math.isfinite(most), path


def values_of(name: str, kind: inspect.Type) -> st.SearchStrategy[Any]:
    """All that the type allows; of numbers the ends of their range too."""
    if name in SMALL:
        return SMALL[name]
    match kind:
        case inspect.IntType():
            low, high = int(kind.ge or 0), int(kind.le or 0)
            return st.sampled_from([low, high]) | st.integers(low, min(high, low + 9))
        case inspect.FloatType():
            low, high = least_of(kind), kind.le
            assert low is not None
            assert high is not None
            return st.floats(low, high, exclude_min=kind.ge is None) | st.sampled_from([high, min(high, low + 1.0)])
        case inspect.BoolType():
            return st.booleans()
        case inspect.LiteralType():
            return st.sampled_from(kind.values)
        case inspect.StrType():
            return st.sampled_from(["math", ""])
        case inspect.UnionType():
            return st.one_of(*(values_of("", one) for one in kind.types))
        case inspect.VarTupleType():
            return st.lists(values_of("", kind.item_type), min_size=1, max_size=2)
        case inspect.StructType():
            return st.fixed_dictionaries({}, optional={one.name: values_of(one.name, one.type) for one in kind.fields})
        case inspect.Metadata():
            return values_of(name, kind.type)
        case _:
            return st.none()


def configs() -> st.SearchStrategy[SchedulerConfig]:
    """Those that a manager decodes."""
    domain = values_of("", inspect.type_info(SchedulerConfig).fields[0].type)  # type: ignore[union-attr]

    def decoded(tree: dict[str, Any]) -> SchedulerConfig | None:
        try:
            return msgspec.json.decode(msgspec.json.encode(tree), type=SchedulerConfig)
        except msgspec.ValidationError:
            return None

    trees = st.tuples(values_of("", inspect.type_info(SchedulerConfig)), domain).map(
        lambda pair: {
            **pair[0],
            "domains": [{"name": "d", "prompts_per_step": 1, "num_prompts": 9, **one} for one in pair[1]],
        }
    )
    return trees.map(decoded).filter(lambda one: one is not None)  # type: ignore[return-value]


@given(configs(), st.integers(0, 1000))
@settings(max_examples=40)
def test_no_configuration_that_is_let_in_ends_the_manager(tmp_path_factory, config: SchedulerConfig, seed: int):
    manager = Manager(tmp_path_factory.mktemp("run") / "run", seed, config)
    for _ in range(150):
        manager.play_all()
    scheduler = manager.lobby.need_run().scheduler
    check(scheduler, manager.lobby.now())
    manager.service.close()


def with_planned_parallelism() -> SchedulerConfig:
    shape = ModelShape(num_layers=4, num_kv_heads=4, head_dim=8, dtype_bytes=2, weight_bytes=1000, activation_bytes=0)
    speed = DecodeSpeed(fixed_s=0.01, per_sample_s=0.001, per_context_token_s=0.0, tp_exponent=0.0)
    return structs.replace(
        CONFIG, parallelism=ParallelismConfig(enabled=True, min_gain=0.0, reshape_s=0.0, model=shape, speed=speed)
    )


def test_what_no_live_fleet_can_do_is_refused_when_the_run_is_opened(tmp_path):
    service = Service(tmp_path, SETTINGS)
    with pytest.raises(Refused, match=r"parallelism\.engines: got .local., expected .fleet.: a simulator"):
        opening.open_run(service.lobby, RunRequest(protocol=PROTOCOL, config=with_planned_parallelism()))
    assert service.lobby.run is None
    service.close()


class OlderManager(Manager):
    """Lets in what is refused now."""

    def open_run(self, config: SchedulerConfig) -> RunReply:
        self.lobby.journal.begin_events(config, {})
        self.lobby.run = Run(self.lobby, Scheduler(config), frames_out.carry_out)
        self.lobby.set_clock(0.0)
        return structs.replace(super().open_run(config), fresh=True)


def test_a_run_that_asks_for_what_no_live_fleet_can_do_goes_on_with_a_line(tmp_path, caplog):
    """Such a run ended its manager when its first round after 256 answers opened, and again after every start."""
    manager = OlderManager(tmp_path / "run", 0, with_planned_parallelism())
    manager.workers["local"] = local = Worker(manager.service, "local", local=True)
    manager.commit()
    scheduler = manager.lobby.need_run().scheduler
    for lengths in scheduler.desk.state.lengths_by_kind.values():
        for _ in range(300):
            lengths.observe(4, finished=True)
    while manager.step == 0:
        local.write(manager.rng)
        manager.commit()
        if manager.is_closed:
            manager.train()
    manager.commit()
    assert "engines stay as wide as they are" in caplog.text
    assert "local" not in manager.lobby.workers, "it is told to join again"
    Worker(manager.service, "local", local=True)
    manager.commit()
    manager.service.close()
