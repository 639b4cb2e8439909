"""One run of everything, so that the figures have the same neighbours: rounds of iperf3 and pulls, taken in turn.

A pull is a full version over loopback TCP, from one process to another, every chunk verified, into memory that a worker
keeps; by xxh3-128, as a run on one machine has it, and in turn by blake3, as one has it whose workers pass weights on.
The sender's CPU time is that of its process while it serves, all threads, as the kernel counts it. Where cores are
shared with others, CPU time a GB says more than GB a second.
"""

import os
import platform
from collections.abc import Callable
from statistics import median
from typing import Any

from benchmarks.weights import late_joiners, peers
from polyrl.bench import floor
from polyrl.bench.processes import Node
from polyrl.weights.chunks import HashName
from polyrl.weights.settings import WeightSettings

GOALS = {
    "ratio_to_iperf3": 0.7,
    "times_mooncake": 2.0,
    "sender_cpu_s_per_gb": 0.3,
    "late_joiners.copies_sent": late_joiners.GOALS["copies_sent"],
    "late_joiners.times_one_copy": late_joiners.GOALS["times_one_copy"],
}
STREAMS = (1, 2, 4)


def measure(*, quick: bool = False) -> dict[str, Any]:
    num_bytes, num_rounds, iperf_s = (64 << 20, 1, 1) if quick else (1 << 30, 2, 2)
    notes: dict[str, str] = {}
    iperf: dict[str, list[peers.Iperf]] = {}
    pulls: dict[str, list[float]] = {}
    shared: list[float] = []
    sender: list[float] = []
    receiver: list[float] = []
    strong: dict[str, list[float]] = {}
    for _ in range(num_rounds):
        for num_streams in STREAMS:
            add_iperf(iperf, num_streams, iperf_s, notes)
            found = _pulls(num_streams, num_bytes, shared_memory=False)
            pulls.setdefault(str(num_streams), []).extend(found["gb_s"])
            sender += found["sender_cpu_s_per_gb"]
            receiver += found["receiver_cpu_s_per_gb"]
            for key, values in _pulls(num_streams, num_bytes, shared_memory=False, hash="blake3").items():
                strong.setdefault(key, []).extend(values)
        shared += _pulls(2, num_bytes, shared_memory=True)["gb_s"]
    result = summary(iperf, pulls, sender, receiver)
    result["shared_memory_gb_s"] = round(max(shared), 2)
    if "iperf3_gb_s" in result:
        result["shared_memory_ratio_to_iperf3"] = round(max(shared) / result["iperf3_gb_s"], 2)
    result["pull_by_blake3"] = {
        "gb_s": _spread(strong["gb_s"]),
        **{key: round(median(strong[key]), 3) for key in ("sender_cpu_s_per_gb", "receiver_cpu_s_per_gb")},
    }
    result["floor"] = floor.measure(num_bytes, 3 * num_rounds)
    result["memcpy_gb_s"] = round(peers.memcpy_gb_s(num_bytes), 2)
    result["peers"] = _mooncake(num_bytes, notes)
    if "mooncake" in result["peers"]:
        result["times_mooncake"] = round(result["pull_gb_s"] / result["peers"]["mooncake"]["best_gb_s"], 2)
    deltas = _deltas(notes, quick=quick)
    goals = {**deltas.pop("goals", {}), **GOALS}
    result.update(deltas)
    size, workers = (32 << 20, 2) if quick else (512 << 20, 8)
    result["late_joiners"] = late_joiners.measure(workers, size, 1000)
    machine = {"cores": os.cpu_count(), "load": round(os.getloadavg()[0], 1), "python": platform.python_version()}
    return {**result, "num_bytes": num_bytes, "goals": goals, "notes": notes, "machine": machine}


def add_iperf(
    found: dict[str, list[peers.Iperf]],
    num_streams: int,
    seconds: int,
    notes: dict[str, str],
    measure_one: Callable[[int, int], peers.Iperf] = peers.iperf3,
) -> None:
    """Add a run of iperf3; where it cannot be measured, a note and nothing else."""
    try:
        one = measure_one(num_streams, seconds)
    except peers.CannotMeasure as why:
        notes["iperf3"] = str(why)
    else:
        found.setdefault(str(num_streams), []).append(one)


def _pulls(
    num_streams: int, num_bytes: int, *, shared_memory: bool, hash: HashName = "xxh3-128"
) -> dict[str, list[float]]:
    """A worker's pulls after its two buffers are there."""
    settings = WeightSettings(
        interfaces=("127.0.0.0/8",), streams=num_streams, num_deltas=0, shared_memory=shared_memory, hash=hash
    )
    found: dict[str, list[float]] = {"gb_s": [], "sender_cpu_s_per_gb": [], "receiver_cpu_s_per_gb": []}
    with Node("serve", settings, num_bytes) as trainer, Node("pull", settings, 0) as worker:
        for turn in range(5):
            offer = trainer.ask(do="publish")
            wish = {"version": offer["version"], "digest": offer["digest"], "addresses": trainer.addresses}
            said = worker.ask(**wish, deadline_s=120)
            if said["error"]:
                raise RuntimeError(f"a worker of the bench has no weights: {said['error']}")
            if turn >= 2:
                cpu_s = trainer.ask(do="tell")["cpu_s"] - offer["cpu_s"]
                found["gb_s"].append(num_bytes / 1e9 / said["took_s"])
                found["sender_cpu_s_per_gb"].append(cpu_s / (num_bytes / 1e9))
                found["receiver_cpu_s_per_gb"].append(said["cpu_s"] / (num_bytes / 1e9))
    return found


def summary(
    iperf: dict[str, list[peers.Iperf]], pulls: dict[str, list[float]], sender: list[float], receiver: list[float]
) -> dict[str, Any]:
    best = max(max(values) for values in pulls.values())
    result: dict[str, Any] = {
        "pull_gb_s": round(best, 2),
        "pull_gb_s_by_streams": {name: _spread(values) for name, values in pulls.items()},
        "sender_cpu_s_per_gb": round(median(sender), 3),
        "receiver_cpu_s_per_gb": round(median(receiver), 3),
    }
    if iperf:
        runs = [one for values in iperf.values() for one in values]
        ceiling = max(one.best_gb_s for one in runs)
        result["iperf3_gb_s"] = round(ceiling, 2)
        result["iperf3_gb_s_by_streams"] = {
            name: {"best": round(max(one.best_gb_s for one in values), 2)}
            | {"means": [round(one.mean_gb_s, 2) for one in values]}
            for name, values in iperf.items()
        }
        result["iperf3_cpu_s_per_gb"] = round(median(one.cpu_s_per_gb for one in runs), 3)
        result["ratio_to_iperf3"] = round(best / ceiling, 2)
        medians = (
            [median(values) for values in pulls.values()],
            [median(one.mean_gb_s for one in v) for v in iperf.values()],
        )
        result["ratio_of_best_medians"] = round(max(medians[0]) / max(medians[1]), 2)
    return result


def _spread(values: list[float]) -> dict[str, float]:
    return {"best": round(max(values), 2), "median": round(median(values), 2)}


def _mooncake(num_bytes: int, notes: dict[str, str]) -> dict[str, Any]:
    try:
        by_request = peers.mooncake_gb_s(num_bytes)
    except peers.CannotMeasure as why:
        notes["mooncake"] = str(why)
        return {}
    return {"mooncake": {"best_gb_s": max(by_request.values()), "gb_s_by_request": by_request, "verified": False}}


def _deltas(notes: dict[str, str], *, quick: bool) -> dict[str, Any]:
    try:
        from benchmarks import delta as bench_delta
    except ImportError as error:
        notes["delta"] = f"needs more than the base install: pip install polyrl[train] ({error})"
        return {}
    return bench_delta.measure(quick=quick)


def table(result: dict[str, Any]) -> list[str]:
    """The keys and their values; nested ones indented."""
    lines: list[str] = []
    for key, value in result.items():
        if isinstance(value, dict):
            lines.append(key)
            lines += [f"  {name:<30}{one}" for name, one in value.items()]
        else:
            lines.append(f"{key:<32}{value}")
    return lines
