"""Getting a version into an engine: what is answered when it cannot be done."""

import asyncio

from polyrl.engines.emulated import EmulatedConfig, EmulatedEngine
from polyrl.engines.engine import Weights
from polyrl.wire import frames
from polyrl.worker.installing import Installer


class Failing(EmulatedEngine):
    async def install(self, weights: Weights) -> None:
        raise RuntimeError("out of memory\n  at 0x7f00\n")


def test_an_engine_that_fails_in_its_own_words_is_answered_in_a_line():
    async def script() -> None:
        answers: asyncio.Queue[frames.Installed | frames.InstallFailed] = asyncio.Queue()
        installer = Installer(Failing(EmulatedConfig()), 1.0, answers.put)
        installer.start(frames.Pull(3, "", 0))
        assert await answers.get() == frames.InstallFailed(3, "RuntimeError: out of memory at 0x7f00")
        assert installer.version is None

    asyncio.run(script())
