"""The vLLM server that a benchmark starts ends with it, however it ends."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from polyrl.engines.served.process import members

ROOT = Path(__file__).parents[2]
SERVER = """#!/bin/sh
sleep 300 &
echo $$ > {told}
wait
"""
BENCH = """
import asyncio
from benchmarks.vllm_peer import serve

async def bench():
    async with serve("model", slots=1, max_context=8):
        pass

asyncio.run(bench())
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL], ids=lambda one: one.name)
def test_a_benchmark_that_is_ended_leaves_no_server(tmp_path: Path, number: signal.Signals):
    told, server = tmp_path / "told", tmp_path / ".cache/polyrl/engines/vllm/bin/vllm"
    server.parent.mkdir(parents=True)
    server.write_text(SERVER.format(told=told))
    server.chmod(0o755)
    bench = subprocess.Popen(
        [sys.executable, "-c", BENCH], cwd=ROOT, env={**os.environ, "HOME": str(tmp_path)}, stderr=subprocess.DEVNULL
    )
    try:
        until(lambda: told.exists() and told.read_text().endswith("\n"))
        group = int(told.read_text())
        assert len(members(group)) == 2
        bench.send_signal(number)
        assert bench.wait(20.0) != 0
        until(lambda: not members(group))
    finally:
        bench.kill()
        bench.wait()


def until(holds) -> None:
    end = time.monotonic() + 20.0
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.02)
