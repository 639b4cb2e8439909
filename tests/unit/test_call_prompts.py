"""The manager's record of an episode's calls: whole prompts out of what each call adds to an earlier one."""

import random
import time

import pytest

from polyrl.manager.calls import CallRecord, grown_prompt, prompt_of, remember_prompt
from polyrl.wire.columns import pack_cells, pack_tokens


@pytest.mark.parametrize("seed", range(20))
def test_a_prompt_is_what_it_keeps_of_an_earlier_call_and_what_it_adds(seed: int):
    draws = random.Random(seed)
    calls: list[CallRecord] = []
    cells = bytearray()
    seen: list[list[int]] = []
    prompts: list[list[int]] = []
    for number in range(30):
        base = draws.randint(-1, number - 1)
        kept = draws.randint(0, len(seen[base])) if base >= 0 else 0
        added = [draws.randint(0, 99) for _ in range(draws.randint(0 if kept else 1, 5))]
        prompt = [*(seen[base][:kept] if base >= 0 else ()), *added]
        start = len(cells) // 8
        assert grown_prompt(calls, cells, base, kept, pack_tokens(added)) == pack_tokens(prompt)
        calls.append(CallRecord(base, kept, pack_tokens(added), start, 9))
        if draws.random() < 0.7:
            remember_prompt(calls, pack_tokens(prompt))
        drawn = [draws.randint(100, 199) for _ in range(draws.randint(0, 5))]
        cells += pack_cells(drawn, [-1.0] * len(drawn))
        calls[-1].close(start + len(drawn), "stop")
        prompts.append(prompt)
        seen.append([*prompt, *drawn])
    for number, prompt in enumerate(prompts):
        assert prompt_of(calls, cells, number) == pack_tokens(prompt)


def test_the_prompt_of_a_call_that_grew_over_thousands_is_copied_once():
    calls: list[CallRecord] = []
    cells = bytearray()
    for number in range(4000):
        calls.append(CallRecord(number - 1, number * 30, pack_tokens([1] * 15), number * 15, 15))
        cells += pack_cells([2] * 15, [-1.0] * 15)
        calls[-1].close(number * 15 + 15, "stop")
    began = time.process_time()
    for number in range(3000, 4000, 100):
        prompt_of(calls, cells, number)
    assert time.process_time() - began < 0.5  # 0.05 s; 1.4 s where each step of the way copied all before it
