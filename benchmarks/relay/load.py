"""The load on a relay and what is read off: samples that stream at once, tokens a CPU-second, added latency, memory.

`measure_sse` puts a peer (peers.py) between fake engines (sse_worker) and a reader (sse_client), one stream a sample.
A relay that works in another way, as our manager does, makes its own `Reading` of the same `Load` with `read_off`.

Neighbours on a shared machine make a relay look slow or, by letting events pile up, cheap. So relays take turns, and of
several readings the middle one counts (`middles`).

Two loads a concurrency. `paced`: 25,000 tokens a second in all, which every relay should sustain, for cost and latency.
`saturated`: as fast as the relay takes them, with no more tokens under way than there are samples, for throughput; its
latency is that queue.
"""

import hashlib
import json
import shutil
import subprocess
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal, NamedTuple, Protocol

from msgspec import Struct
from msgspec.structs import replace

from benchmarks.environments import CannotMeasure
from benchmarks.processes import Program, allow_many_files, busy_s, load_cpus

HERE = Path(__file__).parent
NUM_WORKERS = 16
MAX_TOKENS = 1024
"""Of one sample; then another takes its place."""
PACED_TOKENS_PER_S = 25_000
NO_STEP_S = 1e-3
"""Between steps of a saturated engine: it is always behind, so what is under way holds it back."""
SUSTAINED = 0.97
"""Less of the offered tokens than this is not sustained."""
NUM_TURNS = 3

LoadName = Literal["paced", "saturated"]


class Load(Struct, frozen=True):
    name: LoadName
    num_samples: int
    seconds: float
    num_workers: int = NUM_WORKERS

    @property
    def tokens_per_s(self) -> int | None:
        """That are offered; None is as many as it takes."""
        return PACED_TOKENS_PER_S if self.name == "paced" else None

    @property
    def step_s(self) -> float:
        """Between two tokens of a sample."""
        return self.num_samples / self.tokens_per_s if self.tokens_per_s else NO_STEP_S


class Latency(Struct, frozen=True):
    p50: float
    p99: float

    def beyond(self, other: "Latency") -> "Latency":
        return Latency(round(self.p50 - other.p50, 3), round(self.p99 - other.p99, 3))


class Reading(Struct, frozen=True):
    relay: str
    load: LoadName
    num_samples: int
    offered_tokens_per_s: int | None
    tokens: int
    tokens_per_s: int
    cpu_us_per_token: float
    tokens_per_cpu_s: int | None
    """None of a relay that is no process."""
    cores: float
    """CPU-seconds of the relay a second. Far from 1 when saturated: the load or a neighbour was the limit."""
    neighbours: float
    """CPU-seconds a second that went to neither relay nor load."""
    latency_ms: Latency
    added_latency_ms: Latency | None
    """Percentile less percentile of the direct connection at the same load."""
    rss_bytes: int
    bytes_per_sample: int
    """Memory that it grew by when the samples came."""
    events_per_read: float
    """Events that a read at the far end brought; 1 where each travels by itself."""
    sustained: bool | None
    """Whether the offered tokens came through."""
    turns: int = 1
    """Readings of which this is the one in the middle."""
    cpu_us_per_token_range: tuple[float, float] | None = None
    """The least and the most of them."""


class Peer(Protocol):
    name: str
    version: str

    def start(self, worker_urls: Sequence[str]) -> tuple[str, ...]:
        """Where samples may be asked for, once it relays to all of the workers. Raises CannotMeasure."""
        ...

    def cpu_s(self) -> float: ...
    def rss_bytes(self) -> int: ...
    def stop(self) -> None: ...


class Programs(NamedTuple):
    """The two ends of a measurement, compiled."""

    worker: str
    client: str


class Window(NamedTuple):
    """Counts of one reading."""

    tokens: int
    seconds: float
    reads: int
    latency_ms: Latency
    cpu_s: float
    neighbours_s: float
    rss_before: int
    rss_bytes: int


def middles(readings: Iterable[Reading]) -> list[Reading]:
    """Of each relay's readings under one load, the one in the middle by CPU a token, with the least and the most."""
    by_relay: dict[str, list[Reading]] = {}
    for one in readings:
        by_relay.setdefault(one.relay, []).append(one)
    return [_middle(sorted(one, key=lambda reading: reading.cpu_us_per_token)) for one in by_relay.values()]


def _middle(ranked: list[Reading]) -> Reading:
    least, most = ranked[0].cpu_us_per_token, ranked[-1].cpu_us_per_token
    return replace(ranked[(len(ranked) - 1) // 2], turns=len(ranked), cpu_us_per_token_range=(least, most))


def build_programs(cache: Path) -> Programs:
    """Raises CannotMeasure without a C compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        raise CannotMeasure("there is no C compiler for the two ends of the load (cc, gcc or clang; package gcc)")
    return Programs(*(_compile(compiler, HERE / source, cache) for source in ("sse_worker.c", "sse_client.c")))


def _compile(compiler: str, source: Path, cache: Path) -> str:
    digest = hashlib.sha256(source.read_bytes()).hexdigest()[:12]
    target = cache / "bin" / f"{source.stem}-{digest}"
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        built = subprocess.run(
            [compiler, "-O2", "-Wall", "-o", target, source], capture_output=True, text=True, timeout=60, check=False
        )
        if built.returncode:
            raise CannotMeasure(f"{source.name} does not compile: {built.stderr.strip()[-300:]}")
    return str(target)


def measure_sse(peer: Peer, load: Load, programs: Programs, *, cache: Path, direct: Reading | None = None) -> Reading:
    """One reading of a peer, started and stopped for it. Raises CannotMeasure, also when streams break."""
    allow_many_files()
    step_us = str(round(load.step_s * 1e6))
    received = cache / "received"
    received.write_bytes(bytes(8))
    argv = [programs.worker, str(load.num_workers), step_us, *([received] if load.tokens_per_s is None else [])]
    worker = Program(argv, cpus=load_cpus(), log=cache / "logs" / "sse_worker.log", piped=True)
    try:
        said = worker.read_line()
        if not said:
            raise CannotMeasure(f"the fake engines did not start: {worker.last_words()}")
        urls = peer.start([f"http://127.0.0.1:{port}" for port in json.loads(said)["ports"]])
        return read_off(peer.name, load, _watch(peer, worker, load, urls, programs, cache), direct=direct)
    finally:
        peer.stop()
        worker.stop()


def _watch(peer: Peer, worker: Program, load: Load, urls: Sequence[str], programs: Programs, cache: Path) -> Window:
    ports = [url.rpartition(":")[2] for url in urls]
    rss_before = peer.rss_bytes()
    client = Program(
        [programs.client, str(load.num_samples), str(load.seconds), str(MAX_TOKENS), cache / "received", *ports],
        cpus=load_cpus(),
        log=cache / "logs" / "sse_client.log",
        piped=True,
    )
    try:
        if client.read_line() != b"started\n":
            raise CannotMeasure(f"{load.num_samples} streams did not start through {peer.name}: {client.last_words()}")
        start = peer.cpu_s(), worker.cpu_s() + client.cpu_s(), busy_s()
        time.sleep(0.8 * load.seconds)
        rss_bytes = peer.rss_bytes()
        said = client.read_line()
        end = peer.cpu_s(), worker.cpu_s() + client.cpu_s(), busy_s()
    finally:
        client.stop()
    if not said:
        raise CannotMeasure(f"the streams through {peer.name} broke: {client.last_words()}")
    seen = json.loads(said)
    latency = Latency(seen["latency_ms"]["p50"], seen["latency_ms"]["p99"])
    relay_s, load_s, all_s = (after - before for before, after in zip(start, end, strict=True))
    others_s = max(all_s - relay_s - load_s, 0.0)
    return Window(seen["tokens"], seen["seconds"], seen["reads"], latency, relay_s, others_s, rss_before, rss_bytes)


def read_off(relay: str, load: Load, window: Window, *, direct: Reading | None) -> Reading:
    rate = window.tokens / window.seconds
    return Reading(
        relay=relay,
        load=load.name,
        num_samples=load.num_samples,
        offered_tokens_per_s=load.tokens_per_s,
        tokens=window.tokens,
        tokens_per_s=round(rate),
        cpu_us_per_token=round(1e6 * window.cpu_s / max(window.tokens, 1), 2),
        tokens_per_cpu_s=round(window.tokens / window.cpu_s) if window.cpu_s else None,
        cores=round(window.cpu_s / window.seconds, 2),
        neighbours=round(window.neighbours_s / window.seconds, 2),
        latency_ms=window.latency_ms,
        added_latency_ms=window.latency_ms.beyond(direct.latency_ms) if direct else None,
        rss_bytes=window.rss_bytes,
        bytes_per_sample=round((window.rss_bytes - window.rss_before) / load.num_samples),
        events_per_read=round(window.tokens / max(window.reads, 1), 2),
        sustained=rate >= SUSTAINED * load.tokens_per_s if load.tokens_per_s else None,
    )
