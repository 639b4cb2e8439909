"""Whole steps of every loss x advantage x correction x aggregation x KL, against references in float64."""

from pathlib import Path
from typing import Any
from zlib import crc32

import msgspec
import numpy as np
import pytest
from tests.trainer import formulas, table
from tests.trainer.table import TOLERANCE, Table

from polyrl.config.recipe import AlgorithmConfig
from polyrl.trainer.objectives.registry import BY_CRITIC

BESIDE_THE_TABLE = {
    "advantage_args": "integration/test_extend.py",
    "baseline": "trainer/test_optimal_baseline.py",
    "loss_args": "integration/test_extend.py",
    "fixed_tokens": "trainer/test_step.py",
    "reference": "integration/test_train.py",
    "zero_variance": "integration/test_loop.py",
    "overlong": "trainer/test_episodes.py",
    "overlong_buffer_tokens": "trainer/test_episodes.py",
    "overlong_penalty": "trainer/test_step.py",
    "max_mismatch": "trainer/test_step.py",
    "scale_lr_by_sample_size": "trainer/test_sample_size.py",
    "entropy_coef": "trainer/test_step.py",
    "epochs": "trainer/test_step.py",
    "critic": "trainer/test_critic.py",
}
"""Settings of an algorithm that the table does not vary, and where they are held to what they should do."""


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> Table:
    return Table(tmp_path_factory.mktemp("table"))


def test_every_name_that_ships_has_a_reference():
    assert set(table.all_losses()) == set(formulas.LOSSES) == set(table.CLIPS)
    assert set(table.all_advantages()) == {*formulas.GROUP_ADVANTAGES, *formulas.STEP_ADVANTAGES, BY_CRITIC}
    assert set(table.choices("correction")) == set(formulas.CORRECTIONS) == {"none", *table.BOUNDS}


def test_every_setting_of_an_algorithm_is_in_the_table_or_has_a_place_beside_it():
    settings = {one.name for one in msgspec.structs.fields(AlgorithmConfig)}
    varied = {key for case in table.sample_of_cases(1) for key in case}
    assert settings == varied | BESIDE_THE_TABLE.keys()
    tests = Path(__file__).parents[1]
    assert [key for key, place in BESIDE_THE_TABLE.items() if key not in (tests / place).read_text()] == []


@pytest.mark.parametrize("half", [0, pytest.param(1, marks=pytest.mark.chaos)])
@pytest.mark.parametrize("advantage", table.all_advantages())
@pytest.mark.parametrize("loss", table.all_losses())
def test_a_step_s_values_and_gradients_are_the_references(world, loss, advantage, half):
    cases = [case for case in table.cases(loss, advantage) if crc32(repr(case).encode()) % 2 == half]
    assert len(cases) > 10
    apart = [(world.distance(case), case) for case in cases]
    wrong = [(distance, case) for distance, case in apart if not distance < TOLERANCE]
    assert not wrong, f"{len(wrong)} of {len(cases)}: {wrong[:3]}"


def test_so_are_those_of_two_updates(world):
    apart = [(world.distance(case), case) for case in table.sample_of_cases(61) if case["mini_batches"] == 2]
    assert len(apart) > 20
    assert not [(distance, case) for distance, case in apart if not distance < TOLERANCE]


@pytest.mark.parametrize("loss", table.all_losses())
def test_the_clips_of_the_table_hold_some_tokens_and_not_others(world, loss):
    case = {"loss": loss, "aggregation": "token-mean", **table.CLIPS[loss]}
    config, wide = AlgorithmConfig(**case), AlgorithmConfig(**{**case, "clip_low": 1.0, "clip_high": 9.0})
    held, free = (world.expected(one).gradients[0] for one in (config, wide))
    assert np.linalg.norm(held - free) / np.linalg.norm(free) > 0.01
    assert np.linalg.norm(held) > 0


@pytest.mark.parametrize("correction", table.BOUNDS)
def test_the_bounds_of_the_table_hold_some_tokens_and_not_others(world, correction):
    config = AlgorithmConfig(correction=correction, **table.BOUNDS[correction])
    samples = [one for group in world.known for one in group]
    weights: list[Any] = []
    for one in samples:
        weights += formulas.correction(correction, one.start, one.engine, *config.correction_range).tolist()
    held = [weight in (0.0, config.correction_range[1]) for weight in weights]
    assert 0 < sum(held) < len(held)
