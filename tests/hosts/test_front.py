"""The host's front: tokens in, tokens out, by session and by base URL; retries; and all that is refused."""

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
from tests.hosts.policies import IM_END, PlayedByHand, text_model

from polyrl.hosts.episode import CallLimits, DrawnAnswer, EpisodeFailed, NoRoom
from polyrl.hosts.front import MAX_BODY_BYTES, HostFront, OpenEpisode, SessionTaken
from polyrl.wire.frames import Sampling

TEXT = text_model()
Answer = tuple[int, dict[str, Any]]


class Desk:
    """A front, an episode at it, and a client."""

    def __init__(
        self, front: HostFront, episode: PlayedByHand, opened: OpenEpisode, client: aiohttp.ClientSession
    ) -> None:
        self.front, self.episode, self.opened, self.client = front, episode, opened, client

    async def post(self, path: str, body: Any, **headers: str) -> Answer:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        async with self.client.post(f"{self.front.url}{path}", data=data, headers=named) as reply:
            return reply.status, await reply.json()

    async def generate(self, tokens: list[int], session: str = "trace-1", **params: Any) -> Answer:
        body = {"model": "policy", "token_ids": tokens, "sampling_params": params, "cache_salt": "7"}
        return await self.post("/inference/v1/generate", body, X_Session_ID=session)


@asynccontextmanager
async def desk(answers: Any = ("hello",) * 20, **known: Any) -> AsyncIterator[Desk]:
    front = HostFront(max_context=4096, text=TEXT, sampling=Sampling(temperature=1.0))
    await front.start()
    episode = PlayedByHand(TEXT, answers, **known)
    try:
        async with aiohttp.ClientSession() as client:
            with front.open(episode, "trace-1") as opened:
                yield Desk(front, episode, opened, client)
    finally:
        await front.close()


def at_a_desk(act: Callable[[Desk], Coroutine[Any, Any, Any]], answers: Any = ("hello",) * 20, **known: Any) -> Any:
    async def run() -> Any:
        async with desk(answers, **known) as one:
            return await act(one)

    return asyncio.run(run())


# Tokens in, tokens out


def test_the_route_of_tokens_answers_as_its_contract_says():
    async def act(one: Desk) -> Answer:
        return await one.generate(
            [1, 86],
            temperature=1.0,
            max_tokens=200,
            stop_token_ids=[2, 0],
            logprobs=1,
            skip_special_tokens=False,
            routed_experts_prompt_start=455,
        )

    status, reply = at_a_desk(act)
    expected = [*TEXT.encode("hello"), IM_END]
    assert status == 200
    assert set(reply) == {"request_id", "choices"}
    assert reply["choices"] == [
        {
            "index": 0,
            "token_ids": expected,
            "finish_reason": "stop",
            "logprobs": {"content": [{"token": f"token_id:{token}", "logprob": -0.5} for token in expected]},
        }
    ]


def test_stops_and_max_tokens_are_the_calls_and_max_tokens_beyond_the_context_is_clamped():
    async def act(one: Desk) -> tuple[CallLimits, Answer]:
        answer = await one.generate([1] * 4090, max_tokens=99999, stop_token_ids=[5], stop=["x"])
        return one.episode.limits[0], answer

    limits, (status, reply) = at_a_desk(act, ["a long answer"])
    assert limits == CallLimits(6, (5,), ("x",))
    assert (status, reply["choices"][0]["finish_reason"], len(reply["choices"][0]["token_ids"])) == (200, "length", 6)


@pytest.mark.parametrize(
    "field", [{"n": 2}, {"presence_penalty": 0.5}, {"frequency_penalty": 1}, {"logit_bias": {"5": 1}}]
)
def test_fields_that_would_change_the_answer_are_refused_by_name(field: dict[str, Any]):
    async def act(one: Desk) -> tuple[Answer, int]:
        return await one.generate([1], **field), len(one.episode.prompts)

    (status, reply), num_calls = at_a_desk(act)
    (name,) = field
    assert (status, reply["error"]["code"], num_calls) == (400, "unsupported_parameter", 0)
    assert reply["error"]["message"] == f"{name}: not supported here; leave it out"


def test_other_sampling_is_ignored_and_warned_of_once_by_name(caplog: pytest.LogCaptureFixture):
    async def act(one: Desk) -> list[int]:
        return [(await one.generate([1], temperature=0.2, top_p=0.9))[0] for _ in range(3)]

    with caplog.at_level(logging.WARNING):
        assert at_a_desk(act) == [200, 200, 200]
    assert [record.getMessage() for record in caplog.records] == [
        "temperature = 0.2 is ignored: sampling is the run's, whatever an environment asks for",
        "top_p = 0.9 is ignored: sampling is the run's, whatever an environment asks for",
    ]


def test_a_prompt_that_fills_the_context_and_a_spent_budget_are_refused_with_the_code_that_harnesses_know():
    class Spent(PlayedByHand):
        async def draw(self, prompt: Any, limits: CallLimits) -> DrawnAnswer:
            raise NoRoom("the episode's 512 tokens are spent")

    async def act(one: Desk) -> list[Answer]:
        with one.front.open(Spent(TEXT, []), "trace-2"):
            return [await one.generate([1] * 4096), await one.generate([1], "trace-2")]

    long, spent = at_a_desk(act)
    assert [(status, reply["error"]["code"]) for status, reply in (long, spent)] == [
        (400, "context_length_exceeded")
    ] * 2
    assert long[1]["error"]["message"] == "a prompt of 4096 tokens; the context is 4096 tokens long"


def test_the_list_of_models_names_the_model_and_its_context():
    async def act(one: Desk) -> list[Any]:
        urls = (f"{one.front.url}/v1/models", f"{one.opened.base_url}/models")
        return [await (await one.client.get(url)).json() for url in urls]

    for reply in at_a_desk(act):
        assert [(model["id"], model["max_model_len"]) for model in reply["data"]] == [("policy", 4096)]


# Sessions


def test_a_request_is_answered_by_the_episode_of_its_session_or_of_its_base_url():
    async def act(one: Desk) -> list[int]:
        other = PlayedByHand(TEXT, ["other"] * 3, name="1/1")
        with one.front.open(other) as opened:
            opened.join("trace-2")
            await one.generate([1], "trace-2")
            await one.generate([1], "trace-1")
            await one.post(f"/e/{opened.secret}/inference/v1/generate", {"token_ids": [1]})
        return [len(one.episode.prompts), len(other.prompts)]

    assert at_a_desk(act) == [1, 2]


def test_openenv517_two_episodes_with_one_session_the_second_is_refused_and_the_first_goes_on():
    async def act(one: Desk) -> int:
        with pytest.raises(SessionTaken, match=r"^session trace-1: episode 1/0 has it; 1/1 needs its own$"):
            one.front.open(PlayedByHand(TEXT, [], name="1/1"), "trace-1")
        return (await one.generate([1]))[0]

    assert at_a_desk(act) == 200


def test_an_unknown_session_one_of_another_run_and_none_are_refused_in_one_line():
    async def act(one: Desk) -> list[Answer]:
        return [
            await one.generate([1], "trace-of-another-run"),
            await one.post("/inference/v1/generate", {"token_ids": [1]}),
            await one.post("/e/nobody/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
        ]

    assert [(status, reply["error"]["message"]) for status, reply in at_a_desk(act)] == [
        (404, "X-Session-ID: no episode has the session trace-of-another-run; it ended, or is of another run"),
        (400, "X-Session-ID: missing; expected the session of an episode, or its own base URL"),
        (404, "no episode has this base URL; it ended, or is of another run"),
    ]


def test_a_long_session_is_the_whole_of_it():
    async def act(one: Desk) -> list[int]:
        begin, other = "x" * 256, PlayedByHand(TEXT, ["other"] * 3, name="1/1")
        with one.front.open(other, begin) as opened:
            opened.join(begin + "-long")
            found = [
                await one.generate([1], session) for session in (begin, begin + "-long", begin + "-of another run")
            ]
        return [status for status, _ in found]

    assert at_a_desk(act) == [200, 200, 404]


def test_the_session_of_an_episode_that_ended_may_be_taken_again():
    async def act(one: Desk) -> list[int]:
        found: list[int] = []
        for _ in range(2):
            with one.front.open(PlayedByHand(TEXT, ["x"]), "trace-9"):
                found.append((await one.generate([1], "trace-9"))[0])
        return found

    assert at_a_desk(act) == [200, 200]


# Retries, outages


def test_a_retry_with_the_same_body_is_the_same_call_and_nothing_is_drawn_twice():
    async def act(one: Desk) -> tuple[list[Answer], int]:
        body = {"token_ids": [1, 2], "sampling_params": {}}
        path, session = "/inference/v1/generate", {"X_Session_ID": "trace-1"}
        first = await one.post(path, body, **session, x_stainless_retry_count="0")
        again = await one.post(path, body, **session, x_stainless_retry_count="1")
        return [first, again], len(one.episode.prompts)

    (first, again), num_calls = at_a_desk(act, ["one", "two"])
    assert first == again
    assert num_calls == 1


def test_the_same_body_without_a_retry_is_another_call():
    async def act(one: Desk) -> list[int]:
        first, second = await one.generate([1]), await one.generate([1])
        return [len(reply["choices"][0]["token_ids"]) for _, reply in (first, second)]

    assert at_a_desk(act, ["one", "three"]) == [4, 6]


def test_a_client_that_hangs_up_in_an_outage_and_asks_again_gets_the_answer_of_its_first_call():
    async def act(one: Desk) -> tuple[Answer, int]:
        one.episode.gate.clear()
        body = json.dumps({"token_ids": [1]}).encode()
        url, headers = f"{one.front.url}/inference/v1/generate", {"X-Session-ID": "trace-1"}
        with pytest.raises(TimeoutError):
            await one.client.post(url, data=body, headers=headers, timeout=aiohttp.ClientTimeout(0.2))
        again = asyncio.create_task(
            one.post("/inference/v1/generate", body, X_Session_ID="trace-1", x_stainless_retry_count="1")
        )
        await asyncio.sleep(0.1)
        assert not again.done()
        one.episode.gate.set()
        return await again, len(one.episode.prompts)

    (status, _), num_calls = at_a_desk(act)
    assert (status, num_calls) == (200, 1)


def test_two_calls_at_once_are_answered_one_after_the_other():
    class Watched(PlayedByHand):
        running = most = 0

        async def draw(self, prompt: Any, limits: CallLimits) -> DrawnAnswer:
            self.running += 1
            self.most = max(self.most, self.running)
            await asyncio.sleep(0.01)
            self.running -= 1
            return await super().draw(prompt, limits)

    async def act(one: Desk) -> tuple[int, list[int]]:
        watched = Watched(TEXT, ["x"] * 8)
        with one.front.open(watched, "trace-2"):
            found = await asyncio.gather(*(one.generate([token], "trace-2") for token in range(1, 9)))
        return watched.most, [status for status, _ in found]

    assert at_a_desk(act) == (1, [200] * 8)


def test_a_failed_episode_is_told_once_with_a_status_that_no_client_asks_again_for():
    class Lost(PlayedByHand):
        async def draw(self, prompt: Any, limits: CallLimits) -> DrawnAnswer:
            raise EpisodeFailed("the manager began it elsewhere")

    async def act(one: Desk) -> tuple[Answer, str, int]:
        with one.front.open(Lost(TEXT, []), "trace-2") as lost:
            answer = await one.generate([1], "trace-2")
            return answer, lost.trouble, (await one.generate([1]))[0]

    (status, reply), trouble, of_the_other = at_a_desk(act)
    assert (status, reply["error"]["message"]) == (410, "the episode failed: the manager began it elsewhere")
    assert trouble == "the manager began it elsewhere"
    assert of_the_other == 200


def test_a_request_that_waits_when_its_episode_ends_is_told_so():
    async def act(one: Desk) -> Answer:
        stuck = PlayedByHand(TEXT, ["x"])
        stuck.gate.clear()
        with one.front.open(stuck, "trace-2"):
            waiting = asyncio.create_task(one.generate([1], "trace-2"))
            await asyncio.sleep(0.1)
        return await waiting

    status, reply = at_a_desk(act)
    assert (status, reply["error"]["message"]) == (410, "the episode ended")


def test_an_answer_whose_log_probabilities_are_not_finite_is_nobodys_answer():
    class Odd(PlayedByHand):
        async def draw(self, prompt: Any, limits: CallLimits) -> DrawnAnswer:
            return DrawnAnswer([1, 2], [-0.1, float("-inf")], "stop")

    async def act(one: Desk) -> Answer:
        with one.front.open(Odd(TEXT, []), "trace-2"):
            return await one.generate([1], "trace-2")

    assert at_a_desk(act)[0] == 410


# Bad input


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("/inference/v1/generate", b"{", "the body cannot be read: Input data was truncated"),
        ("/inference/v1/generate", b'"text"', "the body cannot be read: Expected `object`, got `str`"),
        (
            "/inference/v1/generate",
            {"token_ids": []},
            "the body cannot be read: Expected `array` of length >= 1 - at `$.token_ids`",
        ),
        (
            "/inference/v1/generate",
            {"token_ids": [-1]},
            "the body cannot be read: Expected `int` >= 0 - at `$.token_ids[0]`",
        ),
        (
            "/v1/chat/completions",
            {"messages": ["hello"]},
            "messages[0]: got a text, expected an object with role and content",
        ),
        (
            "/v1/chat/completions",
            {"messages": [{"content": "x"}]},
            "messages[0].role: got null, expected a text, for example user",
        ),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages[0].content: got an object, expected parts of type text",
        ),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "assistant", "tool_calls": ["x"]}]},
            "messages[0].tool_calls[0]: got a text, expected an object with function.name",
        ),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "x"}], "tools": ["add"]},
            "tools[0]: got a text, expected an object with function.name",
        ),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "x"}], "tool_choice": "required"},
            "tool_choice: not supported here; leave it out",
        ),
        (
            "/v1/completions",
            {"prompt": ["a", "b"]},
            "prompt: got a text, expected a text, or token ids; one prompt a request",
        ),
        ("/v1/completions", {"prompt": ""}, "prompt: it has no tokens"),
    ],
)
def test_a_body_of_a_wrong_shape_is_refused_in_one_line_and_harms_nobody(path: str, body: Any, message: str):
    async def act(one: Desk) -> tuple[Answer, int]:
        return await one.post(path, body, X_Session_ID="trace-1"), (await one.generate([1]))[0]

    (status, reply), of_the_next = at_a_desk(act)
    assert (status, reply["error"]["message"], of_the_next) == (400, message, 200)


def test_a_body_beyond_the_bound_and_an_unknown_route_are_refused():
    async def act(one: Desk) -> list[int]:
        huge = b'{"token_ids": [1], "x": "' + b"a" * MAX_BODY_BYTES + b'"}'
        found = [
            await one.post("/inference/v1/generate", huge, X_Session_ID="trace-1"),
            await one.post("/v1/embeddings", {}),
        ]
        return [status for status, _ in found]

    assert at_a_desk(act) == [413, 404]


def test_halves_of_characters_in_a_request_are_read_as_marks():
    async def act(desk: Desk) -> None:
        body = {"messages": [{"role": "user", "content": "a \ud800 \U0001f600 \\ud800"}], "return_token_ids": True}
        status, reply = await desk.post("/v1/chat/completions", body, X_Session_ID="trace-1")
        assert status == 200
        shown = TEXT.decode(reply["choices"][0]["prompt_token_ids"])
        assert "a \ufffd \U0001f600 \\ud800" in shown

    at_a_desk(act)


def test_a_request_that_nothing_foresaw_leaves_the_episode_without_a_reward():
    async def act(desk: Desk) -> None:
        status, reply = await desk.generate([5])
        assert (status, "ValueError: no such thing" in reply["error"]["message"]) == (400, True)
        with pytest.raises(EpisodeFailed, match="its last request was not answered: ValueError"):
            desk.opened.check()

    def fail(prompt: str) -> str:
        raise ValueError("no such thing")

    at_a_desk(act, answers=fail)
