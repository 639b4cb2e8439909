"""The cost of going through worker and manager instead of straight to a server, and of an install of weights.

The same work goes to one server directly, over its own interface of token ids, and through a worker and a
manager in processes of their own, in turns (each way first in its turn); ratios are of turns that followed each other:

    tokens a second    many samples at once; a turn ends when the last of them is here, whole
    added latency      one short sample at a time; from asking to the whole answer. It holds the wait for a flush

A version is installed out of shared memory, in turns with the server's own way to load weights from disk (a directory
in memory): in all, and how long the server stood still. No sample runs meanwhile.
"""

import asyncio
import os
import platform
import statistics
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from operator import sub, truediv
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import parser_of, tell
from benchmarks.scratch import scratch
from polyrl.bench.engine import Work, make_model
from polyrl.bench.machine import commit
from polyrl.cli import bench
from polyrl.client import Fleet, Prompt, connect
from polyrl.engines.engine import EngineError, Weights
from polyrl.engines.registry import python_for
from polyrl.engines.served.between import KEY_VARIABLE
from polyrl.engines.served.engine import ServedEngine
from polyrl.engines.served.http import EventStream, Http, Pause
from polyrl.engines.served.server import AnswerPart, ServedConfig, Server, ServerKind, ServerRequest
from polyrl.errors import UserError
from polyrl.ids import LeaseId, Version
from polyrl.run.event_loop import run_loop
from polyrl.run.processes import ManagerProcess, start, stop
from polyrl.scheduling.core.parameters import DomainData, FleetRules, RoundsConfig, SchedulerConfig
from polyrl.scheduling.rules.order import mix64
from polyrl.weights import folder
from polyrl.weights.buffers import Buffer
from polyrl.weights.chunks import table_of
from polyrl.weights.manifest import Manifest, encode
from polyrl.weights.shelf import HostCopy
from polyrl.weights.store import Blob
from polyrl.wire.credentials import read_token_file
from polyrl.wire.frames import Sampling

GOALS = {"tok_s_ratio": 0.97, "added_latency_p50_ms": 60.0}
SAMPLING = Sampling(temperature=1.0, ignore_eos=True)
_GROUP = 8
"""Samples of a prompt."""
_SHORT = 16
"""Tokens of an answer whose latency is measured."""
_WAIT_S = 600.0


class ServedWork(NamedTuple):
    kind: ServerKind
    model: str | None
    """A Hugging Face directory; none: random weights of a tiny shape."""
    batch: int
    """Samples at once: a multiple of the size of a group."""
    prompt: int
    new: int
    turns: int = 30
    repetitions: int = 20
    """Of short samples, and half as many of installs."""


def main(argv: Sequence[str]) -> int:
    parser = parser_of("served", argv, __doc__)
    parser.add_argument("--server", choices=["vllm", "sglang"], default="vllm", help="(default: %(default)s)")
    parser.add_argument("--model", metavar="DIR", help="a Hugging Face directory (default: random weights, tiny)")
    bench.add_engine_options(parser)
    parser.set_defaults(prompt=16, new=64)
    args = parser.parse_args(argv)
    for name in ("batch", "prompt", "new"):
        if getattr(args, name) < 1:
            raise UserError(f"--{name}: {getattr(args, name)}; expected at least 1")
    if args.batch % _GROUP:
        raise UserError(f"--batch: {args.batch}; expected a multiple of {_GROUP}, the samples of a prompt")
    work = ServedWork(args.server, args.model, args.batch, args.prompt, args.new)
    if args.quick:
        work = work._replace(turns=1, repetitions=4, new=min(work.new, 32))
    result = measure(work)
    return tell(result, table(result), as_json=args.json)


def measure(work: ServedWork) -> dict[str, Any]:
    """Raises UserError when the server is not installed or does not start."""
    python = python_for(work.kind)
    with scratch() as folder:  # weights from disk then come from memory
        model = folder / "model"
        make_model(Work("tiny-qwen3", work.model, 1, 1, 1), "cpu").save_pretrained(model)  # in float32, as it is served
        try:
            return run_loop(_measure(work, model, python, folder))
        except EngineError as error:
            raise UserError(f"the {work.kind} server: {error}") from error


async def _measure(work: ServedWork, model: Path, python: str, folder: Path) -> dict[str, Any]:
    config = ServedConfig(model=str(model), python=python, slots=work.batch, log=str(folder / "server.log"))
    engine = ServedEngine(work.kind, config)
    try:
        began = time.perf_counter()
        await engine.start(_Nobody())
        start_s = time.perf_counter() - began
        server = engine.server
        assert server is not None
        many = await _in_turns(work, server, config, folder, work.batch, work.new, work.turns)
        one = await _in_turns(work, server, config, folder, 1, _SHORT, work.repetitions)
        # Last: a worker that attaches takes the server's label for its version, and the manager asks for version 0.
        installs = await _installs(work.kind, engine, server, model, work.repetitions // 2)
    finally:
        await engine.close()
    num_tokens = work.batch * work.new
    return {
        "server": work.kind,
        "batch": work.batch,
        "prompt": work.prompt,
        "new": work.new,
        "start_s": round(start_s, 1),
        "turns": work.turns,
        "direct_tok_s": round(num_tokens / statistics.median(many.straight)),
        "tok_s": round(num_tokens / statistics.median(many.led)),
        "tok_s_ratio": round(statistics.median(map(truediv, many.straight, many.led)), 3),
        "tok_s_ratio_to_thrifty": round(statistics.median(map(truediv, many.thrifty, many.led)), 3),
        "direct_cpu_us_a_token": round(1e6 * statistics.median(many.straight_cpu) / num_tokens, 1),
        "cpu_us_a_token": round(1e6 * statistics.median(many.led_cpu) / num_tokens, 1),
        "direct_latency_p50_ms": round(1e3 * statistics.median(one.straight), 1),
        "added_latency_p50_ms": round(1e3 * statistics.median(map(sub, one.led, one.straight)), 1),
        **installs,
        "goals": GOALS,
        "machine": {"cores": os.cpu_count(), "load": os.getloadavg()[0], "python": platform.python_version()},
        "commit": commit(),
    }


class _Nobody:
    """The engine in this process only keeps the server, and installs: no sample is given to it."""

    def tokens(self, lease: LeaseId, tokens: object, logprobs: object, version: Version) -> None: ...

    def ended(self, lease: LeaseId, reason: object, detail: str = "") -> None: ...


# The same work in two ways


class _Turns(NamedTuple):
    """Seconds of every turn, and of CPU that our side took in it: beside the server, everybody."""

    straight: list[float]
    straight_cpu: list[float]
    thrifty: list[float]
    """Straight, by a client that stands still between two readings, as the worker does."""
    led: list[float]
    led_cpu: list[float]


async def _in_turns(
    work: ServedWork, server: Server, config: ServedConfig, folder: Path, batch: int, new: int, turns: int
) -> _Turns:
    """The first of each is not counted."""
    told = _Turns([], [], [], [], [])
    async with _fleet(work, config, server.http, folder, batch, new) as (fleet, pids):

        async def straight(turn: int) -> None:
            before = _cpu_s([os.getpid()])
            prompts = _prompts(work, batch, 2 * turn)
            told.straight.append(await _straight(server, prompts, new, Pause(rests=False)))
            told.straight_cpu.append(_cpu_s([os.getpid()]) - before)

        async def thrifty(turn: int) -> None:
            told.thrifty.append(await _straight(server, _prompts(work, batch, 2 * turn + 1), new, Pause()))

        async def led(turn: int) -> None:
            before = _cpu_s(pids)
            told.led.append(await _led(fleet, turn, batch, new))
            told.led_cpu.append(_cpu_s(pids) - before)

        for turn in range(turns + 1):
            ways = (straight, led, thrifty) if batch > 1 else (straight, led)  # one answer is read alike by both
            first = turn % len(ways)
            for one in (*ways[first:], *ways[:first]):
                await one(turn)
    return _Turns(*(one[1:] for one in told))


def _cpu_s(pids: Iterable[int]) -> float:
    """CPU seconds of processes so far, to the nanosecond: most of our work takes less than a tick of the clock."""
    threads = (one for pid in pids for one in Path(f"/proc/{pid}/task").glob("*/schedstat"))
    return sum(int(one.read_text().split()[0]) for one in threads) / 1e9


def _prompts(work: ServedWork, batch: int, turn: int) -> list[list[int]]:
    return [_prompt(work, turn * batch + number // _GROUP) for number in range(batch)]


def _prompt(work: ServedWork, number: int) -> list[int]:
    """Prompts differ from their first tokens on, so that none is in the server's cache."""
    return [mix64(number, place) % 1000 + 3 for place in range(work.prompt)]


async def _straight(server: Server, prompts: list[list[int]], new: int, pause: Pause) -> float:
    """With the worker's client, which reads all streams together, every so often."""
    reading: dict[int, _Reading] = {}

    async def answer(number: int, prompt: list[int]) -> None:
        asked = ServerRequest(prompt, new, number, SAMPLING, [])
        async with server.stream(f"bench-{time.monotonic_ns()}-{number}", asked) as events:
            one = reading[number] = _Reading(events)
            num_tokens = await one.done
        del reading[number]
        if num_tokens != new:
            raise UserError(f"the server wrote {num_tokens} tokens; expected {new}")

    async def read() -> None:
        while True:
            await pause.take(len(reading))
            for one in reading.values():
                one.read()

    began = time.perf_counter()
    reader = asyncio.create_task(read())
    await asyncio.gather(*(answer(number, prompt) for number, prompt in enumerate(prompts)))
    reader.cancel()
    return time.perf_counter() - began


class _Reading:
    """An answer that is being read. `done`: how many tokens it has, once it has ended."""

    def __init__(self, events: EventStream[AnswerPart]) -> None:
        self.done: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._events, self._num_tokens = events, 0
        events.on_end(self.read)

    def read(self) -> None:
        if self.done.done():
            return
        try:
            for part in self._events.read():
                self._num_tokens += len(part.tokens)
                if part.end:
                    self.done.set_result(self._num_tokens)
        except EngineError as error:
            self.done.set_exception(error)


async def _led(fleet: Fleet, step: int, batch: int, new: int) -> float:
    began = time.perf_counter()
    num_tokens = 0
    async for group in fleet.round(step):
        num_tokens += sum(len(sample.tokens) for sample in group.samples)
        await fleet.take(group)
    seconds = time.perf_counter() - began
    await fleet.step_done(step)
    await fleet.settled()
    if num_tokens != batch * new:
        raise UserError(f"the fleet wrote {num_tokens} tokens; expected {batch * new}")
    return seconds


@asynccontextmanager
async def _fleet(
    work: ServedWork, config: ServedConfig, http: Http, folder: Path, batch: int, new: int
) -> AsyncIterator[tuple[Fleet, list[int]]]:
    """A manager and a worker, in processes of their own; the worker uses the server that runs already. And the ids of
    all our processes."""
    run_dir = folder / f"run-{batch}"
    (run_dir / "logs").mkdir(parents=True)
    manager = ManagerProcess(run_dir, "127.0.0.1", 0)
    worker = None
    try:
        address = await manager.start()
        where = ("worker", "--join", address.url, "--token-file", str(run_dir / "worker.token"), "--name", "bench")
        engine = ("--engine", work.kind, "--engine-url", http.url, "--model", config.model, "--no-relay")
        worker = await start((*where, *engine), run_dir / "logs" / "worker.log", {KEY_VARIABLE: http.key})
        group = min(batch, _GROUP)
        scheduler = SchedulerConfig(
            domains=(DomainData(name="bench", prompts_per_step=batch // group, num_prompts=1_000_000),),
            max_new_tokens=new,
            max_staleness=1000,
            rounds=RoundsConfig(samples_per_prompt=group),
            fleet_rules=FleetRules(heartbeat_timeout_s=30.0),
        )
        token = read_token_file(run_dir / "admin.token")

        def prompt_of(_domain: int, prompt: int, _epoch: int) -> Prompt:
            return Prompt(_prompt(work, 100_000 + prompt), SAMPLING)

        async with connect(address.url, token, scheduler, prompts=prompt_of) as fleet:
            await fleet.publish(0)
            async with asyncio.timeout(_WAIT_S):
                while not any(one.state == "active" for one in (await fleet.status()).workers):
                    await asyncio.sleep(0.2)
            assert manager.pid is not None
            yield fleet, [os.getpid(), worker.pid, manager.pid]
    finally:
        if worker is not None:
            await stop(worker)
        await manager.stop()


# Weights


async def _installs(kind: ServerKind, engine: ServedEngine, server: Server, model: Path, num: int) -> dict[str, Any]:
    total: list[float] = []
    stood: list[float] = []
    disk: list[float] = []
    copy = _copy_of(model)
    try:
        for number in range(num + 1):
            began = time.perf_counter()
            await engine.install(Weights(Version(number + 1), copy=copy))
            total.append(time.perf_counter() - began)
            stood.append(engine.last_install_s)
            disk.append(await _from_disk(kind, server, model))
        num_bytes = copy.manifest.layout.num_bytes
    finally:
        copy.close()
    return {
        "weights_bytes": num_bytes,
        "install_s": round(statistics.median(total[1:]), 4),
        "install_stood_still_s": round(statistics.median(stood[1:]), 4),
        "from_disk_stood_still_s": round(statistics.median(disk[1:]), 4),
    }


async def _from_disk(kind: ServerKind, server: Server, model: Path) -> float:
    """The server's own way, from a directory: how long it stands still."""
    began = time.perf_counter()
    await server.loading.pause()
    try:
        if kind == "vllm":
            body: dict[str, Any] = {"method": "reload_weights", "kwargs": {"weights_path": str(model)}}
            await server.http.post("/collective_rpc", body, timeout_s=_WAIT_S)
        else:
            body = {"model_path": str(model), "flush_cache": True}
            await server.http.post("/update_weights_from_disk", body, timeout_s=_WAIT_S)
    finally:
        await server.loading.resume()
    return time.perf_counter() - began


def _copy_of(model: Path) -> HostCopy:
    """A model's weights as a worker holds them that has fetched them."""
    found = folder.scan(model)
    layout = folder.layout_in(model, found)
    buffer = Buffer(layout.num_bytes)
    folder.copy_into(layout, found, model, buffer.view)
    manifest = Manifest(1, layout, table_of(buffer.view), "")
    blob = Blob(manifest.digest, "full", 1, encode(manifest), manifest.chunks, buffer, complete=True)
    return HostCopy(blob, manifest)


def table(result: dict[str, Any]) -> list[str]:
    goals = result["goals"]
    return [
        f"{result['server']}, {result['batch']} samples of {result['prompt']} + {result['new']} tokens; up after "
        f"{result['start_s']} s",
        f"straight to the server      {result['direct_tok_s']:>10,} tokens/s",
        f"through worker and manager  {result['tok_s']:>10,} tokens/s   {result['tok_s_ratio']:.1%}, goal: at least "
        f"{goals['tok_s_ratio']:.0%}",
        f"  a client as thrifty as the worker's, straight: {result['tok_s_ratio_to_thrifty']:.1%} of that",
        f"CPU of our side             {result['cpu_us_a_token']:>10} µs a token "
        f"straight: {result['direct_cpu_us_a_token']} µs",
        f"added latency, p50          {result['added_latency_p50_ms']:>10} ms         goal: below "
        f"{goals['added_latency_p50_ms']:g}; straight: {result['direct_latency_p50_ms']} ms",
        f"install of {result['weights_bytes'] / 1e6:,.1f} MB        {result['install_s']:>10} s",
        f"  the server stood still    {result['install_stood_still_s']:>10} s          from disk, its own way: "
        f"{result['from_disk_stood_still_s']} s",
        f"load of the machine: {result['machine']['load']:.1f} on {result['machine']['cores']} cores",
    ]
