"""PolyRL's host as the suite sees it: the front on a real port, asked over HTTP as clients of verifiers and OpenAI ask.

The policy behind it draws what the case says. What a fleet does with calls, and kills, are in tests/chaos.
"""

import asyncio
import json
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import aiohttp

from polyrl.hosts.episode import CallLimits, DrawnAnswer, Episode
from polyrl.hosts.front import HostFront, OpenEpisode, SessionTaken
from polyrl.wire.frames import Sampling
from tests.hosts.policies import text_model

from .adapter import CaseCall

_CONTEXT = 4096


class DrawnByCase(Episode):
    def __init__(self, name: str, draws: Iterator[list[int]]) -> None:
        super().__init__(name, index=0, seed=0, max_context=_CONTEXT, task=None)
        self._draws = draws
        self.calls: list[CaseCall] = []

    async def draw(self, prompt: Sequence[int], limits: CallLimits) -> DrawnAnswer:
        drawn = next(self._draws)
        self.calls.append(CaseCall(list(prompt), drawn))
        return DrawnAnswer(drawn, [-1.0] * len(drawn), "stop")


class PolyrlFront:
    def __init__(self, draws: list[list[int]]) -> None:
        self._draws = iter(draws)
        self._runner, self._stack = asyncio.Runner(), ExitStack()
        self._front = HostFront(max_context=_CONTEXT, text=text_model(), sampling=Sampling(temperature=1.0))
        self._open: dict[str, tuple[OpenEpisode, DrawnByCase]] = {}
        self._run(self._front.start())

    def open(self, session: str) -> bool:
        episode = DrawnByCase(f"1/{len(self._open)}", self._draws)
        try:
            opened = self._stack.enter_context(self._front.open(episode, session))
        except SessionTaken:
            return False
        self._open[session] = opened, episode
        return True

    def ask(self, session: str, saw: list[int], retry: int) -> list[int] | None:
        return self._run(self._ask(session, saw, retry))

    def close(self) -> dict[str, list[CaseCall]]:
        for opened, _ in self._open.values():
            opened.check()  # no request that was refused is an episode's that is open
        self._stack.close()
        self._run(self._front.close())
        self._runner.close()
        return {session: episode.calls for session, (_, episode) in self._open.items()}

    async def _ask(self, session: str, saw: list[int], retry: int) -> list[int] | None:
        body = {"model": "policy", "token_ids": saw, "sampling_params": {"logprobs": 1}}
        headers = {"x-stainless-retry-count": str(retry), **({"X-Session-ID": session} if session else {})}
        url = f"{self._front.url}/inference/v1/generate"
        async with (
            aiohttp.ClientSession() as client,
            client.post(url, data=json.dumps(body), headers=headers) as reply,
        ):
            if reply.status >= 500:
                raise AssertionError(await reply.text())
            return None if reply.status >= 400 else (await reply.json())["choices"][0]["token_ids"]

    def _run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self._runner.run(work)
