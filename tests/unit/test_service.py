"""The manager's owner: frames and other matters are taken in their order, and a failure of ours ends it."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from tests.unit.test_payload import Line

from polyrl.manager.executor import Executor
from polyrl.manager.link import Link
from polyrl.manager.service import Service
from polyrl.manager.settings import JournalSettings, ManagerSettings

SETTINGS = ManagerSettings(journal=JournalSettings(fsync="never"))


class Ear:
    """Hears frames."""

    def __init__(self, *, is_urgent: bool = False) -> None:
        self.heard: list[bytes] = []
        self._is_urgent = is_urgent

    def hear(self, executor: Executor, session: Any, link: Link, raw: bytes) -> None:
        if raw == b"worst":
            raise LookupError("a failure of ours")
        self.heard.append(raw)
        executor.is_urgent = self._is_urgent


@pytest.fixture
def service(tmp_path: Path):
    made = Service(tmp_path, SETTINGS)
    yield made
    made.close()


def test_a_frame_is_heard_where_it_is_read(service: Service) -> None:
    ear = Ear()

    async def live() -> None:
        assert service.hear(ear.hear, None, Line(), b"first")
        assert ear.heard == [b"first"]

    asyncio.run(live())


def test_a_frame_is_heard_after_what_is_due_before_it(service: Service) -> None:
    ear = Ear()

    async def live() -> None:
        service.post(lambda _: ear.heard.append(b"posted"))
        for raw in (b"first", b"second"):
            assert service.hear(ear.hear, None, Line(), raw)
        assert ear.heard == []
        await asyncio.sleep(0)
        assert ear.heard == [b"posted", b"first", b"second"]

    asyncio.run(live())


def test_what_is_urgent_is_told_with_what_is_read_beside_it(service: Service) -> None:
    ear = Ear(is_urgent=True)

    async def live() -> None:
        for raw in (b"first", b"second", b"third"):
            service.hear(ear.hear, None, Line(), raw)
            assert service.executor.is_urgent  # a commit ends that
        await asyncio.sleep(0)
        assert ear.heard == [b"first", b"second", b"third"]
        assert not service.executor.is_urgent

    asyncio.run(live())


def test_nothing_is_heard_after_a_failure_of_ours(service: Service) -> None:
    ear = Ear()

    async def live() -> None:
        owner = asyncio.create_task(service.own())
        await asyncio.sleep(0)
        for raw in (b"first", b"worst", b"last"):
            assert service.hear(ear.hear, None, Line(), raw)
        with pytest.raises(LookupError):
            await owner
        assert ear.heard == [b"first"]

    asyncio.run(live())
