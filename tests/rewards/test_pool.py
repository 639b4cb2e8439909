"""The pool with real processes: whatever a function does, it hurts its own answer only, and nothing is left behind."""

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

import pytest

from polyrl.errors import ConfigError
from polyrl.rewards.pool import RewardPool
from polyrl.rewards.reward import RewardFailed, RewardInput, RewardTimedOut

Result = TypeVar("Result")


@pytest.fixture(autouse=True)
def _modules_of_a_person(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parent))


def given(answer: str = "abc", **row: object) -> RewardInput:
    return RewardInput("1+2=", answer, "abc", dict(row), "stop", len(answer) + 1)


def with_pool(body: Callable[[RewardPool], Awaitable[Result]], processes: int = 1, timeout_s: float = 20.0) -> Result:
    """Runs, closes, and sees that no process is left."""

    async def run() -> Result:
        pool = RewardPool(processes, timeout_s)
        try:
            return await body(pool)
        finally:
            pids = pool.pids
            await pool.close()
            assert not [pid for pid in pids if is_running(pid)]

    return asyncio.run(run())


def is_running(pid: int) -> bool:
    """A zombie that nobody has waited for is none."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def ends_soon(pid: int) -> bool:
    until = time.monotonic() + 20.0
    while is_running(pid) and time.monotonic() < until:
        time.sleep(0.01)
    return not is_running(pid)


def test_plain_functions_get_the_whole_input_and_return_any_real_number():
    async def body(pool: RewardPool) -> list[float]:
        return [
            await pool.score("own_rewards:length", given("four")),
            await pool.score("own_rewards:echo_row", given("x", values=[1, 20.5], text="é", nested={"a": None})),
            await pool.score("own_rewards:is_true", given("abc")),
            await pool.score("arithmetic", given("1+1=abc")),
        ]

    assert with_pool(body) == [4.0, 22.5, 1.0, 1.0]


def test_processes_load_neither_torch_nor_transformers_nor_numpy():
    assert with_pool(lambda pool: pool.score("own_rewards:loaded_modules", given())) == 0.0


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("raises", "KeyError: 'no such thing\\nin two lines'"),
        ("exits", "SystemExit: 3"),
        ("not_a_number", "returned nan, expected a finite number"),
        ("a_text", "returned '1.0', expected a number"),
        ("nothing", "returned None, expected a number"),
        ("dies", "its process ended: exit code 1"),
        ("async_raises", "TimeoutError: its own"),
        ("async_text", "returned 'good', expected a number"),
    ],
)
def test_what_goes_wrong_is_a_failure_with_its_reason_and_the_next_answer_is_scored(name: str, reason: str):
    async def body(pool: RewardPool) -> tuple[str, float]:
        with pytest.raises(RewardFailed) as failed:
            await pool.score(f"own_rewards:{name}", given())
        return str(failed.value), await pool.score("own_rewards:length", given())

    assert with_pool(body) == (reason, 3.0)


@pytest.mark.parametrize("name", ["sleeps", "waits_for_ever"])
def test_what_takes_too_long_is_ended_and_the_next_answer_is_scored(name: str):
    async def body(pool: RewardPool) -> float:
        with pytest.raises(RewardTimedOut, match=r"took longer than 0\.5 s"):
            await pool.score(f"own_rewards:{name}", given())
        return await pool.score("own_rewards:length", given())

    assert with_pool(body, timeout_s=0.5) == 3.0


def test_async_functions_run_beside_each_other_without_a_process():
    async def body(pool: RewardPool) -> tuple[list[float], list[int]]:
        return await asyncio.gather(*(pool.score("own_rewards:waits", given()) for _ in range(20))), pool.pids

    rewards, pids = with_pool(body)
    assert rewards == [0.5] * 20 and pids == []


def test_a_function_that_prints_a_lot_is_scored_and_nobody_hears_it(capfd: pytest.CaptureFixture[str]):
    assert with_pool(lambda pool: pool.score("own_rewards:prints_a_lot", given())) == 1.0
    assert capfd.readouterr() == ("", "")


def test_children_end_with_the_pool():
    child = int(with_pool(lambda pool: pool.score("own_rewards:forks_and_returns", given())))
    assert ends_soon(child)


def test_children_end_with_the_process_that_started_them(tmp_path: Path):
    pid_file = tmp_path / "pid"

    async def body(pool: RewardPool) -> bool:
        with pytest.raises(RewardFailed, match="its process ended: exit code 1"):
            await pool.score("own_rewards:forks_and_dies", given(pid_file=str(pid_file)))
        return await asyncio.to_thread(ends_soon, int(pid_file.read_text()))

    assert with_pool(body)


def test_a_forked_child_never_answers_for_its_parent():
    async def body(pool: RewardPool) -> list[float]:
        return [await pool.score("own_rewards:both_return", given()) for _ in range(5)]

    assert with_pool(body) == [1.0] * 5


def test_there_are_never_more_processes_than_allowed_and_they_are_used_again():
    async def body(pool: RewardPool) -> set[float]:
        return set(await asyncio.gather(*(pool.score("own_rewards:own_pid", given()) for _ in range(30))))

    assert len(with_pool(body, processes=2)) <= 2


def test_a_process_that_was_killed_while_it_waited_hurts_nobody():
    async def body(pool: RewardPool) -> float:
        await pool.score("own_rewards:length", given())
        (process,) = pool._idle
        os.kill(process.pid, 9)
        while process.is_alive:
            await asyncio.sleep(0.01)
        return await pool.score("own_rewards:length", given())

    assert with_pool(body) == 3.0


def test_an_answer_that_nobody_waits_for_leaves_its_process_in_use():
    async def body(pool: RewardPool) -> float:
        asking = asyncio.create_task(pool.score("own_rewards:length", given()))
        await asyncio.sleep(0)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        return await pool.score("own_rewards:length", given())

    assert with_pool(body) == 3.0


def test_closing_while_functions_run_ends_them():
    async def run() -> list[int]:
        pool = RewardPool(2, 60.0)
        asking = [asyncio.create_task(pool.score("own_rewards:sleeps", given())) for _ in range(4)]
        while len(pool.pids) < 2:
            await asyncio.sleep(0.01)
        pids = pool.pids
        await pool.close()
        await asyncio.gather(*asking, return_exceptions=True)
        return pids

    assert not [pid for pid in asyncio.run(run()) if is_running(pid)]


def test_processes_end_with_the_trainer_even_if_it_is_killed():
    program = """
import asyncio
from polyrl.rewards.pool import RewardPool
from polyrl.rewards.reward import RewardInput
async def main():
    pool = RewardPool(1, 600.0)
    asking = asyncio.create_task(pool.score("own_rewards:sleeps", RewardInput("", "", "", {}, "stop", 0)))
    while not pool.pids:
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.5)
    print(pool.pids[0], flush=True)
    await asking
asyncio.run(main())
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(Path(__file__).parent), *sys.path))}
    trainer = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, env=environment, cwd=Path(__file__).parent
    )
    assert trainer.stdout is not None
    pid = int(trainer.stdout.readline())
    assert is_running(pid)
    trainer.kill()
    trainer.communicate()
    assert ends_soon(pid)


def test_a_row_that_is_no_plain_data_fails_by_itself():
    async def body(pool: RewardPool) -> float:
        with pytest.raises(RewardFailed, match="the row is no plain data"):
            await pool.score("own_rewards:length", given(huge=1 << 80))
        return await pool.score("own_rewards:length", given())

    assert with_pool(body) == 3.0


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("aritmetic", 'reward: unknown name "aritmetic"; expected arithmetic, math, or module:function; did you mean'),
        ("no_such_module:f", 'reward: "no_such_module:f": no_such_module cannot be imported'),
        ("own_rewards:nope", 'reward: "own_rewards:nope": own_rewards has no function nope'),
        ("own_rewards:some_value", "own_rewards has no function some_value"),
    ],
)
def test_a_name_that_stands_for_no_function_is_the_persons_mistake(name: str, message: str):
    with pytest.raises(ConfigError) as wrong:
        with_pool(lambda pool: pool.score(name, given()))
    assert message in str(wrong.value)
