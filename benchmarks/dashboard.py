"""What pages that look at a live run cost its manager: its CPU time and the tokens that pass, with and without them.

One run of real processes: a manager, emulated workers, and a trainer that takes rounds as fast as they come. Many
short periods without a page and with several that follow the stream stand in pairs, in changing order, so that
neighbours on the machine hit both alike. A manager has one core for all that passes it, so the share of a core that
pages take from it is the share by which they can slow the relay; that is read in nanoseconds of CPU time, which
neighbours change little. Tokens a second are told too, but the workers offer a fixed load: they cannot show 1%.
Intervals are a bootstrap's over the pairs.
"""

import asyncio
import json
import os
import platform
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from statistics import fmean, median
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
PERIOD_S, NUM_PERIODS = 3.0, 40
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
        f"difference: {result['cores_more']:+.4f} cores (goal 0.02; 0.01), 95% {_span(result['cores_more_95'], 4)}",
        f"tokens a second: {result['tokens_share']:.4f} of those without, 95% {_span(result['tokens_share_95'], 4)}",
        f"{result['answers']:,} answers of the page, all of them 200",
        f"the page's own process: {result['page_cores']:.3f} cores",
    ]


async def measure(*, quick: bool) -> dict[str, Any]:
    period_s, num = (1.0, 3) if quick else (PERIOD_S, NUM_PERIODS)
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
    pairs = list(zip(without, seen, strict=True))
    more = [two["cores"] - one["cores"] for one, two in pairs]
    shares = [two["tok_s"] / one["tok_s"] for one, two in pairs]
    return {
        "cores": cores,
        "tok_s": tok_s,
        "cores_more": fmean(more),
        "cores_more_95": interval(more),
        "tokens_share": fmean(shares),
        "tokens_share_95": interval(shares),
        "answers": sum(int(one["answers"]) for one in seen),
        "page_cores": median(one["page_cores"] for one in seen),
        "periods": {"without": without, "with": seen},
        "pages": NUM_PAGES,
        "workers": NUM_WORKERS,
        "quick": quick,
        "machine": {"cpu": cpu(), "num_cpus": os.cpu_count(), "python": platform.python_version()},
        "commit": commit(),
    }


def interval(values: Sequence[float], num: int = 2_000) -> tuple[float, float]:
    """Return where the mean lies in 95% of the samples that could as well have been drawn."""
    draw = random.Random(0)
    means = sorted(fmean(draw.choices(values, k=len(values))) for _ in range(num))
    return means[num // 40], means[-1 - num // 40]


def _span(ends: tuple[float, float], digits: int) -> str:
    return f"{ends[0]:.{digits}f} to {ends[1]:.{digits}f}"


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
        await _look_once(http)  # the page's process starts, and stays
        for number in range(num):
            kinds = ("without", "with") if number % 2 == 0 else ("with", "without")
            for kind in kinds:
                seen = [0]
                pages = [asyncio.create_task(_look(http, seen)) for _ in range(NUM_PAGES if kind == "with" else 0)]
                await asyncio.sleep(period_s / 3)
                told = await _read(http, pid, period_s)
                for one in pages:
                    if one.done():
                        one.result()  # it ends by a failure alone
                    one.cancel()
                readings[kind].append({**told, "answers": seen[0]})
    return readings


async def _look_once(http: aiohttp.ClientSession) -> None:
    async with http.get("/dash/api/now") as answer:
        answer.raise_for_status()


async def _look(http: aiohttp.ClientSession, seen: list[int]) -> None:
    """A page: it follows the stream, and asks for what its views show now and then. Raises for a refusal."""
    async with http.get("/dash/api/stream", timeout=aiohttp.ClientTimeout(total=None)) as stream:
        stream.raise_for_status()
        async for _ in stream.content:
            for name in ("timeline", "series?name=time/step_total"):
                async with http.get(f"/dash/api/{name}") as answer:
                    answer.raise_for_status()
                    await answer.read()
                seen[0] += 1
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
    pages = sum(map(_spent_s, (one.pid for one in process.children())))
    return {"tok_s": tokens, "cores": _spent_s(process.pid), "page_cores": pages}


def _spent_s(pid: int) -> float:
    """Return the CPU time of a process so far; its ticks of 10 ms are too coarse for short periods."""
    threads = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(one.read_text(encoding="ascii").split()[0]) for one in threads) / 1e9
