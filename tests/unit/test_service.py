"""The manager's owner: frames and other matters are taken in their order, and a failure of ours ends it.

What fails is heard of, whenever it fails; a start that was cut short is made again.
"""

import asyncio
import os
import re
import threading
from pathlib import Path
from typing import Any

import pytest
from tests.unit.played import Line

import polyrl.manager
from polyrl.manager import asking, opening
from polyrl.manager.lobby import Lobby
from polyrl.manager.notes import RunOpened
from polyrl.manager.peers.link import Link
from polyrl.manager.service import Service
from polyrl.manager.settings import JournalSettings, ManagerSettings
from polyrl.manager.status import status

SETTINGS = ManagerSettings(journal=JournalSettings(fsync="never"))


class Ear:
    """Hears frames."""

    def __init__(self, *, is_urgent: bool = False) -> None:
        self.heard: list[bytes] = []
        self._is_urgent = is_urgent

    def hear(self, lobby: Lobby, session: Any, link: Link, raw: bytes) -> None:
        if raw == b"worst":
            raise LookupError("a failure of ours")
        self.heard.append(raw)
        lobby.is_urgent = self._is_urgent


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
            assert service.lobby.is_urgent  # a commit ends that
        await asyncio.sleep(0)
        assert ear.heard == [b"first", b"second", b"third"]
        assert not service.lobby.is_urgent

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


def open_for_asking(lobby: Lobby) -> None:
    opening.open_run_without_trainer(lobby, asking.config_of(SETTINGS))


def kill(service: Service) -> None:
    """Nothing that is not committed is written, and its directory is free."""
    service._journal.abandon()
    os.close(service._lock)


def published(service: Service) -> int:
    return service.lobby.need_run().desk.state.published


def test_a_manager_that_is_killed_between_the_header_and_the_first_event_publishes_when_it_is_started_again(
    tmp_path: Path,
) -> None:
    first = Service(tmp_path, SETTINGS)
    first.lobby.commit()
    open_for_asking(first.lobby)
    kill(first)
    again = Service(tmp_path, SETTINGS)
    assert published(again) == -1
    open_for_asking(again.lobby)
    assert published(again) == 0
    again.close()
    third = Service(tmp_path, SETTINGS)
    open_for_asking(third.lobby)
    assert published(third) == 0
    third.close()


def broken(run_dir: Path) -> Service:
    """Its disk goes away."""
    service = Service(run_dir, SETTINGS)
    payload = service._journal._payload
    assert payload is not None
    os.dup2(os.open("/dev/full", os.O_WRONLY), payload._file)
    service.lobby.journal.add_tokens(b"whatever")
    return service


def test_a_failure_before_the_owner_waits_is_raised_to_whoever_asked_and_by_the_owner(tmp_path: Path) -> None:
    async def scenario() -> None:
        service = broken(tmp_path)
        async with asyncio.timeout(5):
            for _ in range(2):
                with pytest.raises(OSError):
                    await service.call(open_for_asking)
            with pytest.raises(OSError):
                await service.own()

    asyncio.run(scenario())


def test_a_failure_while_the_owner_waits_is_raised_by_it(tmp_path: Path) -> None:
    async def scenario() -> None:
        service = Service(tmp_path, SETTINGS)
        owner = asyncio.create_task(service.own())
        await service.call(open_for_asking)

        def fail(_: Lobby) -> None:
            raise ZeroDivisionError

        service.post(fail)
        async with asyncio.timeout(5):
            with pytest.raises(ZeroDivisionError):
                await owner

    asyncio.run(scenario())


def test_a_manager_that_stops_waits_for_the_sync_that_is_under_way(tmp_path: Path) -> None:
    service = Service(tmp_path, SETTINGS)
    service.lobby.commit()
    sync = service._journal.take_sync()
    may_go, closed = threading.Event(), threading.Event()

    def slow_disk() -> None:
        may_go.wait(20.0)
        sync()

    def close() -> None:
        service.close()
        closed.set()

    syncing = service._syncing = service._syncer.submit(slow_disk)
    closing = threading.Thread(target=close)
    closing.start()
    assert not closed.wait(0.2)
    may_go.set()
    closing.join(20.0)
    assert closed.is_set()
    assert syncing.exception() is None, "its files were closed under it"


def test_a_trainer_whose_run_is_not_on_file_opens_it_again(tmp_path: Path) -> None:
    """The machine lost its power: the payload was on the disk, and the events were not."""
    first = Service(tmp_path, SETTINGS)
    first.lobby.journal.add_note(RunOpened("its session", has_reward=False))
    first.close()
    again = Service(tmp_path, SETTINGS)
    assert again.lobby.run is None
    assert opening.find_trainer(again.lobby, "its session") is None
    assert status(again.lobby, 0.0).trainer == "none"
    again.close()


def test_no_handler_touches_the_lobby() -> None:
    folder = Path(polyrl.manager.__file__).parent
    for path in (folder / "http.py", folder / "routes.py", *(folder / "serving").glob("*.py")):
        assert not re.search(r"service\.lobby\b", path.read_text(encoding="utf-8")), path.name
