"""Other programs that move the same bytes on the same machine: iperf3, and mooncake's transfer engine in TCP mode.

iperf3 discards what it receives into one small buffer that stays in the cache, so it is a ceiling rather than a peer.
mooncake is installed into a cache of its own; it does not verify what it moves. A peer that cannot be measured leaves a
note with the reason.
"""

import json
import shutil
import subprocess
import time
from pathlib import Path
from typing import IO, Any, NamedTuple

from benchmarks.environments import CACHE, CannotMeasure, environment, run
from polyrl.engines.served.process import free_port

MOONCAKE = "mooncake-transfer-engine-non-cuda"
_RUN_S = 120


class Iperf(NamedTuple):
    best_gb_s: float
    """Of any quarter of a second, which is about what a pull takes."""
    mean_gb_s: float
    cpu_s_per_gb: float
    """Sender and receiver together."""


def iperf3(num_streams: int, seconds: int) -> Iperf:
    """`iperf3 -Z -l 1M` on loopback, with the congestion control that does not pace. Raises CannotMeasure."""
    if shutil.which("iperf3") is None:
        raise CannotMeasure("there is no iperf3 (package iperf3)")
    port = str(free_port())
    server = subprocess.Popen(["iperf3", "-s", "-1", "-p", port], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        _wait_for_listener(int(port))
        argv = ["iperf3", "-c", "127.0.0.1", "-p", port, "-Z", "-l", "1M", "-P", str(num_streams), "-t", str(seconds)]
        done = subprocess.run(
            [*argv, "-C", "reno", "-J", "-i", "0.25"], capture_output=True, timeout=_RUN_S, check=False
        )
        said = json.loads(done.stdout)
        if "error" in said:
            raise CannotMeasure(f"iperf3: {said['error']}")
        end = said["end"]
        mean = end["sum_received"]["bits_per_second"] / 8e9
        best = max(one["sum"]["bits_per_second"] for one in said["intervals"] if one["sum"]["seconds"] > 0.2) / 8e9
        percent = end["cpu_utilization_percent"]
        return Iperf(best, mean, (percent["host_total"] + percent["remote_total"]) / 100 / mean)
    except subprocess.TimeoutExpired as error:
        raise CannotMeasure(f"iperf3 took longer than {_RUN_S} s") from error
    finally:
        server.terminate()
        server.wait(10)


def mooncake_gb_s(num_bytes: int) -> dict[str, Any]:
    """GB/s by size of a request, the best of three reads each. Raises CannotMeasure."""
    python = _install_mooncake()
    script = str(Path(__file__).with_name("mooncake_side.py"))
    holder = subprocess.Popen(
        [python, script, "hold", str(num_bytes)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        held = _said(holder.stdout)
        argv = [python, script, "read", str(num_bytes), held["address"], str(held["buffer"])]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=_RUN_S, check=False)
        lines = [line for line in done.stdout.splitlines() if line.startswith("polyrl:")]
        if not lines:
            raise CannotMeasure(f"mooncake ended with {done.returncode}: {done.stderr.strip()[-200:]}")
        return json.loads(lines[0].removeprefix("polyrl:"))["gb_s"]
    except subprocess.TimeoutExpired as error:
        raise CannotMeasure(f"mooncake took longer than {_RUN_S} s") from error
    finally:
        holder.kill()
        holder.wait(10)


def _install_mooncake() -> str:
    python = str(environment(CACHE / "weights" / "mooncake", MOONCAKE).folder / "python")
    try:
        run([python, "-c", "import mooncake.engine"])
    except CannotMeasure as error:
        raise CannotMeasure(f"mooncake does not import (packages libibverbs1, libnl-3-200): {error}") from error
    return python


def _said(stream: IO[str] | None) -> dict[str, Any]:
    for line in stream or ():
        if line.startswith("polyrl:"):
            return json.loads(line.removeprefix("polyrl:"))
    raise CannotMeasure("mooncake did not come up")


def _wait_for_listener(port: int) -> None:
    """Look at the kernel's table: a connection to try would be the one that `-1` serves."""
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        lines = Path("/proc/net/tcp").read_text() + (
            Path("/proc/net/tcp6").read_text() if Path("/proc/net/tcp6").exists() else ""
        )
        if f":{port:04X} " in lines:
            return
        time.sleep(0.02)
    raise CannotMeasure("iperf3 does not listen")
