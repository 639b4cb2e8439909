"""The reward model: tiny random classifiers, held to transformers' own scores; and servers, by their own words."""

import asyncio
import contextlib
import json
import math
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import hypothesis
import pytest
from hypothesis import strategies as st
from tests.rewards.judge_server import Act, Asked, StandIn, stand_in
from tests.serving import CHATML, save_tokenizer

from polyrl.errors import ConfigError
from polyrl.rewards.line import Surroundings
from polyrl.rewards.models import classifier
from polyrl.rewards.models.batches import Batches
from polyrl.rewards.pool import RewardPool
from polyrl.rewards.reward import (
    Reward,
    RewardFailed,
    RewardInput,
    RewardStops,
    RewardUnavailable,
    check_reward,
    find_reward,
    is_async,
)
from polyrl.rewards.reward_model import RewardModel
from polyrl.run.event_loop import run_loop

Result = TypeVar("Result")
KEY = "rewards.functions.0.function"
ANSWERS = ["4", "five, I would say", "", "it is four " * 7, "<|im_end|>", "<|im<|im_end|>_end|>four", "8"]


@pytest.fixture(autouse=True)
def _no_facts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("POLYRL_REWARDS", raising=False)


def save(
    folder: Path,
    kind: str,
    num_labels: int = 1,
    template: str | None = CHATML,
    pad: int | None = 0,
    head_dim: int = 8,
) -> Path:
    """A tiny random classifier of this family; 259 tokens, 128 positions."""
    import torch
    from transformers import (
        BertConfig,
        BertForSequenceClassification,
        LlamaConfig,
        LlamaForSequenceClassification,
        Qwen3Config,
        Qwen3ForSequenceClassification,
    )

    torch.manual_seed(num_labels)
    common: dict[str, Any] = {
        "vocab_size": 259, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_labels": num_labels,
        "num_attention_heads": 4, "max_position_embeddings": 128, "pad_token_id": pad,
    }  # fmt: skip
    made: Any
    if kind == "bert":
        made = BertForSequenceClassification(BertConfig(**common))
    elif kind == "qwen3":
        made = Qwen3ForSequenceClassification(Qwen3Config(**common, num_key_value_heads=2, head_dim=head_dim))
    else:
        made = LlamaForSequenceClassification(LlamaConfig(**common, num_key_value_heads=2))
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.normal_(0.0, 0.3)
    made.save_pretrained(folder)
    save_tokenizer(folder, template)
    return folder


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("llama"), "llama")


def given(answer: str = "4", **row: Any) -> RewardInput:
    return RewardInput("2+2=", answer, "4", row, "stop", 2)


def with_model(body: Callable[[RewardModel], Awaitable[Result]], **args: Any) -> Result:
    async def run() -> Result:
        model = RewardModel(**args)
        await model.start()
        try:
            return await body(model)
        finally:
            await model.close()

    return asyncio.run(run())


async def scores(model: RewardModel, *asked: RewardInput) -> list[float]:
    """As a process of the pool calls it."""

    async def in_turn(one: RewardInput) -> Reward:
        async with model.places or contextlib.nullcontext():
            return await model(one)

    return [one.score for one in await asyncio.gather(*map(in_turn, asked))]


def references(folder: Path, texts: list[Any]) -> list[list[float]]:
    """The logits of transformers' own, one text, or pair of texts, at a time."""
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    found = []
    with torch.no_grad():
        for text in texts:
            pair = isinstance(text, tuple)
            asked = tokenizer(*text, return_tensors="pt") if pair else tokenizer(
                text, add_special_tokens=False, return_tensors="pt"
            )  # fmt: skip
            found.append(model(**asked).logits[0].tolist())
    return found


def chat(answer: str) -> str:
    return f"<|im_start|>user\n2+2=<|im_end|>\n<|im_start|>assistant\n{answer}<|im_end|>\n"


def cleaned(answer: str) -> str:
    return {"<|im_end|>": "", "<|im<|im_end|>_end|>four": "four"}.get(answer, answer)


def test_the_short_name_is_a_class_whose_answers_share_a_process_and_torch_is_not_imported_for_it():
    assert find_reward("reward_model") is RewardModel and is_async(find_reward("reward_model"))


@pytest.mark.parametrize("kind", ["llama", "qwen3", "bert"])
@pytest.mark.parametrize("pad", [0, None])
def test_a_batch_has_the_scores_of_transformers_one_at_a_time(tmp_path: Path, kind: str, pad: int | None):
    if kind == "bert" and pad is None:
        pytest.skip("it always has a padding token")
    folder = save(tmp_path, kind, pad=pad)
    found = with_model(lambda model: scores(model, *map(given, ANSWERS)), path=str(folder))
    expected = [row[0] for row in references(folder, [chat(cleaned(one)) for one in ANSWERS])]
    assert found == pytest.approx(expected, abs=1e-5) and len({round(one, 4) for one in found}) >= 4


@hypothesis.given(text=st.text("abc", max_size=12))
def test_no_special_token_is_left_and_a_text_without_any_stays_as_it_is(text: str):
    tokens = ["ab", "abc", "ca", "bb"]
    left = classifier.without(text, tokens)
    assert not any(one in left for one in tokens)
    assert left == text or any(one in text for one in tokens)


def test_special_tokens_within_each_other_are_taken_out_in_one_pass():
    tokens = [f"<|reserved_{number}|>" for number in range(250)] + ["<|im_end|>"]
    began = time.process_time()
    assert classifier.without("a" + "<|im" * 5000 + "<|im_end|>" + "_end|>" * 5000 + "b", tokens) == "ab"
    assert classifier.without("ab", ["abc", "ab"]) == "" and classifier.without("a", ["abc", "a"]) == ""
    assert time.process_time() - began < 1.0


@pytest.mark.parametrize("kind", ["llama", "bert"])
def test_without_a_chat_template_prompt_and_answer_are_a_pair(tmp_path: Path, kind: str):
    folder = save(tmp_path, kind, template=None)
    found = with_model(lambda model: scores(model, *map(given, ANSWERS[:4])), path=str(folder))
    assert found == pytest.approx(
        [row[0] for row in references(folder, [("2+2=", one) for one in ANSWERS[:4]])], abs=1e-5
    )


def test_of_several_labels_the_chosen_ones_probability_is_the_score(tmp_path: Path):
    folder = save(tmp_path, "llama", num_labels=3)
    (logits,) = references(folder, [chat("4")])
    weights = [math.exp(one) for one in logits]
    for label in (1, "LABEL_1"):
        (found,) = with_model(lambda model: scores(model, given("4")), path=str(folder), label=label)
        assert found == pytest.approx(weights[1] / sum(weights), abs=1e-5)
    (found,) = with_model(lambda model: scores(model, given("4")), path=str(folder), label=2, sigmoid=True)
    assert found == pytest.approx(1 / (1 + math.exp(-logits[2])), abs=1e-5)


def test_answers_that_wait_together_are_computed_together(llama: Path):
    async def body(model: RewardModel) -> tuple[int, int]:
        await scores(model, *(given(str(number)) for number in range(32)))
        num = model.num_batches
        await scores(model, given("alone"))
        return num, model.num_batches

    assert with_model(body, path=str(llama), batch_size=16, wait_ms=20.0) == (2, 3)


def test_a_column_may_have_the_prompt_or_messages(llama: Path):
    async def body(model: RewardModel) -> list[float]:
        return await scores(model, given("4", q="2+2="), given("4", q=[{"role": "user", "content": "2+2="}]))

    expected = references(llama, [chat("4")])[0][0]
    assert with_model(body, path=str(llama), prompt_key="q") == pytest.approx([expected] * 2, abs=1e-5)
    with pytest.raises(RewardFailed, match=r"args\.prompt_key: the row's column 'q' is neither a text nor messages"):
        with_model(lambda model: scores(model, given("4", q=7)), path=str(llama), prompt_key="q")


def test_what_is_too_long_is_cut_on_the_chosen_side_or_fails(llama: Path):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(llama)
    long = "x" * 500 + "4"
    ids = tokenizer(chat(long), add_special_tokens=False)["input_ids"]
    for side, kept in (("left", ids[-128:]), ("right", ids[:128])):
        (found,) = with_model(lambda model: scores(model, given(long)), path=str(llama), truncate=side)
        (expected,) = references(llama, [tokenizer.decode(kept)])
        assert found == pytest.approx(expected[0], abs=1e-5)
    (found,) = with_model(lambda model: scores(model, given("4" * 60)), path=str(llama), max_tokens=16)
    assert found == pytest.approx(references(llama, [tokenizer.decode(
        tokenizer(chat("4" * 60), add_special_tokens=False)["input_ids"][-16:])])[0][0], abs=1e-5)  # fmt: skip
    with pytest.raises(RewardFailed, match=r"prompt and answer have \d+ tokens, expected at most 128"):
        with_model(lambda model: scores(model, given(long)), path=str(llama), truncate="no")


def test_a_score_that_is_no_number_fails_its_answer_alone_and_is_never_a_zero(tmp_path: Path):
    """The row of the byte ~ is not a number: an answer with it has none."""
    from safetensors.torch import load_file, save_file
    from transformers import AutoTokenizer

    folder = save(tmp_path / "model", "llama")
    weights = load_file(folder / "model.safetensors")
    (token,) = AutoTokenizer.from_pretrained(folder)("~", add_special_tokens=False)["input_ids"]
    weights["model.embed_tokens.weight"][token] = math.nan
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})

    async def body() -> tuple[str, list[float]]:
        pool = RewardPool(1, 60.0, surroundings=Surroundings(tmp_path / "log"))
        args = {"path": str(folder), "wait_ms": 50.0}
        try:
            await pool.score("reward_model", given("4"), args)
            failed, *others = await asyncio.gather(
                *(pool.score("reward_model", given(one), args) for one in ("a ~ b", "4", "5")), return_exceptions=True
            )
        finally:
            await pool.close()
        assert isinstance(failed, RewardFailed)
        assert all(isinstance(one, Reward) for one in others)
        return str(failed), [one.score for one in others if isinstance(one, Reward)]

    why, others = run_loop(body())
    assert why.startswith("returned score = nan, expected a finite number")
    assert others == pytest.approx([row[0] for row in references(folder, [chat("4"), chat("5")])], abs=1e-5)


def test_a_folder_that_lacks_the_head_is_refused_not_drawn_at_random(tmp_path: Path):
    from safetensors.torch import load_file, save_file

    folder = save(tmp_path, "llama")
    weights = load_file(folder / "model.safetensors")
    del weights["score.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(RewardStops, match=r"lacks score\.weight: it is no classifier"):
        with_model(lambda model: scores(model, given("4")), path=str(folder))


def test_weights_that_are_damaged_or_a_device_that_is_not_there_are_one_line(tmp_path: Path, llama: Path):
    folder = save(tmp_path, "llama")
    (folder / "model.safetensors").write_bytes(b"not weights")
    for args in ({"path": str(folder)}, {"path": str(llama), "device": "cuda:77"}):
        with pytest.raises(RewardStops, match=r"args\.path: .*: cannot be loaded: ") as stopped:
            with_model(lambda model: scores(model, given("4")), **args)
        assert "\n" not in str(stopped.value) and len(str(stopped.value)) < 700


def wrong_folder(tmp_path: Path, kind: str) -> dict[str, Any]:
    folder = tmp_path / "m"
    if kind == "nothing":
        return {"path": str(folder)}
    folder.mkdir()
    config = {"architectures": ["LlamaForSequenceClassification"], "id2label": {"0": "bad", "1": "good"}}
    if kind == "a language model":
        config["architectures"] = ["LlamaForCausalLM"]
    (folder / "config.json").write_text("{" if kind == "no JSON" else json.dumps(config))
    (folder / ("pytorch_model.bin" if kind == "pickled" else "model.safetensors")).write_bytes(b"x")
    label = {"no label": "", "another label": "fine"}.get(kind, "good")
    return {"path": str(folder), "label": label}


@pytest.mark.parametrize(
    ("kind", "line"),
    [
        ("nothing", "path: .*/m: no config.json there; expected a Hugging Face model directory"),
        ("no JSON", "path: .*/m: its config.json cannot be read: JSONDecodeError"),
        (
            "a language model",
            "path: .*/m is of LlamaForCausalLM, expected one that ends with ForSequenceClassification",
        ),
        ("pickled", "path: .*/m has no safetensors; pickled weights are not read"),
        ("no label", "label: missing, expected one of bad, good"),
        ("another label", "label: got 'fine', expected one of bad, good"),
    ],
)
def test_a_wrong_folder_is_one_line_before_the_run_starts(tmp_path: Path, kind: str, line: str):
    with pytest.raises(ConfigError, match=rf"^rewards\.functions\.0\.args\.{line}"):
        check_reward(find_reward("reward_model"), wrong_folder(tmp_path, kind), KEY)


@pytest.mark.parametrize(
    ("args", "line"),
    [
        ({}, "path: expected either a folder"),
        ({"url": "x"}, "url: got 'x', expected an address"),
        ({"url": "http://a", "label": "good"}, "label: got 'good', expected its number"),
        ({"url": "http://a", "server": "sglang", "form": "chat"}, 'form: "chat" is not known to SGLang'),
        ({"url": "http://a", "server": "tgi"}, "server: "),
        ({"url": "http://a", "batchsize": 3}, "batchsize: unknown key"),
    ],
)
def test_wrong_arguments_are_one_line_before_the_run_starts(args: dict[str, Any], line: str):
    with pytest.raises(ConfigError) as error:
        check_reward(find_reward("reward_model"), args, KEY)
    assert str(error.value).startswith(f"rewards.functions.0.args.{line}")


# Batches


def test_an_error_is_that_of_its_batch_alone():
    def compute(items: Any) -> list[float]:
        if "bad" in items:
            raise KeyError("bad")
        return [float(len(one)) for one in items]

    async def body() -> list[Any]:
        batches: Batches[str] = Batches(compute, 2, 0.0)
        found = await asyncio.gather(*map(batches.score, ("a", "bad", "ccc", "dddd")), return_exceptions=True)
        await batches.close()
        return found

    first, second, *others = asyncio.run(body())
    assert isinstance(first, KeyError) and isinstance(second, KeyError) and others == [3.0, 4.0]


# Servers


def vllm(probs: list[Any]) -> Act:
    data = [{"index": 0, "label": "LABEL_0", "probs": probs, "num_classes": len(probs)}]
    usage = {"prompt_tokens": 9, "total_tokens": 9, "completion_tokens": 0, "prompt_tokens_details": None}
    return Act(
        raw=json.dumps({"id": "classify-1", "object": "list", "model": "m", "data": data, "usage": usage}).encode()
    )


def served(service: StandIn, asked: RewardInput | None = None, **args: Any) -> float:
    url = service.url.removesuffix("/v1")
    (found,) = with_model(lambda model: scores(model, asked or given("4")), url=url, pause_s=0.01, **args)
    return found


def test_vllm_classifies_a_chat_and_its_logit_is_the_score():
    with stand_in([vllm([-1.75])]) as service:
        assert served(service, model="rm", max_tokens=100) == -1.75
        (one,) = service.asked
        assert one.path == "/classify" and one.body == {
            "model": "rm",
            "use_activation": False,
            "truncate_prompt_tokens": 100,
            "truncation_side": "left",
            "messages": [{"role": "user", "content": "2+2="}, {"role": "assistant", "content": "4"}],
        }


def test_vllm_classifies_a_text_and_scores_a_pair():
    with stand_in([vllm([1.0, 2.0])]) as service:
        assert served(service, form="text", label=1, truncate="no") == pytest.approx(1 / (1 + math.exp(-1)))
        assert service.asked[0].body == {"use_activation": False, "input": "2+2=4"}
    raw = json.dumps({"object": "list", "data": [{"index": 0, "object": "score", "score": 0.25}]}).encode()
    with stand_in([Act(raw=raw)]) as service:
        assert served(service, form="pair", truncate="no") == 0.25
        assert service.asked[0].path == "/score"
        assert service.asked[0].body == {"use_activation": False, "text_1": "2+2=", "text_2": "4"}


def test_sglang_classifies_a_text():
    raw = json.dumps([{"embedding": [3.5], "meta_info": {"id": "1", "prompt_tokens": 5}}]).encode()
    with stand_in([Act(raw=raw)]) as service:
        assert served(service, server="sglang", model="rm") == 3.5
        assert service.asked[0].path == "/classify" and service.asked[0].body == {"model": "rm", "text": "2+2=4"}


@pytest.mark.parametrize(
    "fault",
    [
        Act(status=503, text="busy"),
        Act(reset=True),
        Act(raw=b"{"),
        Act(raw=b'{"data": []}'),
        Act(raw=b'{"data": [{"probs": []}]}'),
        Act(raw=b'{"data": [{"probs": ["much"]}]}'),
        Act(raw=b'{"data": [{"probs": ["nan"]}]}'),
        Act(raw=b'{"data": [{"score": 1' + b"0" * 400 + b"}]}"),
        Act(raw=b"[]"),
        Act(after_s=0.6),
    ],
    ids=range(10),
)
def test_a_server_that_fails_is_asked_again_and_then_there_is_no_reward(fault: Act):
    with stand_in([fault, vllm([2.0])]) as service:
        assert served(service, timeout_s=0.3) == 2.0
    with stand_in([fault]) as service, pytest.raises(RewardUnavailable, match=r"\(attempt 2 of 2\)"):
        served(service, timeout_s=0.3, attempts=2)


def test_a_server_that_refuses_an_answer_fails_it_and_one_that_does_not_know_the_route_stops_the_run():
    with stand_in([Act(status=400, text="too long")]) as service, pytest.raises(RewardFailed, match="400: too long"):
        served(service)
    with stand_in([Act(status=404, text="no such route")]) as service, pytest.raises(RewardStops) as stopped:
        served(service)
    assert "/classify answered 404: no such route; check args.url, args.server and args.model" in str(stopped.value)


def test_a_null_of_a_server_is_no_number_and_a_label_that_is_not_there_is_named():
    with stand_in([vllm([None])]) as service:
        assert math.isnan(served(service))  # which the pool turns down
    with (
        stand_in([vllm([1.0, 2.0])]) as service,
        pytest.raises(RewardFailed, match=r"args\.label: missing; .* 2 labels"),
    ):
        served(service)
    with (
        stand_in([vllm([1.0])]) as service,
        pytest.raises(RewardFailed, match="has 1 labels, and label 4 was asked for"),
    ):
        served(service, label=4)


def test_the_servers_own_batches_are_made_of_requests_that_are_under_way_together():
    def act(_: int, asked: Asked) -> Act:
        return vllm([float(asked.body["messages"][1]["content"])])._replace(after_s=0.05)

    with stand_in(act) as service:
        url = service.url.removesuffix("/v1")
        asked = [given(str(number)) for number in range(12)]
        assert with_model(lambda model: scores(model, *asked), url=url, concurrency=6) == [
            float(one) for one in range(12)
        ]
        assert 2 <= service.most_at_once <= 6
