"""The load on our manager: fake workers and a trainer in one cheap process. Run by ours.py, pinned to the load's core.

    python -m benchmarks.relay.fleet_load URL WORKER_TOKEN ADMIN_TOKEN SAMPLES WORKERS SECONDS RATE FLUSH_S LENGTH

Each fake worker runs its share of the samples and sends, every FLUSH_S, one frame with what engines of RATE tokens a
second (of one sample) have made since; samples that it is given ahead of its slots wait for one. RATE 0: frames of
TOKENS_WHEN_SATURATED a sample without a pause. In either case no more than MAX_UNACKNOWLEDGED frames of a worker are
under way.

It says `started` a second after as many samples as may run at once have begun (short ones may have ended by then),
and then one JSON object for the SECONDS that followed: tokens sent (what is acknowledged comes in steps that are a good
part of a reading, and lags by MAX_UNACKNOWLEDGED frames at most); time from sending a frame to its acknowledgement,
which the manager gathers; and from sending the end of a group's last sample to the group's arrival at the trainer.
"""

import asyncio
import json
import sys
import time
from typing import Any

import numpy as np

from polyrl.client import Fleet, Prompt, connect
from polyrl.run.event_loop import run_loop
from polyrl.scheduling.core.parameters import DomainData, RewardConfig, RoundsConfig, SchedulerConfig
from polyrl.wire import columns, frames
from polyrl.wire.control import JoinReply, JoinRequest
from polyrl.wire.dial import Dialer
from polyrl.worker.agent import until_next

SAMPLES_PER_PROMPT = 8
TOKENS_WHEN_SATURATED = 10
"""A sample, in a frame: what an engine of 200 tokens a second makes in 50 ms."""
PROMPT_TOKENS = 256
MAX_UNACKNOWLEDGED = 32
"""Frames of one worker: a manager that is behind is offered no more."""


class FakeWorker:
    """Rows of samples, the oldest first. As many as there are slots run, and advance together; the others wait."""

    def __init__(self, name: str, slots: int, length: int, ended_at: dict[int, float]) -> None:
        self.name = name
        self.slots = slots
        self._length = length
        self._ended_at = ended_at
        self.leases = np.zeros(0, np.uint64)
        self.samples = np.zeros(0, np.int64)
        self.offsets = np.zeros(0, np.int64)
        self._cells = columns.pack_cells([7] * 65536, [-0.5] * 65536)
        self.seq = 0
        self.num_ordered = 0
        """Samples."""
        self.num_sent = 0
        """Tokens."""
        self._unacknowledged: dict[int, float] = {}
        """When a frame was sent, by its number."""
        self.latencies: list[float] = []
        self.wake = asyncio.Event()
        self._stopped: set[int] = set()

    @property
    def may_send(self) -> bool:
        return len(self._unacknowledged) < MAX_UNACKNOWLEDGED

    def order(self, orders: tuple[frames.Order, ...]) -> None:
        self.num_ordered += len(orders)
        self.leases = np.concatenate([self.leases, np.array([one.lease for one in orders], np.uint64)])
        self.samples = np.concatenate([self.samples, np.array([one.sample for one in orders], np.int64)])
        so_far = np.array([len(one.so_far) // 4 for one in orders], np.int64)
        self.offsets = np.concatenate([self.offsets, so_far])
        self.wake.set()

    def drop(self, leases: tuple[int, ...]) -> None:
        self._keep(~np.isin(self.leases, np.array(leases, np.uint64)))

    def _keep(self, rows: Any) -> None:
        self.leases, self.samples, self.offsets = self.leases[rows], self.samples[rows], self.offsets[rows]

    @property
    def num_running(self) -> int:
        return min(self.slots, len(self.leases))

    @property
    def num_waiting(self) -> int:
        return len(self.leases) - self.num_running

    def frame(self, count: int) -> frames.NewTokens:
        leases, samples, offsets = (one[: self.slots] for one in (self.leases, self.samples, self.offsets))
        counts = np.minimum(count, self._length - offsets)
        after = offsets + counts
        done = after >= self._length
        self.seq += 1
        now = time.perf_counter()
        num_tokens = int(counts.sum())
        self.num_sent += num_tokens
        self._unacknowledged[self.seq] = now
        cells = self._cells
        while len(cells) < num_tokens * columns.CELL_BYTES:
            cells = self._cells = cells + cells
        ended = tuple(frames.Ended(lease, self._length, "length") for lease in leases[done].tolist())
        for sample in samples[done].tolist():
            self._ended_at[sample] = now
        said = frames.NewTokens(
            self.seq,
            leases.tobytes(),
            offsets.astype("<u4").tobytes(),
            counts.astype("<u4").tobytes(),
            bytes(4 * len(counts)),
            cells[: num_tokens * columns.CELL_BYTES],
            ended,
        )
        self.offsets[: self.slots] = after
        self._keep(np.append(~done, np.ones(self.num_waiting, bool)))
        return said

    def acknowledge(self, seq: int) -> None:
        for number in [one for one in self._unacknowledged if one <= seq]:
            self.latencies.append(time.perf_counter() - self._unacknowledged.pop(number))
        self.wake.set()


async def work(dialer: Dialer, worker: FakeWorker, rate: float, flush_s: float) -> None:  # noqa: C901 (a case for each kind)
    request = JoinRequest(name=worker.name, protocol=frames.PROTOCOL, engine="none", slots=worker.slots, version=0)
    reply = await dialer.post("/v1/join", request, JoinReply)
    socket = await dialer.stream("/v1/worker", reply.session, frames.MAX_TRAINER_FRAME_BYTES)
    await socket.send_bytes(frames.encode(frames.Hello(0, b"")))

    async def receive() -> None:
        async for message in socket:
            frame = frames.decode_to_worker(message.data)
            match frame:
                case frames.Ack():
                    worker.acknowledge(frame.seq)
                case frames.Orders():
                    worker.order(frame.orders)
                case frames.Stop():
                    worker.drop(frame.aborts + frame.hand_overs)
                case frames.PullOrder():
                    await socket.send_bytes(frames.encode(frames.Installed(frame.version)))
                case _:
                    pass
        raise ConnectionError(f"{worker.name} was cut off")

    async def report() -> None:
        while True:
            await socket.send_bytes(frames.encode(frames.Report(worker.num_running, worker.num_waiting, 0.0, 0, 0.0)))
            await asyncio.sleep(1.0)

    async def send() -> None:
        owed, at = 0.0, time.perf_counter()
        while True:
            if rate:
                await asyncio.sleep(until_next(flush_s, reply.flush_phase_s, time.time()))
                now = time.perf_counter()
                owed, at = (owed + (now - at) * rate if len(worker.leases) else 0.0), now
                count = int(owed)
                if count and worker.may_send:
                    owed -= count
                    await socket.send_bytes(frames.encode(worker.frame(count)))
                continue
            worker.wake.clear()
            if worker.may_send and len(worker.leases):
                await socket.send_bytes(frames.encode(worker.frame(TOKENS_WHEN_SATURATED)))
            else:
                await worker.wake.wait()

    await asyncio.gather(receive(), report(), send())


async def main(argv: list[str]) -> None:
    url, worker_token, admin_token = argv[:3]
    num_samples, num_workers, seconds, rate, flush_s, length = (float(one) for one in argv[3:9])
    # One round, long enough for the time: as one sample ends, another takes its place.
    rate_in_all = num_samples * rate if rate else 4e6
    num_groups = int((num_samples * 1.5 + 1.5 * (seconds + 4) * rate_in_all / length) // SAMPLES_PER_PROMPT) + 1
    config = SchedulerConfig(
        domains=(DomainData(name="all", prompts_per_step=num_groups, num_prompts=num_groups),),
        max_new_tokens=int(length),
        rounds=RoundsConfig(samples_per_prompt=SAMPLES_PER_PROMPT),
        rewards=RewardConfig(slots=1_000_000),
    )
    prompt = Prompt([5] * PROMPT_TOKENS)
    ended_at: dict[int, float] = {}
    delivered: list[float] = []
    slots = int(num_samples // num_workers)
    workers = [FakeWorker(f"w{number}", slots, int(length), ended_at) for number in range(int(num_workers))]
    tasks: list[asyncio.Task[None]] = []
    async with (
        Dialer(url, worker_token) as dialer,
        connect(url, admin_token, config, prompts=lambda *_: prompt) as trainer,
    ):
        await trainer.publish(0)
        tasks += [asyncio.create_task(work(dialer, worker, rate, flush_s)) for worker in workers]
        tasks.append(asyncio.create_task(take(trainer, ended_at, delivered)))
        while sum(worker.num_ordered for worker in workers) < num_samples:
            await asyncio.sleep(0.05)
            raise_failures(tasks)
        await asyncio.sleep(1.0)
        print("started", flush=True)
        before = sum(worker.num_sent for worker in workers)
        began = time.perf_counter()
        for worker in workers:
            worker.latencies.clear()
        delivered.clear()
        await asyncio.sleep(seconds)
        took = time.perf_counter() - began
        raise_failures(tasks)
        latencies = [one for worker in workers for one in worker.latencies]
        seen = {
            "tokens": sum(worker.num_sent for worker in workers) - before,
            "seconds": took,
            "reads": len(latencies),
            "acknowledged_ms": percentiles(latencies),
            "delivered_ms": percentiles(delivered),
            "num_delivered": len(delivered),
        }
        print(json.dumps(seen), flush=True)
        await asyncio.Event().wait()  # until it is stopped: the manager's memory is read meanwhile


def raise_failures(tasks: list[asyncio.Task[None]]) -> None:
    for task in tasks:
        if task.done():
            task.result()


async def take(trainer: Fleet, ended_at: dict[int, float], delivered: list[float]) -> None:
    async for group in trainer.round(0):
        now = time.perf_counter()
        delivered.append(now - max(ended_at.pop(sample.id, now) for sample in group.samples))
        await trainer.take(group)


def percentiles(seconds: list[float]) -> dict[str, float]:
    if not seconds:
        return {"p50": 0.0, "p99": 0.0}
    p50, p99 = np.percentile(np.array(seconds) * 1e3, [50, 99])
    return {"p50": round(float(p50), 3), "p99": round(float(p99), 3)}


if __name__ == "__main__":
    run_loop(main(sys.argv[1:]))
