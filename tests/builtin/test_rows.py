"""Rows of a step on the CPU come in few numbers, and a small cache outlives sleep."""

from pathlib import Path

import pytest
from tests.builtin.tiny_models import save_tiny

from polyrl.engines.builtin import models, runner
from polyrl.engines.builtin.attention import MIN_ROWS
from polyrl.engines.builtin.runner import Runner, round_rows


def test_rows_are_made_up_to_few_numbers_and_by_an_eighth_at_most():
    made_up = [round_rows(num, MIN_ROWS) for num in range(1, 4097)]
    assert all(rows >= MIN_ROWS for rows in made_up)
    assert all(num <= rows <= max(MIN_ROWS, num * 9 / 8) for num, rows in enumerate(made_up, 1))
    assert made_up == sorted(made_up)
    assert [round_rows(rows, MIN_ROWS) for rows in made_up] == made_up
    assert len(set(made_up)) < 80, "oneDNN keeps a compiled product for each of them"


@pytest.mark.parametrize("is_small", [True, False])
def test_a_small_cache_stays_while_the_engine_sleeps_and_a_large_one_is_let_go(tmp_path: Path, is_small: bool):
    loaded = models.load(str(save_tiny("qwen3", tmp_path / "model")), "float32", "cpu")
    token_bytes = 2 * loaded.num_layers * loaded.num_kv_heads * loaded.head_dim * 4
    most = runner._KEPT_BYTES // (32 * token_bytes)
    one = Runner(loaded, most // 8 if is_small else most + 8, 32)
    one.sleep()
    assert one.holds_cache == is_small
    one.wake()
    assert one.holds_cache
    one.close()
    assert not one.holds_cache
