"""The dashboard in a real browser: a live run, answers that try to break out, keys, a phone, and a large run.

Needs Debian's chromium and PyPI's playwright: `make test-web` installs the second and says how to get the first.
"""

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.properties.hostile import play
from tests.telemetry.test_account import write_journal
from tests.web.models import character_model
from tests.web.pages import CHROMIUM, FLAGS, dashboard, go, longest_frame_ms, opened, write_tokens

from polyrl.journal.files import FILE_NAME as JOURNAL
from polyrl.telemetry.metrics import FILE_NAME as METRICS

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: make test-web")
pytestmark = [
    pytest.mark.web,
    pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed: apt-get install chromium"),
]

HOSTILE = (
    "<script>window.broken=1</script>",
    "<img src=x onerror='window.broken=1'>",
    "\x1b[31mred\x1b[0m",
    "abc\u202edcba",
    "</div></main><h1>gone</h1>",
    "javascript:window.broken=1",
    "seen\u115fand\u2066not",
)
LARGE_STEPS, LARGE_SAMPLES = 10_000, 2_000
VIEWS = {
    "now": ".card", "rollouts": ".detail .body", "timeline": ".timeline .names div", "fleet": "section p.quiet",
    "curves": ".chart canvas", "ledger": "pre.ledger",
}  # fmt: skip


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that is over: a journal, metrics, and answers that a hostile model wrote."""
    folder = tmp_path_factory.mktemp("web")
    path = folder / "runs" / "hostile"
    path.mkdir(parents=True)
    write_journal(path / JOURNAL, play(4, num_events=200))
    model = character_model(folder / "model")
    (path / "recipe.toml").write_text(f'model = {{ path = "{model}" }}\n[train]\nsteps = 12\n')
    lines = [
        {"step": n, "reward/mean": n / 10, "time/step_total": 1.5, "own/<b>x</b>": 1.0, "own/turned\u202edna": 1.0}
        for n in range(10)
    ]
    (path / METRICS).write_text("".join(json.dumps(line) + "\n" for line in lines))
    write_tokens(path, 0, ["first " + text for text in HOSTILE])
    write_tokens(path, 9, list(HOSTILE))
    return path


def test_every_view_shows_the_run_and_nothing_complains(browser: Any, run_dir: Path):
    with dashboard(run_dir) as link, opened(browser, link) as seen:
        assert "token=" not in seen.page.url, "the token does not stay in the address"
        assert seen.page.inner_text(".card b") == "10"
        go(seen, "rollouts", ".list button.row")
        assert seen.page.locator(".list button.row").count() == len(HOSTILE)
        go(seen, "timeline", ".timeline .names div")
        assert "trainer" in seen.page.inner_text(".timeline .names")
        go(seen, "curves", ".chart canvas")
        assert seen.page.locator(".chart").count() >= 2
        go(seen, "ledger", "pre.ledger")
        assert "prompts started" in seen.page.inner_text("pre.ledger")
        go(seen, "fleet", "section p.quiet")


@pytest.mark.parametrize("place", range(len(HOSTILE)))
def test_what_a_model_writes_is_text_whatever_it_looks_like(browser: Any, run_dir: Path, place: int):
    with dashboard(run_dir) as link, opened(browser, link) as seen:
        go(seen, "rollouts", ".list button.row")
        seen.page.locator(".list button.row").nth(place).click()
        playwright.expect(seen.page.locator(".detail .top")).to_contain_text(f" {place}/0 ")
        shown = seen.page.inner_text(".detail .body")
        for part in (
            HOSTILE[place]
            .replace("\x1b", "\n")
            .replace("\u202e", "\n")
            .replace("\u115f", "\n")
            .replace("\u2066", "\n")
            .split("\n")
        ):
            assert part in shown
        assert ("\\u{1b}" in shown) == ("\x1b" in HOSTILE[place])
        assert ("\\u{202e}" in shown) == ("\u202e" in HOSTILE[place])
        assert ("\\u{115f}" in shown and "\\u{2066}" in shown) == ("\u115f" in HOSTILE[place])
        assert seen.page.evaluate("window.broken") is None
        assert seen.page.locator("main img, main script, main h1").count() == 0
        assert "<i>style</i> 0.5" in seen.page.inner_text(".detail .top")


def test_keys_filters_colours_and_the_difference_of_two_answers(browser: Any, run_dir: Path):
    with dashboard(run_dir) as link, opened(browser, link) as seen:
        page = seen.page
        page.keyboard.press("2")
        page.wait_for_selector(".detail .span.drawn span")
        assert page.locator(".detail .span.drawn span[class^=l]").count() > 3, "improbable tokens are coloured"
        page.click("text=compare with")
        page.keyboard.press("j")
        page.wait_for_selector("text=difference to 0/0")
        page.click("text=difference to 0/0")
        assert page.locator(".detail del").count() > 0 and page.locator(".detail ins").count() > 0
        page.fill("input[type=search]", "gone")
        page.keyboard.press("Enter")
        playwright.expect(page.locator(".list button.row")).to_have_count(1)
        page.keyboard.press("Escape")
        page.fill("input[type=search]", "")
        shortest = min(map(len, HOSTILE))
        page.fill("input[aria-label='Most tokens']", str(shortest))
        page.keyboard.press("Enter")
        playwright.expect(page.locator(".list button.row")).to_have_count(1)
        page.fill("input[aria-label='Most tokens']", "")
        page.select_option("select[aria-label=Order]", "worker")
        playwright.expect(page.locator(".list .group").first).to_have_text("w<b>1</b>")
        page.click("main")
        page.select_option("select[aria-label='Colour tokens by']", "worker")
        assert "w<b>1</b>" in page.inner_text(".detail .top .legend")
        dark = page.evaluate("document.documentElement.dataset.theme")
        page.locator("#theme").click()
        assert page.evaluate("document.documentElement.dataset.theme") != dark


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
def test_every_view_fits_and_can_be_read_by_everybody(browser: Any, run_dir: Path, width: int, theme: str):
    """No view scrolls sideways, and axe finds no fault in contrast, names, roles or order."""
    axe_module = pytest.importorskip("axe_playwright_python.sync_playwright", reason="no axe: make test-web")
    faults: dict[str, list[str]] = {}
    is_phone = width < 800
    with (
        dashboard(run_dir) as link,
        opened(browser, link, is_mobile=is_phone, has_touch=is_phone, color_scheme=theme) as seen,
    ):
        seen.page.set_viewport_size({"width": width, "height": 844})
        for view, there in VIEWS.items():
            go(seen, view, there)
            seen.page.wait_for_timeout(300)
            assert seen.page.evaluate("document.documentElement.scrollWidth") <= width + 1, view
            found = axe_module.Axe().run(seen.page).response["violations"]
            told = [f"{one['id']}: {node['html'][:90]}" for one in found for node in one["nodes"][:2]]
            if told:
                faults[view] = told
    assert faults == {}, "\n".join(f"{view}: {one}" for view, told in faults.items() for one in told)


def test_a_row_of_the_timeline_opens_into_its_samples_and_each_tells_its_story(browser: Any, run_dir: Path):
    with dashboard(run_dir) as link, opened(browser, link) as seen:
        page = seen.page
        go(seen, "timeline", ".timeline .names button")
        said = page.locator("main p[role=status]")
        page.locator(".timeline .names button").first.focus()
        page.keyboard.press("Enter")
        playwright.expect(page.locator(".timeline .names button").first).to_have_attribute("aria-expanded", "true")
        playwright.expect(said).to_contain_text("click on one for its story")
        name = page.locator(".timeline .names button").first
        place, picture = name.bounding_box(), page.locator("canvas").bounding_box()
        page.mouse.click(picture["x"] + 3, place["y"] + place["height"] + 5)  # its first sample, at the very beginning
        playwright.expect(page.locator(".beside h2")).to_contain_text("Sample ")
        page.wait_for_selector("pre.story:has-text('opened in round')")
        picture, whole = page.locator("canvas").bounding_box(), page.locator(".timeline").bounding_box()
        assert picture["x"] + picture["width"] <= whole["x"] + whole["width"], "the picture is drawn as wide as it is"
        name.click()
        playwright.expect(said).to_contain_text("Click on a row for its samples")


def test_a_drag_over_the_timeline_marks_what_will_be_seen_larger(browser: Any, run_dir: Path):
    with dashboard(run_dir) as link, opened(browser, link) as seen:
        page, drawn = seen.page, "document.querySelector('canvas').toDataURL()"
        go(seen, "timeline", ".timeline .names button")
        playwright.expect(page.locator("main p[role=status]")).to_contain_text("rows 1 to")
        before, box = page.evaluate(drawn), page.locator("canvas").bounding_box()
        page.mouse.move(box["x"] + 100, box["y"] + 40)
        page.mouse.down()
        page.mouse.move(box["x"] + 300, box["y"] + 40)
        marked = page.evaluate(drawn)
        page.mouse.move(box["x"] + 100, box["y"] + 40)
        page.mouse.up()  # back where it began: nothing is chosen
        assert marked != before


def test_answers_without_spaces_are_compared_sign_by_sign(browser: Any, run_dir: Path):
    with dashboard(run_dir) as link, opened(browser, link) as seen:
        words = """async () => { const { diff } = await import("/dash/page/diff.js");
            return [["3+4=7+5=12", "3+4=7+5=11"], ["\\u4f60\\u597d\\u5417", "\\u4f60\\u597d\\u554a"]].map(
                ([one, other]) => diff(one, other).map((part) => part.text)); }"""
        assert seen.page.evaluate(words) == [["3+4=7+5=", "12", "11"], ["\u4f60\u597d", "\u5417", "\u554a"]]


def test_names_that_a_stranger_chose_turn_no_text_around(browser: Any, run_dir: Path):
    with dashboard(run_dir) as link, opened(browser, link) as seen:
        go(seen, "curves", ".chart canvas")
        seen.page.fill("input[type=search]", "turned")
        seen.page.click(".picks input")
        seen.page.wait_for_selector(".chart h2:has-text('own/turned')")
        assert "own/turned\\u{202e}dna" in seen.page.inner_text(".charts")
        assert "\u202e" not in seen.page.inner_text("main")


def test_an_answer_of_ten_megabytes_shows_its_ends(browser: Any, run_dir: Path, tmp_path: Path):
    path = tmp_path / "run"
    shutil.copytree(run_dir, path)
    write_tokens(path, 9, ["b" * 10_000_000 + "END", "short"])
    with dashboard(path) as link, opened(browser, link) as seen:
        began = time.perf_counter()
        go(seen, "rollouts", ".detail .body .span")
        seen.page.wait_for_selector("text=tokens are left out here", timeout=60_000)
        assert "END" in seen.page.inner_text(".detail .body")
        print("a 10 MB answer stands after", round(time.perf_counter() - began, 1), "s")


def test_a_browser_that_goes_away_in_mid_stream_harms_nobody(browser: Any, run_dir: Path):
    with dashboard(run_dir) as link, opened(browser, link) as seen:
        for _ in range(5):
            other = browser.new_context()
            page = other.new_page()
            page.goto(link, wait_until="commit")
            page.wait_for_timeout(50)
            other.close()  # some before their first event, some after
        go(seen, "ledger", "pre.ledger")
        go(seen, "now", ".card")


def test_a_page_whose_process_is_slow_to_start_says_so_and_tries_again(browser: Any, run_dir: Path):
    refusals = [json.dumps({"error": "the page's process did not start"})] * 2

    def answer(route: Any) -> None:
        if refusals:
            route.fulfill(status=409, content_type="application/json", body=refusals.pop())
        else:
            route.continue_()

    with dashboard(run_dir) as link:
        context = browser.new_context()
        page = context.new_page()
        page.route("**/dash/api/runs", answer)
        page.goto(link)
        page.wait_for_selector("text=did not start; trying again")
        assert "is starting" in page.inner_text("main")
        page.wait_for_selector(".card")
        assert refusals == []
        context.close()


def test_without_a_token_it_asks_for_one(browser: Any, run_dir: Path):
    with dashboard(run_dir) as link:
        context = browser.new_context()
        page = context.new_page()
        page.goto(link.partition("#")[0])
        page.wait_for_selector("text=A token is needed")
        page.fill("input[type=password]", link.partition("token=")[2])
        page.keyboard.press("Enter")
        page.wait_for_selector(".card")
        context.close()


def test_what_is_marked_focused_or_zoomed_stays_while_the_run_goes_on(browser: Any, tmp_path: Path):
    """Stamps are put on elements that the page must not draw anew, and looked for after the state has come again."""
    run_dir = tmp_path / "grows"
    run_dir.mkdir()
    write_journal(run_dir / JOURNAL, play(4, num_events=200))
    write_steps(run_dir, range(50))
    with dashboard(run_dir) as link, opened(browser, link) as seen:
        page = seen.page
        page.wait_for_selector(".finding")
        page.evaluate("getSelection().selectAllChildren(document.querySelector('.finding'))")
        marked = page.evaluate("getSelection().toString()")
        page.wait_for_timeout(2_500)
        assert marked and page.evaluate("getSelection().toString()") == marked
        go(seen, "curves", ".chart .u-over")
        place = page.locator(".chart .u-over").first.bounding_box()
        page.mouse.move(place["x"] + 50, place["y"] + 30)
        page.mouse.down()
        page.mouse.move(place["x"] + 150, place["y"] + 30, steps=5)
        page.mouse.up()
        page.evaluate("document.querySelector('.chart .uplot').dataset.stamp = 'zoomed'")
        write_steps(run_dir, range(50, 60))
        page.wait_for_selector("#state:has-text('step 59')")
        page.wait_for_timeout(1_500)
        assert page.evaluate("document.querySelector('.chart .uplot').dataset.stamp") == "zoomed"


def write_steps(run_dir: Path, steps: Sequence[int]) -> None:
    with (run_dir / METRICS).open("a") as file:
        file.writelines(json.dumps({"step": n, "reward/mean": n / 100, "time/step_total": 1.5}) + "\n" for n in steps)


def test_any_number_of_tabs_may_be_open_and_one_that_comes_back_goes_on(browser: Any, run_dir: Path):
    """A browser has six connections to a server; a tab that nobody sees has none of them."""
    turn = """hidden => {
        Object.defineProperty(document, "hidden", { value: hidden, configurable: true });
        document.dispatchEvent(new Event("visibilitychange"));
    }"""
    with dashboard(run_dir) as link:
        context = browser.new_context()
        for _ in range(8):
            for earlier in context.pages:
                earlier.evaluate(turn, True)
            page = context.new_page()
            page.goto(link)
            page.wait_for_selector(".card")
        first = context.pages[0]
        first.evaluate("document.querySelector('.card').dataset.stamp = 'old'")
        first.evaluate(turn, False)
        first.wait_for_selector(".card:not([data-stamp])")
        context.close()


def test_a_worker_of_a_live_run_is_drained_by_a_button_with_the_admin_token_alone(browser: Any, tmp_path: Path):
    words = [sys.executable, "-m", "polyrl"]
    run_dir = tmp_path / "run"
    manager = subprocess.Popen([*words, "manager", "--run-dir", str(run_dir), "--port", "0"], stdout=subprocess.DEVNULL)
    started = [manager]
    try:
        url = wait_for_url(run_dir)
        join = ["worker", "--join", url, "--token-file", str(run_dir / "worker.token"), "--engine", "emulated"]
        worker = subprocess.Popen([*words, *join, "--name", "spot-1"], stdout=subprocess.DEVNULL)
        started.append(worker)
        told = subprocess.run(
            [*words, "dash", str(run_dir), "--no-browser"], capture_output=True, text=True, check=True
        )
        with opened(browser, told.stdout.strip()) as seen:
            go(seen, "fleet", "text=spot-1")
            assert url in seen.page.url
            for token, answer in (("view", "draining needs"), ("admin", "was asked to hand everything over")):
                seen.page.click("button[aria-label='Drain spot-1']")
                assert seen.page.input_value("dialog input") == "", "the page keeps no admin token"
                seen.page.fill("dialog input", (run_dir / f"{token}.token").read_text().strip())
                seen.page.click("dialog button >> text=Drain")
                seen.page.wait_for_selector(f"text={answer}")
                seen.complaints = [one for one in seen.complaints if "403" not in one]  # the browser tells refusals
        assert worker.wait(30) == 0
    finally:
        for one in started:
            one.terminate()
            one.wait(20)


def wait_for_url(run_dir: Path) -> str:
    until = time.monotonic() + 30.0
    while not (run_dir / "manager.json").exists():
        assert time.monotonic() < until
        time.sleep(0.1)
    return json.loads((run_dir / "manager.json").read_text())["url"]


def test_a_large_run_stays_smooth(browser: Any, tmp_path: Path):
    """10,000 steps of 60 metrics, and a step of 2,000 answers of 200 tokens: figures of the browser itself."""
    write_journal(tmp_path / JOURNAL, play(4, num_events=100))
    columns = [f"own/m{number}" for number in range(55)]
    fixed = dict.fromkeys(("reward/mean", "time/step_total", "actor/entropy", "actor/grad_norm", "fleet/workers"), 0.5)
    with (tmp_path / METRICS).open("w") as file:
        for step in range(LARGE_STEPS):
            file.write(json.dumps({"step": step, **fixed, **dict.fromkeys(columns, step / LARGE_STEPS)}) + "\n")
    model = character_model(tmp_path / "model")
    (tmp_path / "recipe.toml").write_text(f'model = {{ path = "{model}" }}\n')
    write_tokens(tmp_path, LARGE_STEPS - 1, ["word " * 40 + str(number) for number in range(LARGE_SAMPLES)])
    with dashboard(tmp_path) as link, opened(browser, link) as seen:
        took: dict[str, float] = {}
        for view, there in (("curves", ".chart canvas"), ("rollouts", ".detail .span.drawn span"), ("now", ".uplot")):
            began = time.perf_counter()
            go(seen, view, there)
            took[view] = round(time.perf_counter() - began, 2)
        longest = longest_frame_ms(seen)
        print(json.dumps({"seconds to open": took, "longest frame, ms": round(longest)}))
        assert max(took.values()) < 15.0, took
        assert longest < 1000.0, "the page stands still while the run's state comes every second"
