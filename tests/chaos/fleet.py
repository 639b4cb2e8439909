"""A real fleet on loopback that a test may torment: processes, signals, sockets that are cut, a manager that is killed.

Every worker dials the manager through a gate of its own, which can be shut and opened. Emulated engines count the
tokens they make in files, so what a killed worker made and never sent is known.
"""

import asyncio
import random
import signal
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from polyrl.client import Group, Prompt, connect
from polyrl.engines.emulated import EmulatedConfig
from polyrl.engines.emulated.text import EOS, TOKEN_STREAM, draw, ending_of
from polyrl.engines.engine import Job
from polyrl.ids import LeaseId, SampleId
from polyrl.scheduling.core.parameters import SchedulerConfig
from polyrl.scheduling.rules.order import mix64
from polyrl.wire.frames import Sampling

POLYRL = [sys.executable, "-m", "polyrl"]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Gate:
    """A TCP relay in front of the manager; `cut` breaks every connection that goes through it."""

    def __init__(self, target: int) -> None:
        self._target = target
        self._writers: set[asyncio.StreamWriter] = set()
        self._server: asyncio.Server | None = None
        self.port = 0

    async def open(self) -> None:
        self._server = await asyncio.start_server(self._pass_through, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    async def _pass_through(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            other_reader, other_writer = await asyncio.open_connection("127.0.0.1", self._target)
        except OSError:
            writer.close()
            return
        self._writers |= {writer, other_writer}
        await asyncio.gather(self._copy(reader, other_writer), self._copy(other_reader, writer))
        self._writers -= {writer, other_writer}

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(1 << 16):
                writer.write(data)
                await writer.drain()
        except (ConnectionError, OSError):
            pass
        finally:
            writer.close()

    def cut(self) -> None:
        for writer in self._writers:
            writer.transport.abort()

    async def close(self) -> None:
        self.cut()
        if self._server is not None:
            self._server.close()


class Process:
    """A program that we started, and may therefore kill."""

    def __init__(self, argv: list[str], log: Path) -> None:
        self._argv = argv
        self._log = log
        self.process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        with self._log.open("ab") as log:
            self.process = await asyncio.create_subprocess_exec(*self._argv, stdout=log, stderr=log)

    @property
    def is_running(self) -> bool:
        return self.process is not None and self.process.returncode is None

    def send(self, number: signal.Signals) -> None:
        if self.is_running and self.process is not None:
            self.process.send_signal(number)

    async def wait(self, timeout_s: float) -> int:
        assert self.process is not None
        async with asyncio.timeout(timeout_s):
            return await self.process.wait()

    async def kill(self) -> None:
        self.send(signal.SIGCONT)
        self.send(signal.SIGKILL)
        if self.process is not None:
            await self.process.wait()


class Fleet:
    def __init__(self, folder: Path, num_workers: int, engine: list[str], settings: Sequence[str] = ()) -> None:
        self.folder = folder
        self.run_dir = folder / "run"
        self.port = free_port()
        self.engine = engine
        self.names = [f"w{number}" for number in range(num_workers)]
        self.one_plug = asyncio.Lock()
        """Held while the manager is away, and while the whole fleet is killed: not both at once."""
        self.gates: dict[str, Gate] = {}
        self.workers: dict[str, Process] = {}
        argv = [*POLYRL, "manager", "--run-dir", str(self.run_dir), "--port", str(self.port), "--verbose", *settings]
        self.manager = Process(argv, folder / "manager.log")

    async def __aenter__(self) -> "Fleet":
        await self.manager.start()
        await self.until_listening()
        for name in self.names:
            gate = self.gates[name] = Gate(self.port)
            await gate.open()
            self.workers[name] = Process(self._worker_argv(name), self.folder / f"{name}.log")
            await self.workers[name].start()
        return self

    async def __aexit__(self, *_: object) -> None:
        for process in (*self.workers.values(), self.manager):
            await process.kill()
        for gate in self.gates.values():
            await gate.close()

    def _worker_argv(self, name: str) -> list[str]:
        url = f"http://127.0.0.1:{self.gates[name].port}"
        token = str(self.run_dir / "worker.token")
        session = ["--session-file", str(self.folder / f"{name}.session")]
        flags = ["--join", url, "--token-file", token, "--name", name, *session, "--spot", "--price", "1.0"]
        return [*POLYRL, "worker", *flags, *self.engine, f"tally={self.folder / f'{name}.tally'}"]

    async def until_listening(self) -> None:
        async with asyncio.timeout(30):
            while True:
                try:
                    _, writer = await asyncio.open_connection("127.0.0.1", self.port)
                except OSError:
                    await asyncio.sleep(0.05)
                else:
                    writer.close()
                    return

    async def restart_manager(self, away_s: float) -> None:
        await self.manager.kill()
        await asyncio.sleep(away_s)
        await self.manager.start()
        await self.until_listening()
        await asyncio.sleep(2.0)  # workers dial in again

    @property
    def admin_token(self) -> str:
        return (self.run_dir / "admin.token").read_text().strip()

    @property
    def num_made(self) -> int:
        """Tokens that all engines ever made, sent or not."""
        tallies = (self.folder / f"{name}.tally" for name in self.names)
        return sum(int(np.fromfile(path, np.int64)[0]) for path in tallies if path.exists())


class Tormentor:
    """Every second, something happens to somebody."""

    def __init__(self, fleet: Fleet, seed: int) -> None:
        self._fleet = fleet
        self._rng = random.Random(seed)
        self.done: dict[str, int] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def torment(self) -> None:
        while True:
            await asyncio.sleep(1.0)
            kind = self._rng.choice(["kill", "stop", "term", "cut"])
            name = self._rng.choice(self._fleet.names)
            self.done[kind] = self.done.get(kind, 0) + 1
            task = asyncio.create_task(getattr(self, f"_{kind}")(name))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _kill(self, name: str) -> None:
        worker = self._fleet.workers[name]
        if worker.is_running:
            await worker.kill()
            await asyncio.sleep(self._rng.uniform(0.2, 2.0))
            await worker.start()

    async def _stop(self, name: str) -> None:
        worker = self._fleet.workers[name]
        worker.send(signal.SIGSTOP)
        await asyncio.sleep(self._rng.uniform(0.5, 6.0))
        worker.send(signal.SIGCONT)

    async def _term(self, name: str) -> None:
        worker = self._fleet.workers[name]
        if worker.is_running:
            worker.send(signal.SIGTERM)
            await worker.wait(60.0)
            if not worker.is_running:
                await worker.start()

    async def _cut(self, name: str) -> None:
        self._fleet.gates[name].cut()

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for worker in self._fleet.workers.values():
            worker.send(signal.SIGCONT)


def prompt_of(domain: int, prompt: int, epoch: int) -> Prompt:
    return Prompt([5, 6, 7, 8 + prompt % 1000, 8 + prompt // 1000])


def expected_tokens(sample: int, prompt: Prompt, config: SchedulerConfig, engine: EmulatedConfig) -> list[int]:
    """What the emulated engine writes for a sample, however often it moved."""
    seed = mix64(config.seed, sample) >> 1
    job = Job(LeaseId(1), SampleId(sample), prompt.tokens, [], config.max_new_tokens, seed, Sampling())
    ending = ending_of(job, engine, [])
    tokens = draw([mix64(seed, TOKEN_STREAM)], [0], [ending.num_tokens], engine.vocab)[0].tolist()
    return [*tokens[:-1], EOS] if ending.has_eos else tokens


async def play_round(fleet: Fleet, config: SchedulerConfig, step: int, timeout_s: float) -> list[Group]:
    """One round from the trainer's seat."""
    url = f"http://127.0.0.1:{fleet.port}"
    groups: list[Group] = []
    async with asyncio.timeout(timeout_s), connect(url, fleet.admin_token, config, prompts=prompt_of) as trainer:
        await trainer.publish(step)
        async for group in trainer.round(step):
            groups.append(group)
            await trainer.take(group)
            await trainer.micro_batch_done(step)
        await trainer.step_done(step)
        await trainer.settled()
    return groups
