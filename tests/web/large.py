"""Open the dashboard of a very large run in a real browser: `python -m tests.web.large FOLDER [--steps N | --live]`.

The journal is a simulation's: 1,000 workers, of which machines are taken and come back, and 2,000 samples in each of 50
steps. Metrics and kept answers have 10,000 steps, ten answers each. FOLDER keeps the run, so that a second measurement
does not make it again. With --live, a real manager with 1,000 workers that dial it, two samples each, twice: FOLDER
keeps nothing of it. Prints JSON: seconds until each view stands, and the longest frame while it is looked at.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from playwright.sync_api import sync_playwright  # pyright: ignore[reportMissingImports] (make test-web installs it)
from tests.web.models import character_model
from tests.web.pages import CHROMIUM, FLAGS, Seen, dashboard, go, longest_frame_ms, opened, write_tokens

from polyrl.journal.files import FILE_NAME as JOURNAL
from polyrl.telemetry.metrics import FILE_NAME as METRICS

NUM_METRIC_STEPS, ANSWERS_A_STEP = 10_000, 10
METRIC_NAMES = (
    "reward/mean", "time/step_total", "actor/entropy", "actor/grad_norm", "fleet/workers",
    *(f"own/m{number}" for number in range(55)),
)  # fmt: skip
SCENARIO = """
name = "large"
about = "A thousand workers, two thousand samples a step"
[run]
steps = 50
warmup_steps = 0
max_new_tokens = 512
[trainer]
num_devices = 8
local_workers = 4
price_usd_per_hour = 30.0
s_per_token = 3.0e-7
[engine]
step_fixed_s = 0.02
step_sample_s = 80e-6
slots = 16
flush_s = 5.0
[fleet]
workers = 1000
price_usd_per_hour = 4.0
[network]
weights_gb = 1.0
[supply]
events = [{ at_s = 30.0, workers = 900 }, { at_s = 50.0, workers = 1000 }]
[[domains]]
name = "math"
prompts_per_step = 250
prompt_tokens = 100
length_quantiles = [[0.05, 50], [0.5, 100], [0.9, 300], [1.0, 512]]
"""
VIEWS = {
    "now": ".uplot", "rollouts": ".detail .span.drawn span", "timeline": ".timeline .names > *",
    "fleet": "section table", "curves": ".chart canvas", "ledger": "pre.ledger",
}  # fmt: skip
LIVE_VIEWS = {"now": ".finding", "timeline": ".timeline .names > *", "fleet": "section table", "ledger": "pre.ledger"}
"""A manager without a trainer's process has no answers and no metrics."""
NUM_WORKERS, SAMPLES_A_WORKER, TOKENS_PER_S, FLUSH_S, LENGTH = 1_000, 2, 4, 1.0, 200


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=50, help="of the simulation, 2,000 samples each (default: 50)")
    parser.add_argument("--live", action="store_true", help="of a live manager with 1,000 workers")
    args = parser.parse_args()
    run_dir = args.folder / "run"
    if args.live:
        with tempfile.TemporaryDirectory() as folder:
            print(json.dumps(measure_live(Path(folder) / "run"), indent=2))
        return
    if not (run_dir / "recipe.toml").exists():
        make(args.folder, run_dir, args.steps)
    print(json.dumps(measure(run_dir), indent=2))


def make(folder: Path, run_dir: Path, num_steps: int) -> None:
    """Make the run; its recipe comes last, so that a run that is half made is made again."""
    folder.mkdir(parents=True, exist_ok=True)
    if not (run_dir / JOURNAL).exists():
        (folder / "large.toml").write_text(SCENARIO)
        words = ["simulate", str(folder / "large.toml"), "--steps", str(num_steps), "--json", "--no-progress"]
        command = [sys.executable, "-m", "polyrl", *words, "--out", str(run_dir)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    with (run_dir / METRICS).open("w") as file:
        for step in range(NUM_METRIC_STEPS):
            values = dict.fromkeys(METRIC_NAMES, step / NUM_METRIC_STEPS)
            file.write(json.dumps({"step": step, **values}) + "\n")
    for step in range(NUM_METRIC_STEPS):
        write_tokens(run_dir, step, ["word " * 40 + str(number) for number in range(ANSWERS_A_STEP)])
    model = character_model(folder / "model")
    (run_dir / "recipe.toml").write_text(f'model = {{ path = "{model}" }}\n')


def measure(run_dir: Path) -> dict[str, Any]:
    with sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        began = time.perf_counter()
        with dashboard(run_dir) as link, opened(browser, link) as seen:
            first_s = time.perf_counter() - began
            while_reading = look(seen)
            seen.page.wait_for_selector("#state:not(:has-text('%'))", timeout=600_000)
            read_s = time.perf_counter() - began
            after = look(seen)
        browser.close()
    return {
        "first card, s": round(first_s, 2),
        "while the journal is read": while_reading,
        "journal read after, s": round(read_s, 1),
        "journal, MB": round((run_dir / JOURNAL).stat().st_size / 1e6),
        "afterwards": after,
    }


def measure_live(run_dir: Path) -> dict[str, Any]:
    """Open a live manager's page while its workers write."""
    words = [sys.executable, "-m", "polyrl"]
    limits = ["limits.joins_per_s=10000", "limits.connections_per_address=4000"]  # all of them come from one address
    served = [*words, "manager", "--run-dir", str(run_dir), "--port", "0", *limits]
    manager = subprocess.Popen(served, stdout=subprocess.DEVNULL)
    started = [manager]
    try:
        while not (run_dir / "manager.json").exists():
            time.sleep(0.1)
        url = json.loads((run_dir / "manager.json").read_text())["url"]
        tokens = [(run_dir / f"{scope}.token").read_text().strip() for scope in ("worker", "admin")]
        load = map(str, (NUM_WORKERS * SAMPLES_A_WORKER, NUM_WORKERS, 600, TOKENS_PER_S, FLUSH_S, LENGTH))
        fleet = [sys.executable, "-m", "benchmarks.relay.fleet_load", url, *tokens, *load]
        started.append(subprocess.Popen(fleet, stdout=subprocess.PIPE))
        assert started[1].stdout is not None
        assert started[1].stdout.readline() == b"started\n"
        told = subprocess.run(
            [*words, "dash", str(run_dir), "--no-browser"], capture_output=True, text=True, check=True
        )
        with sync_playwright() as playing:
            browser = playing.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
            began = time.perf_counter()
            with opened(browser, told.stdout.strip()) as seen:
                first_s = time.perf_counter() - began
                seen.page.wait_for_selector("#state:not(:has-text('%'))", timeout=60_000)
                there = f".card:has-text('{NUM_WORKERS:,}')"
                seen.page.wait_for_selector(there, timeout=60_000)
                views = look(seen, LIVE_VIEWS)
                again = look(seen, LIVE_VIEWS)
            browser.close()
        return {"workers": NUM_WORKERS, "first card, s": round(first_s, 2), "views": views, "again": again}
    finally:
        for one in reversed(started):
            one.terminate()
            one.wait(30)


def look(seen: Seen, views: Mapping[str, str] = VIEWS) -> dict[str, dict[str, float]]:
    """Open every view, act in it, and return its seconds and its longest frame."""
    found: dict[str, dict[str, float]] = {}
    seen.page.set_default_timeout(300_000)
    for view, there in views.items():
        began = time.perf_counter()
        go(seen, view, there)
        took_s = time.perf_counter() - began
        found[view] = {"seconds": round(took_s, 2), "longest frame, ms": round(longest_frame_ms(seen))}
    return found


if __name__ == "__main__":
    main()
