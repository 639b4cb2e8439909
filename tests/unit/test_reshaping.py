"""Planned widths of the fleet's engines: whom the plan is for, what it is made from, and when it is said."""

from msgspec.structs import replace
from tests.unit.driver import Driver, only, small_config

from polyrl.ids import WorkerName
from polyrl.scheduling.core import commands as c
from polyrl.scheduling.core.parameters import ParallelismConfig
from polyrl.scheduling.rules.parallelism import ModelShape

SHAPE = ModelShape(num_layers=4, num_kv_heads=4, head_dim=8, dtype_bytes=2, weight_bytes=1000, activation_bytes=0)


def fleet_of_two(**others) -> Driver:
    """Two engines of one device, whose decode steps take 10 ms whatever they run; long answers were seen."""
    planned = ParallelismConfig(enabled=True, engines="fleet", num_devices=2, reshape_s=0.0, model=SHAPE, **others)
    run = Driver(replace(small_config(prompts=2, samples=1), parallelism=planned))
    run.begin()
    for name in ("a", "b"):
        run.join(name, planned=True)
    for lengths in run.scheduler.desk.state.lengths_by_kind.values():
        for _ in range(400):
            lengths.observe(500, finished=True)
    return run


def see_speed(run: Driver) -> None:
    fleet = run.scheduler.desk.state.fleet
    for worker in fleet.seats.values():
        for num in (1, worker.slots):
            worker.speed.observe(num, 0.01)


def train(run: Driver, step: int) -> list[c.Reshape]:
    first = 2 * step + 1
    run.complete(first, first + 1, samples=1)
    run.take(step, first, first + 1)
    said = run.trained(step)
    for name in run.beating:
        run.install(name)
    return only(said, c.Reshape)


def test_a_plan_is_made_from_the_speed_that_engines_were_seen_to_have():
    run = fleet_of_two(tp_exponent=0.9)
    assert train(run, 0) == [], "no speed was seen yet"
    see_speed(run)
    (planned,) = train(run, 1)
    assert (planned.tensor_parallel, planned.replicas) == (2, 1)
    assert planned.why


def test_a_width_that_was_told_is_not_told_again_before_the_engines_have_changed():
    run = fleet_of_two(tp_exponent=0.9)
    see_speed(run)
    assert len(train(run, 0)) == 1
    assert train(run, 1) == []


def test_where_wider_engines_gain_nothing_they_stay_as_they_are():
    run = fleet_of_two(tp_exponent=0.0)
    see_speed(run)
    assert train(run, 0) == []


def test_workers_that_the_run_did_not_start_are_not_planned():
    run = fleet_of_two(tp_exponent=0.9)
    see_speed(run)
    for name in ("a", "b"):
        run.leave(name)
    run.join("stranger")
    assert WorkerName("stranger") in run.scheduler.desk.state.fleet.by_name
    assert train(run, 0) == []
