"""What a trainer says nobody should read its run's numbers without is in whatever tells of the run."""

import asyncio
import json
from pathlib import Path

import aiohttp
import pytest
from msgspec.structs import replace
from tests.integration.live import QUICK, Live, honest_worker, manager, play_round, run, trainer

from polyrl.cli.main import main
from polyrl.journal.files import EVENTS, LIVE_FOLDER
from polyrl.manager.settings import JournalSettings
from polyrl.telemetry.account import read_account
from polyrl.telemetry.pictures import timeline_figure
from polyrl.telemetry.runs import make_run

CAVEAT = "lengths of answers are imposed (lognormal)"


async def scrape(live: Live) -> str:
    async with (
        aiohttp.ClientSession() as http,
        http.get(f"{live.url}/v1/metrics", headers=live.headers("admin")) as told,
    ):
        return await told.text()


async def two_lives(run_dir: Path) -> list[int]:
    """A step with one manager, and one with the next; events go into many files. Returns how `polyrl status` ended."""
    settings = replace(QUICK, journal=JournalSettings(segment_mb=0.002))
    codes: list[int] = []
    for step in range(2):
        async with (
            manager(run_dir, settings) as live,
            honest_worker(live, name=f"worker-{step}"),
            trainer(live, caveat=CAVEAT) as fleet,
        ):
            await fleet.publish(step)
            await play_round(fleet, step)
            status = await fleet.status()
            assert status.caveat == CAVEAT
            assert f'polyrl_caveat{{caveat="{CAVEAT}"}} 1.0' in await scrape(live)
            codes.append(await asyncio.to_thread(main, ["status", "--run-dir", str(run_dir)]))
    return codes


def test_status_metrics_ledger_story_and_pictures_repeat_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert run(two_lives(tmp_path)) == [0, 0]
    assert capsys.readouterr().out.count(CAVEAT) == 2
    assert len(list((tmp_path / LIVE_FOLDER).glob(f"{EVENTS}-*.bin"))) > 2
    assert main(["ledger", str(tmp_path)]) == 0
    assert capsys.readouterr().out.splitlines()[1] == CAVEAT
    assert main(["ledger", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["caveat"] == CAVEAT
    assert main(["story", str(tmp_path), "1/0"]) == 0
    assert capsys.readouterr().out.splitlines()[0] == CAVEAT
    figure = timeline_figure(make_run("r", read_account(tmp_path), []))
    assert figure is not None and figure.axes[0].get_title(loc="left") == f"What every worker did: r, {CAVEAT}"
