"""Hosts that a run keeps alive: which are killed, and what they leave behind."""

import asyncio
import os
import re
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from tests.serving import byte_tokenizer

from polyrl.client import Fleet
from polyrl.config import build
from polyrl.config.recipe import Recipe
from polyrl.data.sources import EnvironmentSource, open_validation
from polyrl.errors import UserError
from polyrl.run import hosts, left_behind
from polyrl.run.hosts import HostProcess

RECIPE = build({"name": "r", "model": {"path": "m"}, "data": {"environment": "treasure"}}, Recipe)
AWAY, GONE, THERE = "the manager is away", (), ("host-0",)


class FleetByScript:
    """Says one status after the other, and moves the clock on before each; then it says no more."""

    def __init__(self, script: list[tuple[float, Any]]) -> None:
        self.now = 0.0
        self.said = asyncio.Event()
        self._script = list(script)

    async def status(self) -> Any:
        if not self._script:
            self.said.set()
            await asyncio.Event().wait()
        seconds, said = self._script.pop(0)
        self.now += seconds
        if said == AWAY:
            raise UserError(AWAY)
        if isinstance(said, SimpleNamespace):
            return said
        return SimpleNamespace(hosts=[SimpleNamespace(name=name, connected=True) for name in said])


async def is_killed(tmp_path: Path, script: list[tuple[float, Any]]) -> bool:
    fleet = FleetByScript(script)
    host = HostProcess("host-0", ["sleep", "60"], tmp_path / "log", lambda: fleet.now)
    await host.start()
    assert host.process is not None
    first = host.process
    keeping = asyncio.create_task(hosts.keep(RECIPE, cast("Fleet", fleet), {"host-0": host}, print))
    try:
        await fleet.said.wait()
        return first.returncode is not None or host.process is not first
    finally:
        keeping.cancel()
        await asyncio.wait([keeping])
        with suppress(ProcessLookupError):
            host.process.kill()
        await host.process.wait()


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ([(600.0, THERE), (1.0, GONE), (1.0, THERE)], False),
        ([(1.0, THERE), (40.0, AWAY), (1.0, GONE), (1.0, THERE)], False),
        ([(1.0, THERE), (31.0, GONE), (0.0, GONE), (0.0, GONE)], True),
        ([(100.0, GONE), (100.0, GONE), (1.0, THERE)], False),
        ([(301.0, GONE), (0.0, GONE), (0.0, GONE)], True),
    ],
    ids=[
        "an old host breaks off for a second",
        "the manager was away",
        "it was not heard of for half a minute",
        "its environment gets ready",
        "it never joins",
    ],
)
def test_a_host_is_killed_for_its_own_silence_only(tmp_path: Path, script: list[tuple[float, Any]], expected: bool):
    assert asyncio.run(is_killed(tmp_path, script)) is expected


def test_processes_that_a_killed_host_left_behind_in_sessions_of_their_own_are_ended():
    server = "subprocess.Popen(['sleep', '60'], start_new_session=True)"
    program = f"import subprocess, time; {server}; print(flush=True); time.sleep(60)"
    environ = {**os.environ, left_behind.MARK: "mine"}
    other = subprocess.Popen(["sleep", "60"], env={**os.environ, left_behind.MARK: "mine too"})
    host = subprocess.Popen([sys.executable, "-c", program], env=environ, stdout=subprocess.PIPE)
    try:
        assert host.stdout is not None and host.stdout.readline()
        host.kill()
        host.wait()
        time.sleep(0.1)
        assert left_behind.end("mine") == 1
        time.sleep(0.1)
        assert left_behind.end("mine") == 0
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()


@pytest.mark.parametrize(
    ("data", "line"),
    [
        ({"num_prompts": 12}, ""),
        ({}, "validation.num_prompts: 4, and the environment few:Few has 16 tasks, of which 16 are trained on"),
        ({"num_prompts": 13}, "validation.num_prompts: 4, and the environment few:Few has 16 tasks, of which 13 are"),
        ({"validation_args": {"num": 4}}, ""),
        (
            {"validation_args": {"num": 3}},
            "validation.num_prompts: 4, and the environment few:Few has 3 tasks; expected",
        ),
    ],
)
def test_tasks_of_validation_are_there_and_are_not_trained_on(tmp_path: Path, data: dict[str, Any], line: str):
    (tmp_path / "few.py").write_text(
        "class Few:\n"
        "    def __init__(self, num: int = 16):\n"
        "        self.num_tasks = num\n"
        "    def play(self, base_url, task, seed):\n"
        "        return 1.0\n"
    )
    byte_tokenizer().save(str(tmp_path / "tokenizer.json"))
    tree = {
        "name": "r",
        "model": {"path": str(tmp_path)},
        "modules": str(tmp_path),
        "data": {"environment": "few:Few", "validation": "held-out", "prompts_per_step": 4, **data},
        "validation": {"num_prompts": 4},
    }
    recipe = build(tree, Recipe)
    if line:
        with pytest.raises(UserError, match=re.escape(line)):
            hosts.check(recipe)
        return
    domain = hosts.check(recipe).data.all_domains[0]
    source = open_validation(
        "held-out", domain, cast(Any, None), num_prompts=4, max_tokens=None, needs_answer=False, key="data"
    )
    assert isinstance(source, EnvironmentSource)
    assert (source.first, source.num_prompts) == (0 if "validation_args" in data else 12, 4)


def test_processes_that_an_environment_starts_find_the_modules_beside_it(tmp_path: Path):
    (tmp_path / "beside.py").write_text("")
    (tmp_path / "served.py").write_text(
        "import subprocess, sys\n"
        "class Served:\n"
        "    num_tasks = 3\n"
        "    def __init__(self):\n"
        "        subprocess.run([sys.executable, '-c', 'import beside'], check=True)\n"
        "    def play(self, base_url, task, seed):\n"
        "        return 1.0\n"
    )
    argv = [sys.executable, "-m", "polyrl", "env", "check", "served:Served", "--modules", str(tmp_path)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    assert '"num_tasks": 3' in done.stdout.replace('":3', '": 3')


def test_the_last_failure_of_an_episode_is_found_in_the_logs_of_the_runs_hosts(tmp_path: Path):
    assert hosts.last_failure(tmp_path) == ""
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "host-0.log").write_text(
        "12:00 polyrl.hosts joined http://x as host-0\n"
        "12:01 polyrl.hosts episode 3/0-1 failed after 0.0 s: the disk is full\n"
        "12:02 polyrl.hosts episode 3/1-1 failed after 0.1 s: the database is down (10 times by now)\n"
        "host host-0: left: the run is over\n"
    )
    assert hosts.last_failure(tmp_path) == "the database is down (10 times by now)"


def test_episodes_that_fail_are_told_once_and_at_ten_times_as_many(tmp_path: Path):
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "host-0.log").write_text("12:01 polyrl.hosts episode 3/0-1 failed after 0.0 s: no disk\n")
    counts = [None, 0, 1, 3, 9, 10, 12, 240]
    said = [SimpleNamespace(ledger={} if num is None else {"episodes_ended": {"failed": num}}) for num in counts]
    fleet, lines = FleetByScript([(0.0, one) for one in said]), list[str]()

    async def listen() -> None:
        telling = asyncio.create_task(
            hosts.tell_of_failures(cast(Fleet, fleet), tmp_path, lambda line: lines.append(str(line)), every_s=0.0)
        )
        async with asyncio.timeout(10.0):
            await fleet.said.wait()
        telling.cancel()

    asyncio.run(listen())
    why = "failed so far, through no fault of the policy; the last: no disk"
    assert lines == [f"1 episode has {why}", f"10 episodes have {why}", f"240 episodes have {why}"]
