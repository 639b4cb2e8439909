"""Play an environment by its name, against a policy that was written down."""

import asyncio
import importlib.util
from typing import Any

import pytest
from tests.hosts.policies import HERMES, PlayedByHand, text_model

from polyrl.hosts.episode import EpisodeEnd
from polyrl.hosts.front import HostFront
from polyrl.hosts.own import HostParts
from polyrl.hosts.registry import find_environment
from polyrl.hosts.texts import ModelText

CONTEXT = 20_000


def needs(package: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(importlib.util.find_spec(package) is None, reason=f"{package} is not installed")


class Played:
    """An environment that has started, and what was played in it."""

    def __init__(self, name: str, args: dict[str, Any], text: ModelText | None = None, **parts: Any) -> None:
        self.text = text_model(HERMES, max_context=CONTEXT) if text is None else text
        self._front = HostFront(max_context=CONTEXT, text=self.text)
        self._name, self._args, self._parts = name, args, parts
        self.environment: Any = None

    async def __aenter__(self) -> "Played":
        await self._front.start()
        parts = HostParts(self._front, self.text, **self._parts)
        self.environment = find_environment(self._name, self._args, parts)
        await self.environment.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.environment.close()
        await self._front.close()

    async def play(self, answers: Any, **known: Any) -> tuple[EpisodeEnd, PlayedByHand]:
        episode = PlayedByHand(self.text, answers, max_context=CONTEXT, **known)
        return await self.environment.play(episode), episode


def play(name: str, args: dict[str, Any], answers: Any, **known: Any) -> tuple[EpisodeEnd, PlayedByHand]:
    async def run() -> tuple[EpisodeEnd, PlayedByHand]:
        async with Played(name, args) as one:
            return await one.play(answers, **known)

    return asyncio.run(run())
