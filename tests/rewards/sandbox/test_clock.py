"""The time of a program as a whole: a slow one is wrong, and one that hardly ran is nobody's fault but ours."""

import math
import time

import pytest
from tests.rewards.sandbox.surroundings import LIMITS, honest, in_sandbox

from polyrl.rewards.sandbox.clock import ProgramClock
from polyrl.rewards.sandbox.program import InputCase, Program
from polyrl.rewards.sandbox.sandbox import Sandbox
from polyrl.rewards.sandbox.slot import RunResult


def ran(cpu_s: float, wall_s: float, queued_s: float) -> RunResult:
    return RunResult("ended", 0, cpu_s, wall_s, queued_s, b"", b"", b"")


@pytest.mark.parametrize(
    ("runs", "is_starved"),
    [
        ([], True),
        ([ran(0.0, 9.0, 0.0), ran(0.0, 1.0, 0.0)], False),  # it slept
        ([ran(0.9, 10.0, 9.1)], True),
        ([ran(1.1, 10.0, 8.9)], False),
        ([ran(0.3, 3.0, 2.7), ran(0.3, 7.0, 6.7)], True),  # in all of its runs together
        ([ran(9.9, 10.0, 9.8)], False),  # its threads waited for each other
    ],
)
def test_a_program_that_had_a_core_for_a_tenth_of_its_time_is_to_blame(runs: list[RunResult], is_starved: bool):
    now = 5.0
    clock = ProgramClock(10.0, lambda: now)
    for one in runs:
        clock.count(one)
    now = 15.0
    assert clock.left_s == 0.0
    assert clock.is_starved is is_starved


def test_the_time_of_a_run_that_broke_its_sandbox_excuses_nothing():
    """Under load, a fork bomb kept its zygote from answering, and then seemed to have hardly run."""
    now = 0.0
    clock = ProgramClock(20.0, lambda: now)
    now = 6.6
    clock.leave_out(6.6)
    now = 13.0
    clock.count(ran(0.95, 6.4, 6.0))
    assert not clock.is_starved and clock.left_s == 7.0


def test_without_a_time_of_its_own_a_program_has_any():
    assert ProgramClock(None, lambda: 0.0).left_s == math.inf


@pytest.mark.usefixtures("bubblewrap")
def test_all_cases_together_end_with_the_time_of_the_program():
    sleeps = Program(source="import time\ntime.sleep(0.5)\nprint(1)", cases=(InputCase(output="1"),) * 20, within_s=1.8)

    async def body(sandbox: Sandbox) -> None:
        began = time.monotonic()
        verdict = await sandbox.run(sleeps)
        assert time.monotonic() - began < 1.8 + 1.0
        assert verdict.outcome == verdict.cases[-1].outcome == "timed_out"
        assert 1 <= verdict.num_passed == len(verdict.cases) - 1 <= 3
        assert sandbox.pool.num_replaced == 0

    in_sandbox(body, size=1)


@pytest.mark.usefixtures("bubblewrap")
def test_a_program_that_waited_for_the_sandbox_alone_is_not_to_blame():
    async def body(sandbox: Sandbox) -> None:
        async with sandbox.pool.slot(math.inf):
            waited = await sandbox.run(Program(source="print(1)", cases=(InputCase(output="1"),), within_s=0.2))
        assert (waited.outcome, waited.cases) == ("infrastructure_failed", ())
        assert waited.detail.startswith("the program has hardly run in 0.2")
        assert (await sandbox.run(honest(2))).outcome == "passed"
        assert sandbox.pool.num_replaced == 0

    in_sandbox(body, LIMITS, size=1)
