"""Real servers for tests: started once for many tests, which attach to them; versions of tiny models in memory."""

import asyncio
import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, NamedTuple

import pytest
from tests.builtin.reference import Reference
from tests.builtin.tiny_models import save_tiny
from tests.weights.copies import copy_of

from polyrl.engines.contract import EngineContract, Script
from polyrl.engines.engine import Weights
from polyrl.engines.served.between import KEY_VARIABLE, SOCKET_VARIABLE
from polyrl.engines.served.engine import ServedEngine
from polyrl.engines.served.http import Http
from polyrl.engines.served.process import free_port
from polyrl.engines.served.server import ServedConfig, Server, ServerKind
from polyrl.ids import Version
from polyrl.weights.shelf import HostCopy

CACHE = Path("~/.cache/polyrl/engines").expanduser()
START_S = 600.0
PATIENCE_S = 300.0
KEY = "the-key-of-the-tests"
CONTEXT = 1024


class Setup(NamedTuple):
    kind: ServerKind
    family: Literal["qwen3", "llama"]
    tied: bool = False
    num_slices: int = 1

    def __str__(self) -> str:
        tied = "-tied" if self.tied else ""
        return f"{self.kind}-{self.family}{tied}-tp{self.num_slices}"


def python_of(kind: ServerKind) -> str:
    """The interpreter of a server's environment; `make test-engines` installs it, POLYRL_VLLM_PYTHON names another."""
    named = os.environ.get(f"POLYRL_{kind.upper()}_PYTHON")
    python = Path(named) if named else CACHE / kind / "bin" / "python"
    if not python.exists():
        pytest.skip(f"{kind}: {python} is not there; install it with: sh benchmarks/install_{kind}_cpu.sh")
    return str(python)


def save(setup: Setup, folder: Path, seed: int) -> Path:
    """A model that both servers can run: they have kernels for heads of 32 numbers and more."""
    changes: dict[str, Any] = {"tie_word_embeddings": setup.tied, "head_dim": 32, "max_position_embeddings": CONTEXT}
    return save_tiny(setup.family, folder, seed=seed, **changes)


class Running:
    """A server that runs, and the models that its versions are of. Version v holds the weights of model v % 3."""

    def __init__(self, setup: Setup, url: str, models: list[Path]) -> None:
        self.setup, self.url, self.models = setup, url, models
        self.references = [Reference(one) for one in models]

    def engine(self, **settings: Any) -> ServedEngine:
        return ServedEngine(self.setup.kind, ServedConfig(model=str(self.models[0]), url=self.url, **settings))

    def reference(self, version: int) -> Reference:
        return self.references[version % len(self.references)]

    def copy(self, version: int, dtype: str = "float32") -> HostCopy:
        return copy_of(self.reference(version).model.state_dict(), version, dtype)


@contextmanager
def running(setup: Setup, folder: Path) -> Iterator[Running]:
    models = [save(setup, folder / f"{setup}-{seed}", seed) for seed in range(3)]
    flag = "--tensor-parallel-size" if setup.kind == "vllm" else "--tp-size"
    config = ServedConfig(
        model=str(models[0]),
        python=python_of(setup.kind),
        kv_tokens=16_384,
        slots=16,
        flags=(flag, str(setup.num_slices)),
    )
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    server: Server = ServedEngine(setup.kind, config)._make(Http(url, KEY))
    command = server.command(port)
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    log = folder / f"{setup}.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            command.argv, env=environment | command.environment, stdout=output, stderr=output, process_group=0
        )
    ours = {SOCKET_VARIABLE: command.environment.get(SOCKET_VARIABLE, ""), KEY_VARIABLE: KEY}
    before = {name: os.environ[name] for name in ours if name in os.environ}
    os.environ.update(ours)
    try:
        asyncio.run(_until_ready(server, process, log))
        yield Running(setup, url, models)
    finally:
        for name in ours:
            os.environ.pop(name)
        os.environ.update(before)
        _end(process)


def play(server: Running, script: Script, **settings: Any) -> None:
    """With the weights of the server's directory, where the test before this one has left a version there."""
    contract = EngineContract()
    contract.patience_s = PATIENCE_S
    contract.weights = lambda version: Weights(Version(version), folder=str(server.models[0]))
    contract.play(script, server.engine(**settings))


async def _until_ready(server: Server, process: subprocess.Popen[bytes], log: Path) -> None:
    until = time.monotonic() + START_S
    while not await server.is_ready():
        assert process.poll() is None, log.read_text()[-4000:]
        assert time.monotonic() < until, log.read_text()[-4000:]
        await asyncio.sleep(0.5)
    await server.http.close()


def _end(process: subprocess.Popen[bytes]) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(15.0)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
