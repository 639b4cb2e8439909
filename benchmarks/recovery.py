"""How fast a manager that was killed has its run again: megabytes of payload a second, the events' replay included.

The run is written by the manager's own code: fake workers and a trainer say their frames to it, without sockets. Two
loads. `full`: every frame has a few tokens of each of its worker's samples, as engines that decode in lock step send
them. `sparse`: frames of a dozen rows with a token each, as many slow workers do; these are small, and cost the most.
Everything that is written is still wanted: no step is over.

The first recovery warms the disk's cache; the middle one of those that follow counts. Neighbours on a shared machine
make seconds longer, and CPU-seconds hardly.
"""

import os
import platform
import shutil
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from benchmarks import parser_of, tell
from polyrl.bench.machine import commit, cpu
from polyrl.journal.files import EVENTS, LIVE_FOLDER, PAYLOAD, segments
from polyrl.manager import opening
from polyrl.manager.frames_in import from_trainer, from_workers, joining
from polyrl.manager.peers.link import AnyFrame, Link
from polyrl.manager.service import Service
from polyrl.manager.settings import JournalSettings, ManagerSettings
from polyrl.scheduling.core.parameters import DomainData, FleetRules, RoundsConfig, SchedulerConfig
from polyrl.wire import columns, frames
from polyrl.wire.control import JoinRequest, RunRequest

GOAL_MB_PER_S = 200
ANSWER_TOKENS = 1024
SAMPLES_PER_PROMPT = 8
NUM_TURNS = 3
_SETTINGS = ManagerSettings(journal=JournalSettings(fsync="never"))
_CELLS = columns.pack_cells([7] * 65536, [-0.5] * 65536)


class RecoveryLoad(NamedTuple):
    name: str
    num_workers: int
    slots: int
    rows: int
    """Of a frame: so many of a worker's samples have new tokens."""
    tokens: int
    """Of a row."""
    payload_mb: int


LOADS = (RecoveryLoad("full", 64, 64, 64, 2, 256), RecoveryLoad("sparse", 400, 48, 12, 1, 96))


def main(argv: Sequence[str]) -> int:
    args = parser_of("recovery", argv, __doc__).parse_args(argv)
    result = measure(quick=args.quick)
    return tell(result, table(result), as_json=args.json)


def measure(*, quick: bool = False) -> dict[str, Any]:
    loads = [one._replace(payload_mb=4) for one in LOADS] if quick else LOADS
    readings = {load.name: _measure(load, num_turns=1 if quick else NUM_TURNS) for load in loads}
    return {
        "mb_per_s": {name: reading["mb_per_s"] for name, reading in readings.items()},
        "mb_per_cpu_s": {name: reading["mb_per_cpu_s"] for name, reading in readings.items()},
        "goal_mb_per_s": GOAL_MB_PER_S,
        "loads": readings,
        "quick": quick,
        "machine": {"cpu": cpu(), "num_cpus": os.cpu_count(), "python": platform.python_version()},
        "commit": commit(),
    }


def table(result: dict[str, Any]) -> list[str]:
    lines = [f"{'load':<9}{'MB':>6}{'rows':>13}{'tokens held':>13}{'seconds':>9}{'MB/s':>7}{'MB/CPU s':>10}"]
    for name, one in result["loads"].items():
        lines.append(
            f"{name:<9}{one['payload_mb']:>6.0f}{one['rows']:>13,}{one['tokens']:>13,}{one['seconds']:>9.2f}"
            f"{one['mb_per_s']:>7.0f}{one['mb_per_cpu_s']:>10.0f}"
        )
    machine = result["machine"]
    where = f"{machine['cpu']}, Python {machine['python']}, commit {result['commit']}"
    return [*lines, f"goal: at least {result['goal_mb_per_s']} MB/s", "", where]


def _measure(load: RecoveryLoad, *, num_turns: int) -> dict[str, Any]:
    folder = Path(tempfile.mkdtemp(prefix="polyrl-recovery-"))
    try:
        num_rows = _write(folder / "run", load)
        journal = folder / "run" / LIVE_FOLDER
        num_bytes = sum(path.stat().st_size for path in segments(journal, PAYLOAD))
        event_bytes = sum(path.stat().st_size for path in segments(journal, EVENTS))
        took: list[tuple[float, float]] = []
        num_tokens = 0
        for turn in range(num_turns + 1):
            copy = folder / f"copy-{turn}"
            shutil.copytree(folder / "run", copy)
            began, began_cpu = time.perf_counter(), time.process_time()
            service = Service(copy, _SETTINGS)
            took.append((time.perf_counter() - began, time.process_time() - began_cpu))
            num_tokens = service.lobby.need_run().payload.num_bytes // columns.CELL_BYTES
            service.close()
            shutil.rmtree(copy)
        seconds, cpu_s = (median(column) for column in zip(*took[1:], strict=True))
        return {
            "payload_mb": round(num_bytes / 1e6, 1),
            "events_mb": round(event_bytes / 1e6, 1),
            "rows": num_rows,
            "tokens": num_tokens,
            "seconds": round(seconds, 3),
            "cpu_s": round(cpu_s, 3),
            "mb_per_s": round(num_bytes / 1e6 / seconds, 1),
            "mb_per_cpu_s": round(num_bytes / 1e6 / cpu_s, 1),
        }
    finally:
        shutil.rmtree(folder, ignore_errors=True)


# Writing a run


class _Line(Link):
    """A connection that keeps what is sent."""

    def __init__(self) -> None:
        self.seen_at = "127.0.0.1"
        self.sent: list[AnyFrame] = []

    def send(self, frame: AnyFrame) -> None:
        self.sent.append(frame)

    def close(self, reason: str, code: int = 1001) -> None:
        pass


class _Worker:
    """Its samples in the order in which they got tokens last."""

    def __init__(self, service: Service, name: str, load: RecoveryLoad) -> None:
        self._lobby, self._load = service.lobby, load
        request = JoinRequest(name=name, protocol=frames.PROTOCOL, engine="none", slots=load.slots, version=0)
        session = joining.find_worker(self._lobby, joining.join(self._lobby, request).session)
        assert session is not None
        self._session, self._line = session, _Line()
        session.connect(self._line)
        self._say(frames.Hello(0, b""))
        self._seq = 0
        self._at: dict[int, int] = {}

    def _say(self, frame: frames.FromWorker) -> None:
        from_workers.said(self._lobby, self._session, self._line, frames.encode(frame))

    def listen(self) -> None:
        for frame in self._line.sent:
            if isinstance(frame, frames.Orders):
                self._at |= {one.lease: 0 for one in frame.orders}
        self._line.sent.clear()

    def write(self) -> int:
        """Say a frame. Returns its rows."""
        leases = list(self._at)[: self._load.rows]
        if not leases:
            return 0
        offsets = [self._at.pop(lease) for lease in leases]
        counts = [min(self._load.tokens, ANSWER_TOKENS - one) for one in offsets]
        ended: list[frames.Ended] = []
        for lease, offset, count in zip(leases, offsets, counts, strict=True):
            if offset + count < ANSWER_TOKENS:
                self._at[lease] = offset + count
            else:
                ended.append(frames.Ended(lease, ANSWER_TOKENS, "length"))
        self._seq += 1
        self._say(
            frames.NewTokens(
                self._seq,
                np.asarray(leases, "<u8").tobytes(),
                np.asarray(offsets, "<u4").tobytes(),
                np.asarray(counts, "<u4").tobytes(),
                bytes(4 * len(counts)),
                _CELLS[: sum(counts) * columns.CELL_BYTES],
                tuple(ended),
            )
        )
        return len(leases)


def _write(run_dir: Path, load: RecoveryLoad) -> int:
    """A run whose manager is killed when its payload is large enough. Returns the rows of all its frames."""
    row_bytes = 20 + columns.CELL_BYTES * load.tokens
    num_answers = load.num_workers * load.slots + load.payload_mb * 1e6 / row_bytes * load.tokens / ANSWER_TOKENS
    num_prompts = int(num_answers * 1.2 / SAMPLES_PER_PROMPT) + 1
    config = SchedulerConfig(
        domains=(DomainData(name="all", prompts_per_step=num_prompts, num_prompts=num_prompts),),
        max_new_tokens=ANSWER_TOKENS,
        rounds=RoundsConfig(samples_per_prompt=SAMPLES_PER_PROMPT),
        fleet_rules=FleetRules(heartbeat_timeout_s=1e6),
    )
    service = Service(run_dir, _SETTINGS)
    lobby = service.lobby
    opening.open_run(lobby, RunRequest(protocol=frames.PROTOCOL, config=config))
    run = lobby.need_run()
    trainer, line = run.trainer, _Line()
    assert trainer is not None
    trainer.connect(line)
    for said in (frames.TrainerHello(), frames.Published(1, 0), frames.RequestRound(2, 0)):
        from_trainer.said(lobby, trainer, line, frames.encode(said))
    lobby.commit()
    tokens = columns.pack_tokens([5] * 64)
    prompts = [frames.PromptPayload(group, tokens, frames.Sampling()) for group in run.desk.groups]
    from_trainer.said(lobby, trainer, line, frames.encode(frames.SupplyPrompts(3, tuple(prompts))))
    workers = [_Worker(service, f"w{number}", load) for number in range(load.num_workers)]
    lobby.commit()
    num_rows = num_bytes = 0
    while num_bytes < load.payload_mb * 1e6:
        for worker in workers:
            worker.listen()
            rows = worker.write()
            num_rows, num_bytes = num_rows + rows, num_bytes + rows * row_bytes
        lobby.commit()
        line.sent.clear()
    service._journal.abandon()  # killed
    service._syncer.shutdown()
    os.close(service._lock)
    return num_rows
