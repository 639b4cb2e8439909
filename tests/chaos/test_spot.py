"""Real worker processes that get notice from imitations of clouds on loopback, and by signals: they leave in time."""

import asyncio
import os
import signal
import sys
import time
from asyncio.subprocess import Process
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from email.utils import format_datetime
from pathlib import Path

import pytest
from aiohttp import web
from tests.integration.live import Live, honest_worker, manager, play_round, run, trainer, until

from polyrl.ids import WorkerName
from polyrl.worker.spot import watching

ENGINE = ("slots=8", "tokens_per_s=1", "median_tokens=60", "sigma=0.1")
NOTICE_S = 9.0
NAME = WorkerName("spot")

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(120)]


class Cloud:
    """The documented answers of three metadata services, on loopback."""

    def __init__(self) -> None:
        self.goes_at: float | None = None
        self.asked: list[str] = []
        self.token = "a-token"

    def routes(self) -> list[web.RouteDef]:
        return [
            web.put("/latest/api/token", self._token),
            web.get("/latest/meta-data/spot/instance-action", self._action),
            web.get("/latest/meta-data/events/recommendations/rebalance", self._rebalance),
            web.get("/computeMetadata/v1/instance/preempted", self._preempted),
            web.get("/computeMetadata/v1/instance/maintenance-event", self._maintenance),
            web.get("/metadata/instance/compute/name", self._name),
            web.get("/metadata/scheduledevents", self._events),
        ]

    async def _token(self, request: web.Request) -> web.Response:
        assert 1 <= int(request.headers["X-aws-ec2-metadata-token-ttl-seconds"]) <= 21600
        return web.Response(text=self.token)

    def _is_known(self, request: web.Request) -> bool:
        self.asked.append(request.path)
        return request.headers.get("X-aws-ec2-metadata-token") == self.token

    async def _action(self, request: web.Request) -> web.Response:
        if not self._is_known(request):
            return web.Response(status=401)
        if self.goes_at is None:
            return web.Response(status=404)
        at = datetime.fromtimestamp(self.goes_at, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        return web.json_response({"action": "terminate", "time": at})

    async def _rebalance(self, request: web.Request) -> web.Response:
        return web.json_response({"noticeTime": "2026-01-01T00:00:00Z"}) if self._is_known(request) else web.Response()

    async def _preempted(self, request: web.Request) -> web.Response:
        assert request.headers["Metadata-Flavor"] == "Google"
        self.asked.append(request.path)
        return web.Response(text="TRUE" if self.goes_at else "FALSE", headers={"Metadata-Flavor": "Google"})

    async def _maintenance(self, request: web.Request) -> web.Response:
        return web.Response(text="NONE", headers={"Metadata-Flavor": "Google"})

    async def _name(self, request: web.Request) -> web.Response:
        assert request.headers["Metadata"] == "true"
        return web.Response(text="gpu-1")

    async def _events(self, request: web.Request) -> web.Response:
        assert request.headers["Metadata"] == "true"
        self.asked.append(request.path)
        if self.goes_at is None:
            return web.json_response({"DocumentIncarnation": 1, "Events": []})
        at = format_datetime(datetime.fromtimestamp(self.goes_at, UTC), usegmt=True)
        event = {"EventId": "1", "EventType": "Preempt", "Resources": ["gpu-1"], "EventStatus": "Scheduled"}
        return web.json_response({"DocumentIncarnation": 2, "Events": [{**event, "NotBefore": at}]})


@asynccontextmanager
async def served(routes: list[web.RouteDef]) -> AsyncIterator[str]:
    application = web.Application()
    application.add_routes(routes)
    runner = web.AppRunner(application, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield site.name
    finally:
        await runner.cleanup()


@asynccontextmanager
async def worker(live: Live, folder: Path, *options: str, **environment: str) -> AsyncIterator[Process]:
    token = str(live.service.run_dir / "worker.token")
    argv = ("-m", "polyrl", "worker", "--join", live.url, "--token-file", token, "--name", NAME, *options, *ENGINE)
    with (folder / "worker.log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            sys.executable, *argv, stdout=log, stderr=log, env={**os.environ, **environment}
        )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


def has_samples(live: Live) -> bool:
    lobby = live.service.lobby
    if NAME not in lobby.workers:
        return False
    seat = lobby.need_run().seat_of(lobby.workers[NAME])
    return seat is not None and bool(seat.leases)


async def leaves_in_time(
    live: Live, folder: Path, process: Process, warn: Callable[[], float], *, works_on_s: float
) -> None:
    """Give notice while it writes: it writes on for `works_on_s` at least, hands over, and has ended before."""
    async with trainer(live) as fleet:
        await fleet.publish(0)
        playing = asyncio.create_task(play_round(fleet, 0))
        await until(lambda: has_samples(live), "it has samples")
        began, goes_at = time.time(), warn()
        assert await asyncio.wait_for(process.wait(), 60) == 0, (folder / "worker.log").read_text()
        assert began + works_on_s < time.time() < goes_at, (folder / "worker.log").read_text()
        async with honest_worker(live):
            assert len(await playing) == 2
        assert live.service.lobby.need_run().scheduler.ledger.moves.keys() == {"handed_over"}


@pytest.mark.parametrize("place", ["aws", "gcp", "azure"])
def test_a_notice_of_a_cloud_lets_a_worker_write_on_and_leave_before_its_machine_goes(place: str, tmp_path: Path):
    async def scenario() -> None:
        cloud = Cloud()

        def warn() -> float:
            cloud.goes_at = time.time() + (30.0 if place == "gcp" else NOTICE_S)
            cloud.token = "another"  # the old one is refused from now on
            return cloud.goes_at

        async with (
            served(cloud.routes()) as address,
            manager(tmp_path / "run") as live,
            worker(live, tmp_path, "--spot", place, POLYRL_METADATA_URL=address) as process,
        ):
            await leaves_in_time(live, tmp_path, process, warn, works_on_s=1.0)
            assert cloud.asked

    run(scenario(), 90.0)


@pytest.mark.parametrize(
    ("place", "environment"),
    [
        ("kubernetes", {"POLYRL_GRACE_S": f"{NOTICE_S:g}"}),
        ("auto", {"KUBERNETES_SERVICE_HOST": "127.0.0.1", "POLYRL_GRACE_S": f"{NOTICE_S:g}"}),
        ("slurm", {"SLURM_JOB_END_TIME": "soon"}),
    ],
)
def test_a_signal_of_a_cluster_lets_a_worker_write_on_and_leave_in_time(
    place: str, environment: dict[str, str], tmp_path: Path
):
    goes_at = time.time() + 16.0
    environment = {key: f"{int(goes_at)}" if value == "soon" else value for key, value in environment.items()}

    async def scenario() -> None:
        async with (
            manager(tmp_path / "run") as live,
            worker(live, tmp_path, "--spot", place, **environment) as process,
        ):

            def warn() -> float:
                process.send_signal(signal.SIGUSR1 if place == "slurm" else signal.SIGTERM)
                return goes_at if place == "slurm" else time.time() + NOTICE_S

            await leaves_in_time(live, tmp_path, process, warn, works_on_s=1.0)

    run(scenario(), 90.0)


async def hangs(request: web.Request) -> web.Response:
    await asyncio.sleep(3600)
    return web.Response()


async def floods(request: web.Request) -> web.StreamResponse:
    answer = web.StreamResponse(headers={"Metadata-Flavor": "Google"})
    await answer.prepare(request)
    try:
        for _ in range(10_000):
            await answer.write(b"x" * 65536)
    except ConnectionError:
        pass
    return answer


async def drips(request: web.Request) -> web.StreamResponse:
    answer = web.StreamResponse(headers={"Metadata-Flavor": "Google"})
    await answer.prepare(request)
    for _ in range(1000):
        await answer.write(b"T")
        await asyncio.sleep(0.5)
    return answer


async def sends_elsewhere(request: web.Request) -> web.Response:
    raise web.HTTPFound("http://127.0.0.1:9/")


async def talks_nonsense(request: web.Request) -> web.Response:
    return web.Response(body=os.urandom(4000), headers={"Metadata-Flavor": "Google"})


@pytest.mark.parametrize(
    "server", [hangs, floods, drips, sends_elsewhere, talks_nonsense], ids=lambda one: one.__name__
)
def test_a_bad_metadata_service_harms_nothing(server, tmp_path: Path):
    async def scenario() -> None:
        told: list[str] = []
        async with served([web.route("*", "/{any:.*}", server)]) as address:
            for place in ("aws", "gcp", "azure"):
                paused = asyncio.Event()

                async def once(seconds: float, paused: asyncio.Event = paused) -> None:
                    paused.set()
                    await asyncio.sleep(3600)

                watch = asyncio.create_task(watching.watch(place, address, lambda why, _: told.append(why), once))
                await asyncio.wait_for(paused.wait(), 15)
                watch.cancel()
                await asyncio.gather(watch, return_exceptions=True)
        assert not told

    run(scenario(), 60.0)
