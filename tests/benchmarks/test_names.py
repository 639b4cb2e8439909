"""`make bench`: what it lists, what it refuses, and what `polyrl bench` says of a comparison that it no longer has."""

import pytest
from benchmarks.__main__ import BENCHMARKS, main

from polyrl.cli.main import main as polyrl


def test_without_a_name_every_benchmark_is_listed(capsys):
    assert main([]) == 0
    lines = capsys.readouterr().out.splitlines()[1:]
    assert [line.split()[0] for line in lines] == list(BENCHMARKS)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["rely"], "NAME: 'rely' is unknown; expected one of relay, engine, "),
        (["relay", "--worker", "0", "--quick"], "--workers: 0; expected 1 to 64"),
        (["engine", "--peer", "nobody"], "--peer: got 'nobody', expected one of transformers, vllm"),
        (["engine", "--new", "1", "--peer", "transformers"], "--new: 1, expected at least 2"),
        (["smollm2"], "expected: run MODEL_DIR OUT.json"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(arguments, complaint, capsys):
    assert main(arguments) == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.startswith(f"bench: error: {complaint}") and said.err.count("\n") == 1


@pytest.mark.parametrize("part", ["relay", "recovery", "served"])
def test_a_comparison_that_left_the_package_is_found_by_who_looks_for_it_there(part, capsys):
    assert polyrl(["bench", part]) == 2
    where = f"bench {part}: is not in the package; in a checkout, `make bench NAME={part}` runs it"
    assert capsys.readouterr().err == f"polyrl: error: {where}\n"
