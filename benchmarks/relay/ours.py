"""Our manager under the same loads as the other relays (load.py): a real `polyrl manager`, journal on, on one core.

The load comes from fleet_load.py: fake workers that speak our frames. `paced`: 25,000 tokens a second in all, frames
every 50 ms. `saturated`: frames as fast as they are taken. Latency is from the sending of a group's last token to the
arrival of the whole group at the trainer, and has a run of its own with answers of two seconds, so that many end.
"""

import json
import shutil
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.environments import CannotMeasure
from benchmarks.processes import Program, allow_many_files, busy_s, load_cpus, relay_cpus
from benchmarks.relay.load import PACED_TOKENS_PER_S, Latency, Load, Reading, Window, read_off
from polyrl.engines.served.process import free_port

NAME = "polyrl"
FLUSH_S = 0.05
LENGTH = 1024
_READY_S = 30.0
_ANSWER_S = 2.0
_ALL_AT_ONCE = "limits.joins_per_s=10000"
"""The fleet joins from one address."""


def measure_ours(load: Load, *, cache: Path, length: int = LENGTH) -> Reading:
    """A reading of our manager. Raises CannotMeasure."""
    window, _ = _run(load, cache=cache, length=length)
    return read_off(NAME, load, window, direct=None)


def measure_delivery(load: Load, *, cache: Path) -> Latency:
    """From the end of a group's last answer to the group's arrival. Raises CannotMeasure."""
    length = max(2, round(_ANSWER_S * PACED_TOKENS_PER_S / load.num_samples))
    _, seen = _run(load, cache=cache, length=length)
    return Latency(seen["delivered_ms"]["p50"], seen["delivered_ms"]["p99"])


def _run(load: Load, *, cache: Path, length: int) -> tuple[Window, dict[str, Any]]:
    allow_many_files()
    run_dir = cache / "manager-run"
    shutil.rmtree(run_dir, ignore_errors=True)
    port = free_port()
    argv = [sys.executable, "-m", "polyrl", "manager", "--run-dir", str(run_dir), "--port", str(port), _ALL_AT_ONCE]
    manager = Program(argv, cpus=relay_cpus(), log=cache / "logs" / "manager.log")
    try:
        _wait_until_ready(manager, run_dir)
        return _watch(manager, load, f"http://127.0.0.1:{port}", run_dir, cache, length)
    finally:
        manager.stop()
        shutil.rmtree(run_dir, ignore_errors=True)


def _wait_until_ready(manager: Program, run_dir: Path) -> None:
    deadline = time.monotonic() + _READY_S
    while not (run_dir / "manager.json").exists():
        if manager.has_ended or time.monotonic() > deadline:
            raise CannotMeasure(f"the manager did not come up: {manager.last_words()}")
        time.sleep(0.1)


def _watch(
    manager: Program, load: Load, url: str, run_dir: Path, cache: Path, length: int
) -> tuple[Window, dict[str, Any]]:
    rate = PACED_TOKENS_PER_S / load.num_samples if load.name == "paced" else 0.0
    tokens = [(run_dir / f"{scope}.token").read_text(encoding="ascii").strip() for scope in ("worker", "admin")]
    facts = [load.num_samples, load.num_workers, load.seconds, rate, FLUSH_S, length]
    argv = [sys.executable, str(Path(__file__).with_name("fleet_load.py")), url, *tokens, *map(str, facts)]
    rss_before = manager.rss_bytes()
    fleet = Program(argv, cpus=load_cpus(), log=cache / "logs" / "fleet_load.log", piped=True)
    try:
        if fleet.read_line() != b"started\n":
            raise CannotMeasure(f"{load.num_samples} samples did not start: {fleet.last_words()}")
        start = manager.cpu_s(), fleet.cpu_s(), busy_s()
        said = fleet.read_line()
        end = manager.cpu_s(), fleet.cpu_s(), busy_s()
        rss_bytes = manager.rss_bytes()
    finally:
        fleet.stop()
    if not said:
        raise CannotMeasure(f"the streams broke: {fleet.last_words()}")
    seen = json.loads(said)
    manager_s, load_s, all_s = (after - before for before, after in zip(start, end, strict=True))
    latency = Latency(seen["acknowledged_ms"]["p50"], seen["acknowledged_ms"]["p99"])
    others_s = max(all_s - manager_s - load_s, 0.0)
    window = Window(seen["tokens"], seen["seconds"], seen["reads"], latency, manager_s, others_s, rss_before, rss_bytes)
    return window, seen
