"""The device and the size of a check: the real shape on a GPU; with --small, a tiny model on the device that is here.

test_scripts.py runs every script of this folder with --small on the CPU, so that none of them falls behind the code.
"""

import os
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

SMALL = "--small" in sys.argv
if SMALL:
    sys.argv.remove("--small")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ARCH = "tiny-qwen3" if SMALL else "qwen3-1.7b"
if DEVICE == "cpu":
    torch.set_num_threads(1)
    os.environ["TRITON_INTERPRET"] = "1"  # before anybody imports Triton


class Sink:
    """What an engine says of its samples, by lease."""

    def __init__(self) -> None:
        self.text: dict[int, list[int]] = {}
        self.logprobs: dict[int, list[float]] = {}
        self.ends: dict[int, str] = {}

    def tokens(self, lease: Any, tokens: Any, logprobs: Any, version: Any) -> None:
        self.text.setdefault(lease, []).extend(tokens)
        self.logprobs.setdefault(lease, []).extend(logprobs)

    def ended(self, lease: Any, reason: Any, detail: str = "") -> None:
        self.ends[lease] = f"{reason} {detail}".strip()


def need_a_gpu_or_small() -> None:
    """End the script where it would run the real shape on a CPU."""
    if DEVICE == "cpu" and not SMALL:
        sys.exit(f"{sys.argv[0]}: no GPU here; --small runs the same with a tiny model on the CPU")


def synchronize() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def reset_peak_memory() -> None:
    if DEVICE == "cuda":
        torch.cuda.reset_peak_memory_stats()


def print_profile(work: Callable[[], object], steps: int, rows: int) -> None:
    """Print the operations that take most of the device's time, in milliseconds a step."""
    activity = torch.profiler.ProfilerActivity
    with torch.profiler.profile(activities=[activity.CUDA if DEVICE == "cuda" else activity.CPU]) as seen:
        work()
        synchronize()

    def microseconds(one: Any) -> float:
        return one.self_device_time_total if DEVICE == "cuda" else one.self_cpu_time_total

    events = sorted(seen.key_averages(), key=microseconds, reverse=True)
    total = sum(map(microseconds, events))
    print(f"{total / steps / 1e3:.1f} ms a step on the {DEVICE}")
    for one in events[:rows]:
        share, each_ms = microseconds(one) / total, microseconds(one) / steps / 1e3
        print(f"{share:6.1%} {each_ms:8.3f} ms {one.count / steps:7.1f}x {one.key[:90]}", flush=True)


def time_ms(call: Callable[[], object]) -> float:
    """Return the median milliseconds of one call; on a GPU ten calls are one graph, without the host's share."""
    call()
    one_ms = _as_a_graph(call) if DEVICE == "cuda" else partial(_by_the_clock, call)
    return statistics.median(one_ms() for _ in range(7))


def _as_a_graph(call: Callable[[], object]) -> Callable[[], float]:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(10):
            call()

    def replayed_ms() -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end) / 10

    return replayed_ms


def _by_the_clock(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return (time.perf_counter() - began) * 1e3
