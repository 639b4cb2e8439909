"""A real model, SmolLM2-135M-Instruct in float32: the engine beside transformers, and `polyrl generate`."""

import json
import subprocess
import sys

import pytest
from tests.builtin.reference import TOLERANCE, Reference
from tests.builtin.smollm2 import model_directory
from tests.builtin.stage import GREEDY, answers, play
from transformers import AutoTokenizer

from polyrl.engines.contract import Stage

pytestmark = [pytest.mark.engines, pytest.mark.timeout(600)]

NEW_TOKENS = 32
QUESTION = "What is 7 plus 5?"
STORY = "Once upon a time there was a miller who had three sons, a mill, a donkey and a cat. " * 8


@pytest.fixture(scope="module")
def folder():
    try:
        return model_directory()
    except subprocess.CalledProcessError as error:
        pytest.skip(f"SmolLM2 cannot be made here: {error}")


@pytest.fixture(scope="module")
def prompts(folder) -> list[list[int]]:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": QUESTION}], add_generation_prompt=True, tokenize=False
    )
    return [tokenizer(text, add_special_tokens=False)["input_ids"] for text in ("The", chat, STORY)]


def test_three_prompts_in_a_batch_are_as_transformers_generates_them(folder, prompts):
    reference = Reference(folder)
    expected = [reference.greedy(prompt, NEW_TOKENS) for prompt in prompts]

    async def script(stage: Stage) -> None:
        leases = [stage.begin(prompt=prompt, max_tokens=NEW_TOKENS, sampling=GREEDY) for prompt in prompts]
        assert await answers(stage, leases) == expected
        for lease, prompt, answer in zip(leases, prompts, expected, strict=True):
            error = reference.error(prompt, answer, stage.sink.logprobs[lease])
            print(f"\nprompt of {len(prompt)}: largest error of a log-probability {error:.1e}")
            assert error < TOLERANCE

    assert len(prompts[0]) < 3 < 20 < len(prompts[1]) < 100 < len(prompts[2])
    play(script, folder, kv_tokens=2048, chunk_tokens=128)


def generate(folder, *more: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "polyrl", "generate", "--model", str(folder), "--prompt", QUESTION, *more]
    return subprocess.run(command, capture_output=True, text=True, timeout=500, check=True)


def test_7_plus_5_is_12(folder):
    said = generate(folder)
    assert "12" in said.stdout
    assert "<|im_end|>" not in said.stdout
    assert "tok/s; loaded in" in said.stderr
    assert len(said.stderr.splitlines()) == 1


def test_the_same_seed_gives_the_same_answer_again(folder):
    first, again, other = (
        json.loads(generate(folder, "--json", "--temperature", "1", "--seed", seed, "--tokens", "24").stdout)["text"]
        for seed in ("1", "1", "2")
    )
    assert first == again != other
