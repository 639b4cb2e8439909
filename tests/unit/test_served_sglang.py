"""An SGLang server as it is spoken to: events that a real one streamed, and its routes for weights on a stand-in."""

import asyncio
import base64
import math
import pickle
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from aiohttp import web
from aiohttp.test_utils import TestServer
from tests.unit.slices import Model, loader, state
from tests.weights.copies import copy_of

from polyrl.engines.engine import EngineError, Weights
from polyrl.engines.served import sglang, vllm
from polyrl.engines.served.between import SOCKET_VARIABLE
from polyrl.engines.served.http import Http
from polyrl.engines.served.inside import Rank, take
from polyrl.engines.served.server import AnswerPart, JobRefused, LabelSpan, ServedConfig, ServerBroken, ServerRequest
from polyrl.engines.served.sglang import SglangWeightLoading
from polyrl.ids import Version
from polyrl.wire.frames import Sampling

# Events


def recorded(name: str) -> list[bytes]:
    """What came after a heading of the recording."""
    text = (Path(__file__).parent / "recorded" / "sglang_events.txt").read_text()
    lines = text.split(f"### {name}\n")[1].partition("###")[0].splitlines()
    return [line.removeprefix("data: ").encode() for line in lines if line != "data: [DONE]"]


def parts(name: str) -> list[AnswerPart]:
    return [part for data in recorded(name) for part in sglang._parts(data)]


def test_tokens_and_their_log_probabilities_come_as_they_were_written_and_the_labels_with_the_end():
    first, second, last = parts("length")
    assert first == AnswerPart([387], [-1.7602205276489258])
    assert second == AnswerPart([126], [-2.7206504344940186])
    assert last == AnswerPart([74], [-2.8237202167510986], "length", [LabelSpan("default", 0, 3)])


def test_the_token_that_ends_an_answer_is_its_last():
    assert parts("stop") == [AnswerPart([387], [-1.7602202892303467], "stop", [LabelSpan("default", 0, 1)])]


def test_what_is_aborted_ends_without_the_token_of_its_last_event():
    *before, last = parts("abort")
    assert [list(part.tokens) for part in before] == [[12], [297], [341], [351, 49]]
    assert [len(part.logprobs) for part in before] == [1, 1, 1, 2]
    assert last == AnswerPart((), (), "aborted")


@pytest.mark.parametrize(
    ("name", "why"), [("too long", r"longer than the model's context length"), ("bad temperature", r"non-negative")]
)
def test_a_job_that_it_refuses_in_a_stream_is_refused_and_is_no_failure_of_the_server(name, why):
    with pytest.raises(JobRefused, match=why):
        parts(name)


@pytest.mark.parametrize(
    ("event", "expected", "why"),
    [
        ({"error": {"message": "out of memory", "code": 500}}, EngineError, "the server failed: out of memory"),
        ({"meta_info": {"finish_reason": {"type": "abort", "message": "no", "status_code": 400}}}, JobRefused, "^no$"),
        ({"meta_info": {"finish_reason": {"type": "tired"}}}, EngineError, "ended an answer with 'tired'"),
        ({"output_ids": "none"}, msgspec.ValidationError, "output_ids"),
    ],
    ids=["error", "refused", "unknown end", "no tokens"],
)
def test_what_goes_wrong_is_told_for_what_it_is(event, expected, why):
    with pytest.raises(expected, match=why) as failure:
        sglang._parts(msgspec.json.encode(event))
    assert failure.type is expected


def test_a_job_is_asked_for_in_the_words_of_the_server():
    sampling = Sampling(temperature=0.5, top_p=0.9, top_k=20, min_p=0.1, ignore_eos=True)
    asked = {
        "max_new_tokens": 8,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 20,
        "min_p": 0.1,
        "sampling_seed": 7,
        "ignore_eos": True,
        "stop_token_ids": [2, 3],
    }
    assert sglang._sampling(ServerRequest([5, 6], 8, 7, sampling, [2, 3])) == asked
    assert sglang._sampling(ServerRequest([5, 6], 8, 7, Sampling(), []))["top_k"] == -1  # all: 0 would be an error


# Weights


class WeightRoutes:
    """The routes that an install uses. Its ranks take a version as the real ones do, in threads."""

    def __init__(self, models: list[Model], *, fails: str = "") -> None:
        self._models, self._fails = models, fails
        self.socket_name = ""
        self.asked: list[tuple[str, Any]] = []

    @property
    def paths(self) -> list[str]:
        return [path for path, _ in self.asked]

    def body(self, wanted: str) -> Any:
        return next(body for path, body in self.asked if path == wanted)

    async def answer(self, request: web.Request) -> web.Response:
        self.asked.append((request.path, await request.json() if request.can_read_body else None))
        if request.path == self._fails:
            return web.json_response({"error": {"message": "it will not"}}, status=500)
        if request.path == "/update_weights_from_tensor":
            num = len(self._models)
            ranks = [(Rank(at, num, at, num), model) for at, model in enumerate(self._models)]
            loads = (
                asyncio.to_thread(take, self.socket_name, rank, model, loader(model, rank)) for rank, model in ranks
            )
            await asyncio.gather(*loads)
        return web.json_response({"tp_size": len(self._models)})


def play(routes: WeightRoutes, config: ServedConfig, script: Callable[[SglangWeightLoading], Awaitable[None]]) -> None:
    async def main() -> None:
        app = web.Application()
        app.router.add_route("*", "/{path}", routes.answer)
        async with TestServer(app) as server:
            http = Http(str(server.make_url("")))
            loading = SglangWeightLoading(http, config)
            routes.socket_name = loading.environment()[SOCKET_VARIABLE]
            try:
                await script(loading)
            finally:
                await http.close()

    asyncio.run(asyncio.wait_for(main(), 30.0))


async def install(loading: SglangWeightLoading, version: int) -> None:
    with copy_of(state(version), version) as copy:
        staged = await loading.stage(Weights(Version(version), copy=copy))
        await loading.pause()
        try:
            await loading.put(staged)
        finally:
            await loading.resume()


@pytest.mark.parametrize(
    ("after_install", "mode", "flag"), [("recompute", "retract", ""), ("keep", "in_place", "--disable-radix-cache")]
)
def test_an_install_asks_for_each_step_in_its_order_and_carries_no_tensors(after_install, mode, flag, tmp_path):
    models = [Model(2), Model(2)]
    routes = WeightRoutes(models)
    config = ServedConfig(model=str(tmp_path), after_install=after_install)

    async def script(loading: SglangWeightLoading) -> None:
        await install(loading, 3)
        update = routes.body("/update_weights_from_tensor")
        flags = loading.flags()
        assert update["load_format"] == flags[flags.index("--custom-weight-loader") + 1]
        assert [pickle.loads(base64.b64decode(one)) for one in update["serialized_named_tensors"]] == [[], []]
        assert update["flush_cache"] == (after_install == "recompute")
        assert flags[2:] == ([flag] if flag else [])

    play(routes, config, script)
    assert routes.paths == [
        "/server_info",
        "/pause_generation",
        "/begin_weight_update",
        "/update_weights_from_tensor",
        "/end_weight_update",
        "/update_weight_version",
        "/continue_generation",
    ]
    assert routes.body("/pause_generation") == {"mode": mode}
    assert routes.body("/update_weight_version") == {"new_version": "3", "abort_all_requests": False}
    table = torch.cat([one.embed_tokens.weight for one in models])
    assert torch.equal(table, state(3)["embed_tokens.weight"])


def test_a_version_that_does_not_fit_leaves_the_label_alone_and_the_update_ended(tmp_path):
    routes = WeightRoutes([Model(1, torch.bfloat16)])

    async def script(loading: SglangWeightLoading) -> None:
        with pytest.raises(EngineError, match="start it with --dtype float32") as failure:
            await install(loading, 1)
        assert not isinstance(failure.value, ServerBroken)

    play(routes, ServedConfig(model=str(tmp_path)), script)
    assert routes.paths[-2:] == ["/end_weight_update", "/continue_generation"]
    assert "/update_weight_version" not in routes.paths


@pytest.mark.parametrize(
    ("path", "why"),
    [("/end_weight_update", "could not be ended"), ("/update_weight_version", "in place, but not their label")],
)
def test_a_server_that_fails_once_the_weights_are_in_place_cannot_be_trusted(path, why, tmp_path):
    async def script(loading: SglangWeightLoading) -> None:
        with pytest.raises(ServerBroken, match=f"{why}.*it will not"):
            await install(loading, 1)

    play(WeightRoutes([Model(1)], fails=path), ServedConfig(model=str(tmp_path)), script)


def test_a_server_that_does_not_begin_an_update_keeps_its_weights(tmp_path):
    async def script(loading: SglangWeightLoading) -> None:
        with pytest.raises(EngineError, match="/begin_weight_update answered 500") as failure:
            await install(loading, 1)
        assert not isinstance(failure.value, ServerBroken)

    play(WeightRoutes([Model(1)], fails="/begin_weight_update"), ServedConfig(model=str(tmp_path)), script)


def test_a_log_probability_that_is_no_number_is_none_and_no_error():
    """JSON has no NaN: both servers write null where weights give none."""
    event = {"output_ids": [5], "meta_info": {"output_token_logprobs": [[None, 5, None]]}}
    (of_sglang,) = sglang._parts(msgspec.json.encode(event))
    choice = {"token_ids": [5], "logprobs": {"content": [{"logprob": None}]}}
    (of_vllm,) = vllm._parts(msgspec.json.encode({"choices": [choice]}))
    assert of_sglang.tokens == of_vllm.tokens == [5]
    assert math.isnan(of_sglang.logprobs[0]) and math.isnan(of_vllm.logprobs[0])
