"""The dashboard's server: who may look, what it refuses, and that a run's text stays text."""

import asyncio
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from tests.integration.live import run
from tests.properties.hostile import play
from tests.telemetry.test_account import write_journal
from tests.unit.test_cli_samples import write
from yarl import URL

from polyrl.cli.dash import newest_run
from polyrl.cli.main import main
from polyrl.dashboard.life import live_link
from polyrl.dashboard.server import DashboardServer, serving, write_or_cut
from polyrl.dashboard.watched import WatchedRun, dollars_by_cause
from polyrl.errors import UserError
from polyrl.journal.files import FILE_NAME
from polyrl.manager import page

TOKEN = "a-token-that-may-look"


@asynccontextmanager
async def dashboard(path: Path, token: str | None = TOKEN) -> AsyncIterator[aiohttp.ClientSession]:
    watched = WatchedRun(path, live=False)
    watched.start()
    watched.follower.wait(20.0)
    async with serving(DashboardServer([watched], token), lambda runner: web.TCPSite(runner, "127.0.0.1", 0)) as site:
        port = site._server.sockets[0].getsockname()[1]  # type: ignore[attr-defined]
        headers = {"Authorization": f"Bearer {TOKEN}"}
        async with aiohttp.ClientSession(f"http://127.0.0.1:{port}", headers=headers) as session:
            yield session


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    write_journal(folder / FILE_NAME, play(4, num_events=150))
    write(folder, 3)
    return folder


async def get(session: aiohttp.ClientSession, route: str, **query: Any) -> tuple[int, Any]:
    async with session.get(f"/dash/api/{route}", params=query) as answer:
        return answer.status, await answer.json()


def test_everything_that_the_page_asks_for_is_there(path: Path):
    async def scenario():
        async with dashboard(path) as session:
            assert (await get(session, "runs"))[1][0]["simulation"] is True
            for name in ("now", "metrics", "ledger", "timeline", "samples", "fleet"):
                code, told = await get(session, name)
                assert code == 200 and told, name
            spent = (await get(session, "ledger"))[1]
            assert sum(sum(one.values()) for one in spent["dollars"].values()) == pytest.approx(spent["usd"]["total"])
            code, told = await get(session, "series", name=["time/step_total", "own/a,b"], x="seconds")
            assert code == 200 and len(told["x"]) == len(told["columns"]["own/a,b"])
            assert (await get(session, "sample", step=3, name="1/0"))[1]["reward"] == 0.25
            rows = (await get(session, "timeline"))[1]["rows"]
            name = next(row["name"] for row in rows if row["num_leases"])
            opened = next(row for row in (await get(session, "timeline", open=name))[1]["rows"] if row["name"] == name)
            assert len(opened["leases"]) == opened["num_leases"]
            sample = opened["leases"][0][2]
            assert (await get(session, "story", sample=sample))[1][0].startswith(f"sample {sample}: ")
            assert (await get(session, "prompt", domain=0, prompt=0))[0] == 200
            had = (await get(session, "fleet", first=1, most=2))[1]
            assert not had["is_there"] and had["num"] > 2 and len(had["workers"]) == 2
            name = had["workers"][0]["name"]
            assert name in {one["name"] for one in (await get(session, "fleet", text=name))[1]["workers"]}
            assert (await get(session, "fleet", text="nobody"))[1]["num"] == 0

    run(scenario())


def test_the_name_of_a_folder_that_is_no_text_is_written_out(path: Path, tmp_path: Path):
    odd = tmp_path / os.fsdecode(b"a\xff<b>")
    shutil.copytree(path, odd)

    async def scenario():
        async with dashboard(odd) as session:
            assert (await get(session, "runs"))[1][0]["name"] == r"a\udcff<b>"
            assert (await get(session, "now"))[1]["name"] == r"a\udcff<b>"

    run(scenario())


def test_dollars_are_told_by_what_they_were_spent_on():
    workers = [
        {"usd": 6.0, "seconds": {"generating": 20.0, "idle": 10.0}},
        {"usd": 1.0, "seconds": {"idle": 5.0}},
        {"usd": 0.0, "seconds": {}},
    ]
    usd = {"trainer": 10.0, "hosts": 2.0, "reward_workers": 0.0}
    found = dollars_by_cause({"workers": workers, "usd": usd}, {"training": 0.75, "waiting for rewards": 0.25})
    assert found == {
        "trainer": {"training": 7.5, "waiting for rewards": 2.5},
        "workers": {"generating": 4.0, "idle": 3.0},
        "hosts": {"in all": 2.0},
        "reward workers": {"in all": 0.0},
    }


def test_without_the_token_there_is_the_page_and_nothing_of_the_run(path: Path):
    async def scenario():
        async with dashboard(path) as session:
            for name in ("runs", "now", "stream", "samples", "ledger", "timeline", "story", "nothing"):
                for header in ("", "Bearer wrong", f"Basic {TOKEN}"):
                    async with session.get(f"/dash/api/{name}", headers={"Authorization": header}) as answer:
                        assert answer.status == 401, name
            async with session.get("/dash", headers={"Authorization": ""}) as answer:
                assert answer.status == 200 and "PolyRL" in await answer.text()
                policy = answer.headers["Content-Security-Policy"]
                assert "default-src 'none'" in policy and "unsafe" not in policy and "*" not in policy

    run(scenario())


@pytest.mark.parametrize(
    ("name", "query"),
    [
        ("now", {"run": "7"}), ("now", {"run": "x"}), ("samples", {"step": "-1"}), ("samples", {"first": "1e9"}),
        ("samples", {"low": "nan"}), ("samples", {"most": "100000"}), ("samples", {"text": "x" * 5000}),
        ("sample", {"step": "0", "name": "../../etc/passwd"}), ("story", {"sample": "no"}),
        ("story", {"sample": "9999999/0"}),
        ("timeline", {"from": "inf"}), ("timeline", {"most": "0"}),
        ("fleet", {"most": "9999"}), ("prompt", {"prompt": "9" * 30}),
    ],
)  # fmt: skip
def test_what_makes_no_sense_is_refused_in_a_line(path: Path, name: str, query: dict[str, str]):
    async def scenario():
        async with dashboard(path) as session:
            code, told = await get(session, name, **query)
            assert code == 400 and "\n" not in told["error"] and told["error"]

    run(scenario())


def test_no_file_but_the_pages_own_is_served(path: Path):
    async def scenario():
        async with dashboard(path) as session:
            for name in (
                "../server.py",
                "..%2fserver.py",
                "%2e%2e%2fserver.py",
                "uPlot.LICENSE",
                "nothing.js",
            ):
                async with session.get(f"/dash/page/{name}") as answer:
                    assert answer.status == 404, name
            for name in ("app.js", "style.css", "uPlot.js"):
                async with session.get(f"/dash/page/{name}") as answer:
                    assert answer.status == 200 and answer.headers["X-Content-Type-Options"] == "nosniff"

    run(scenario())


def test_a_stream_tells_what_the_run_does_and_ends_with_its_reader(path: Path):
    async def scenario():
        async with dashboard(path) as session:
            for _ in range(3):
                async with session.get("/dash/api/stream") as answer:
                    line = await answer.content.readline()
                    assert line.startswith(b"data: {") and answer.headers["Content-Type"] == "text/event-stream"
            await asyncio.sleep(0.1)
            assert (await get(session, "now"))[0] == 200

    run(scenario())


def test_the_page_makes_no_markup_of_text_and_loads_nothing_from_elsewhere():
    ours = [one for one in page.FOLDER.iterdir() if not one.name.startswith("uPlot")]
    for file in ours:
        text = file.read_text(encoding="utf-8")
        for word in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "//cdn", "https://"):
            assert word not in text, f"{file.name}: {word}"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "RUN: missing, and runs has no run here; expected the directory of a run, or a journal"),
        (["nowhere"], "nowhere: there is no such file or directory; expected that of a run"),
        (["."], ".: there is no run; expected journal.bin of a simulation, or journal/events-*.bin of a live run"),
        ([".", "--port", "99999"], "--port: got 99999, expected one from 0 to 65535"),
    ],
)
def test_what_cannot_be_shown_is_one_line(
    tmp_path: Path,
    arguments: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    monkeypatch.chdir(tmp_path)
    assert main(["dash", *arguments, "--no-browser"]) == 2
    assert capsys.readouterr().err == f"polyrl: error: {message}\n"


def test_without_a_name_it_is_the_run_that_was_written_to_last(path: Path, tmp_path: Path):
    journal = (path / FILE_NAME).read_bytes()
    for name, at in (("a", 100.0), ("b", 300.0), ("c", 200.0)):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / FILE_NAME).write_bytes(journal)
        os.utime(tmp_path / "runs" / name / FILE_NAME, (at, at))
    (tmp_path / "runs" / "no-run").mkdir()
    (tmp_path / "runs" / "a-file").touch()
    assert newest_run(tmp_path / "runs") == tmp_path / "runs" / "b"


@pytest.mark.parametrize(
    "name", ["a" * 300 + ".js", "%00.js", "..%2Fserver.py", "..%2Fpage%2Fapp.js", "%2Fetc%2Fpasswd", ""]
)
def test_the_page_has_its_own_parts_and_nothing_else(path: Path, name: str):
    async def scenario():
        async with dashboard(path) as session, session.get(URL(f"/dash/page/{name}", encoded=True)) as answer:
            assert answer.status == 404
            assert "error" in await answer.json()

    run(scenario())


@pytest.mark.parametrize("how", ["end of input", "SIGTERM"])
def test_the_process_behind_a_manager_ends_with_it_and_leaves_no_folder(path: Path, tmp_path: Path, how: str):
    folder = tmp_path / "private"
    folder.mkdir()
    words = [sys.executable, "-m", "polyrl", "dash", str(path), "--socket", str(folder / "socket")]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None and process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        assert (folder / "socket").exists()
        if how == "SIGTERM":
            process.terminate()
        else:
            process.stdin.close()
        assert process.wait(20) == 0
    assert not folder.exists()


def test_a_port_that_another_program_took_is_no_live_run(tmp_path: Path):
    with socket.create_server(("127.0.0.1", 0)) as other:
        url = f"http://127.0.0.1:{other.getsockname()[1]}"
        (tmp_path / "manager.json").write_text(json.dumps({"url": url}))

        def greet() -> None:
            with other.accept()[0] as dialed:
                dialed.sendall(b"SSH-2.0-OpenSSH\r\n")

        greeter = threading.Thread(target=greet)
        greeter.start()
        assert live_link(tmp_path) is None
        greeter.join(10.0)
    for broken in ("[]", '{"url": 5}', "{}"):
        (tmp_path / "manager.json").write_text(broken)
        assert live_link(tmp_path) is None


def test_a_manager_that_does_not_answer_in_time_is_said_and_no_run_that_is_over(tmp_path: Path):
    with socket.create_server(("127.0.0.1", 0)) as busy:
        (tmp_path / "manager.json").write_text(json.dumps({"url": f"http://127.0.0.1:{busy.getsockname()[1]}"}))
        with pytest.raises(UserError, match="its manager did not answer within 0 s; try again"):
            live_link(tmp_path, health_s=0.2)


def test_a_run_whose_model_was_moved_is_shown_without_its_texts(path: Path, tmp_path: Path):
    shutil.copytree(path, tmp_path / "run")
    (tmp_path / "run" / "recipe.toml").write_text('model = { path = "/moved/away" }\n')

    async def scenario():
        async with dashboard(tmp_path / "run") as session:
            code, now = await get(session, "now")
            assert code == 200 and now["kind"] == "simulation"
            code, told = await get(session, "samples", step="3")
            assert code == 400 and "/moved/away" in told["error"]

    asyncio.run(scenario())


def test_a_page_that_reads_nothing_of_its_stream_is_cut_off():
    ended = asyncio.Event()

    async def stream(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        with pytest.raises(ConnectionResetError, match="took nothing for"):
            while True:
                await write_or_cut(request, response, b"x" * 1_000_000, 0.3)
        ended.set()
        return response

    async def scenario():
        app = web.Application()
        app.router.add_get("/", stream)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = site._server.sockets[0].getsockname()[1]  # type: ignore[attr-defined]
        with socket.create_connection(("127.0.0.1", port)) as deaf:
            deaf.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
            await asyncio.wait_for(ended.wait(), 30.0)
        await runner.cleanup()

    asyncio.run(scenario())


def test_what_is_no_http_is_refused_and_leaves_no_traceback(path: Path, caplog: pytest.LogCaptureFixture):
    async def scenario():
        async with dashboard(path) as session:
            port = session._base_url.port  # type: ignore[union-attr]
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"GET /dash/?run=\xd9\xa3 HTTP/1.1\r\nHost: x\r\n\r\n")
            assert b" 400 " in await reader.readline()
            writer.close()

    asyncio.run(scenario())
    assert caplog.records == []
