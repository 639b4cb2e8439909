"""What the page shows of a fleet's state, in a real browser; the test tells it in the manager's place."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from tests.properties.hostile import play
from tests.telemetry.test_account import write_journal
from tests.unit.test_diagnosis import STATUS, WORKER
from tests.unit.test_waits import fleet_of, wait
from tests.web.pages import CHROMIUM, FLAGS, opened, served

from polyrl.dashboard.watched import WatchedRun
from polyrl.journal.files import FILE_NAME as JOURNAL

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: make test-web")
pytestmark = [
    pytest.mark.web,
    pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed: apt-get install chromium"),
]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture
def run(tmp_path: Path) -> WatchedRun:
    """A live run without a manager."""
    write_journal(tmp_path / JOURNAL, play(4, num_events=200))
    return WatchedRun(tmp_path, live=True)


def tell_of_twenty(run: WatchedRun) -> None:
    workers = tuple(replace(WORKER, name=f"w{n}") for n in range(20))
    waits = (*fleet_of(20), wait("pull", "w7", 90.0), wait("hand_over", "lease 12", 95.0), wait("turn", "episode 4/0"))
    run.tell(replace(STATUS, workers=workers, waits=waits))


def test_among_twenty_workers_waits_that_tell_something_are_seen_and_the_others_counted(browser: Any, run: WatchedRun):
    tell_of_twenty(run)
    with served(run) as link, opened(browser, link) as seen:
        told = seen.page.locator("section[aria-label=Waits]")
        told.locator("table").wait_for()
        shown = [one.split("\t")[:2] for one in told.locator("tbody tr").all_inner_texts()]
        assert shown[:3] == [["pull", "w7"], ["hand over", "lease 12"], ["turn", "episode 4/0"]]
        assert [what for what, _ in shown[3:]] == ["heartbeat"] * 3 + ["stall"] * 3
        assert told.locator("p").inner_text() == "and 34 more: 17 for heartbeat, 17 for stall"
        assert "the weights' arrival, or another try" in told.locator("tbody tr").first.inner_text()


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_a_phone_shows_a_live_runs_waits_whole_and_axe_finds_no_fault(browser: Any, run: WatchedRun, theme: str):
    axe_module = pytest.importorskip("axe_playwright_python.sync_playwright", reason="no axe: make test-web")
    tell_of_twenty(run)
    phone = {"is_mobile": True, "has_touch": True, "color_scheme": theme}
    with served(run) as link, opened(browser, link, **phone) as seen:
        seen.page.set_viewport_size({"width": 390, "height": 844})
        cells = seen.page.locator("section[aria-label=Waits] tbody td")
        cells.first.wait_for()
        ends = cells.evaluate_all("all => all.map((one) => one.getBoundingClientRect().right)")
        assert max(ends) <= 390
        heights = seen.page.locator("section[aria-label=Waits] tbody tr").evaluate_all(
            "all => all.map((one) => one.offsetHeight)"
        )
        assert max(heights) < 100, "a wait is no column of single words"
        found = axe_module.Axe().run(seen.page).response["violations"]
        assert [f"{one['id']}: {node['html'][:90]}" for one in found for node in one["nodes"]] == []
