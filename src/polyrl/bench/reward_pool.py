"""The cost of the pool of reward processes: answers of mathematics beside plain calls, and rewards that only wait.

Mathematics: the same answers are compared by plain calls of math-verify, in as many processes at once as the pool has,
and by the pool's processes, in turns. Rates are by CPU time, so that other work on the machine does not count: an
answer's share of a core is what this process and those of the pool used for it. All of them have seen all answers
before, because the library remembers; and all cores compute each time, because a core is slower beside a busy one.

Waiting: async functions that sleep, ten thousand at once. The share of a core is what this process, which has the event
loop, used meanwhile. The pool is asked for its state every second; a run does so every few seconds.
"""

import asyncio
import random
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any, NamedTuple

import psutil

from polyrl.rewards import math_answers
from polyrl.rewards.pool import RewardPool
from polyrl.rewards.reward import RewardInput

GOALS = {"math_times_plain": 0.8, "waiting_share_of_a_core": 0.01}
_PROCESSES = 2
_AT_ONCE = 8
"""Answers at a time for each process, as in a run."""
_WAIT = "polyrl.bench.reward_pool:wait"
_TIMEOUT_S = 600.0
_WARM_PASSES = 7


class PoolLoad(NamedTuple):
    num_rounds: int
    num_answers: int
    num_waiting: int
    watched_s: float


async def wait(given: RewardInput) -> float:
    """Wait: a reward that takes no CPU time, and does not end within the measurement."""
    await asyncio.sleep(_TIMEOUT_S)
    return 0.0


def draw_answers(num: int) -> list[RewardInput]:
    """Return answers as models write them: numbers, fractions, roots, intervals; every fifth is wrong."""
    draws = random.Random(0)
    found: list[RewardInput] = []
    for number in range(num):
        a, b = draws.randint(1, 99), draws.randint(2, 99)
        kinds = [
            (f"So the answer is $\\boxed{{{a * b}}}$.", str(a * b)),
            (f"Hence \\boxed{{\\frac{{{a}}}{{{b}}}}}", f"\\frac{{{a}}}{{{b}}}"),
            (f"We get $x = \\sqrt{{{a}}}+{b}$", f"\\sqrt{{{a}}}+{b}"),
            (f"The result is {a * b + 1}.", str(a * b)),
            (f"$\\boxed{{({a}, {a + b}]}}$", f"({a},{a + b}]"),
        ]
        answer, expected = kinds[number % len(kinds)]
        found.append(RewardInput("", answer, expected, {}, "stop", 16))
    return found


async def measure_pool(load: PoolLoad) -> dict[str, Any]:
    return {**await _measure_math(load), **await _measure_waiting(load)}


async def _measure_math(load: PoolLoad) -> dict[str, Any]:
    answers = draw_answers(load.num_answers)
    plain: list[float] = []
    pooled: list[float] = []
    latencies_ms: list[float] = []
    pool = RewardPool(_PROCESSES, _TIMEOUT_S)
    calls = [ProcessPoolExecutor(1, mp_context=get_context("spawn")) for _ in range(_PROCESSES)]
    try:
        await _call(calls, answers)
        for _ in range(_WARM_PASSES):
            await _score(pool, answers, _AT_ONCE)
        for _ in range(load.num_rounds):
            plain.append(await _call(calls, answers))
            before_s = _cpu_s(pool.pids)
            await _score(pool, answers, _AT_ONCE)
            pooled.append((_cpu_s(pool.pids) - before_s) / len(answers))
            latencies_ms += await _score(pool, answers, 1)
    finally:
        await pool.close()
        for one in calls:
            one.shutdown()
    return {
        "math_per_core_s": round(1.0 / statistics.median(plain), 1),
        "math_pool_per_core_s": round(1.0 / statistics.median(pooled), 1),
        "math_times_plain": round(statistics.median(plain) / statistics.median(pooled), 2),
        "math_p50_ms": round(statistics.median(latencies_ms), 1),
        "math_p99_ms": round(sorted(latencies_ms)[int(0.99 * len(latencies_ms))], 1),
        "math_cpu_ms_of_rounds": {"plain": _in_ms(plain), "pool": _in_ms(pooled)},
    }


async def _call(processes: Sequence[Executor], answers: Sequence[RewardInput]) -> float:
    """Compare all answers by plain calls in each of these processes, and return the CPU time of an answer."""
    loop = asyncio.get_running_loop()
    used_s = await asyncio.gather(*(loop.run_in_executor(one, _call_here, answers) for one in processes))
    return statistics.mean(used_s) / len(answers)


def _call_here(answers: Sequence[RewardInput]) -> float:
    began_s = time.process_time()
    for answer in answers:
        math_answers.score(answer)
    return time.process_time() - began_s


async def _score(pool: RewardPool, answers: Sequence[RewardInput], at_once: int) -> list[float]:
    """Score all answers, so many at a time for each process, and return the milliseconds of each."""
    remaining, found = iter(answers), list[float]()

    async def work() -> None:
        for answer in remaining:
            began = time.perf_counter()
            await pool.score("math", answer)
            found.append(1e3 * (time.perf_counter() - began))

    await asyncio.gather(*(work() for _ in range(at_once * _PROCESSES)))
    return found


async def _measure_waiting(load: PoolLoad) -> dict[str, Any]:
    """Measure the pool while some rewards are under way, and then all of them; the others wait in its queue."""
    shares: dict[str, float] = {}
    for name, together in (("queued", _AT_ONCE), ("under_way", load.num_waiting)):
        pool = RewardPool(_PROCESSES, _TIMEOUT_S, together=together)
        given = RewardInput("", "", "", {}, "stop", 1)
        waiting = [asyncio.create_task(pool.score(_WAIT, given)) for _ in range(load.num_waiting)]
        try:
            num_running = min(load.num_waiting, _PROCESSES * together)
            while pool.state().running < num_running:
                await asyncio.sleep(0.1)
            shares[name] = await _watch(pool, load.watched_s)
        finally:
            for one in waiting:
                one.cancel()
            await pool.close()
    return {
        "num_waiting": load.num_waiting,
        "waiting_share_of_a_core": round(max(shares.values()), 5),
        "waiting_shares": {name: round(one, 5) for name, one in shares.items()},
    }


async def _watch(pool: RewardPool, seconds: float) -> float:
    """Return the share of a core that this process uses."""
    began, cpu_s = time.perf_counter(), time.process_time()
    while time.perf_counter() - began < seconds:
        pool.state()
        await asyncio.sleep(1.0)
    return (time.process_time() - cpu_s) / (time.perf_counter() - began)


def _cpu_s(pids: Sequence[int]) -> float:
    """Return the CPU time of this process and of others."""
    others = [psutil.Process(pid).cpu_times() for pid in pids]
    return time.process_time() + sum(one.user + one.system for one in others)


def _in_ms(seconds: Sequence[float]) -> list[float]:
    return [round(1e3 * one, 3) for one in seconds]
