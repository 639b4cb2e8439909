"""The conversations of `polyrl bench episodes`: their lengths, what they note, and the figures that are read off."""

import asyncio
from collections.abc import Sequence

import aiohttp

from polyrl.bench.chats import chat, chat_text
from polyrl.bench.conversations import Phase, Talk, TimedTurn, converse, length_of, read_off
from polyrl.hosts.episode import CallLimits, DrawnAnswer, Episode
from polyrl.hosts.front import HostFront

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


def test_chats_have_as_many_tokens_as_the_same_conversations_in_tokens():
    talk = Talk(model="", vocab=300, slots=2, kv_tokens=0, num_turns=3, new=10, first=9, given=8)
    text = chat_text(talk)

    class Drawing(Episode):
        async def draw(self, prompt: Sequence[int], limits: CallLimits) -> DrawnAnswer:
            assert limits.max_tokens is not None
            return DrawnAnswer([50 + at for at in range(limits.max_tokens)], [-0.5] * limits.max_tokens, "length")

    async def hold_chat() -> list[TimedTurn]:
        turns: list[TimedTurn] = []
        front = HostFront(max_context=talk.longest + 1, text=text)
        await front.start()
        with front.open(Drawing("1/0", index=7, seed=0, max_context=talk.longest + 1)) as opened:
            async with aiohttp.ClientSession() as client:
                await chat(talk, PHASE, 7, client, opened.base_url, turns)
        await front.close()
        return turns

    async def draw(prompt: list[int], num_tokens: int) -> list[int]:
        return [50] * num_tokens

    expected: list[TimedTurn] = []
    asyncio.run(converse(talk, PHASE, 7, draw, expected))
    found = asyncio.run(hold_chat())
    assert [one[2:] for one in found] == [one[2:] for one in expected]


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
