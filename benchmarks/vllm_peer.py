"""The vLLM server on the CPU, as a peer of the builtin engine: started, driven over HTTP with the same work, stopped.

It runs as it comes, compiled, in float32 and with one thread, over its interface of token ids. Answers come whole,
which costs it less than token by token. It stays in our session: Linux shares a busy machine out by sessions. While the
other has its turn it stands still, since its worker spins between requests and would take a core.
"""

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import NamedTuple

import aiohttp

from benchmarks.scratch import scratch
from polyrl.engines.engine import EngineError
from polyrl.engines.served.process import ServerProcess, free_port
from polyrl.engines.served.server import LaunchCommand
from polyrl.errors import UserError

FOLDER = Path("~/.cache/polyrl/engines/vllm").expanduser()
INSTALL = "sh benchmarks/install_vllm_cpu.sh"
_START_S = 400.0
_ANSWER_S = 600.0


class Asked(NamedTuple):
    prompts: list[list[int]]
    new: int


def check_installed() -> None:
    """Raises UserError, in a line."""
    if not (FOLDER / "bin" / "vllm").exists():
        raise UserError(f"--peer vllm: it is not in {FOLDER}; install it with: {INSTALL}")


class Server:
    def __init__(self, url: str, session: aiohttp.ClientSession, group: int) -> None:
        self._url = url
        self._session = session
        self._group = group

    async def tok_s(self, asked: Asked) -> float:
        """Tokens a second, with all prompts sent at once."""
        began = time.perf_counter()
        counts = await asyncio.gather(
            *(self._ask(prompt, asked.new, 1000 + n) for n, prompt in enumerate(asked.prompts))
        )
        return sum(counts) / (time.perf_counter() - began)

    async def _ask(self, prompt: list[int], new: int, seed: int) -> int:
        sampling = {"max_tokens": new, "temperature": 1.0, "logprobs": 0, "seed": seed, "ignore_eos": True}
        body = {"token_ids": prompt, "stream": False, "sampling_params": sampling}
        async with self._session.post(f"{self._url}/inference/v1/generate", json=body) as reply:
            if reply.status != 200:
                raise UserError(f"--peer vllm: answered {reply.status}: {(await reply.text())[:200]}")
            return len((await reply.json())["choices"][0]["token_ids"])

    @contextmanager
    def standing_still(self) -> Iterator[None]:
        os.killpg(self._group, signal.SIGSTOP)
        try:
            yield
        finally:
            os.killpg(self._group, signal.SIGCONT)

    async def is_up(self) -> bool:
        try:
            async with self._session.get(f"{self._url}/health") as reply:
                return reply.status == 200
        except aiohttp.ClientConnectionError:
            return False


@asynccontextmanager
async def serve(model: str, *, slots: int, max_context: int) -> AsyncIterator[Server]:
    """Raises UserError when it does not come up. Its processes are gone when this returns, and when we are killed."""
    check_installed()
    port = free_port()
    argv = [str(FOLDER / "bin" / "vllm"), "serve", model, "--host", "127.0.0.1", "--port", str(port)]
    argv += ["--served-model-name", "bench", "--dtype", "float32", "--skip-tokenizer-init", "--enable-scale-out"]
    argv += ["--max-model-len", str(max_context), "--max-num-seqs", str(slots), "--kv-cache-memory-bytes", "1G"]
    with scratch() as folder:
        try:
            process = await ServerProcess.start(LaunchCommand(argv, _environment()), folder / "vllm.log")
        except EngineError as error:
            raise UserError(f"--peer vllm: {error}") from error
        timeout = aiohttp.ClientTimeout(total=_ANSWER_S)
        try:
            async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as session:
                server = Server(f"http://127.0.0.1:{port}", session, process.pid)
                await _until_up(server, process)
                yield server
        finally:
            await process.stop()


def _environment() -> dict[str, str]:
    faster = {"LD_PRELOAD": str(FOLDER / "lib" / "libiomp5.so")} if (FOLDER / "lib" / "libiomp5.so").exists() else {}
    threads = {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    patient = {"VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "600"}  # else it hangs up on us for the time that it stood still
    return {**faster, **threads, **patient, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}


async def _until_up(server: Server, process: ServerProcess) -> None:
    until = time.monotonic() + _START_S
    while not await server.is_up():
        if process.has_ended or time.monotonic() > until:
            said = process.first_error() or " ".join(process.last_lines(1)) or "it said nothing"
            raise UserError(f"--peer vllm: the server did not start: {said}")
        await asyncio.sleep(0.5)
