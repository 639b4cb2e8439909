"""`polyrl worker`: what is wrong with its arguments is said before an engine is made."""

import argparse
import re
import sys

import pytest
from tests.weights.stage import KEY, publish, pull, stage, weights

from polyrl.cli import worker
from polyrl.cli.main import main
from polyrl.weights.settings import WeightSettings


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--relay-on", "300.0.0.0/8"], "--relay-on[0]: '300.0.0.0/8'; expected a network"),
        (["--relay-on", "127.0.0.0/8", "--relay-on", "192.0.2.255/32"], "--relay-on[1]: no address of this machine is"),
        (
            ["--join", "https://h:1", "--relay-on", "127.0.0.0/8"],
            "--relay-on: over https, weights come from the trainer",
        ),
        (["--join", "https://h:1", "--mooncake", "tcp"], "--mooncake: is not encrypted"),
        (["--egress-mb-s", "-1"], "--egress-mb-s: -1; expected megabytes a second"),
        (["--egress-mb-s", "nan"], "--egress-mb-s: nan; expected megabytes a second"),
        (["--name", "no name"], "--name: 'no name' is not a name"),
        (["--price", "nan"], "--price: nan is not a price"),
        (["--drain-deadline", "nan"], "--drain-deadline: nan; expected seconds"),
        (["--notice", "nan"], "--notice: nan; expected seconds from 0 to 86400"),
        (["--notice", "1e9"], "--notice: 1e+09; expected seconds from 0 to 86400"),
        (
            ["--spot", "slots=4"],
            "--spot: got 'slots=4', expected one of auto, aws, gcp, azure, kubernetes, slurm, none",
        ),
        (["--engine", "vllm"], "--model: missing; a vLLM server needs a Hugging Face model directory"),
        (["--engine", "sglang", "--model", "/nowhere"], "--model: /nowhere: no config.json there"),
        (["--engine-url", "http://127.0.0.1:1"], "--engine-url: the emulated engine has no server"),
        (["--", "--max-num-seqs", "4"], "--: the emulated engine has no server"),
        (["--rewards", "--model", "m"], "--model: is of an engine, and --rewards has none; leave it out"),
        (["--rewards", "slots=4"], "key=value: is of an engine, and --rewards has none; leave it out"),
        (["--rewards", "--slots", "0"], "--slots: 0; expected 1 to 256 answers at once"),
        (["--rewards", "--log", "/nowhere/at/all"], "--log: /nowhere/at/all cannot be written: No such file"),
        (["--rewards"], "no token: give --token-file, or set POLYRL_TOKEN"),
    ],
    ids=lambda one: one[0] if isinstance(one, list) else "",
)
def test_bad_input_is_one_line(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]):
    assert main(["worker", "--join", "http://127.0.0.1:1", *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"polyrl: error: {said}") and error.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--engine-python", "/nowhere/python"], "--engine-python: /nowhere/python is not there"),
        (["--engine-url", "127.0.0.1:8000"], "--engine-url: '127.0.0.1:8000' is no URL"),
        (["--engine-url", "http://127.0.0.1:1", "--", "--dtype", "x"], "--engine-url: that server runs already"),
        (["--engine-python", sys.executable, "--", "--port=80"], "--port=80: the worker chooses it"),
        (["slot=4"], "slot: unknown key; did you mean slots?"),
    ],
    ids=lambda one: one[0] if isinstance(one, list) else "",
)
def test_bad_input_about_a_server_is_one_line(arguments: list[str], said: str, capsys, tmp_path):
    (tmp_path / "config.json").write_text('{"vocab_size": 8}')
    assert main(["worker", "--check", "--engine", "vllm", "--model", str(tmp_path), *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"polyrl: error: {said}") and error.count("\n") == 1


def test_how_much_a_worker_passes_on_can_be_bounded():
    parser = argparse.ArgumentParser()
    worker.add_arguments(parser)
    peer = worker._peer_of(parser.parse_args(["--join", "http://127.0.0.1:1", "--egress-mb-s", "2.5"]))(b"k" * 32)
    try:
        assert peer._sender._pace.is_limited
    finally:
        peer.close()


def test_a_worker_beside_its_trainer_reads_weights_out_of_its_memory():
    parser = argparse.ArgumentParser()
    worker.add_arguments(parser)
    with stage() as on:
        trainer = on.server(WeightSettings(interfaces=("127.0.0.0/8",)))
        peer = worker._peer_of(parser.parse_args(["--join", "http://127.0.0.1:1"]))(KEY)
        try:
            for version in (1, 2):  # in full, and by a delta
                assert pull(peer, publish(trainer, version)) == weights(version)
        finally:
            peer.close()
        assert trainer.num_bytes_sent == 0


def test_a_manager_or_a_check_is_wanted(capsys: pytest.CaptureFixture[str]):
    assert main(["worker"]) == 2
    assert capsys.readouterr().err.startswith(
        "polyrl: error: --join: missing; expected the manager's address, or --check"
    )


def test_a_check_says_how_an_engine_fares(capsys: pytest.CaptureFixture[str]):
    assert main(["worker", "--check", "--quiet", "speedup=50", "median_tokens=500"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert re.match(r"check: emulated is up after \d+\.\d s: none, 64 slots", said[0])
    assert said[-1] == "check: all is well"


def test_a_check_of_a_server_that_cannot_start_ends_with_a_line_and_its_log(tmp_path, capsys):
    (tmp_path / "config.json").write_text('{"vocab_size": 8}')
    arguments = ["--engine", "sglang", "--engine-python", sys.executable, "--model", str(tmp_path)]
    assert main(["worker", "--check", "--quiet", *arguments, f"log={tmp_path}/log", "device=cpu"]) == 1
    error = capsys.readouterr().err.splitlines()
    assert error[0].startswith("polyrl: error: check: the SGLang server ended with code 1: ")
    assert error[1].startswith("  | ")


def test_a_setting_on_the_command_line_is_not_blamed_on_the_file(tmp_path, capsys):
    file = tmp_path / "engine.toml"
    file.write_text("slots = 4\n")
    argv = ["worker", "--join", "http://127.0.0.1:1", "--engine-config", str(file)]
    assert main([*argv, "slots=none"]) == 2
    assert "(given as slots=none)" in capsys.readouterr().err
    file.write_text("slots = 'four'\n")
    assert main(argv) == 2
    assert f"(in {file})" in capsys.readouterr().err
