"""`polyrl bench engine`: what it prints, and what it refuses."""

import asyncio
import json

import pytest
from tests.builtin.tiny_models import save_tiny

from polyrl.bench.engine import ARCHITECTURES, ClockSink, Work, make_model, measure, num_bytes_read
from polyrl.cli.main import main
from polyrl.errors import UserError


def test_the_json_has_the_promised_keys(capsys):
    assert main(["bench", "engine", "--batch", "2", "--prompt", "8", "--new", "8", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    for key in ("tok_s", "job_tok_s", "step_ms", "limit_tok_s", "fraction_of_limit", "first_token_s"):
        assert result[key] > 0
    assert (result["batch"], result["prompt"], result["new"]) == (2, 8, 8)


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


def test_more_samples_than_an_engine_has_places_for_are_refused():
    with pytest.raises(UserError, match="--batch: 5000, expected at most 4096"):
        measure(Work("tiny-qwen3", None, 5000, 4, 4))


def test_a_short_answer_is_not_decoded_more_slowly_than_its_job_ran():
    result = measure(Work("tiny-qwen3", None, 4, 8, 16))
    assert result["tok_s"] >= result["job_tok_s"]
    assert not result["compile"], "there is no GPU to compile for"
