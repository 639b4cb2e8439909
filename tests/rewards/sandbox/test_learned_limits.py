"""The code reward under learned limits, in real sandboxes behind the real pool."""

import asyncio
import time
from typing import Any

import pytest

from polyrl.config.rewards import WeightedReward
from polyrl.rewards import weighing
from polyrl.rewards.pool import RewardPool
from polyrl.rewards.reward import Reward, RewardInput

pytestmark = [pytest.mark.timeout(300), pytest.mark.usefixtures("bubblewrap")]
CODE = WeightedReward(function="code", args={"cpu_s": 20.0, "sandboxes": 1})
LOOP = "while True: pass"
BURNS = "import time\nwhile time.process_time() < 0.3: pass\nprint(1)"


def given(answer: str, limit_s: float = 0.0, **row: Any) -> RewardInput:
    return RewardInput("", answer, "1", row, "stop", 1, limit_s)


def test_programs_keep_to_the_limit_of_their_row_and_say_the_cpu_time_that_they_took():
    async def body() -> tuple[list[Reward], float]:
        pool = RewardPool(1, 60.0)
        try:
            right = await weighing.score(pool, [CODE], given(BURNS))
            wrong = await weighing.score(pool, [CODE], given("print(2)", 2.0))
            crashed = await weighing.score(pool, [CODE], given("raise ValueError", 2.0))
            began = time.monotonic()
            looped = await weighing.score(pool, [CODE], given(LOOP, 0.5))
            took_s = time.monotonic() - began
            mild = WeightedReward(function="code", args={"cpu_s": 0.3, "sandboxes": 1})
            capped = await weighing.score(pool, [mild], given(LOOP, 20.0))
            return [right, wrong, crashed, looped, capped], took_s
        finally:
            await pool.close()

    (right, wrong, crashed, looped, capped), took_s = asyncio.run(body())
    assert (right.score, right.outcome, right.correct) == (1.0, "scored", True)
    assert right.cpu_s is not None and 0.25 < right.cpu_s < 3.0
    assert (wrong.score, wrong.outcome, wrong.correct) == (0.0, "scored", False)
    assert (crashed.score, crashed.outcome) == (0.0, "crashed")
    assert (looped.score, looped.outcome, looped.correct) == (0.0, "timed_out", False)
    assert looped.cpu_s is not None and 0.4 < looped.cpu_s < 2.0
    assert took_s < 12.0  # its settings allow 20 s of CPU time
    assert capped.outcome == "timed_out" and capped.cpu_s is not None and capped.cpu_s < 2.0  # they allow 0.3 s
