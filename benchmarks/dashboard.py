"""What pages that look at a live run cost its manager: its CPU time and the tokens that pass, with and without them.

One run of real processes: a manager, emulated workers, and a trainer that takes rounds as fast as they come. Periods
without a page and with several that follow the stream take turns, so that neighbours on the machine hit both alike.
"""

import asyncio
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from statistics import median
from typing import Any

import aiohttp
import psutil

from benchmarks import parser_of, tell
from polyrl.bench.machine import commit, cpu
from polyrl.client import Fleet, Prompt, connect
from polyrl.run.event_loop import run_loop
from polyrl.scheduling.core.parameters import DomainData, RoundsConfig, SchedulerConfig
from polyrl.wire.credentials import bearer, read_token_file

NUM_WORKERS, SLOTS, TOKENS_PER_S = 4, 64, 60.0
NUM_PAGES = 3
PERIOD_S, NUM_PERIODS = 10.0, 6
_CONFIG = SchedulerConfig(
    domains=(DomainData(name="d", prompts_per_step=32, num_prompts=100_000),),
    max_new_tokens=512,
    rounds=RoundsConfig(samples_per_prompt=8),
)
_POLYRL = (sys.executable, "-m", "polyrl")


def main(argv: Sequence[str]) -> int:
    args = parser_of("dashboard", argv, __doc__).parse_args(argv)
    result = run_loop(measure(quick=args.quick))
    return tell(result, table(result), as_json=args.json)


def table(result: dict[str, Any]) -> list[str]:
    return [
        f"manager without a page: {result['cores']['without']:.4f} cores, {result['tok_s']['without']:,.0f} tokens/s",
        f"with {NUM_PAGES} pages:         {result['cores']['with']:.4f} cores, {result['tok_s']['with']:,.0f} tokens/s",
        f"difference: {result['cores_more']:+.4f} cores (goal 0.02); tokens: {result['tokens_share']:.3f} of those",
        f"the page's own process: {result['page_cores']:.3f} cores",
    ]


async def measure(*, quick: bool) -> dict[str, Any]:
    period_s, num = (2.0, 2) if quick else (PERIOD_S, NUM_PERIODS)
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / "run"
        started = [
            subprocess.Popen([*_POLYRL, "manager", "--run-dir", str(run_dir), "--port", "0"], stdout=subprocess.DEVNULL)
        ]
        try:
            url = await _url_of(run_dir)
            started += [_worker(url, run_dir, number) for number in range(NUM_WORKERS)]
            async with _training(url, run_dir):
                await asyncio.sleep(2 * period_s)  # workers join, lengths settle
                readings = await _periods(started[0].pid, url, run_dir, period_s, num)
        finally:
            for one in reversed(started):
                one.terminate()
                one.wait(20)
    without, seen = (readings[kind] for kind in ("without", "with"))
    cores = {kind: median(one["cores"] for one in readings[kind]) for kind in readings}
    tok_s = {kind: median(one["tok_s"] for one in readings[kind]) for kind in readings}
    return {
        "cores": cores,
        "tok_s": tok_s,
        "cores_more": cores["with"] - cores["without"],
        "tokens_share": tok_s["with"] / tok_s["without"],
        "page_cores": median(one["page_cores"] for one in seen),
        "periods": {"without": without, "with": seen},
        "pages": NUM_PAGES,
        "workers": NUM_WORKERS,
        "quick": quick,
        "machine": {"cpu": cpu(), "num_cpus": os.cpu_count(), "python": platform.python_version()},
        "commit": commit(),
    }


async def _url_of(run_dir: Path) -> str:
    while not (run_dir / "manager.json").exists():
        await asyncio.sleep(0.05)
    return json.loads((run_dir / "manager.json").read_text(encoding="utf-8"))["url"]


def _worker(url: str, run_dir: Path, number: int) -> "subprocess.Popen[bytes]":
    words = ["worker", "--join", url, "--token-file", str(run_dir / "worker.token"), "--engine", "emulated"]
    settings = [f"slots={SLOTS}", f"tokens_per_s={TOKENS_PER_S}", "median_tokens=200"]
    return subprocess.Popen(
        [*_POLYRL, *words, "--name", f"w{number}", *settings], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )


@asynccontextmanager
async def _training(url: str, run_dir: Path) -> AsyncIterator[None]:
    """A trainer that takes every group, and is done with a step at once."""
    token = read_token_file(run_dir / "admin.token")
    async with connect(url, token, _CONFIG, prompts=lambda *_: Prompt([5, 6, 7])) as fleet:
        task = asyncio.create_task(_train(fleet))
        try:
            yield
        finally:
            task.cancel()


async def _train(fleet: Fleet) -> None:
    await fleet.publish(0)
    step = 0
    while True:
        async for group in fleet.round(step):
            await fleet.take(group)
        await fleet.step_done(step)
        step += 1
        await fleet.publish(step)


async def _periods(pid: int, url: str, run_dir: Path, period_s: float, num: int) -> dict[str, list[dict[str, float]]]:
    readings: dict[str, list[dict[str, float]]] = {"without": [], "with": []}
    headers = bearer(read_token_file(run_dir / "admin.token"))
    async with aiohttp.ClientSession(url, headers=headers) as http:
        for _ in range(num):
            for kind, found in readings.items():
                pages = [asyncio.create_task(_look(http)) for _ in range(NUM_PAGES if kind == "with" else 0)]
                await asyncio.sleep(period_s / 2)  # the page's process starts, and reads the journal
                found.append(await _read(http, pid, period_s))
                for one in pages:
                    one.cancel()
    return readings


async def _look(http: aiohttp.ClientSession) -> None:
    """A page: it follows the stream, and asks for what its views show now and then."""
    async with http.get("/dash/api/stream", timeout=aiohttp.ClientTimeout(total=None)) as stream:
        async for _ in stream.content:
            for name in ("timeline", "series?names=time/step_total"):
                async with http.get(f"/dash/api/{name}") as answer:
                    await answer.read()
            await asyncio.sleep(1.0)


async def _read(http: aiohttp.ClientSession, pid: int, period_s: float) -> dict[str, float]:
    process = psutil.Process(pid)
    before, began = await _state(http, process), time.perf_counter()
    await asyncio.sleep(period_s)
    after, took_s = await _state(http, process), time.perf_counter() - began
    return {name: (after[name] - before[name]) / took_s for name in ("tok_s", "cores", "page_cores")}


async def _state(http: aiohttp.ClientSession, process: psutil.Process) -> dict[str, float]:
    async with http.get("/v1/status") as answer:
        tokens = (await answer.json())["tokens_received"]
    spent = process.cpu_times()
    pages = sum(one.cpu_times().user + one.cpu_times().system for one in process.children())
    return {"tok_s": tokens, "cores": spent.user + spent.system, "page_cores": pages}
