"""How fast weights move on this machine: full versions over loopback TCP, beside the same bytes without a protocol.

A pull is a full version from one process to another, every chunk verified, into memory that a worker keeps; by
xxh3-128, as in a run on one machine, and in turn by blake3, as in a run whose workers pass weights on. The sender's CPU
time is that of its process while it serves, all threads, as the kernel counts it. Where cores are shared with others,
CPU time a GB says more than GB a second.
"""

import os
import platform
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import numpy as np

from polyrl.bench import floor
from polyrl.bench.machine import commit
from polyrl.bench.nodes import Node
from polyrl.weights.chunks import HashName
from polyrl.weights.settings import WeightSettings

GOALS = {"sender_cpu_s_per_gb": 0.3}
STREAMS = (1, 2, 4)

Readings = dict[str, list[float]]


def measure(quick: bool = False, before_pulls: Callable[[int], object] = lambda _: None) -> dict[str, Any]:
    """Measure pulls. `before_pulls(num_streams)` is called before each series, so that a comparison can take turns."""
    num_bytes, num_rounds = (64 << 20, 1) if quick else (1 << 30, 2)
    by_streams: Readings = {}
    weak: Readings = {}
    strong: Readings = {}
    shared: list[float] = []
    for _ in range(num_rounds):
        for num_streams in STREAMS:
            before_pulls(num_streams)
            found = _pulls(num_streams, num_bytes, shared_memory=False)
            by_streams.setdefault(str(num_streams), []).extend(found["gb_s"])
            _add(weak, found)
            _add(strong, _pulls(num_streams, num_bytes, shared_memory=False, hash="blake3"))
        shared += _pulls(2, num_bytes, shared_memory=True)["gb_s"]
    return {
        "pull_gb_s": round(max(weak["gb_s"]), 2),
        "pull_gb_s_by_streams": {name: _spread(values) for name, values in by_streams.items()},
        **_cpu(weak),
        "shared_memory_gb_s": round(max(shared), 2),
        "pull_by_blake3": {"gb_s": _spread(strong["gb_s"]), **_cpu(strong)},
        "floor": floor.measure(num_bytes, 3 * num_rounds),
        "memcpy_gb_s": round(_memcpy_gb_s(num_bytes), 2),
        "num_bytes": num_bytes,
        "goals": GOALS,
        "machine": {"cores": os.cpu_count(), "load": round(os.getloadavg()[0], 1), "python": platform.python_version()},
        "commit": commit(),
    }


def _add(to: Readings, found: Readings) -> None:
    for key, values in found.items():
        to.setdefault(key, []).extend(values)


def _cpu(readings: Readings) -> dict[str, float]:
    return {key: round(median(readings[key]), 3) for key in ("sender_cpu_s_per_gb", "receiver_cpu_s_per_gb")}


def _pulls(
    num_streams: int, num_bytes: int, *, shared_memory: bool, hash: HashName = "xxh3-128"
) -> dict[str, list[float]]:
    """Pulls of one worker, from the third on: the first two make its buffers."""
    settings = WeightSettings(
        interfaces=("127.0.0.0/8",), streams=num_streams, num_deltas=0, shared_memory=shared_memory, hash=hash
    )
    found: dict[str, list[float]] = {"gb_s": [], "sender_cpu_s_per_gb": [], "receiver_cpu_s_per_gb": []}
    with Node("serve", settings, num_bytes) as trainer, Node("pull", settings, 0) as worker:
        for number in range(5):
            offer = trainer.request(do="publish")
            wish = {"version": offer["version"], "digest": offer["digest"], "addresses": trainer.addresses}
            said = worker.request(**wish, deadline_s=120)
            if said["error"]:
                raise RuntimeError(f"a worker of the bench has no weights: {said['error']}")
            if number >= 2:
                cpu_s = trainer.request(do="tell")["cpu_s"] - offer["cpu_s"]
                found["gb_s"].append(num_bytes / 1e9 / said["took_s"])
                found["sender_cpu_s_per_gb"].append(cpu_s / (num_bytes / 1e9))
                found["receiver_cpu_s_per_gb"].append(said["cpu_s"] / (num_bytes / 1e9))
    return found


def _spread(values: list[float]) -> dict[str, float]:
    return {"best": round(max(values), 2), "median": round(median(values), 2)}


def _memcpy_gb_s(num_bytes: int, num_runs: int = 5) -> float:
    """Measure one thread, from one buffer to another, both touched before."""
    source, target = np.ones(num_bytes, np.uint8), np.zeros(num_bytes, np.uint8)
    took_s = []
    for _ in range(num_runs):
        start = time.perf_counter()
        np.copyto(target, source)
        took_s.append(time.perf_counter() - start)
    return num_bytes / 1e9 / min(took_s)


def table(result: dict[str, Any]) -> list[str]:
    """Return the keys and their values; nested ones indented."""
    lines: list[str] = []
    for key, value in result.items():
        if isinstance(value, dict):
            lines.append(key)
            lines += [f"  {name:<30}{one}" for name, one in value.items()]
        else:
            lines.append(f"{key:<32}{value}")
    return lines
