"""Offering weights, when whoever waits for it is cancelled."""

import asyncio
import threading
from typing import Any, cast

from tests.trainer.small import save_small

from polyrl.trainer.model import Policy
from polyrl.trainer.publishing import Publishing


class SlowServer:
    """Still writes when it is left."""

    def __init__(self) -> None:
        self.started, self.goes_on = threading.Event(), threading.Event()
        self.is_done = False

    def publish(self, *_: Any, **__: Any) -> None:
        self.started.set()
        self.goes_on.wait(5.0)
        self.is_done = True


def test_who_is_cancelled_while_weights_are_copied_leaves_when_they_are(tmp_path):
    async def scenario() -> None:
        server = SlowServer()
        publishing = Publishing(Policy.load(str(save_small(tmp_path))), cast("Any", server), None)
        publish = asyncio.create_task(publishing.publish(1))
        await asyncio.to_thread(server.started.wait, 5.0)
        publish.cancel()
        await asyncio.sleep(0.01)
        assert not publish.done()
        server.goes_on.set()
        await asyncio.wait((publish,))
        assert publish.cancelled()
        assert server.is_done

    asyncio.run(scenario())
