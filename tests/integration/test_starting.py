"""A manager that is started again has its port open while it reads its run: all hear how far it is, and wait."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
from tests.integration.live import (
    CONFIG,
    ENGINE,
    QUICK,
    Live,
    honest_worker,
    manager,
    play_round,
    run,
    trainer,
    until,
)

from polyrl.cli import dialing
from polyrl.engines.emulated import EmulatedEngine
from polyrl.manager.http import Front
from polyrl.manager.service import Service
from polyrl.wire.control import READ_HEADER, Status
from polyrl.wire.dial import Dialer, Patience, Starting, Unreachable
from polyrl.worker.agent import WorkerAgent, WorkerOptions


async def make_a_run(run_dir: Path) -> None:
    async with manager(run_dir) as live, honest_worker(live), trainer(live, CONFIG) as fleet:
        await fleet.publish(0)
        await play_round(fleet, 0)


@asynccontextmanager
async def starting(run_dir: Path) -> AsyncIterator[Live]:
    """Its port is open, and it has read nothing yet: `service.recover` is the test's to call."""
    service = Service(run_dir, QUICK, recovers=False)
    front = Front(service)
    address = await front.listen("127.0.0.1", 0, None)
    try:
        yield Live(service, address)
    finally:
        await front.close("the manager stops")
        service.close()


def test_every_request_and_stream_is_told_how_far_it_is_until_all_is_read(tmp_path: Path, capsys):
    async def scenario() -> None:
        await make_a_run(tmp_path)
        async with starting(tmp_path) as live, aiohttp.ClientSession(headers=live.headers("admin")) as http:
            for path in ("/v1/status", "/v1/health", "/v1/models", "/nothing"):
                async with http.get(live.url + path) as answer:
                    assert (answer.status, answer.headers["Retry-After"]) == (503, "1"), path
                    assert float(answer.headers[READ_HEADER]) == 0.0
                    assert "the manager starts again: 0% of its run is read" in await answer.text()
            async with Dialer(live.url, live.token("worker")) as dialer:
                with pytest.raises(Starting, match="starts again: 0% of its run is read"):
                    await dialer.stream("/v1/worker", "whatever", 1 << 20)
            worker = WorkerAgent(
                EmulatedEngine(ENGINE), Dialer(live.url, live.token("worker")), WorkerOptions("patient")
            )
            life = asyncio.create_task(worker.run())
            async with Dialer(live.url, live.token("admin")) as dialer:
                asked = asyncio.create_task(dialing.answer(dialer, "/v1/status", Status))
                await asyncio.sleep(0.3)
                assert not life.done()
                assert not asked.done()
                await asyncio.to_thread(live.service.recover)
                owner = asyncio.create_task(live.service.own())
                assert live.service.share_read is None
                assert (await asked).run == "open"
            await until(lambda: "patient" in live.service.lobby.workers, "it has joined")
            worker.drain("SIGTERM")
            assert (await life).ok
            owner.cancel()

    run(scenario(), timeout_s=60.0)
    assert "the manager starts again: 0% of its run is read" in capsys.readouterr().err


def test_nobody_gives_up_a_manager_that_reads_on():
    patience = Patience(0.0)
    assert not patience.is_over(Starting("10%", 0.1)) or patience.away_s > 0.0
    since = patience.since
    assert patience.is_over(Starting("10%", 0.1))
    assert patience.since == since, "it stands still"
    patience.is_over(Starting("11%", 0.11))
    assert patience.since > since
    assert patience.is_over(Unreachable("gone"))


def test_a_share_that_is_none_is_not_believed(tmp_path: Path):
    from polyrl.wire.dial import _share_in

    for said in ("nan", "-1", "2", "inf", "soon", ""):
        assert _share_in({READ_HEADER: said}) is None
    assert _share_in({}) is None
    assert _share_in({READ_HEADER: "0.25"}) == 0.25
