"""OpenAI's own client against a manager that serves, with real workers: what it is told is what the model says."""

import asyncio
import contextlib
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch
from tests.builtin.tiny_models import save_tiny
from tests.serving import ServedFleet, save_tokenizer, served
from transformers import AutoModelForCausalLM, AutoTokenizer

MOST = 130
FAST = ("slots=128", "tokens_per_s=300", "median_tokens=40", "sigma=0.3")
CHAT: list[Any] = [
    {"role": "system", "content": "You are brief."},
    {"role": "user", "content": [{"type": "text", "text": "How much is 2 €?"}]},
]


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedFleet]:
    """Two workers whose tokens are bytes: most of what they write is no whole character."""
    folder = tmp_path_factory.mktemp("serve")
    model = save_tokenizer(folder / "bytes")
    with served(folder, model, f"serve.max_samples={MOST}", "stream.flush_interval_s=0.02") as fleet:
        for name in ("a", "b"):
            fleet.start_byte_worker(name, *FAST)
        fleet.until_active(2)
        yield fleet


# What is answered


def test_the_model_is_listed_by_the_name_of_its_directory(fleet: ServedFleet):
    assert [one.id for one in fleet.client().models.list()] == ["bytes"]


def test_a_stream_put_together_is_the_answer_that_comes_whole(fleet: ServedFleet):
    ask: Any = {"model": "bytes", "prompt": "Say:", "max_tokens": 200, "seed": 5, "n": 3, "logprobs": 0}
    ids = {"return_token_ids": True}
    whole = fleet.client().completions.create(**ask, extra_body=ids)
    texts = ["", "", ""]
    tokens: list[list[int]] = [[], [], []]
    logprobs: list[list[float]] = [[], [], []]
    ends: dict[int, str] = {}
    usages = []
    options: Any = {"include_usage": True}
    for chunk in fleet.client().completions.create(**ask, stream=True, stream_options=options, extra_body=ids):
        usages.append(chunk.usage)
        for one in chunk.choices:
            texts[one.index] += one.text
            tokens[one.index] += one.token_ids  # type: ignore[attr-defined]
            if one.logprobs is not None:
                logprobs[one.index] += one.logprobs.token_logprobs or []
            if one.finish_reason is not None:  # which OpenAI's types do not allow in mid-stream
                ends[one.index] = one.finish_reason
    assert texts == [one.text for one in whole.choices]
    assert tokens == [one.token_ids for one in whole.choices]  # type: ignore[attr-defined]
    assert logprobs == [one.logprobs.token_logprobs for one in whole.choices if one.logprobs is not None]
    assert ends == {one.index: one.finish_reason for one in whole.choices}
    assert usages[:-1] == [None] * (len(usages) - 1)
    assert usages[-1] == whole.usage
    assert len(set(texts)) == 3
    assert whole.usage is not None
    assert whole.usage.completion_tokens == sum(map(len, tokens))
    assert whole.usage.prompt_tokens == len("Say:")


def test_the_same_seed_gives_the_same_answer_and_another_another(fleet: ServedFleet):
    def text(**seed: Any) -> str | None:
        done = fleet.client().chat.completions.create(model="bytes", messages=CHAT, max_tokens=50, **seed)
        return done.choices[0].message.content

    assert text(seed=1) == text(seed=1)
    assert len({text(seed=1), text(seed=-2), text(), text()}) == 4


def test_several_prompts_are_answered_in_their_order(fleet: ServedFleet):
    ask: Any = {"model": "bytes", "max_tokens": 30, "seed": 9}
    one_by_one = [
        choice.text
        for prompt in ("first", "second")
        for choice in fleet.client().completions.create(**ask, prompt=prompt, n=2).choices
    ]
    together = fleet.client().completions.create(**ask, prompt=["first", "second"], n=2)
    assert [(one.index, one.text) for one in together.choices] == list(enumerate(one_by_one))
    as_tokens = fleet.client().completions.create(**ask, prompt=[[70, 71], [72]])
    assert len(as_tokens.choices) == 2
    assert as_tokens.usage is not None
    assert as_tokens.usage.prompt_tokens == 3


def test_a_chat_streams_its_role_first_and_its_log_probabilities_with_its_tokens(fleet: ServedFleet):
    ask: Any = {"model": "bytes", "messages": CHAT, "max_completion_tokens": 25, "seed": 3, "logprobs": True}
    whole = fleet.client().chat.completions.create(**ask).choices[0]
    chunks = [chunk.choices[0] for chunk in fleet.client().chat.completions.create(**ask, stream=True)]
    assert chunks[0].delta.role == "assistant"
    assert "".join(chunk.delta.content or "" for chunk in chunks) == whole.message.content
    assert [chunk.finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].finish_reason == whole.finish_reason == "length"
    streamed = [one.logprob for chunk in chunks if chunk.logprobs is not None for one in chunk.logprobs.content or ()]
    assert whole.logprobs is not None
    assert streamed == [one.logprob for one in whole.logprobs.content or ()]
    assert len(streamed) == 25
    for one in whole.logprobs.content or ():  # half a character's bytes are not known
        assert one.bytes == (None if "\ufffd" in one.token else list(one.token.encode()))


def test_a_hundred_streams_at_once_are_all_answered_and_each_is_its_own(fleet: ServedFleet):
    async def one(client: openai.AsyncOpenAI, seed: int) -> str:
        text = ""
        ask: Any = {"model": "bytes", "prompt": "many", "max_tokens": 40, "seed": seed, "stream": True}
        async for chunk in await client.completions.create(**ask, extra_body={"ignore_eos": True}):
            text += chunk.choices[0].text
        return text

    async def all_of_them() -> list[str]:
        async with fleet.async_client() as client:
            return await asyncio.gather(*(one(client, seed) for seed in range(100)))

    texts = asyncio.run(all_of_them())
    assert len(set(texts)) == 100
    again = fleet.client().completions.create(
        model="bytes", prompt="many", max_tokens=40, seed=77, extra_body={"ignore_eos": True}
    )
    assert texts[77] == again.choices[0].text
    fleet.until_idle()


# Who goes away, and what is too much


def test_a_stream_that_is_hung_up_frees_its_place_at_once(fleet: ServedFleet):
    before = fleet.status()["ledger"]["samples_discarded"].get("withdrawn", 0)
    long: Any = {"model": "bytes", "prompt": "long", "max_tokens": 5000, "stream": True, "n": 2}
    with fleet.client().completions.create(**long, extra_body={"ignore_eos": True}) as stream:
        next(iter(stream))
        assert fleet.status()["queues"]["samples_asked"] == 2
    fleet.until_idle()
    assert fleet.status()["ledger"]["samples_discarded"]["withdrawn"] == before + 2


def test_so_does_one_that_waits_for_the_whole_answer(fleet: ServedFleet):
    async def hang_up_when_it_is_asked() -> None:
        long: Any = {"model": "bytes", "prompt": "long", "max_tokens": 5000, "extra_body": {"ignore_eos": True}}
        async with fleet.async_client() as client:
            waiting = asyncio.create_task(client.completions.create(**long))
            await asyncio.to_thread(fleet.until, lambda now: now["queues"]["samples_asked"] == 1)
            waiting.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await waiting

    before = fleet.status()["ledger"]["samples_discarded"].get("withdrawn", 0)
    asyncio.run(hang_up_when_it_is_asked())
    fleet.until_idle()
    assert fleet.status()["ledger"]["samples_discarded"]["withdrawn"] == before + 1
    assert "Traceback" not in (fleet.folder / "manager.log").read_text(), "to hang up is no failure of the manager"


def test_who_asks_for_more_than_is_allowed_at_once_is_told_to_try_again(fleet: ServedFleet):
    long: Any = {"model": "bytes", "prompt": "long", "max_tokens": 5000, "stream": True, "n": 128}
    with fleet.client().completions.create(**long, extra_body={"ignore_eos": True}) as stream:
        next(iter(stream))
        with pytest.raises(openai.RateLimitError, match="128 answers are being written"):
            fleet.client().completions.create(model="bytes", prompt="one more", n=3)
        assert fleet.client().completions.create(model="bytes", prompt="one more", n=2, max_tokens=2).choices
    with pytest.raises(openai.BadRequestError, match="at most 130"):
        fleet.client().completions.create(model="bytes", prompt=["a", "b"], n=100)
    fleet.until_idle()


# What is refused


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"prompt": ""}, "no tokens"),
        ({"prompt": []}, "empty"),
        ({"prompt": [1, "two"]}, "token ids"),
        ({"prompt": [1, -2]}, "token ids"),
        ({"prompt": [[]]}, "token ids"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 1 << 20}, "the longest answer of this run"),
        ({"temperature": -1}, "temperature"),
        ({"logprobs": 5}, "logprobs"),
        ({"echo": True}, "echo: not supported"),
        ({"stop": [""]}, "stop"),
        ({"extra_body": {"colour": "red"}}, "colour"),
        ({"frequency_penalty": 0.5}, "frequency_penalty: not supported"),
        ({"stream_options": {"include_usage": True}}, "stream_options: only with stream"),
        ({"stream": True, "stream_options": {"continuous_usage_stats": True}}, "continuous_usage_stats"),
    ],
)
def test_what_is_wrong_is_named(fleet: ServedFleet, fields: dict[str, Any], words: str):
    with pytest.raises(openai.BadRequestError, match=words) as caught:
        fleet.client().completions.create(**{"model": "bytes", "prompt": "x", **fields})
    assert caught.value.type == "invalid_request_error"


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"content": "who?"}]}, r"messages\[0\].role"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "type text"),
        ({"messages": [{"role": "user"}]}, "chat template refuses"),
        ({"tools": [{"type": "function"}]}, "tools: not supported"),
        ({"top_logprobs": 3, "logprobs": True}, "top_logprobs: not supported"),
        ({"response_format": {"type": "json_object"}}, "response_format: not supported"),
    ],
)
def test_what_is_wrong_with_a_chat_is_named(fleet: ServedFleet, fields: dict[str, Any], words: str):
    with pytest.raises(openai.BadRequestError, match=words):
        fleet.client().chat.completions.create(**{"model": "bytes", "messages": CHAT, **fields})


def test_fields_that_say_what_holds_anyway_are_taken(fleet: ServedFleet):
    done = fleet.client().chat.completions.create(
        model="bytes", messages=CHAT, max_tokens=3, user="me", presence_penalty=0, tool_choice="none", store=False
    )
    assert done.usage is not None
    assert done.usage.completion_tokens == 3


def test_tokens_and_names_are_asked_for(fleet: ServedFleet):
    ask: Any = {"model": "bytes", "prompt": "x"}
    with pytest.raises(openai.AuthenticationError, match="a valid token is needed"):
        fleet.client(api_key="y" * 43).completions.create(**ask)
    with pytest.raises(openai.PermissionDeniedError, match="the worker token may not"):
        fleet.client(api_key=fleet.token("worker")).completions.create(**ask)
    assert fleet.client(api_key=fleet.token("admin")).completions.create(**ask).choices
    with pytest.raises(openai.NotFoundError, match="there is no model 'gpt'"):
        fleet.client().completions.create(**{**ask, "model": "gpt"})
    headers = {"Authorization": f"Bearer {fleet.token('generate')}"}
    assert httpx.get(f"{fleet.url}/v1/status", headers=headers).status_code == 403
    assert httpx.post(f"{fleet.url}/v1/join", headers=headers, json={}).status_code == 403


def test_a_prompt_that_is_too_long_costs_nobody_a_second(fleet: ServedFleet):
    """Three megabytes a request are seconds of tokenizing each; whoever asks meanwhile does not wait for them."""
    long = "x" * 3_500_000
    for _ in range(3):
        with pytest.raises(openai.BadRequestError, match=r"a text of 3500000 bytes; at most \d+ are read") as caught:
            fleet.client().completions.create(model="bytes", prompt=long)
        assert caught.value.code == "context_length_exceeded"
        with pytest.raises(openai.BadRequestError, match="at most"):
            fleet.client().chat.completions.create(model="bytes", messages=[{"role": "user", "content": long}])
    assert fleet.client().completions.create(model="bytes", prompt="short", max_tokens=2).choices


def test_token_ids_by_the_million_are_refused_before_they_are_looked_at(fleet: ServedFleet):
    """Each request stood in everybody's way for a third of a second, and its tokens went out to a worker."""
    headers = {"Authorization": f"Bearer {fleet.token('generate')}", "Content-Type": "application/json"}
    asked = b'{"model": "bytes", "max_tokens": 2, "prompt": [' + b"1," * 1_899_999 + b"1]}"
    answer = httpx.post(f"{fleet.url}/v1/completions", headers=headers, content=asked)
    assert answer.status_code == 400
    assert "1900000 token ids; expected at most" in answer.json()["error"]["message"]
    assert answer.json()["error"]["code"] == "context_length_exceeded"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"eos_token": "x" * 1_000_000}, "eos_token is not among"),
        ({"bos_token": "x"}, "bos_token is not among"),
        ({"note": "x" * 1_000_000}, "bytes, expected at most 16384"),
    ],
)
def test_what_a_template_writes_with_every_message_is_not_for_clients_to_make_large(
    fleet: ServedFleet, options: dict[str, str], words: str
):
    """A special token of megabytes was written once for each of ten thousand messages: the manager died of it."""
    many: Any = [{"role": "user", "content": "x"}] * 20
    with pytest.raises(openai.BadRequestError, match=words):
        fleet.client().chat.completions.create(
            model="bytes", messages=many, extra_body={"chat_template_kwargs": options}
        )


def test_a_body_nested_without_end_is_refused(fleet: ServedFleet):
    headers = {"Authorization": f"Bearer {fleet.token('generate')}"}
    nested = b'{"messages": [{"role": "user", "content": ' + b"[" * 100_000
    answer = httpx.post(f"{fleet.url}/v1/chat/completions", headers=headers, content=nested)
    assert answer.status_code == 400
    assert answer.json()["error"]["type"] == "invalid_request_error"


# Deaths


def test_a_worker_that_is_killed_in_mid_stream_is_not_noticed_but_for_a_pause(fleet: ServedFleet):
    ask: Any = {"model": "bytes", "prompt": "go on", "max_tokens": 900, "seed": 11, "n": 4}
    ids = {"return_token_ids": True, "ignore_eos": True}
    tokens: list[list[int]] = [[], [], [], []]
    killed = False
    for chunk in fleet.client().completions.create(**ask, stream=True, extra_body=ids):
        for one in chunk.choices:
            tokens[one.index] += one.token_ids  # type: ignore[attr-defined]
        if not killed and min(map(len, tokens)) > 100:
            fleet.kill_worker("a")  # where siblings are together
            fleet.kill_worker("b")
            fleet.start_byte_worker("c", *FAST)
            killed = True
    assert killed
    assert fleet.status()["ledger"]["moves"]["lost"] >= 4
    whole = fleet.client().completions.create(**ask, extra_body=ids)
    assert tokens == [one.token_ids for one in whole.choices]  # type: ignore[attr-defined]
    fleet.verified()


def test_a_manager_that_is_killed_in_mid_stream_ends_it_and_leaves_nothing_behind(fleet: ServedFleet):
    long: Any = {"model": "bytes", "prompt": "long", "max_tokens": 5000, "stream": True}
    with (
        pytest.raises((openai.APIConnectionError, openai.APIError, httpx.HTTPError)),
        fleet.client().completions.create(**long, extra_body={"ignore_eos": True}) as stream,
    ):
        for number, _ in enumerate(stream):
            if number == 3:
                fleet.kill_manager()
    fleet.start_manager()
    fleet.until_idle()
    fleet.until(lambda now: now["workers"] and all(one["running"] == 0 for one in now["workers"]))
    assert fleet.client().completions.create(model="bytes", prompt="again", max_tokens=3).choices
    fleet.verified()


def test_a_manager_that_is_stopped_says_so_in_the_stream(fleet: ServedFleet):
    long: Any = {"model": "bytes", "prompt": "long", "max_tokens": 5000, "stream": True}
    with fleet.client().completions.create(**long, extra_body={"ignore_eos": True}) as stream:
        chunks = iter(stream)
        next(chunks)
        stopping = threading.Thread(target=fleet.stop_manager)
        stopping.start()
        with pytest.raises(openai.APIError, match="the manager stops"):
            for _ in chunks:
                pass
        stopping.join()
    began = time.monotonic()
    fleet.start_manager()
    assert time.monotonic() - began < 30
    fleet.until_idle()
    assert "withdrawn" in fleet.verified()["samples"]["discarded"]


def test_a_worker_whose_tokens_are_made_up_is_refused_and_answers_nobody(fleet: ServedFleet):
    fleet.start_worker("made-up", "--engine", "emulated")
    assert fleet.workers["made-up"].wait(60) == 2
    said = (fleet.folder / "made-up.log").read_text().splitlines()[-1]
    why = "the run is of a model, and the emulated engine has none: it makes up its tokens."
    assert said.startswith(f"polyrl: error: worker made-up: {fleet.url}: {why} Start the worker with --engine builtin")
    assert "made-up" not in [one["name"] for one in fleet.status()["workers"]]


# The truth


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save_tiny("llama", tmp_path_factory.mktemp("model") / "tiny", vocab_size=259, eos_token_id=258)
    return save_tokenizer(folder)


@pytest.fixture(scope="module")
def builtin(tmp_path_factory: pytest.TempPathFactory, model_dir: Path) -> Iterator[ServedFleet]:
    with served(tmp_path_factory.mktemp("builtin"), model_dir) as fleet:
        fleet.start_worker("a", "--engine", "builtin", "--model", str(model_dir))
        fleet.until_active(1)
        yield fleet


def generated(model_dir: Path, prompt: list[int], num: int) -> list[int]:
    """What transformers generates, greedily."""
    model: Any = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    ids = torch.tensor([prompt])
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=num, do_sample=False, pad_token_id=0)
    return out[0, len(prompt) :].tolist()


def test_a_completion_is_what_transformers_generates_and_decodes(builtin: ServedFleet, model_dir: Path):
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    prompt = tokenizer("Größe: 5 €")["input_ids"]
    expected = generated(model_dir, prompt, 150)
    done = builtin.client().completions.create(
        model="tiny",
        prompt="Größe: 5 €",
        max_tokens=150,
        temperature=0,
        logprobs=0,
        extra_body={"return_token_ids": True},
    )
    choice = done.choices[0]
    assert choice.token_ids == expected  # type: ignore[attr-defined]
    assert choice.prompt_token_ids == prompt  # type: ignore[attr-defined]
    assert choice.text == tokenizer.decode(expected, skip_special_tokens=True)
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *expected]])).logits[0, len(prompt) - 1 : -1]
    truth = torch.log_softmax(logits, -1).gather(1, torch.tensor(expected).unsqueeze(1)).squeeze(1)
    assert choice.logprobs is not None
    assert choice.logprobs.token_logprobs == pytest.approx(truth.tolist(), abs=1e-3)


def test_a_chat_is_what_transformers_makes_of_its_template(builtin: ServedFleet, model_dir: Path):
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    flat = [CHAT[0], {"role": "user", "content": "How much is 2 €?"}]
    prompt = tokenizer.apply_chat_template(flat, add_generation_prompt=True, return_dict=False)
    expected = generated(model_dir, prompt, 60)
    done = builtin.client().chat.completions.create(
        model="tiny", messages=CHAT, max_tokens=60, temperature=0, extra_body={"return_token_ids": True}
    )
    assert done.prompt_token_ids == prompt  # type: ignore[attr-defined]
    assert done.choices[0].message.content == tokenizer.decode(expected, skip_special_tokens=True)


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_cuts_the_answer_wherever_its_tokens_end_and_frees_the_place(builtin: ServedFleet, stream: bool):
    ask: Any = {"model": "tiny", "prompt": "stop", "max_tokens": 400, "temperature": 0}
    whole = builtin.client().completions.create(**ask).choices[0].text
    stop = whole[90:93]  # three characters: at least as many tokens
    if stream:
        chunks = [
            one.choices[0] for one in builtin.client().completions.create(**ask, stop=["never", stop], stream=True)
        ]
        text, end = "".join(one.text for one in chunks), chunks[-1].finish_reason
    else:
        choice = builtin.client().completions.create(**ask, stop=stop).choices[0]
        text, end = choice.text, choice.finish_reason
    assert text == whole[: whole.index(stop)]
    assert end == "stop"
    builtin.until_idle()


def test_what_does_not_fit_the_model_is_refused_and_harms_no_worker(builtin: ServedFleet):
    client = builtin.client()
    for _ in range(4):
        with pytest.raises(openai.BadRequestError, match="token ids go from 0 to 258"):
            client.completions.create(model="tiny", prompt=[1, 40_000])
    with pytest.raises(openai.BadRequestError, match="the model's context is 512") as caught:
        client.completions.create(model="tiny", prompt="x" * 500, max_tokens=100)
    assert caught.value.code == "context_length_exceeded"
    assert [one["state"] for one in builtin.status()["workers"]] == ["active"]
    done = client.chat.completions.create(model="tiny", messages=CHAT, temperature=0)  # as long as the context allows
    assert done.usage is not None
    assert done.usage.total_tokens <= 512


def test_a_manager_that_serves_a_model_says_how_to_join_it_with_that_model(tmp_path: Path):
    model = save_tokenizer(tmp_path / "bytes")
    command = f"polyrl manager --run-dir {tmp_path / 'run'} --port 0 --serve {model}"
    with subprocess.Popen([sys.executable, "-m", *command.split()], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        said = [process.stdout.readline() for _ in range(2)]
        process.terminate()
    assert said[1].endswith(f" --token-file {tmp_path / 'run' / 'worker.token'} --engine builtin --model {model}\n")
