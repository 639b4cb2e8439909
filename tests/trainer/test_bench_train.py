"""`polyrl bench train` runs, and its sums are right."""

import pytest

from polyrl.bench.train import Bench, TrainWork, measure, table
from polyrl.cli import main

SMALL = TrainWork(pack_tokens=128, num_groups=1, shorter=512, repetitions=1)


def test_it_measures_and_tells():
    result = measure(SMALL)
    assert set(result["packing"]) == {"math", "code", "judge"}
    assert result["fraction_of_limit"] > 0
    assert "ratio_to_unpadded" not in result["unpadded"], "no peer was asked for"
    assert "streaming costs" in "\n".join(table(result))


def test_the_work_s_flops_are_those_of_its_matrices():
    """Six for each weight and row; the output layer for answer tokens alone."""
    bench = Bench(SMALL)
    (group,) = bench.equal(32)
    config = bench.policy.model.config
    width, inner = config.hidden_size, config.intermediate_size
    q, kv = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    body = config.num_hidden_layers * (2 * width * q + 2 * width * kv + 3 * width * inner)
    a_row = body + 32 * q * config.num_hidden_layers
    expected = len(group) * 6 * (32 * a_row + 31 * width * config.vocab_size)
    assert bench.flops([group]) == expected


@pytest.mark.parametrize("args", [["--pack-tokens", "0"], ["--arch", "x", "--model", "y"], ["--arch", "unheard-of"]])
def test_nonsense_is_one_line(args, capsys):
    assert main.main(["bench", "train", *args]) == 2
    assert capsys.readouterr().err.count("\n") == 1
