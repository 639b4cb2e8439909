"""Getting a version into an engine: what is answered when it cannot be done."""

import asyncio

import pytest

from polyrl.engines.emulated import EmulatedConfig, EmulatedEngine
from polyrl.engines.engine import NotOfThisModel, Weights
from polyrl.wire import frames
from polyrl.worker.installing import Installer


class Failing(EmulatedEngine):
    async def install(self, weights: Weights) -> None:
        raise RuntimeError("out of memory\n  at 0x7f00\n")


def test_an_engine_that_fails_in_its_own_words_is_answered_in_a_line():
    async def script() -> None:
        answers: asyncio.Queue[frames.Installed | frames.InstallFailed] = asyncio.Queue()
        installer = Installer(Failing(EmulatedConfig()), 1.0, answers.put, pytest.fail)
        installer.start(frames.PullOrder(3, "", 0))
        assert await answers.get() == frames.InstallFailed(3, "RuntimeError: out of memory at 0x7f00")
        assert installer.version is None

    asyncio.run(script())


class OfAnotherModel(EmulatedEngine):
    async def install(self, weights: Weights) -> None:
        raise NotOfThisModel(f"version {weights.version} is not of this model")


def test_a_version_of_another_model_is_not_tried_again_and_no_other_is():
    async def script() -> None:
        answers: asyncio.Queue[frames.Installed | frames.InstallFailed] = asyncio.Queue()
        misfits: asyncio.Queue[str] = asyncio.Queue()
        installer = Installer(OfAnotherModel(EmulatedConfig()), 1.0, answers.put, misfits.put_nowait)
        installer.start(frames.PullOrder(3, "", 0))
        assert (await misfits.get()).startswith("version 3 is not of this model; the command with which")
        assert answers.empty()

    asyncio.run(script())
