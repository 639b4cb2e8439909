"""The conversations of `polyrl bench episodes`: their lengths, what they note, and the figures that are read off."""

import asyncio

from polyrl.bench.conversations import Phase, Talk, TimedTurn, converse, length_of, read_off

TALK = Talk(model="", vocab=100, slots=2, kv_tokens=0, num_turns=3, new=10, first=5, given=2)
PHASE = Phase(at_once=1, num_turns=3, new=10)


def hold(index: int) -> tuple[list[TimedTurn], list[list[int]]]:
    turns: list[TimedTurn] = []
    prompts: list[list[int]] = []

    async def draw(prompt: list[int], num_tokens: int) -> list[int]:
        prompts.append(prompt)
        return [50] * num_tokens

    asyncio.run(converse(TALK, PHASE, index, draw, turns))
    return turns, prompts


def test_each_prompt_is_all_that_was_said_and_a_few_given_tokens():
    turns, prompts = hold(7)
    assert len(prompts[0]) == TALK.first
    for turn in (1, 2):
        before, drawn = prompts[turn - 1], length_of(PHASE, 7, turn - 1)
        assert prompts[turn][: len(before) + drawn] == [*before, *[50] * drawn]
        assert len(prompts[turn]) == len(before) + drawn + TALK.given
    assert [one.num_prompt for one in turns] == [len(one) for one in prompts]
    assert [one.num_new_to_it for one in turns] == [5, 3, 3]
    assert max(map(len, prompts)) < TALK.longest


def test_lengths_are_a_function_of_the_conversation_and_the_turn():
    assert hold(7)[1] == hold(7)[1] != hold(8)[1]
    lengths = {length_of(PHASE, index, turn) for index in range(50) for turn in range(3)}
    assert (min(lengths), max(lengths)) == (5, 15)


def test_the_rate_is_that_of_the_middle_where_all_conversations_run():
    ends = [0.0, *(10.0 + 0.1 * number for number in range(98)), 100.0]
    figures = read_off([TimedTurn(end - 0.5, end, 10, 2) for end in ends])
    assert round(figures.turns_per_s, 6) == 10.0
    assert round(figures.p50_ms) == round(figures.p99_ms) == 500
    assert (figures.num_prompt, figures.num_new) == (1000, 200)
