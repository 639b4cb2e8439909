"""The contract of providers (polyrl/providers/provider.py) as a suite. A class that makes one holds it to that:

    class TestMyProvider(ProviderContract):
        def provider(self, run: ProviderRun) -> Provider:
            return MyProvider(run, ...)

The workers that are started are real ones, which dial a manager that is not there. `kill` ends a worker here without
the provider's doing.
"""

import asyncio
import subprocess
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import ClassVar

import pytest

from polyrl.providers.provider import HeldWorker, Provider, ProviderRun, WorkerOrder

SECRET = "a-token-that-nobody-may-see-anywhere"


def order_of(run: ProviderRun, name: str) -> WorkerOrder:
    """Return an order for a worker that dials a port without a listener."""
    run.logs.mkdir(parents=True, exist_ok=True)
    arguments = ("worker", "--join", "http://127.0.0.1:9", "--engine", "emulated", "--name", name)
    if run.folder.name == "shared":
        token_file = run.folder / "a.token"
        token_file.parent.mkdir(parents=True, exist_ok=True)
        token_file.write_text(SECRET)
        arguments += ("--token-file", str(token_file))
    return WorkerOrder(name, arguments, SECRET, run.logs / f"{name}.log")


class ProviderContract:
    timeout_s: ClassVar[float] = 30.0
    is_found_again: ClassVar[bool] = True
    """Whether another process can list the workers."""

    def provider(self, run: ProviderRun) -> Provider:
        raise NotImplementedError

    async def kill(self, provider: Provider, run: ProviderRun, name: str) -> None:
        """Kill a worker from outside."""
        raise NotImplementedError

    @pytest.fixture
    def run(self, tmp_path: Path) -> ProviderRun:
        return ProviderRun(
            "contract-" + tmp_path.name.lower().replace("_", "-")[:30], tmp_path / "shared", tmp_path / "logs"
        )

    async def until(self, provider: Provider, is_so: Callable[[dict[str, HeldWorker]], bool]) -> dict[str, HeldWorker]:
        """Look until it is so. Fails when time is up."""
        deadline = time.monotonic() + self.timeout_s
        while True:
            held = dict(await provider.held())
            if is_so(held):
                return held
            assert time.monotonic() < deadline, held
            await asyncio.sleep(0.2)

    def play(self, run: ProviderRun, scene: Callable[[Provider], Awaitable[None]]) -> None:
        """Play a scene with a provider whose workers are ended afterwards."""

        async def whole() -> None:
            provider = self.provider(run)
            provider.check()
            try:
                await scene(provider)
            finally:
                for name in await provider.held():
                    await provider.stop(name)
                await provider.close()

        asyncio.run(whole())

    def test_a_worker_is_held_from_its_start_to_its_stop_and_each_may_be_said_twice(self, run: ProviderRun) -> None:
        async def scene(provider: Provider) -> None:
            assert not any(one.is_there for one in (await provider.held()).values())
            await provider.start(order_of(run, "worker-0"))
            await provider.start(order_of(run, "worker-1"))
            held = await self.until(provider, lambda held: all(held[name].state == "running" for name in held))
            assert sorted(held) == ["worker-0", "worker-1"]
            places = {name: one.place for name, one in held.items()}
            await provider.start(order_of(run, "worker-0"))
            assert {name: one.place for name, one in (await provider.held()).items()} == places, "it is that very one"
            await provider.stop("worker-0")
            held = await self.until(provider, lambda held: not is_there(held, "worker-0"))
            assert held["worker-1"].is_there, "no other worker was touched"
            await provider.stop("worker-0")
            await provider.stop("worker-that-never-was")
            await provider.start(order_of(run, "worker-0"))
            await self.until(provider, lambda held: is_there(held, "worker-0"))

        self.play(run, scene)

    def test_another_process_finds_the_workers_and_can_end_them(self, run: ProviderRun) -> None:
        if not self.is_found_again:
            pytest.skip("this provider's workers belong to the process that started them")

        async def scene(provider: Provider) -> None:
            await provider.start(order_of(run, "worker-0"))
            await self.until(provider, lambda held: is_there(held, "worker-0"))
            other = self.provider(run)
            assert list(await other.held()) == ["worker-0"]
            await other.start(order_of(run, "worker-0"))
            assert len(await other.held()) == 1
            await other.stop("worker-0")
            await self.until(other, lambda held: not is_there(held, "worker-0"))
            await other.close()
            await self.until(provider, lambda held: not is_there(held, "worker-0"))

        self.play(run, scene)

    def test_a_worker_that_dies_is_no_longer_there_and_can_be_started_again(self, run: ProviderRun) -> None:
        async def scene(provider: Provider) -> None:
            await provider.start(order_of(run, "worker-0"))
            await self.until(provider, lambda held: held["worker-0"].state == "running")
            await self.kill(provider, run, "worker-0")
            await self.until(provider, lambda held: not is_there(held, "worker-0"))
            await provider.start(order_of(run, "worker-0"))
            await self.until(provider, lambda held: is_there(held, "worker-0"))

        self.play(run, scene)

    def test_no_process_list_shows_the_token(self, run: ProviderRun) -> None:
        async def scene(provider: Provider) -> None:
            await provider.start(order_of(run, "worker-0"))
            await self.until(provider, lambda held: held["worker-0"].state == "running")
            assert SECRET not in subprocess.run(["ps", "axww"], capture_output=True, text=True, check=True).stdout

        self.play(run, scene)

    def test_runs_do_not_see_each_other(self, run: ProviderRun, tmp_path: Path) -> None:
        async def scene(provider: Provider) -> None:
            await provider.start(order_of(run, "worker-0"))
            await self.until(provider, lambda held: is_there(held, "worker-0"))
            other = self.provider(ProviderRun(f"{run.id[:-2]}x", tmp_path / "other" / "shared", tmp_path / "logs"))
            assert not any(one.is_there for one in (await other.held()).values())
            await other.stop("worker-0")
            await other.close()
            assert (await provider.held())["worker-0"].is_there

        self.play(run, scene)


def is_there(held: dict[str, HeldWorker], name: str) -> bool:
    return name in held and held[name].is_there
