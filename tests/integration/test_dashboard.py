"""The dashboard on the manager's port: a process of its own, behind the manager's tokens; a browser harms nobody."""

import asyncio
import contextlib
import json
import sys
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest
from tests.integration.live import CONFIG, check_right, honest_worker, manager, play_round, prompts_of, run, trainer
from tests.properties.hostile import play
from tests.telemetry.test_account import write_journal

from polyrl.dashboard.life import live_link
from polyrl.journal.files import FILE_NAME
from polyrl.wire.credentials import bearer


async def get(session: aiohttp.ClientSession, url: str, token: str) -> tuple[int, Any]:
    async with session.get(url, headers=bearer(token)) as answer:
        return answer.status, await answer.json()


def test_a_live_run_is_shown_to_whoever_may_look_and_to_nobody_else(tmp_path: Path):
    async def scenario():
        async with (
            manager(tmp_path) as live,
            honest_worker(live),
            trainer(live) as fleet,
            aiohttp.ClientSession() as http,
        ):
            await fleet.publish(0)
            await play_round(fleet, 0)
            url = f"{live.url}/dash/api/now"
            for scope in ("worker", "host", "generate"):
                code, told = await get(http, url, live.token(scope))
                assert code == 403 and "the view token may" in told["error"]
            assert (await get(http, url, "no token of this run"))[0] == 401
            async with http.get(f"{live.url}/dash/") as page:
                assert page.status == 200 and "frame-ancestors 'none'" in page.headers["Content-Security-Policy"]
            told = await until_told(http, url, live.token("view"))
            assert told["kind"] == "live"
            code, fleet_page = await get(http, f"{live.url}/dash/api/fleet", live.token("view"))
            assert [worker["name"] for worker in fleet_page["workers"]] == ["honest"]
            assert (await get(http, url, live.token("admin")))[0] == 200
            code, rows = await get(http, f"{live.url}/dash/api/timeline", live.token("view"))
            assert "honest" in [row["name"] for row in rows["rows"]]
            assert await asyncio.to_thread(live_link, tmp_path) == f"{live.url}/dash/#token={live.token('view')}"

    run(scenario(), 90.0)


def test_a_live_run_beside_another_is_live_until_its_manager_goes(tmp_path: Path):
    async def scenario():
        async with contextlib.AsyncExitStack() as stack, aiohttp.ClientSession() as http:
            live = await stack.enter_async_context(manager(tmp_path / "live"))
            await stack.enter_async_context(honest_worker(live))
            fleet = await stack.enter_async_context(trainer(live))
            await fleet.publish(0)
            await play_round(fleet, 0)
            other = write_journal(tmp_path / FILE_NAME, play(1, num_events=50))
            words = [sys.executable, "-m", "polyrl", "dash", "--no-browser", str(tmp_path / "live"), str(other)]
            process = await asyncio.create_subprocess_exec(*words, stdout=asyncio.subprocess.PIPE)
            try:
                assert process.stdout is not None
                base, _, token = (await process.stdout.readline()).decode().strip().partition("#token=")
                url = f"{base}api/now?run=0"
                told = await until_told(http, url, token)
                assert told["kind"] == "live" and "--resume" not in json.dumps(told["findings"])
                _, runs = await get(http, f"{base}api/runs", token)
                assert [(one["live"], one["drains"]) for one in runs] == [(True, False), (False, False)]
                await stack.aclose()
                while told["kind"] == "live":
                    await asyncio.sleep(0.5)
                    _, told = await get(http, url, token)
            finally:
                process.terminate()
                await process.wait()

    run(scenario(), 90.0)


async def until_told(http: aiohttp.ClientSession, url: str, token: str) -> Any:
    """Ask until the manager's state has come, and the journal is read."""
    while True:
        code, told = await get(http, url, token)
        assert code == 200, told
        if told["status"] is not None and told["read"] == 1.0 and told["status"]["num_workers"]:
            return told
        await asyncio.sleep(0.2)


def test_whoever_may_look_may_change_nothing(tmp_path: Path):
    async def scenario():
        async with manager(tmp_path) as live, honest_worker(live), aiohttp.ClientSession() as http:
            for path in ("/v1/workers/honest/drain", "/v1/pause", "/v1/run"):
                async with http.post(live.url + path, headers=live.headers("view")) as answer:
                    assert answer.status == 403, path
            for path in ("/v1/status", "/v1/trainer", "/v1/worker"):
                async with http.get(live.url + path, headers=live.headers("view")) as answer:
                    assert answer.status == 403, path

    run(scenario())


def test_browsers_that_come_and_go_in_mid_stream_harm_nothing(tmp_path: Path):
    async def scenario():
        async with manager(tmp_path) as live, honest_worker(live), trainer(live) as fleet:
            await fleet.publish(0)

            async def browse() -> None:
                while True:
                    async with aiohttp.ClientSession() as http:
                        with_token = live.headers("view")
                        async with http.get(f"{live.url}/dash/api/stream", headers=with_token) as answer:
                            line = await answer.content.readline()
                            assert json.loads(line.removeprefix(b"data: "))["kind"] == "live", line
                    await asyncio.sleep(0.3)  # a stream that is left behind is noticed at its next line

            browsers = [asyncio.create_task(browse()) for _ in range(4)]
            for step in range(3):
                asked = asyncio.create_task(play_round(fleet, step))
                prompts: dict[int, Any] = {}
                while not asked.done():
                    prompts |= prompts_of(live)
                    await asyncio.sleep(0.02)
                check_right(await asked, prompts, CONFIG)
                await fleet.publish(step + 1)
            for one in browsers:
                assert not one.done(), one.exception()
                one.cancel()

    run(scenario(), 90.0)


def test_a_process_that_is_killed_in_mid_stream_is_started_again_and_no_refusal_is_counted(tmp_path: Path):
    async def scenario():
        async with manager(tmp_path) as live, honest_worker(live), aiohttp.ClientSession() as http:
            async with http.get(f"{live.url}/dash/api/stream", headers=live.headers("view")) as answer:
                assert (await answer.content.readline()).startswith(b"data: ")
                child = next(one for one in psutil.Process().children() if "dash" in one.cmdline())
                folder = Path(child.cmdline()[-1]).parent
                child.kill()
                with pytest.raises(aiohttp.ClientError):
                    while await answer.content.readline():
                        pass
            while psutil.pid_exists(child.pid):  # until its parent has heard of it
                await asyncio.sleep(0.05)
            await asyncio.sleep(0.2)
            told = await until_told(http, f"{live.url}/dash/api/now", live.token("view"))
            assert told["kind"] == "live" and "dashboard" not in told["status"]["refused"]
            assert not folder.exists()

    run(scenario(), 60.0)
