"""Speculation on the CPU: answers are the same to the last bit with and without it, in all that can happen to them."""

import random
from pathlib import Path
from typing import Any

import pytest
from tests.builtin.stage import GREEDY, answers, play
from tests.builtin.tiny_models import save_tiny

from polyrl.engines.contract import ON, Stage
from polyrl.engines.engine import Speculated
from polyrl.wire.frames import Sampling

Answer = tuple[list[int], list[float], str]

SHARP = Sampling(temperature=0.1, ignore_eos=True)
"""Sure enough of itself that answers to one prompt have stretches in common."""


def run(
    folder: Path, jobs: list[dict[str, Any]], *, rounds: int = 1, **settings: Any
) -> tuple[list[Answer], Speculated]:
    """The answers to all jobs, given `rounds` times: from the second on there are earlier answers."""
    found: list[Answer] = []
    counts: list[Speculated] = []

    async def script(stage: Stage) -> None:
        for _ in range(rounds):
            leases = [stage.begin(**job) for job in jobs]
            texts = await answers(stage, leases)
            sink = stage.sink
            found.extend((text, sink.logprobs[one], sink.ends[one][0]) for text, one in zip(texts, leases, strict=True))
        counts.append(stage.engine.stats().speculated)

    play(script, folder, **{"kv_tokens": 16_384, **settings})
    return found, counts[0]


def jobs_of(num: int, sampling: Sampling, num_prompts: int = 3, new: int = 60) -> list[dict[str, Any]]:
    draw = random.Random(3)
    prompts = [[draw.randrange(3, 512) for _ in range(draw.choice((5, 40, 130)))] for _ in range(num_prompts)]
    return [
        {"prompt": prompts[at % num_prompts], "seed": at, "max_tokens": new - at % 5, "sampling": sampling}
        for at in range(num)
    ]


@pytest.fixture(scope="module")
def qwen(tmp_path_factory) -> Path:
    return save_tiny("qwen3", tmp_path_factory.mktemp("qwen"), max_position_embeddings=1024, tokenizer=True)


@pytest.mark.parametrize("sampling", [GREEDY, SHARP, ON, Sampling(ignore_eos=True, top_p=0.9, temperature=0.3)])
def test_answers_are_equal_to_the_last_bit_with_and_without(qwen, sampling):
    jobs = jobs_of(9, sampling)
    without, none = run(qwen, jobs, rounds=2, speculation="off")
    for slots in (9, 1, 4):
        with_it, counts = run(qwen, jobs, rounds=2, slots=slots, speculation="always", block_tokens=8)
        assert with_it == without
        assert counts.num_accepted > 200, "the second round had the first as drafts"
    assert none == Speculated()


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2", "gemma3_text", "smollm3"])
def test_families_with_windows_and_modules_of_their_own_give_the_same_tokens(family, tmp_path):
    folder = save_tiny(family, tmp_path)
    jobs = jobs_of(6, SHARP, new=80)
    without, _ = run(folder, jobs, rounds=2, speculation="off")
    with_it, counts = run(folder, jobs, rounds=2, speculation="always")
    assert with_it == without
    assert counts.num_accepted > 200
