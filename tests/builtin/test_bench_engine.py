"""`polyrl bench engine`: what it prints, and what it says when its peer cannot be had."""

import json
import os
import subprocess

import pytest
from tests.chaos.fleet import POLYRL

from polyrl.cli.main import main


def bench_with_vllm_of(home, *more: str) -> subprocess.CompletedProcess[str]:
    argv = [*POLYRL, "bench", "engine", "--batch", "1", "--new", "4", "--peer", "vllm", *more]
    env = {**os.environ, "HOME": str(home)}
    return subprocess.run(argv, env=env, capture_output=True, text=True, timeout=60, check=False)


def test_the_json_has_the_promised_keys(capsys):
    assert main(["bench", "engine", "--batch", "2", "--prompt", "8", "--new", "8", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    for key in ("tok_s", "job_tok_s", "step_ms", "limit_tok_s", "fraction_of_limit", "first_token_s"):
        assert result[key] > 0
    assert (result["batch"], result["prompt"], result["new"]) == (2, 8, 8)
    assert result["peer"] is None and result["peer_tok_s"] is None


def test_a_peer_that_is_not_installed_is_said_with_the_command_that_installs_it(tmp_path):
    done = bench_with_vllm_of(tmp_path)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert "--peer vllm" in done.stderr and "benchmarks/install_vllm_cpu.sh" in done.stderr


def test_a_peer_that_does_not_start_is_said_with_its_last_words(tmp_path):
    program = tmp_path / ".cache" / "polyrl" / "engines" / "vllm" / "bin" / "vllm"
    program.parent.mkdir(parents=True)
    program.write_text("#!/bin/sh\necho first\necho no such model\nexit 3\n")
    program.chmod(0o755)
    done = bench_with_vllm_of(tmp_path)
    assert done.returncode == 2
    assert "the server did not start: no such model" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("wrong", [["--batch", "0"], ["--arch", "gpt-9"], ["--arch", "tiny-qwen3", "--model", "x"]])
def test_wrong_options_are_one_line(wrong, capsys):
    assert main(["bench", "engine", *wrong]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
