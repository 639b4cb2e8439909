"""Harnesses that know a base URL and nothing else, with tools, through a real manager, worker and host."""

import asyncio
import json
import re
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import openai
import pytest
from tests.hosts.policies import HERMES, IM_END, text_model
from tests.integration.live import Live, is_connected, manager, play_round, run, trainer, until

from polyrl.client import Group, Prompt
from polyrl.engines.engine import Capabilities, EngineInfo, EngineStats, Job, Sink, Weights
from polyrl.hosts.agent import HostAgent, HostOptions
from polyrl.hosts.front import HostFront
from polyrl.hosts.own import HostParts, OwnEnvironment, Turn
from polyrl.ids import HostName, LeaseId, Version
from polyrl.scheduling.core.parameters import DomainData, FleetRules, RoundsConfig, SchedulerConfig
from polyrl.wire.control import AnswerRules
from polyrl.wire.dial import Dialer
from polyrl.worker.agent import WorkerAgent, WorkerOptions

CONFIG = SchedulerConfig(
    domains=(DomainData(name="d", prompts_per_step=2, num_prompts=50, environment="agent"),),
    max_new_tokens=512,
    rounds=RoundsConfig(samples_per_prompt=4),
    fleet_rules=FleetRules(heartbeat_timeout_s=3.0),
)
MODEL = AnswerRules(vocab=259, end_ids=(IM_END,), max_context=4096)
ADD: Any = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
    },
}


class WritingEngine:
    """A policy of bytes that can read: it calls the tool for a sum, and answers with the tool's result."""

    def __init__(self) -> None:
        self._text = text_model(HERMES)
        self._version: Version | None = None
        self._sink: Sink | None = None
        self._waiting: dict[LeaseId, asyncio.TimerHandle] = {}

    async def start(self, sink: Sink) -> EngineInfo:
        self._sink = sink
        able = Capabilities(seeds_survive_moves=True, keeps_running_over_install=True, stop_strings=False)
        return EngineInfo("writing", "none", 8, 0, able)

    def generate(self, job: Job) -> None:
        self._waiting[job.lease] = asyncio.get_running_loop().call_later(0.02, self._write, job)

    def _write(self, job: Job) -> None:
        assert self._sink is not None and self._version is not None
        prompt = self._text.decode(job.prompt, special=True)
        if "<|im_start|>tool\n" in prompt:
            answer = prompt.rsplit("<|im_start|>tool\n", 1)[1].partition("<|im_end|>")[0]
        else:
            first, second = re.findall(r"What is (\d+) \+ (\d+)", prompt)[-1]
            call = json.dumps({"name": "add", "arguments": {"a": int(first), "b": int(second)}})
            answer = f"<tool_call>\n{call}\n</tool_call>"
        tokens = [*self._text.encode(answer), IM_END]
        self._sink.tokens(job.lease, tokens, [-0.5] * len(tokens), self._version)
        self._sink.ended(job.lease, "stop")

    async def abort(self, lease: LeaseId) -> None:
        if lease in self._waiting:
            self._waiting.pop(lease).cancel()

    async def install(self, weights: Weights) -> None:
        self._version = weights.version

    def stats(self) -> EngineStats:
        return EngineStats(0, 0, 8, 0.0, 0)

    def health(self) -> str | None:
        return None

    async def close(self) -> None:
        for handle in self._waiting.values():
            handle.cancel()


class OpenAIAgent:
    """Asks, runs the tools, asks again: as people write it with OpenAI's client."""

    async def play(self, base_url: str, task: dict[str, Any], seed: int) -> Turn:
        first, second = task["first"], task["second"]
        messages: list[Any] = [{"role": "user", "content": f"What is {first} + {second}?"}]
        num_calls = 0
        async with openai.AsyncOpenAI(base_url=base_url, api_key="none") as client:
            while True:
                reply = await client.chat.completions.create(model="policy", messages=messages, tools=[ADD])
                message = reply.choices[0].message
                messages.append(message)
                if not message.tool_calls:
                    break
                for call in message.tool_calls:
                    assert call.type == "function"
                    given = json.loads(call.function.arguments)
                    result = {"role": "tool", "tool_call_id": call.id, "content": str(given["a"] + given["b"])}
                    messages.append(result)
                    num_calls += 1
        is_right = message.content == str(first + second)
        return Turn(reward=float(is_right), parts={"tool_calls": float(num_calls)})


class PlainAgent:
    """The same with nothing but HTTP, and code that waits."""

    def play(self, base_url: str, task: dict[str, Any], seed: int) -> Turn:
        first, second = task["first"], task["second"]
        messages: list[Any] = [{"role": "user", "content": f"What is {first} + {second}?"}]
        (call,) = self._ask(base_url, messages)["tool_calls"]
        given = json.loads(call["function"]["arguments"])
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": str(given["a"] + given["b"])})
        last = self._ask(base_url, messages)
        return Turn(reward=float(last["content"] == str(first + second)), parts={"tool_calls": 1.0})

    def _ask(self, base_url: str, messages: list[Any]) -> dict[str, Any]:
        body = json.dumps({"model": "policy", "messages": messages, "tools": [ADD]}).encode()
        request = urllib.request.Request(
            f"{base_url}/chat/completions", body, {"Content-Type": "application/json", "Authorization": "Bearer none"}
        )
        with urllib.request.urlopen(request, timeout=30) as reply:
            message = json.load(reply)["choices"][0]["message"]
        messages.append(message)
        return message


def prompt_of(domain: int, prompt: int, epoch: int) -> Prompt:
    return Prompt([], task=msgspec.json.encode({"first": 10 + prompt, "second": 7}))


@asynccontextmanager
async def worker(live: Live, name: str) -> AsyncIterator[None]:
    agent = WorkerAgent(WritingEngine(), Dialer(live.url, live.token("worker")), WorkerOptions(name))
    life = asyncio.create_task(agent.run())
    try:
        await until(lambda: is_connected(live, name), f"{name} is connected")
        yield
    finally:
        life.cancel()
        await asyncio.wait([life])


@asynccontextmanager
async def host(live: Live, make: Any) -> AsyncIterator[None]:
    text = text_model(HERMES)
    front = HostFront(max_context=4096, text=text)
    await front.start()
    environment = OwnEnvironment(make, HostParts(front, text), name="agent")
    agent = HostAgent(environment, Dialer(live.url, live.token("host")), HostOptions("h0"))
    life = asyncio.create_task(agent.run())
    try:
        await until(lambda: HostName("h0") in live.service.lobby.hosts, "the host joined")
        yield
    finally:
        life.cancel()
        await asyncio.wait([life])
        await front.close()


def check(groups: list[Group]) -> None:
    text = text_model(HERMES)
    assert [len(group.samples) for group in groups] == [4, 4]
    for group in groups:
        answer = str(10 + group.origin.prompt + 7)
        for sample in group.samples:
            assert (sample.reward, sample.parts) == (1.0, {"tool_calls": 1.0, "turns": 2.0})
            first, second = sample.calls
            old = [*first.prompt.tolist(), *sample.tokens[first.start : first.end].tolist()]
            assert second.prompt.tolist()[: len(old)] == old  # what was drawn stays as it was drawn
            given = text.decode(second.prompt.tolist()[len(old) :], special=True)
            assert given == f"\n<|im_start|>tool\n{answer}<|im_end|>\n<|im_start|>assistant\n"
            assert sample.tokens[second.start : second.end].tolist() == [*text.encode(answer), IM_END]


@pytest.mark.parametrize("make", [OpenAIAgent, PlainAgent])
def test_a_harness_that_knows_only_a_base_url_drives_episodes_with_tools_through_the_fleet(make: Any, tmp_path: Path):
    async def scenario() -> None:
        async with (
            manager(tmp_path) as live,
            trainer(live, CONFIG, prompts=prompt_of, answers=MODEL) as fleet,
            worker(live, "w0"),
            host(live, make),
        ):
            await fleet.publish(0)
            check(await play_round(fleet, 0))
            ledger = live.service.lobby.need_run().scheduler.ledger
            assert (ledger.num_calls, ledger.episodes_ended) == (16, {"scored": 8})

    run(scenario(), 60.0)


def test_the_openai_client_waits_while_there_is_no_worker_and_hears_nothing_of_it(tmp_path: Path):
    async def scenario() -> None:
        async with (
            manager(tmp_path) as live,
            trainer(live, CONFIG, prompts=prompt_of, answers=MODEL) as fleet,
            host(live, OpenAIAgent),
        ):
            await fleet.publish(0)
            round_ = asyncio.create_task(play_round(fleet, 0))
            ledger = lambda: live.service.lobby.need_run().scheduler.ledger  # noqa: E731
            async with worker(live, "mortal"):
                await until(lambda: ledger().num_calls >= 3, "some calls were made")
            await asyncio.sleep(0.3)
            async with worker(live, "second"):
                check(await round_)
            assert ledger().episodes_ended == {"scored": 8}

    run(scenario(), 60.0)
