"""What a recipe leaves to the machine: dtype, threads, and whether rank zero generates too."""

from pathlib import Path

import msgspec
import pytest

from polyrl.config.recipe import ArithmeticTask, Recipe
from polyrl.config.recipe_files import load_recipe
from polyrl.errors import UserError
from polyrl.run import nodes
from polyrl.run.plan import choose_threads, fit, fits_beside, read_shape, show_plan
from polyrl.run.ranks import with_ranks
from polyrl.run.workers import join_command
from polyrl.starters.arithmetic import make_model
from polyrl.trainer.ranks import RankInfo

LARGE = 135_000_000
GIB = 1 << 30


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    make_model(folder, seed=0, task=ArithmeticTask(), num_steps=1)
    return str(folder)


def recipe(*overrides: str) -> Recipe:
    return load_recipe("arithmetic", list(overrides))


@pytest.mark.parametrize(
    ("overrides", "cores", "threads"),
    [
        ([], 1, 1),
        ([], 2, 1),
        ([], 8, 7),
        (["fleet.workers=2"], 8, 5),
        (["fleet.workers=2", "fleet.settings={ threads = 3 }"], 8, 1),
        (["fleet.workers=64"], 8, 1),
        (["train.ranks=3"], 8, 2),
    ],
)
def test_training_has_the_cores_that_nobody_else_needs(overrides: list[str], cores: int, threads: int):
    assert choose_threads(recipe(*overrides), LARGE, cores, {}) == threads


def test_ranks_of_other_nodes_need_no_cores_of_this_one():
    four = recipe("train.ranks=4")
    assert choose_threads(four, LARGE, 9, {}) == 2
    assert choose_threads(four, LARGE, 9, {"LOCAL_WORLD_SIZE": "2"}) == 4
    said = msgspec.json.encode(nodes.Nodes(2, "10.0.0.1:29500")).decode()
    assert choose_threads(four, LARGE, 9, {nodes._NODES: said}) == 4


def test_a_small_model_has_one_thread_and_the_environment_comes_before_the_default():
    assert choose_threads(recipe(), 90_000, 64, {}) == 1
    assert choose_threads(recipe(), 90_000, 64, {"OMP_NUM_THREADS": "5"}) == 5
    assert choose_threads(recipe(), LARGE, 64, {"OMP_NUM_THREADS": "many"}) == 63


def test_what_is_chosen_is_in_the_recipe_that_a_run_writes_down(model: str):
    fitted = fit(recipe(f"model.path={model}"))
    assert fitted.model.dtype == "float32"
    assert fitted.train.threads is not None
    assert (fitted.train.local_generation, fitted.validation.at_start) == (True, True)
    assert fit(fitted) == fitted
    said = fit(recipe(f"model.path={model}", "train.threads=2", "model.dtype=bfloat16", "validation.at_start=false"))
    assert (said.model.dtype, said.train.threads, said.validation.at_start) == ("bfloat16", 2, False)


def test_the_plan_shows_dtype_and_threads(model: str):
    plan = show_plan(fit(recipe(f"model.path={model}", "train.threads=3")), Path("runs/one"))
    assert "cpu, 3 threads: trains and generates" in plan
    assert 'dtype = "float32"' in plan


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_printed_command_names_the_dtype_since_a_worker_may_have_another_device(model: str, dtype: str):
    fitted = fit(recipe(f"model.path={model}", f"model.dtype={dtype}"))
    assert join_command(fitted, Path("runs/one"), "http://127.0.0.1:5000").endswith(f" dtype={dtype}")


def test_rank_zero_generates_where_a_whole_model_fits_beside_its_part(model: str):
    two = recipe(f"model.path={model}", "train.ranks=2")
    assert (two.train.local_generation, two.validation.at_start) == (None, None)
    shape = read_shape(model)._replace(num_parameters=10_000_000_000)
    assert fits_beside(two, shape, 200 * GIB)
    assert not fits_beside(two, shape, 120 * GIB)


def test_what_depends_on_ranks_is_chosen_for_those_that_torchrun_started():
    read = lambda overrides: recipe(*overrides)  # noqa: E731
    assert with_ranks(read, [], None).train.local_generation is True
    four = with_ranks(read, ["train.steps=7"], RankInfo(0, 4))
    assert (four.train.ranks, four.train.steps, four.train.local_generation) == (4, 7, None)
    assert with_ranks(read, ["train.local_generation=true"], RankInfo(0, 4)).train.local_generation is True
    assert with_ranks(read, ["train.mode=synchronous"], RankInfo(0, 4)).train.local_generation is True
    with pytest.raises(UserError, match=r"train\.ranks: 2, and torchrun has started 4"):
        with_ranks(read, ["train.ranks=2"], RankInfo(0, 4))
