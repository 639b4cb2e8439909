"""Commands of a provider: the deadline holds, whatever a command prints, leaves behind, or is told about others."""

import asyncio
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import psutil
import pytest

from polyrl.providers.calling import call
from polyrl.providers.provider import ProviderError
from polyrl.providers.registry import run_of
from polyrl.providers.slurm import SlurmProvider
from polyrl.run.event_loop import run_loop


def running(mark: str) -> list[psutil.Process]:
    found = []
    for one in psutil.process_iter():
        try:
            if mark in one.cmdline():
                found.append(one)
        except psutil.Error:
            continue
    return found


async def until(num: int, mark: str) -> None:
    """Wait until so many processes with this word run."""
    deadline = time.monotonic() + 20.0
    while len(found := running(mark)) != num:
        assert time.monotonic() < deadline, found
        await asyncio.sleep(0.05)


def test_a_command_that_leaves_a_child_at_its_pipes_ends_at_its_deadline_with_that_child():
    began = time.monotonic()
    with pytest.raises(ProviderError, match=r"^sh: no answer within 0\.5 s$"):
        asyncio.run(call(["sh", "-c", "sleep 271.828; true"], timeout_s=0.5))
    assert time.monotonic() - began < 20.0
    asyncio.run(until(0, "271.828"))


def test_a_command_that_is_not_waited_for_any_more_is_ended():
    async def body() -> None:
        asking = asyncio.create_task(call(["sh", "-c", "sleep 271.829; true"], timeout_s=60.0))
        await until(1, "271.829")
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        await until(0, "271.829")

    asyncio.run(body())


@pytest.mark.parametrize("run", [asyncio.run, run_loop])
def test_a_command_that_is_cancelled_at_any_point_of_its_start_is_ended(
    run: Callable[[Coroutine[Any, Any, None]], None],
):
    async def body() -> None:
        for turns in range(12):
            asking = asyncio.create_task(call(["sh", "-c", "sleep 271.831; true"], timeout_s=60.0))
            for _ in range(turns):
                await asyncio.sleep(0)
            asking.cancel()
            async with asyncio.timeout(20.0):
                await asyncio.gather(asking, return_exceptions=True)
        await until(0, "271.831")

    run(body())


def test_a_command_that_prints_for_ever_is_ended_before_the_memory_is():
    with pytest.raises(ProviderError, match=r"^sh: printed more than 16 MiB$"):
        asyncio.run(call(["sh", "-c", "yes"], timeout_s=30.0))


def test_what_a_command_leaves_in_the_background_is_not_waited_for_and_lives_on():
    began = time.monotonic()
    assert asyncio.run(call(["sh", "-c", "sleep 271.830 & echo started"], timeout_s=30.0)) == "started\n"
    assert time.monotonic() - began < 20.0
    (left,) = running("271.830")
    left.kill()


def test_jobs_of_other_users_are_not_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Anybody may give a job our name, and would keep a worker from being started."""
    fake = tmp_path / "squeue"
    fake.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/asked\n')
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert asyncio.run(SlurmProvider(run_of(tmp_path, ends_with_us=True)).held()) == {}
    assert f"--user {psutil.Process().uids().real} " in (tmp_path / "asked").read_text()


def test_a_command_answers_in_the_event_loop_of_a_run():
    async def scenario() -> str:
        return await call(["cat"], timeout_s=10.0, stdin=b"said")

    assert run_loop(scenario()) == "said"


def test_a_command_that_reads_nothing_and_is_over_at_once_answers():
    async def scenario() -> str:
        return "".join([await call(["true"], timeout_s=10.0, stdin=b"said" * size) for size in (0, 1, 1000) * 10])

    assert run_loop(scenario()) == ""
