"""Learned time limits of code rewards against a fixed one of 30 s: the time of a step's rollout and rewards.

The programs are real, and run in real sandboxes behind the real pool; limits come from the scheduler's own rule. The
clock is scaled: everything takes a tenth of the time that it stands for, so t_max is 3 s and t_min 0.2 s of CPU time.
Generation is a wait: answers end between a fifth and all of 30.8 s. Of the programs, 93% take 0.3 to 1.05 s and are
right, 2% are right and take up to 8 s, 5% loop. Both ways see the same steps, one after the other in turns.

A step's time is from its first token to its last reward. With a fixed limit, that is up to 30.8 + 30 s, and longer
where there are fewer cores than programs that loop. `cores_to_spare_s` is the same step from the measured CPU times:
every program begins when its answer ends, and nothing waits for a core.
"""

import asyncio
import os
import platform
import random
import time
from collections.abc import Sequence
from statistics import fmean
from typing import Any, NamedTuple

from benchmarks import parser_of, tell
from polyrl.bench.machine import commit, cpu
from polyrl.config.rewards import WeightedReward
from polyrl.rewards import weighing
from polyrl.rewards.pool import RewardPool
from polyrl.rewards.reward import RewardInput
from polyrl.scheduling.rules.reward_budgets import RewardBudgets, RewardConfig

GOAL = 1.45
SCALE = 10.0
T_MIN_S, T_MAX_S, ROLLOUT_S = 2.0, 30.0, 30.8
PROMPTS, SAMPLES = 8, 6
CODE = WeightedReward(function="code", args={"cpu_s": T_MAX_S / SCALE})
_PROGRAM = "import time\nwhile time.process_time() < {cpu_s:.4f}: pass\nprint(1)"


class Answer(NamedTuple):
    prompt: int
    rollout_s: float
    cpu_s: float
    """0: it loops."""


class StepTimes(NamedTuple):
    total_s: float
    spare_s: float
    """The time of the step if nothing waited for a core."""
    rewards_s: list[float]
    num_lost: int
    """Correct programs that were ended at their limit."""


def draw_step(rng: random.Random, number: int) -> list[Answer]:
    """Draw the answers of a step; every prompt comes again after two steps."""
    made = []
    for prompt in range(PROMPTS):
        for _ in range(SAMPLES):
            kind = rng.random()
            quick, slow = rng.uniform(0.3, 1.05), rng.uniform(1.05, 8.0)
            cpu_s = 0.0 if kind < 0.05 else slow if kind < 0.07 else quick
            made.append(Answer((number % 2) * PROMPTS + prompt, ROLLOUT_S * rng.uniform(0.2, 1.0), cpu_s))
    return made


async def play(pool: RewardPool, budgets: RewardBudgets, answers: Sequence[Answer], rng: random.Random) -> StepTimes:
    """Play one step, in the seconds that it stands for."""
    rewards_s: list[float] = []
    began = time.monotonic()

    async def score(answer: Answer) -> tuple[bool, float]:
        await asyncio.sleep(answer.rollout_s / SCALE)
        limit = budgets.limit(answer.prompt, rng.random()).timeout_s
        text = _PROGRAM.format(cpu_s=answer.cpu_s / SCALE) if answer.cpu_s else "while True: pass"
        given = RewardInput("", text, "1", {}, "stop", 1, limit / SCALE)
        asked = time.monotonic()
        found = await weighing.score(pool, [CODE], given)
        rewards_s.append(SCALE * (time.monotonic() - asked))
        budgets.observe(answer.prompt, SCALE * (found.cpu_s or 0.0), correct=bool(found.correct))
        lost = bool(answer.cpu_s) and not found.correct
        return lost, answer.rollout_s + SCALE * (found.cpu_s or 0.0)

    ended = await asyncio.gather(*map(score, answers))
    total_s = SCALE * (time.monotonic() - began)
    return StepTimes(total_s, max(spare_s for _, spare_s in ended), rewards_s, sum(lost for lost, _ in ended))


async def compare(num_steps: int, seed: int) -> dict[str, list[StepTimes]]:
    config = RewardConfig(t_min_s=T_MIN_S, t_max_s=T_MAX_S)
    ways = {
        "fixed": RewardBudgets(config=RewardConfig(adaptive=False, t_max_s=T_MAX_S)),
        "adaptive": RewardBudgets(config=config),
    }
    found: dict[str, list[StepTimes]] = {way: [] for way in ways}
    pool = RewardPool(1, 600.0, together=64)
    try:
        await weighing.score(pool, [CODE], RewardInput("", "print(1)", "1", {}, "stop", 1))  # sandboxes are warm
        for number in range(num_steps):
            for way, budgets in ways.items():
                answers = draw_step(random.Random(f"{seed} {number}"), number)
                found[way].append(await play(pool, budgets, answers, random.Random(f"{seed} {number} probes")))
    finally:
        await pool.close()
    return found


def summarize(found: dict[str, list[StepTimes]]) -> dict[str, Any]:
    result: dict[str, Any] = {
        way: {
            "step_s": round(fmean(one.total_s for one in steps), 1),
            "cores_to_spare_s": round(fmean(one.spare_s for one in steps), 1),
            "reward_s": round(fmean(seconds for one in steps for seconds in one.rewards_s), 2),
            "longest_step_s": round(max(one.total_s for one in steps), 1),
            "correct_lost": sum(one.num_lost for one in steps),
            "num_answers": sum(len(one.rewards_s) for one in steps),
        }
        for way, steps in found.items()
    }
    for name, of in (("ratio", "step_s"), ("ratio_with_cores_to_spare", "cores_to_spare_s")):
        result[name] = round(result["fixed"][of] / result["adaptive"][of], 2)
    return result


def main(argv: Sequence[str]) -> int:
    args = parser_of("adaptive_timeout", argv, __doc__).parse_args(argv)
    num_steps = 2 if args.quick else 10
    result = summarize(asyncio.run(compare(num_steps, seed=0)))
    result |= {"goal": GOAL, "scale": SCALE, "num_steps": num_steps, "commit": commit()}
    result["machine"] = {"cpu": cpu(), "cores": len(os.sched_getaffinity(0)), "python": platform.python_version()}
    lines = [
        f"{way:9} rollout and rewards {one['step_s']:5.1f} s a step, "
        f"{one['cores_to_spare_s']:.1f} s with cores to spare, "
        f"{one['reward_s']:.2f} s a reward, {one['correct_lost']} correct of {one['num_answers']} answers lost"
        for way, one in ((way, result[way]) for way in ("fixed", "adaptive"))
    ]
    least = min(result["ratio"], result["ratio_with_cores_to_spare"])
    verdict = "holds" if least >= GOAL else "does not hold"
    spare = result["ratio_with_cores_to_spare"]
    lines.append(f"ratio {result['ratio']:.2f}, {spare:.2f} with cores to spare; published {GOAL}: {verdict}")
    tell(result, lines, as_json=args.json)
    return 0 if args.quick or least >= GOAL else 1
