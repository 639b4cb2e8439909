"""On the CPU a sample is the same to the last bit wherever it runs: hundreds of answers, moved at random tokens.

That rests on how the machine's matrix library adds, which no standard promises: a row's product must not depend on the
rows beside it, once there are `min_rows`. The first tests hold the library to it, over shapes from tiny models' to real
ones'. If they fail on a new machine or a new torch, answers still continue with the same random numbers, but one draw
in thousands turns; attention.py says where the numbers PIECE and `min_rows` come from.
"""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.builtin.stage import answers, play
from tests.builtin.tiny_models import save_tiny

from polyrl.engines.builtin.attention import MIN_ROWS, PIECE, min_rows
from polyrl.engines.builtin.decoder import can_pack, pack
from polyrl.engines.contract import ON, Stage

NUM_ANSWERS = 256
NEW_TOKENS = 48
LENGTHS = (1, 2, 5, 16, 16, 16, 31, 60, PIECE - 1, PIECE, 200, 2 * PIECE + 60)
"""Of prompts. Some are computed together; contexts end in the first, the second and the third piece."""

Answer = tuple[list[int], list[float]]
Product = Callable[[torch.Tensor], torch.Tensor]


def plainly(weight: torch.Tensor) -> Product:
    return lambda rows: torch.nn.functional.linear(rows, weight)


def packed(weight: torch.Tensor) -> Product:
    if not can_pack():
        pytest.skip("no oneDNN here: plain decoders run through their modules")
    return pack(weight, None).times


@pytest.mark.parametrize(
    ("num_in", "num_out"), [(64, 128), (128, 64), (256, 768), (768, 256), (576, 1536), (1536, 576), (896, 512)]
)
@pytest.mark.parametrize("times", [plainly, packed], ids=["plain", "packed"])
def test_a_row_times_a_matrix_is_the_same_whatever_the_number_of_rows(times, num_in, num_out):
    torch.manual_seed(0)
    weight, rows = torch.randn(num_out, num_in), torch.randn(600, num_in)
    product = times(weight)
    whole = product(rows)
    fewest = MIN_ROWS if times is packed else min_rows(num_in)
    for num in [*range(fewest, 40), 63, 64, 65, 127, 128, 129, 255, 256, 300, 511, 512, 513]:
        first = random.Random(num).randrange(600 - num)
        assert torch.equal(product(rows[first : first + num]), whole[first : first + num]), f"{num} rows"


@pytest.mark.parametrize("dim", [16, 32, 64, 96, 128, 256])
def test_a_query_over_pieces_of_context_is_the_same_whatever_runs_beside_it(dim):
    """Both products of attention: with keys, and of weights with values."""
    torch.manual_seed(dim)
    draw, fewest = random.Random(dim), min_rows(dim)
    keys, values = torch.randn(9, 4 * PIECE, dim), torch.randn(9, PIECE, dim)
    queries, weights = torch.randn(9, 200, dim), torch.rand(9, 200, PIECE)
    for _ in range(60):
        num_rows, num_pieces, num = draw.randint(fewest, 70), draw.randint(1, 4), draw.randint(1, 6)
        row, one = draw.randrange(200 - num_rows), draw.randrange(9 - num)
        its_keys, its_rows = keys[one : one + num, : num_pieces * PIECE], slice(row, row + num_rows)
        scores = torch.bmm(queries[one : one + num, its_rows], its_keys.transpose(1, 2))
        alone = torch.bmm(queries[one : one + 1, row : row + fewest], keys[one : one + 1].transpose(1, 2))
        assert torch.equal(scores[0, :fewest, :PIECE], alone[0, :, :PIECE])
        sums = torch.bmm(weights[one : one + num, its_rows], values[one : one + num])
        alone = torch.bmm(weights[one : one + 1, row : row + fewest], values[one : one + 1])
        assert torch.equal(sums[0, :fewest], alone[0])


def jobs_of(num: int) -> list[dict[str, Any]]:
    draw = random.Random(7)
    return [
        {
            "prompt": [draw.randrange(3, 512) for _ in range(draw.choice(LENGTHS))],
            "seed": number,
            "max_tokens": NEW_TOKENS,
            "sampling": ON,
        }
        for number in range(num)
    ]


def run(folder: Path, jobs: list[dict[str, Any]], **settings: Any) -> list[Answer]:
    """All at once, as far as there are slots."""
    found: list[Answer] = []

    async def script(stage: Stage) -> None:
        leases = [stage.begin(**job) for job in jobs]
        texts = await answers(stage, leases)
        found.extend(zip(texts, (stage.sink.logprobs[lease] for lease in leases), strict=True))

    play(script, folder, kv_tokens=16_384, **settings)
    return found


def test_answers_moved_at_random_tokens_into_other_batches_are_equal_to_the_last_bit(tmp_path):
    folder = save_tiny("qwen3", tmp_path, num_hidden_layers=3, max_position_embeddings=1024)
    jobs = jobs_of(NUM_ANSWERS)
    unmoved = run(folder, jobs, slots=16)
    draw = random.Random(11)
    order = draw.sample(range(NUM_ANSWERS), NUM_ANSWERS)
    cuts = [draw.randrange(1, NEW_TOKENS) for _ in order]
    moved = [jobs[number] | {"so_far": unmoved[number][0][:cut]} for number, cut in zip(order, cuts, strict=True)]
    num_different = 0
    for slots, settings in ((37, {"chunk_tokens": 100, "block_tokens": 8}), (3, {"chunk_tokens": 512})):
        part = slice(0, 200) if slots == 37 else slice(200, NUM_ANSWERS)
        after = run(folder, moved[part], slots=slots, **settings)
        for number, cut, (text, logprobs) in zip(order[part], cuts[part], after, strict=True):
            its_text, its_logprobs = unmoved[number]
            num_different += (text, logprobs) != (its_text[cut:], its_logprobs[cut:])
    assert num_different == 0
    assert len({tuple(text) for text, _ in unmoved}) == NUM_ANSWERS


def test_turns_of_conversations_that_go_on_from_what_was_cached_are_equal_to_the_last_bit(tmp_path):
    folder = save_tiny("qwen3", tmp_path, num_hidden_layers=3, max_position_embeddings=1024)
    draw = random.Random(13)
    said = [[draw.randrange(3, 512) for _ in range(draw.choice(LENGTHS))] for _ in range(24)]
    turns: list[tuple[dict[str, Any], Answer]] = []
    num_reused: list[int] = []

    async def script(stage: Stage) -> None:
        for turn in range(5):
            jobs = [
                {"prompt": list(one), "seed": 100 * turn + at, "max_tokens": draw.randrange(2, 40), "sampling": ON}
                for at, one in enumerate(said)
            ]
            leases = [stage.begin(**job) for job in jobs]
            texts = await answers(stage, leases)
            turns.extend(
                (job, (text, stage.sink.logprobs[lease])) for job, text, lease in zip(jobs, texts, leases, strict=True)
            )
            for one, text in zip(said, texts, strict=True):
                one += [*text, *(draw.randrange(3, 512) for _ in range(draw.randrange(1, 9)))]
            num_reused.append(stage.engine.stats().num_reused)

    play(script, folder, kv_tokens=32_768, slots=16, block_tokens=16)
    anew = run(folder, [job for job, _ in turns], slots=5, block_tokens=1024)
    assert anew == [answer for _, answer in turns]
    assert num_reused[-1] > 0.8 * sum(len(job["prompt"]) for job, _ in turns[24:])
