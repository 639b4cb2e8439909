"""The `openai` client, unpatched, with a base URL and nothing else, drives episodes with tools through the front."""

import asyncio
import json
import re
from collections.abc import Callable, Coroutine
from typing import Any

import openai
import pytest
from tests.hosts.policies import HERMES, IM_END, PlayedByHand, published_model, text_model
from tests.serving import CHATML

from polyrl.hosts.episode import CallLimits, DrawnAnswer
from polyrl.hosts.front import HostFront
from polyrl.hosts.own import HostParts, OwnEnvironment, Turn
from polyrl.hosts.texts import ModelText

ADD: Any = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
    },
}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 12, "b": 7}}\n</tool_call>'
USER: Any = {"role": "user", "content": "What is 12 + 7?"}


def with_client(
    act: Callable[[openai.AsyncOpenAI, PlayedByHand], Coroutine[Any, Any, Any]],
    answers: Any,
    text: ModelText | None = None,
    max_context: int = 4096,
    kind: type[PlayedByHand] = PlayedByHand,
) -> Any:
    model = text_model(HERMES) if text is None else text

    async def run() -> Any:
        front = HostFront(max_context=max_context, text=model)
        await front.start()
        episode = kind(model, answers, max_context=max_context)
        try:
            with front.open(episode) as opened:
                async with openai.AsyncOpenAI(base_url=opened.base_url, api_key="none", max_retries=2) as client:
                    return await act(client, episode)
        finally:
            await front.close()

    return asyncio.run(run())


async def use_tools(client: openai.AsyncOpenAI, tools: dict[str, Callable[..., Any]], first: Any = USER) -> str:
    """A harness as people write it: ask, run the tools, ask again."""
    messages: list[Any] = [first]
    while True:
        reply = await client.chat.completions.create(model="policy", messages=messages, tools=[ADD])
        message = reply.choices[0].message
        messages.append(message)
        if not message.tool_calls:
            return message.content or ""
        for call in message.tool_calls:
            assert call.type == "function"
            try:
                result = tools[call.function.name](**json.loads(call.function.arguments))
            except KeyError:
                result = f"there is no tool {call.function.name}"
            except ValueError:
                result = "these arguments are not JSON"
            messages.append({"role": "tool", "tool_call_id": call.id, "content": str(result)})


def add(a: int, b: int) -> int:
    return a + b


def test_a_harness_uses_a_tool_and_the_second_prompt_goes_on_from_the_first_answer_as_drawn():
    async def act(client: openai.AsyncOpenAI, episode: PlayedByHand) -> Any:
        return await use_tools(client, {"add": add}), episode

    said, episode = with_client(act, [CALL, "19"])
    assert said == "19"
    first, second = episode.prompts
    old = [*first, *episode.drawn[0].tokens]
    assert second[: len(old)] == old
    assert episode.shown(1).endswith("</tool_call><|im_end|>\n<|im_start|>tool\n19<|im_end|>\n<|im_start|>assistant\n")


def _is_bridged(episode: PlayedByHand) -> list[bool]:
    """Whether each prompt after the first goes on from the answer before, as it was drawn."""
    old = [[*prompt, *drawn.tokens] for prompt, drawn in zip(episode.prompts, episode.drawn, strict=True)]
    return [new[: len(one)] == one for one, new in zip(old, episode.prompts[1:], strict=False)]


GIVEN = '{"a": 12, "b": %d}'
BY_MISTRAL = '[TOOL_CALLS] [{"name": "add", "arguments": ' + GIVEN + "}]"
BY_QWEN = '<think>\nhm\n</think>\n\n<tool_call>\n{"name": "add", "arguments": ' + GIVEN + "}\n</tool_call>"
BY_LLAMA = '{"name": "add", "parameters": ' + GIVEN + "}"
BY_DEEPSEEK = (
    "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>add<｜tool▁sep｜>" + GIVEN + "<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
)


@pytest.mark.parametrize(
    ("name", "end", "call", "bridged"),
    [
        # a tool call as text counts as a turn of the assistant; the second one is refused, and rendered as a call
        ("mistral-v0.3", "</s>", BY_MISTRAL, [True, False, True]),
        ("qwen3", "<|im_end|>", BY_QWEN, [True, True, True]),
        ("llama-3.1", "<|eot_id|>", BY_LLAMA, [True, True, True]),
        ("deepseek-v3.1", "<｜end▁of▁sentence｜>", BY_DEEPSEEK, [True, True, True]),
    ],
)
def test_three_turns_of_tools_are_played_with_templates_as_they_are_published(
    name: str, end: str, call: str, bridged: list[bool]
):
    text = published_model(name, end)

    async def act(client: openai.AsyncOpenAI, episode: PlayedByHand) -> Any:
        return await use_tools(client, {"add": add}), episode

    said, episode = with_client(act, [*(call % b for b in (7, 8, 9)), "19, 20, 21"], text, max_context=40_000)
    assert said == "19, 20, 21"
    assert _is_bridged(episode) == bridged
    shown = episode.shown(3)
    calls = [shown.rfind(GIVEN % b) for b in (7, 8, 9)]
    results = [[one.start() for one in re.finditer(rf"\b{result}\b", shown)][-1] for result in (19, 20, 21)]
    assert -1 not in calls
    assert sorted([*calls, *results]) == [one for pair in zip(calls, results, strict=True) for one in pair]


@pytest.mark.parametrize(
    ("name", "end"),
    [("mistral-v0.3", "</s>"), ("qwen3", "<|im_end|>"), ("llama-3.1", "<|eot_id|>"), ("deepseek-v3.1", "</s>")],
)
def test_edited_histories_with_tool_calls_are_rendered_whole_by_published_templates(name: str, end: str):
    call = {"id": "a1b2c3d4e", "type": "function", "function": {"name": "add", "arguments": GIVEN % 7}}
    messages: Any = [
        USER,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "a1b2c3d4e", "content": "19"},
    ]

    async def act(client: openai.AsyncOpenAI, episode: PlayedByHand) -> Any:
        await client.chat.completions.create(model="policy", messages=messages, tools=[ADD])
        return episode.shown(0)

    shown = with_client(act, ["19"], published_model(name, end), max_context=40_000)
    assert GIVEN % 7 in shown
    assert shown.rfind("19") > shown.index(GIVEN % 7)


@pytest.mark.parametrize(
    ("written", "told"),
    [
        ('<tool_call>{"name": "fly", "arguments": {}}</tool_call>', "there is no tool fly"),
        ('<tool_call>{"name": "add", "arguments": {"a": twelve}}</tool_call>', "these arguments are not JSON"),
    ],
    ids=["unknown tool", "arguments not JSON"],
)
def test_a_bad_call_reaches_the_harness_which_tells_the_model(written: str, told: str):
    async def act(client: openai.AsyncOpenAI, episode: PlayedByHand) -> Any:
        return await use_tools(client, {"add": add}), episode

    said, episode = with_client(act, [written, "sorry"])
    assert said == "sorry"
    assert told in episode.shown(1)


BY_ITEMS = (
    "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{{ m.content }}{% for call in m.tool_calls or [] %}<tool_call>\n<function={{ call.function.name }}>\n"
    "{% for name, value in call.function.arguments | items %}<parameter={{ name }}>\n{{ value }}\n</parameter>\n"
    "{% endfor %}</function>\n</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Writes each argument by itself, as Qwen3-Coder's does."""


@pytest.mark.parametrize("arguments", ['{"a": twelve}', '"twelve"', "[12]"])
def test_a_call_that_the_template_could_not_write_again_is_text_so_that_the_history_can_be_compacted(arguments: str):
    """The harness was told a call, and could not say it again: its request was refused, and the episode had failed."""

    async def act(client: openai.AsyncOpenAI, episode: PlayedByHand) -> Any:
        messages: list[Any] = [{"role": "user", "content": "A long history."}, USER]
        first = await client.chat.completions.create(model="policy", messages=messages, tools=[ADD])
        said = first.choices[0].message
        results = [{"role": "tool", "tool_call_id": one.id, "content": "wrong"} for one in said.tool_calls or []]
        messages = [USER, said.model_dump(exclude_none=True), *results, {"role": "user", "content": "Go on."}]
        again = await client.chat.completions.create(model="policy", messages=messages, tools=[ADD])
        return again.choices[0].message.content

    written = f'<tool_call>{{"name": "add", "arguments": {arguments}}}</tool_call>'
    assert with_client(act, [written, "19"], text_model(BY_ITEMS)) == "19"


def test_one_call_of_two_is_told_where_the_template_refuses_a_second_so_that_the_history_can_be_compacted():
    """The harness was told both, and its request with both was refused: the episode had failed."""

    async def act(client: openai.AsyncOpenAI, episode: PlayedByHand) -> Any:
        messages: list[Any] = [{"role": "user", "content": "A long history."}, USER]
        first = await client.chat.completions.create(model="policy", messages=messages, tools=[ADD])
        said = first.choices[0].message
        results = [{"role": "tool", "tool_call_id": one.id, "content": "19"} for one in said.tool_calls or []]
        messages = [USER, said.model_dump(exclude_none=True), *results]
        again = await client.chat.completions.create(model="policy", messages=messages, tools=[ADD])
        return len(results), again.choices[0].message.content

    two = f"{BY_LLAMA % 7}; {BY_LLAMA % 8}"
    assert with_client(act, [two, "19"], published_model("llama-3.1", "<|eot_id|>"), max_context=40_000) == (1, "19")


def test_a_template_that_cannot_render_tools_is_a_bad_request_in_one_line():
    async def act(client: openai.AsyncOpenAI, episode: PlayedByHand) -> Any:
        with pytest.raises(openai.BadRequestError) as raised:
            await use_tools(client, {"add": add})
        return str(raised.value), len(episode.prompts)

    said, num_calls = with_client(act, [], text_model(CHATML))
    assert "tools: the model's chat template does not render tools; leave them out" in said
    assert num_calls == 0


def test_tools_are_a_bad_request_where_nobody_can_tell_how_the_model_writes_a_call():
    async def act(client: openai.AsyncOpenAI, episode: PlayedByHand) -> Any:
        with pytest.raises(openai.BadRequestError, match="writes calls in a way that cannot be read safely") as refused:
            await client.chat.completions.create(model="policy", messages=[USER], tools=[ADD])
        plain = await client.chat.completions.create(model="policy", messages=[USER])
        return str(refused.value).count("\n"), plain.choices[0].message.content, len(episode.prompts)

    unread = text_model("{{ tools | tojson }}{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}")
    assert with_client(act, ["5"], unread) == (0, "5", 1)


def test_one_call_is_told_where_parallel_calls_are_switched_off():
    async def act(client: openai.AsyncOpenAI, episode: PlayedByHand) -> Any:
        found = []
        for parallel in (True, False):
            reply = await client.chat.completions.create(
                model="policy", messages=[USER], tools=[ADD], parallel_tool_calls=parallel
            )
            found.append((len(reply.choices[0].message.tool_calls or []), reply.choices[0].finish_reason))
        return found

    assert with_client(act, [CALL + CALL] * 2) == [(2, "tool_calls"), (1, "tool_calls")]


def test_a_stream_is_one_chunk_with_the_whole_answer_its_usage_and_the_end():
    async def act(client: openai.AsyncOpenAI, episode: PlayedByHand) -> Any:
        stream = await client.chat.completions.create(
            model="policy", messages=[USER], tools=[ADD], stream=True, stream_options={"include_usage": True}
        )
        return [chunk async for chunk in stream]

    first, usage = with_client(act, [CALL])
    (call,) = first.choices[0].delta.tool_calls
    assert (call.index, call.function.name, json.loads(call.function.arguments)) == (0, "add", {"a": 12, "b": 7})
    assert first.choices[0].finish_reason == "tool_calls"
    assert usage.usage.completion_tokens == len(CALL) + 1


def test_completions_of_text_and_of_token_ids_are_answered():
    text = text_model(HERMES)

    async def act(client: openai.AsyncOpenAI, episode: PlayedByHand) -> Any:
        first = await client.completions.create(
            model="policy", prompt="12 + 7 =", stop=["\n"], max_tokens=20, logprobs=1
        )
        second = await client.completions.create(model="policy", prompt=[1, 2, 3])
        return first, second, episode

    first, second, episode = with_client(act, [" 19\nmore…", "x"], text)
    assert first.choices[0].text == " 19"
    assert first.choices[0].logprobs.token_logprobs == [-0.5] * 8
    assert episode.prompts == [text.encode("12 + 7 ="), [1, 2, 3]]
    assert episode.limits[0] == CallLimits(20, (), ("\n",))
    assert (second.choices[0].text, second.usage.prompt_tokens, second.usage.completion_tokens) == ("x", 3, 2)


def test_a_completion_that_goes_on_from_an_answer_keeps_the_tokens_that_were_drawn():
    class Odd(PlayedByHand):
        async def draw(self, prompt: Any, limits: CallLimits) -> DrawnAnswer:
            await super().draw(prompt, limits)
            return DrawnAnswer([255, 254, *text.encode("\nObs:")], [-0.5] * 7, "stop")

    text = text_model(HERMES)
    shown = text.decode([255, 254])

    async def act(client: openai.AsyncOpenAI, episode: PlayedByHand) -> list[list[int]]:
        first = await client.completions.create(model="policy", prompt="q", stop=["\nObs:"])
        assert first.choices[0].text == shown
        await client.completions.create(model="policy", prompt=f"q{shown}\nObs: 3\n", stop=["\nObs:"])
        return episode.prompts

    first, second = with_client(act, ["x…"] * 2, text, kind=Odd)
    assert second == [*first, 255, 254, *text.encode("\nObs:"), *text.encode(" 3\n")]


def test_the_clients_own_retries_after_a_time_out_draw_nothing_twice():
    async def act(client: openai.AsyncOpenAI, episode: PlayedByHand) -> Any:
        episode.gate.clear()
        patient = client.with_options(timeout=1.0, max_retries=5)
        waiting = asyncio.create_task(patient.chat.completions.create(model="policy", messages=[USER]))
        await asyncio.sleep(2.5)
        episode.gate.set()
        reply = await waiting
        return reply.choices[0].message.content, len(episode.prompts)

    assert with_client(act, ["19", "20", "21"]) == ("19", 1)


def test_a_full_context_is_a_bad_request_with_the_code_that_harnesses_know():
    async def act(client: openai.AsyncOpenAI, episode: PlayedByHand) -> Any:
        with pytest.raises(openai.BadRequestError) as raised:
            await client.chat.completions.create(model="policy", messages=[{"role": "user", "content": "x" * 200}])
        return raised.value.code

    assert with_client(act, ["19"], max_context=100) == "context_length_exceeded"


def test_log_probabilities_and_token_ids_are_told_on_request():
    async def act(client: openai.AsyncOpenAI, episode: PlayedByHand) -> Any:
        return await client.chat.completions.create(
            model="policy", messages=[USER], logprobs=True, extra_body={"return_token_ids": True}
        )

    choice = with_client(act, ["19"]).choices[0]
    assert [one.logprob for one in choice.logprobs.content] == [-0.5] * 3
    assert choice.model_extra["token_ids"][-1] == IM_END


class Harness:
    """A foreign harness with its own loop and its own score."""

    async def play(self, base_url: str, task: dict[str, Any], seed: int) -> float:
        async with openai.AsyncOpenAI(base_url=base_url, api_key="none") as client:
            return 1.0 if await use_tools(client, {"add": add}) == "19" else 0.0


class Careless(Harness):
    """It takes a refusal for an answer, and scores it with zero."""

    async def play(self, base_url: str, task: dict[str, Any], seed: int) -> Any:
        try:
            async with openai.AsyncOpenAI(base_url=base_url, api_key="none") as client:
                await client.chat.completions.create(model="policy", messages=[USER], n=2)
        except openai.BadRequestError:
            return Turn(reward=0.0)


class Idle(Harness):
    """It never asks."""

    async def play(self, base_url: str, task: dict[str, Any], seed: int) -> float:
        return 1.0


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (Harness, "1.0"),
        (Careless, "its last request was not answered: n: not supported here; leave it out"),
        (Idle, "the policy was never asked, or there was no room for the first prompt"),
    ],
)
def test_a_harness_that_knows_only_a_base_url_is_played_and_a_refusal_of_ours_is_never_a_zero(make: Any, expected: str):
    async def run() -> str:
        text = text_model(HERMES)
        front = HostFront(max_context=4096, text=text)
        await front.start()
        environment = OwnEnvironment(make, HostParts(front, text))
        await environment.start()
        try:
            return str((await environment.play(PlayedByHand(text, [CALL, "19"]))).reward)
        except Exception as error:  # noqa: BLE001  compared below
            return str(error)
        finally:
            await front.close()

    assert asyncio.run(run()) == expected
