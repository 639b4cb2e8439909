"""A worker for a manager that serves in text, where tokens are bytes: fast, and its answers are known beforehand.

    python tests/bytes_worker.py URL TOKEN_FILE NAME [key=value ...]

It writes what the emulated engine writes, which a manager that serves refuses by its name: most tokenizers have no text
for that. Settings are those of the emulated engine.
"""

import sys
from pathlib import Path

from polyrl.config import apply_overrides, build
from polyrl.engines.emulated import EmulatedConfig, EmulatedEngine
from polyrl.engines.engine import EngineInfo, Sink
from polyrl.run.event_loop import run_loop
from polyrl.wire.credentials import read_token_file
from polyrl.wire.dial import Dialer
from polyrl.worker.agent import Left, WorkerAgent, WorkerOptions


class ByteEngine(EmulatedEngine):
    async def start(self, sink: Sink) -> EngineInfo:
        return (await super().start(sink))._replace(engine="bytes")


async def work(url: str, token_file: str, name: str, *settings: str) -> Left:
    config = build(apply_overrides({"vocab": 256}, settings), EmulatedConfig)
    dialer = Dialer(url, read_token_file(Path(token_file)))
    return await WorkerAgent(ByteEngine(config), dialer, WorkerOptions(name=name)).run()


if __name__ == "__main__":
    print(run_loop(work(*sys.argv[1:])))
