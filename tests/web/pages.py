"""A dashboard as a process, and its page in a browser."""

import asyncio
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import Queue
from typing import Any

import numpy as np
from aiohttp import web

from polyrl.dashboard.server import DashboardServer, serving
from polyrl.dashboard.watched import WatchedRun
from polyrl.trainer.batch import TrainSample, TrainSegment
from polyrl.trainer.state import entries

CHROMIUM = shutil.which("chromium")
FLAGS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
]  # fmt: skip


class Seen:
    """A page, and what it complained about."""

    def __init__(self, page: Any) -> None:
        self.page = page
        self.complaints: list[str] = []
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("console", lambda one: self.complaints.append(one.text) if one.type == "error" else None)


@contextmanager
def dashboard(*paths: Path) -> Iterator[str]:
    """`polyrl dash` as a process; yields its link."""
    words = [sys.executable, "-m", "polyrl", "dash", *map(str, paths), "--no-browser"]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield process.stdout.readline().strip()
    finally:
        process.terminate()
        process.wait(10)


@contextmanager
def served(run: WatchedRun) -> Iterator[str]:
    """The page of a run that the test tells of its state, from this process; yields its link."""
    links: Queue[str] = Queue()
    is_over = threading.Event()

    async def serve() -> None:
        server = DashboardServer([run], "a-token")
        async with serving(server, lambda runner: web.TCPSite(runner, "127.0.0.1", 0)) as site:
            port = site._server.sockets[0].getsockname()[1]  # type: ignore[attr-defined]
            links.put(f"http://127.0.0.1:{port}/dash/#token=a-token")
            await asyncio.to_thread(is_over.wait)

    run.start()
    thread = threading.Thread(target=asyncio.run, args=(serve(),), daemon=True)
    thread.start()
    try:
        yield links.get(timeout=30.0)
    finally:
        is_over.set()
        thread.join(20.0)


@contextmanager
def opened(browser: Any, link: str, **options: Any) -> Iterator[Seen]:
    context = browser.new_context(viewport={"width": 1280, "height": 850}, **options)
    try:
        context.set_default_timeout(60_000)  # of a machine whose cores are all taken
        seen = Seen(context.new_page())
        seen.page.goto(link)
        seen.page.wait_for_selector(".card")
        yield seen
        assert seen.complaints == []
    finally:
        context.close()


def go(seen: Seen, view: str, wait_for: str) -> None:
    seen.page.click(f"nav a[data-view={view}]")
    seen.page.wait_for_selector(wait_for)


def write_tokens(run_dir: Path, step: int, answers: list[str], reward: float = 1.0) -> None:
    """A step whose answers are these texts; a token is a character of the model made by `character_model`."""
    samples = [
        TrainSample(
            np.array([ord("?")], np.int32), np.array(list(map(ord, text)), np.int32),
            np.linspace(-4.0, 0.0, len(text), dtype=np.float32), reward, group,
            written_by=(TrainSegment(step, len(text), "builtin", "w<b>1</b>"),), parts={"<i>style</i>": 0.5},
        )
        for group, text in enumerate(answers)
    ]  # fmt: skip
    folder = run_dir / entries.SAMPLES_FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    made = entries.make(step, 10, [[[sample] for sample in samples]], b"", [])
    (folder / entries.name_of(step)).write_bytes(entries.encode(made))


def longest_frame_ms(seen: Seen, for_s: float = 3.0) -> float:
    """Return the longest time between two frames while the run's state comes in."""
    return seen.page.evaluate(
        """async (for_s) => { let worst = 0, last = performance.now();
        const until = last + 1000 * for_s;
        while (performance.now() < until) {
          await new Promise(requestAnimationFrame);
          const now = performance.now(); worst = Math.max(worst, now - last); last = now; }
        return worst; }""",
        for_s,
    )
