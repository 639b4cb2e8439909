"""`polyrl bench engine`: what it prints, and what it says when its peer cannot be had."""

import asyncio
import json
import os
import subprocess

import pytest
from tests.builtin.tiny_models import save_tiny
from tests.chaos.fleet import POLYRL

from polyrl.bench.engine import (
    ARCHITECTURES,
    ClockSink,
    EngineTurns,
    Ran,
    Work,
    make_model,
    measure,
    num_bytes_read,
    num_turns_for,
)
from polyrl.cli.main import main
from polyrl.errors import UserError


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


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (["--batch", "0"], "--batch: 0"),
        (["--arch", "gpt-9"], "'gpt-9' is unknown"),
        (["--arch", "tiny-qwen3", "--model", "x"], "exclude each other"),
        (["--batch", "1", "--prompt", "5000", "--new", "8"], "5008 tokens in all, and the model's context is 4096"),
        (["--model", "/nowhere/at/all"], "no config.json there"),
    ],
)
def test_wrong_options_are_one_line(wrong, said, capsys):
    assert main(["bench", "engine", *wrong]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line


def test_a_directory_whose_config_has_no_head_size_is_measured(tmp_path, capsys):
    folder = save_tiny("qwen2", tmp_path)
    work = ["--batch", "2", "--prompt", "8", "--new", "4", "--json"]
    assert main(["bench", "engine", "--model", str(folder), *work]) == 0
    assert json.loads(capsys.readouterr().out)["limit_tok_s"] > 0


def test_a_sample_that_does_not_end_well_is_said_and_waited_for_no_longer():
    async def script() -> None:
        sink = ClockSink(2)
        sink.ended(2, "engine_failed", "the device is gone")
        with pytest.raises(UserError, match="sample 2: engine_failed: the device is gone"):
            await asyncio.wait_for(sink.until_done(), 1.0)

    asyncio.run(script())


def test_a_step_reads_the_head_and_not_an_embedding_of_its_own():
    facts = ARCHITECTURES["tiny-qwen3"]
    model = make_model(Work("tiny-qwen3", None, 1, 1, 1), "cpu")
    whole = 4 * sum(one.numel() for one in model.parameters())
    assert num_bytes_read(model) == whole - 4 * facts["vocab_size"] * facts["hidden_size"]
    model.tie_weights()
    model.lm_head.weight = model.model.embed_tokens.weight
    assert num_bytes_read(model) == whole - 4 * facts["vocab_size"] * facts["hidden_size"], "shared: it is read, once"


@pytest.mark.parametrize(("job_s", "num"), [(0.3, 25), (0.8, 10), (3.0, 5), (600.0, 5)])
def test_short_jobs_are_measured_in_more_turns(job_s: float, num: int):
    assert num_turns_for(job_s) == num


def test_the_spread_is_that_of_neighbouring_turns():
    ours = [Ran(seconds, 0.1, 0.1, 100, 1.0, 1.0) for seconds in (1.0, 2.0, 4.0)]
    turns = EngineTurns(ours, [100.0, 50.0, 12.5])
    assert turns.ratio_quartiles == [1.0, 2.0]
    assert turns.median.seconds == 2.0


def test_more_samples_than_an_engine_has_places_for_are_refused():
    with pytest.raises(UserError, match="--batch: 5000, expected at most 4096"):
        measure(Work("tiny-qwen3", None, 5000, 4, 4))


def test_a_short_answer_is_not_decoded_more_slowly_than_its_job_ran():
    result = measure(Work("tiny-qwen3", None, 4, 8, 16))
    assert result["tok_s"] >= result["job_tok_s"]
    assert not result["compile"], "there is no GPU to compile for"
