"""Speculation on the CPU: answers are the same to the last bit with and without it, in all that can happen to them."""

import math
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from tests.builtin.stage import GREEDY, answers, play
from tests.builtin.tiny_models import letters_of, save_tiny

from polyrl.engines.contract import ON, Stage
from polyrl.engines.engine import Speculated, Weights
from polyrl.ids import Version
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


def test_it_ends_at_stop_ids_stop_strings_and_the_last_token(qwen):
    """Tokens that a draft foresaw behind the end are not part of the answer."""
    plain, _ = run(qwen, jobs_of(3, SHARP), speculation="off")
    text = plain[0][0]
    prompt = jobs_of(3, SHARP)[0]["prompt"]
    ways = [
        (Sampling(temperature=0.1, ignore_eos=True, stop_ids=(text[31],)), 60),
        (Sampling(temperature=0.1, ignore_eos=True, stop=(letters_of(text[27:30]),)), 60),
        (SHARP, 23),
        (SHARP, 1),
    ]
    jobs = [{"prompt": prompt, "seed": 0, "max_tokens": most, "sampling": way} for way, most in ways]
    without, _ = run(qwen, jobs, rounds=2, speculation="off")
    with_it, counts = run(qwen, [{"prompt": prompt, "seed": 0, "max_tokens": 60, "sampling": SHARP}, *jobs],
                          rounds=2, speculation="always", slots=1)  # fmt: skip
    assert [one for at, one in enumerate(with_it) if at % 5] == without
    assert [end for _, _, end in without[:4]] == ["stop", "stop", "length", "length"]
    assert [len(one) for one, _, _ in without[:4]] == [text.index(text[31]) + 1, 30, 23, 1]
    assert counts.num_accepted > 100


def test_a_cache_too_small_for_all_preempts_and_goes_on_with_the_same_tokens(qwen):
    jobs = jobs_of(6, SHARP)
    without, _ = run(qwen, jobs, rounds=2, speculation="off")
    with_it, counts = run(qwen, jobs, rounds=2, speculation="always", kv_tokens=512, block_tokens=8)
    assert with_it == without
    assert counts.num_accepted > 100


def test_moved_answers_and_turns_of_an_episode_go_on_with_the_same_tokens(qwen):
    jobs = jobs_of(6, SHARP)
    whole, _ = run(qwen, jobs, speculation="off")
    moved = [
        job | {"so_far": text[: 5 + 7 * at]} for at, (job, (text, _, _)) in enumerate(zip(jobs, whole, strict=True))
    ]
    turns = [job | {"prompt": [*job["prompt"], *text, 7, 8]} for job, (text, _, _) in zip(jobs, whole, strict=True)]
    without, _ = run(qwen, [*moved, *turns], speculation="off")
    with_it, counts = run(qwen, [*jobs, *moved, *turns], speculation="always", slots=3)
    assert with_it == [*whole, *without]
    assert counts.num_accepted > 100


def test_versions_that_change_in_mid_answer_and_aborts(qwen, tmp_path):
    """Every token is its version's: the same as without drafts, when the versions change at the same tokens."""
    other = save_tiny("qwen3", tmp_path, max_position_embeddings=1024, seed=5)
    job = jobs_of(1, SHARP, new=300)[0]

    async def script(stage: Stage) -> None:
        await stage.text(**job)
        lease, gone = stage.begin(**job), stage.begin(**{**job, "seed": 4})
        await stage.sink.some_of(lease)
        await stage.engine.abort(gone)
        num = len(stage.sink.texts.get(gone, ()))
        await stage.engine.install(Weights(Version(1), folder=str(other)))
        assert await stage.sink.end_of(lease) == "length"
        assert len(stage.sink.texts.get(gone, ())) == num
        found.append((stage.sink.texts[lease], stage.sink.logprobs[lease], stage.sink.versions[lease]))

    found: list[tuple[list[int], list[float], list[Version]]] = []
    play(script, qwen, speculation="always")
    text, logprobs, versions = found[0]
    num_old = versions.index(Version(1))
    assert versions == [Version(0)] * num_old + [Version(1)] * (300 - num_old)
    old, _ = run(qwen, [job], speculation="off")
    assert (text[:num_old], logprobs[:num_old]) == (old[0][0][:num_old], old[0][1][:num_old])
    new, _ = run(other, [job | {"so_far": text[:num_old]}], speculation="off")
    assert (text[num_old:], logprobs[num_old:]) == new[0][:2]


def test_tokens_are_drawn_from_the_models_distribution(qwen):
    """400 seeds at one place after a draft that is nearly always there: as often as the model says, by chi-squared."""
    prompt = [5, 6, 7, 8]
    sampling = Sampling(temperature=0.15, ignore_eos=True)
    jobs = [{"prompt": prompt, "seed": seed, "max_tokens": 5, "sampling": sampling} for seed in range(400)]
    found, counts = run(qwen, jobs, speculation="always", slots=4)
    assert counts.num_accepted > 200
    followed: dict[tuple[int, ...], list[Answer]] = {}
    for one in found:
        followed.setdefault(tuple(one[0][:2]), []).append(one)
    alike = max(followed.values(), key=len)
    shares = {text[2]: math.exp(logprobs[2]) for text, logprobs, _ in alike}
    seen = Counter(text[2] for text, _, _ in alike)
    likely = [token for token, share in shares.items() if share * len(alike) >= 5]
    rest = 1 - sum(shares[token] for token in likely)
    chi = sum((seen[token] - share) ** 2 / share for token in likely if (share := shares[token] * len(alike)))
    chi += (sum(seen.values()) - sum(seen[one] for one in likely) - (of := rest * len(alike))) ** 2 / max(of, 1.0)
    assert len(alike) > 50 and len(likely) > 1
    assert chi < 3 * (len(likely) + 3), (chi, len(likely))


def test_auto_is_on_by_itself_where_drafts_are_right(qwen):
    """Greedy answers, again and again: after the first of them, drafts foresee everything."""
    jobs = [{"prompt": [5, 6, 7], "seed": 0, "max_tokens": 500, "sampling": GREEDY}]
    without, _ = run(qwen, jobs, speculation="off")
    with_it, counts = run(qwen, jobs, rounds=4, speculation="auto")
    assert with_it == without * 4
    assert counts.num_accepted > 100


def test_auto_is_off_by_itself_where_no_draft_is_right(qwen):
    jobs = [
        {"prompt": [5, 6, 7], "seed": 0, "max_tokens": 800, "sampling": Sampling(temperature=50.0, ignore_eos=True)}
    ]
    _, counts = run(qwen, jobs, speculation="auto")
    assert counts == Speculated()
