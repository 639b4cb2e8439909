"""The Grafana dashboard: its file, read by Grafana's own library, and every expression of it, asked of a real
Prometheus that scrapes a live manager.

Needs PyPI's grafana-foundation-sdk and Debian's prometheus: `apt-get install prometheus`. It stands beside the tests of
the browser since it takes seconds.
"""

import asyncio
import importlib
import json
import shutil
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from tests.integration import test_episodes as episodes
from tests.integration.live import Live, honest_worker, manager, play_round, run, trainer
from tests.integration.test_remote_rewards import reward_worker

BOARD = Path(__file__).parents[2] / "docs" / "reference" / "grafana.json"
PROMETHEUS = shutil.which("prometheus")
pytestmark = [pytest.mark.web]
NEEDS_A_LOSS = "rate(polyrl_ledger_tokens_discarded[5m])"
"""No token is thrown away here: this one is asked for its grammar alone."""
ROUNDS, PATIENCE_S = 3, 40.0


@asynccontextmanager
async def prometheus(live: Live, folder: Path) -> AsyncIterator[aiohttp.ClientSession]:
    """Prometheus as a process, with the scrape job of docs/reference/manager.md; yields a session with it."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    (folder / "admin.token").write_text(live.token("admin"))
    job = {
        "job_name": "polyrl", "metrics_path": "/v1/metrics", "scrape_interval": "1s", "scrape_timeout": "1s",
        "authorization": {"credentials_file": str(folder / "admin.token")},
        "static_configs": [{"targets": [live.url.partition("://")[2]]}],
    }  # fmt: skip
    (folder / "prometheus.yml").write_text(json.dumps({"scrape_configs": [job]}))
    words = [f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data"]
    assert PROMETHEUS is not None
    process = await asyncio.create_subprocess_exec(
        PROMETHEUS, *words, f"--web.listen-address={address}", stderr=asyncio.subprocess.DEVNULL
    )
    try:
        async with aiohttp.ClientSession(f"http://{address}") as session:
            yield session
    finally:
        process.terminate()
        await process.wait()


async def ask(session: aiohttp.ClientSession, expression: str) -> list[Any]:
    async with session.get("/api/v1/query", params={"query": expression}) as answer:
        told = await answer.json()
    assert told["status"] == "success", f"{expression}: {told}"
    return told["data"]["result"]


async def ask_with_a_wrong_token(live: Live) -> None:
    async with (
        aiohttp.ClientSession(headers={"Authorization": "Bearer wrong"}) as session,
        session.get(f"{live.url}/v1/status") as answer,
    ):
        assert answer.status in (401, 403)


async def empty_of(session: aiohttp.ClientSession, expressions: list[str]) -> list[str]:
    try:
        return [one for one in expressions if not await ask(session, one)]
    except aiohttp.ClientConnectionError:  # it is not up yet
        return expressions


def lost(given: Any, kept: Any, place: str = "") -> Iterator[str]:
    """Yield the places of what a library that read and wrote a file has left out or changed."""
    match given:
        case dict():
            for key, value in given.items():
                yield from lost(value, kept[key], f"{place}.{key}") if key in kept else [f"{place}.{key}"]
        case list() if len(given) == len(kept):
            for number, (one, other) in enumerate(zip(given, kept, strict=True)):
                yield from lost(one, other, f"{place}[{number}]")
        case _ if given != kept:
            yield place


def test_grafanas_own_library_knows_every_field_of_the_file():
    plugins = pytest.importorskip("grafana_foundation_sdk.cog.plugins", reason="no Grafana library: make test-web")
    encoder = importlib.import_module("grafana_foundation_sdk.cog.encoder")
    dashboard = importlib.import_module("grafana_foundation_sdk.models.dashboard")
    plugins.register_default_plugins()

    def again(board: Any) -> Any:
        return json.loads(encoder.JSONEncoder().encode(dashboard.Dashboard.from_json(board)))

    board = json.loads(BOARD.read_text(encoding="utf-8"))
    assert list(lost(board, again(board))) == []
    board["panels"][7]["options"]["legend"]["calculations"] = []
    assert list(lost(board, again(board))) == [".panels[7].options.legend.calculations"]


@pytest.mark.skipif(PROMETHEUS is None, reason="prometheus is not installed: apt-get install prometheus")
def test_every_expression_gets_data_from_a_real_prometheus(tmp_path: Path):
    panels = json.loads(BOARD.read_text(encoding="utf-8"))["panels"]
    expressions = [target["expr"] for panel in panels for target in panel["targets"]]
    wanted = [one for one in expressions if one != NEEDS_A_LOSS]
    assert len(wanted) == len(expressions) - 1

    async def scenario() -> list[str]:
        async with (
            manager(tmp_path / "run") as live,
            trainer(live, episodes.CONFIG, prompts=episodes.prompt_of, answers=episodes.MODEL) as fleet,
            honest_worker(live),
            episodes.host(live, episodes.EchoEnvironment()),
            reward_worker(live, "scorer"),
            prometheus(live, tmp_path) as session,
        ):
            await ask_with_a_wrong_token(live)
            for step in range(ROUNDS):
                await fleet.publish(step)
                await play_round(fleet, step)
                await asyncio.sleep(2.0)  # two scrapes see each state
            await fleet.publish(ROUNDS)
            await fleet.request(ROUNDS)
            until = asyncio.get_running_loop().time() + PATIENCE_S
            while (left := await empty_of(session, wanted)) and asyncio.get_running_loop().time() < until:
                await asyncio.sleep(0.5)
            await ask(session, NEEDS_A_LOSS)
            return left

    assert run(scenario(), timeout_s=90.0) == []
