"""Hostile programs: none gets out, none outlives its limit, and the programs after it are scored right."""

import asyncio
import os
import platform
import time
from pathlib import Path

import psutil
import pytest
from msgspec import structs
from tests.rewards.sandbox.attacks import ATTACKS, CALLS, Attack
from tests.rewards.sandbox.conftest import Outside
from tests.rewards.sandbox.surroundings import LIMITS, honest, in_sandbox

from polyrl.rewards.sandbox.program import InputCase, Program
from polyrl.rewards.sandbox.sandbox import Sandbox

pytestmark = [pytest.mark.usefixtures("bubblewrap"), pytest.mark.timeout(300)]
LATEST_S = 3.0 * LIMITS.wall_limit_s + 1.0
"""A run that has no core for a while gets up to three times its time; then a second."""


def hostile(attack: Attack, outside: Outside) -> Program:
    return Program(source=outside.fill_in(attack.source), cases=(InputCase(output="ESCAPED"),))


_others: set[int] = set()
"""Processes that other tests have left to this process, such as the one that a tracker's library keeps."""


@pytest.fixture(autouse=True)
def know_the_others() -> None:
    _others.clear()
    _others.update(descendants())


def descendants() -> set[int]:
    return {one.pid for one in psutil.Process().children(recursive=True)} - _others


async def until_full(sandbox: Sandbox, size: int) -> None:
    async with asyncio.timeout(20):
        while sandbox.pool.num_idle != size:
            await asyncio.sleep(0.01)
    assert sandbox.pool.num_alive == size


@pytest.mark.parametrize("name", [name for name in ATTACKS if name not in CALLS or platform.machine() == "x86_64"])
def test_an_attack_neither_succeeds_nor_outlives_its_limit_nor_harms_the_next_program(
    name: str, outside: Outside, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("SANDBOX_TEST_SECRET", "1")
    attack = ATTACKS[name]

    async def body(sandbox: Sandbox) -> None:
        await sandbox.run(Program(source="'REMEMBER-ME'; open('/tmp/left', 'w')", cases=(InputCase(output=""),)))
        idle = descendants()
        began = time.monotonic()
        verdict = await sandbox.run(hostile(attack, outside))
        assert time.monotonic() - began < LATEST_S
        assert verdict.outcome in attack.outcomes, verdict
        await until_full(sandbox, 1)
        if not sandbox.pool.num_replaced:
            assert descendants() <= idle, "a process outlived its program"
        assert (await sandbox.run(honest(4))).outcome == "passed"
        assert (await sandbox.run(honest(3))).outcome == "failed"

    in_sandbox(body, size=1)
    assert not descendants() - {outside.pid}


@pytest.mark.parametrize("name", [name for name, one in ATTACKS.items() if one.works_outside])
def test_the_same_attack_succeeds_without_a_sandbox(name: str, outside: Outside):
    """Otherwise it would prove nothing about the walls."""

    async def body(sandbox: Sandbox) -> None:
        verdict = await sandbox.run(hostile(ATTACKS[name], outside))
        assert verdict.outcome == "passed", verdict

    in_sandbox(body, size=1, unsafe_no_sandbox=True)


def test_after_all_attacks_together_a_hundred_honest_programs_are_scored_right_and_the_pool_is_full(outside: Outside):
    async def body(sandbox: Sandbox) -> None:
        wanted = [one for name, one in ATTACKS.items() if name not in CALLS]
        found = await asyncio.gather(*(sandbox.run(hostile(one, outside)) for one in wanted))
        assert "passed" not in [one.outcome for one in found]
        assert "infrastructure_failed" not in [one.outcome for one in found]
        await until_full(sandbox, 2)
        honestly = await asyncio.gather(*(sandbox.run(honest(number)) for number in range(100)))
        assert [one.outcome for one in honestly] == ["passed", "failed"] * 50
        await until_full(sandbox, 2)

    in_sandbox(body, size=2)


def test_a_killed_zygote_costs_no_program_its_verdict_and_is_replaced():
    async def body(sandbox: Sandbox) -> None:
        for _ in range(3):
            running = asyncio.create_task(
                sandbox.run(Program(source="import time\ntime.sleep(0.4)\nprint(1)", cases=(InputCase(output="1"),)))
            )
            await asyncio.sleep(0.2)
            zygote = sorted(descendants())[2]  # after bubblewrap and its process 1
            os.kill(zygote, 9)
            assert (await running).outcome == "passed"
            await until_full(sandbox, 1)

    in_sandbox(body, size=1)


def test_output_that_is_too_long_when_the_program_is_gone_costs_no_zygote():
    async def body(sandbox: Sandbox) -> None:
        flood = Program(source="import os\nfor _ in range(9): os.write(1, bytes(32768))", cases=(InputCase(output=""),))
        for _ in range(5):
            assert (await sandbox.run(flood)).outcome == "failed"
            assert (await sandbox.run(honest(2))).outcome == "passed"
        assert sandbox.pool.num_replaced == 0

    in_sandbox(body, size=1)


def test_a_program_that_holds_many_pipes_takes_none_from_another():
    """The kernel counts pipes for the user, whom all programs share, and makes further ones small."""
    hoarder = """
import os, time
for _ in range(5): os.fork()
try:
    while True: os.pipe()
except OSError: time.sleep(1.5)
"""
    text = "x" * 60_000
    reader = Program(source="print(len(input()))", cases=(InputCase(input=text, output=str(len(text))),))
    limits = structs.replace(LIMITS, wall_s=10.0, open_files=256)

    async def body(sandbox: Sandbox) -> None:
        running = asyncio.create_task(sandbox.run(Program(source=hoarder, cases=(InputCase(output=""),))))
        found = []
        while not running.done():
            found.append((await sandbox.run(reader)).outcome)
        assert (await running).outcome == "passed"
        assert found and set(found) == {"passed"}

    in_sandbox(body, limits, size=2)


def test_a_sandbox_leaves_nothing_behind():
    async def body(sandbox: Sandbox) -> None:
        assert (await sandbox.run(honest(2))).outcome == "passed"

    before = set(os.listdir("/proc/self/fd"))
    in_sandbox(body, size=2)
    assert not descendants()
    assert set(os.listdir("/proc/self/fd")) == before
    mine = f"polyrl-sandbox-{os.getpid()}-*"
    assert not list(Path("/sys/fs/cgroup").glob(f"**/{mine}"))
