"""The manager's keeper: one that dies while it starts is started once more, and not for ever."""

import asyncio
import shutil
import sys
from pathlib import Path

import pytest

from polyrl.errors import UserError
from polyrl.run import processes
from polyrl.run.processes import ManagerProcess

UP = """
import json, pathlib, time
pathlib.Path({folder!r}, "manager.json").write_text(json.dumps({{"url": "http://127.0.0.1:5000"}}))
time.sleep({seconds})
"""
DOWN = "print('the port is taken'); raise SystemExit(3)"


def scripts(monkeypatch: pytest.MonkeyPatch, *lives: str) -> list[str]:
    """Every start of a manager runs the next of these instead; the last one for ever."""
    left = list(lives)

    async def start(_: object, log_file: Path, more: object = None) -> asyncio.subprocess.Process:
        life = left.pop(0) if len(left) > 1 else left[0]
        with log_file.open("ab") as output:
            return await asyncio.create_subprocess_exec(sys.executable, "-c", life, stdout=output, stderr=output)

    monkeypatch.setattr(processes, "start", start)
    monkeypatch.setattr(processes, "_RESTART_PAUSE_S", 0.01)
    return left


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    (tmp_path / "logs").mkdir()
    return tmp_path


def test_a_manager_that_dies_while_it_starts_again_is_started_once_more(run_dir, monkeypatch):
    folder = str(run_dir)
    lives = (UP.format(folder=folder, seconds=0.5), DOWN, DOWN, UP.format(folder=folder, seconds=30))
    left = scripts(monkeypatch, *lives)

    async def scenario() -> None:
        manager = ManagerProcess(run_dir, "127.0.0.1", 0)
        try:
            await manager.start()
            async with asyncio.timeout(20):
                while len(left) > 1 or not (run_dir / "manager.json").exists():
                    await asyncio.sleep(0.02)
        finally:
            await manager.stop()

    asyncio.run(scenario())


async def until_failed(run_dir: Path) -> None:
    """Start a manager, and watch it until it fails for good."""
    manager = ManagerProcess(run_dir, "127.0.0.1", 0)
    try:
        await manager.start()
        async with asyncio.timeout(20):
            await manager.failed()
    finally:
        await manager.stop()


def test_a_manager_that_cannot_start_again_ends_the_run_with_what_it_said_last(run_dir, monkeypatch):
    scripts(monkeypatch, UP.format(folder=str(run_dir), seconds=0.5), DOWN)

    with pytest.raises(UserError, match="died 6 times in a minute: the port is taken"):
        asyncio.run(until_failed(run_dir))


KILLED = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"


def test_a_manager_that_never_comes_up_again_ends_the_run_however_long_each_try_takes(run_dir, monkeypatch):
    monkeypatch.setattr(processes, "_MAX_QUICK_DEATHS", 1000)  # as if each try took longer than its share of a minute
    left = scripts(monkeypatch, UP.format(folder=str(run_dir), seconds=0.5), *[KILLED] * 10)
    with pytest.raises(UserError, match="the manager did not start"):
        asyncio.run(until_failed(run_dir))
    assert len(left) == 5


BROKEN = "print('polyrl: error: events.bin: frame 7 is damaged'); raise SystemExit(2)"


def test_a_manager_that_says_at_two_restarts_what_a_person_must_mend_is_not_tried_again(run_dir, monkeypatch):
    left = scripts(monkeypatch, UP.format(folder=str(run_dir), seconds=0.5), KILLED, BROKEN, BROKEN, DOWN, DOWN)

    with pytest.raises(UserError, match=r"did not start: events\.bin: frame 7 is damaged.*; then go on with --resume"):
        asyncio.run(until_failed(run_dir))
    assert len(left) == 2


def test_a_port_that_is_taken_for_a_moment_ends_no_run(run_dir, monkeypatch):
    up = UP.format(folder=str(run_dir), seconds=0.3)
    taken = "print('polyrl: error: cannot listen on 127.0.0.1:5000'); raise SystemExit(2)"
    left = scripts(monkeypatch, up, taken, up, taken, KILLED, taken, up, BROKEN, BROKEN, DOWN)
    monkeypatch.setattr(processes, "_MAX_QUICK_DEATHS", 1000)

    with pytest.raises(UserError, match="frame 7 is damaged"):
        asyncio.run(until_failed(run_dir))
    assert len(left) == 1


def test_a_manager_that_is_killed_as_it_first_starts_is_started_once_more(run_dir, monkeypatch):
    scripts(monkeypatch, KILLED, KILLED, UP.format(folder=str(run_dir), seconds=30))

    async def scenario() -> str:
        manager = ManagerProcess(run_dir, "127.0.0.1", 0)
        try:
            return (await manager.start()).url
        finally:
            await manager.stop()

    assert asyncio.run(scenario()) == "http://127.0.0.1:5000"


@pytest.mark.parametrize("life, starts", [(DOWN, 1), (BROKEN, 1), (KILLED, 5)])
def test_a_manager_that_never_comes_up_ends_the_run(run_dir, monkeypatch, life, starts):
    left = scripts(monkeypatch, *[life] * 10)
    with pytest.raises(UserError, match="the manager did not start"):
        asyncio.run(ManagerProcess(run_dir, "127.0.0.1", 0).start())
    assert len(left) == 10 - starts


def test_a_manager_that_ends_with_a_line_for_a_person_is_not_started_again(run_dir, monkeypatch):
    full = "print('polyrl: error: events.bin: cannot be written: No space left on device'); raise SystemExit(2)"
    left = scripts(monkeypatch, UP.format(folder=str(run_dir), seconds=0.2) + full, DOWN, DOWN)

    with pytest.raises(UserError, match=r"^the manager ended: events\.bin: cannot be written: No space left on device"):
        asyncio.run(until_failed(run_dir))
    assert len(left) == 2


def test_a_full_disk_is_named_where_the_log_on_it_could_not_say_so(run_dir, monkeypatch):
    usage = shutil.disk_usage(run_dir)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=0))
    scripts(monkeypatch, "raise SystemExit(2)")
    with pytest.raises(UserError, match=f"^the manager did not start: {run_dir}: No space left on device"):
        asyncio.run(ManagerProcess(run_dir, "127.0.0.1", 0).start())
