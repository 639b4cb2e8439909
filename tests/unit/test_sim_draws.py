"""Draws are functions of their keys."""

import subprocess
import sys
from itertools import pairwise
from statistics import fmean, pstdev

from hypothesis import given
from hypothesis import strategies as st

from polyrl.sim.draws import exponential, key_of, normal, unit

keys = st.lists(st.integers(min_value=-(2**70), max_value=2**70), min_size=1, max_size=6)


@given(keys)
def test_a_draw_depends_only_on_its_key(key):
    first = (unit(*key), normal(*key))
    unit(1, 2, 3)
    assert (unit(*key), normal(*key)) == first


@given(keys)
def test_a_unit_draw_lies_strictly_between_zero_and_one(key):
    assert 0.0 < unit(*key) < 1.0


def test_keys_of_different_length_or_order_give_different_draws():
    drawn = {unit(*key) for key in [(0,), (0, 0), (0, 0, 0), (1, 0), (0, 1), (1,), (-1,)]}
    assert len(drawn) == 7


def test_neighbouring_keys_are_unrelated():
    units = [unit(7, index) for index in range(20_000)]
    assert abs(fmean(units) - 0.5) < 0.01
    lagged = fmean((a - 0.5) * (b - 0.5) for a, b in pairwise(units))
    assert abs(lagged) < 0.002


def test_normal_and_exponential_draws_have_their_moments():
    normals = [normal(3, index) for index in range(20_000)]
    assert abs(fmean(normals)) < 0.03
    assert abs(pstdev(normals) - 1.0) < 0.03
    assert abs(fmean(exponential(5.0, 4, index) for index in range(20_000)) - 5.0) < 0.15


def test_a_name_has_the_same_key_in_every_process():
    code = "from polyrl.sim.draws import key_of, unit; print(key_of('w1'), unit(1, key_of('w1')))"
    path = ":".join(sys.path)
    outputs = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONHASHSEED": hash_seed, "PYTHONPATH": path},
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        ).stdout
        for hash_seed in ("1", "2")
    }
    assert outputs == {f"{key_of('w1')} {unit(1, key_of('w1'))}\n"}
