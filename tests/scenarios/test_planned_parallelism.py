"""The parallelism planner foresees rounds, and never makes one much slower than leaving the engines alone."""

from functools import cache
from itertools import product
from statistics import fmean, median

import pytest

from polyrl.errors import ConfigError
from polyrl.sim.library import load_scenario
from polyrl.sim.simulation import Simulation

FREE_REWARDS = (
    "trainer.reward_slots_per_device=10000",
    "domains.code.reward.endless_share=0",
    "domains.code.reward.duration_quantiles=[[0.0, 0.01], [1.0, 0.01]]",
    "domains.judge.reward.duration_quantiles=[[0.0, 0.01], [1.0, 0.01]]",
)
SMALL = (
    "run.steps=11",
    "domains.math.prompts_per_step=16",
    "domains.code.prompts_per_step=12",
    "domains.judge.prompts_per_step=4",
)
MODELS = {"synchronous-7b-8k": 1, "synchronous-14b-16k": 2, "tail-7b-8k": 1, "tail-14b-16k": 2}
GRID = [
    (model, gpus, cap, exponent, mode)
    for (model, cap), (gpus, exponent), mode in product(
        (("synchronous-7b-8k", 8192), ("synchronous-14b-16k", 32768)), ((8, 0.7), (32, 0.2)), ("off", "race")
    )
]


@cache
def rounds(
    model: str, gpus: int, cap: int, exponent: float, mode: str, *, planned: bool, free: tuple[str, ...] = FREE_REWARDS
):
    """By kind: (seconds from opening to closing, seconds predicted) of every round but the first."""
    settings = (
        f"trainer.num_devices={gpus}",
        f"trainer.local_workers={gpus // MODELS[model]}",
        f"run.max_new_tokens={cap}",
        f"engine.tp_exponent={exponent}",
        f"rounds.tail_batching={mode}",
        f"parallelism.enabled={str(planned).lower()}",
    )
    sim = Simulation(load_scenario(model, [*SMALL, *free, *settings]), 0)
    sim.run()
    assert sim.law_violations == []
    found: dict[str, list[tuple[float, float | None]]] = {}
    for line in sim.lines[1:]:
        found.setdefault(line.kind, []).append((line.closed_at - line.opened_at, line.predicted_s))
    return found


@pytest.mark.parametrize(("model", "gpus", "cap", "exponent", "mode"), GRID)
def test_a_round_takes_what_the_planner_foresees_and_no_longer_than_without_it(model, gpus, cap, exponent, mode):
    planned = rounds(model, gpus, cap, exponent, mode, planned=True)
    alone = rounds(model, gpus, cap, exponent, mode, planned=False)
    for kind, played in planned.items():
        ratios = [predicted / took for took, predicted in played if predicted is not None]
        assert ratios or kind == "long", "nothing was predicted"
        assert median(ratios or [1.0]) == pytest.approx(1.0, abs=0.2), f"{kind}: predicted against played"
        slower = fmean(took for took, _ in played) / fmean(took for took, _ in alone[kind])
        assert slower <= 1.02, f"{kind}: planned against left alone"


@pytest.mark.parametrize(
    ("model", "gpus", "cap", "exponent", "mode"),
    [
        ("synchronous-7b-8k", 16, 4096, 0.3, "designated"),
        ("tail-7b-8k", 8, 8192, 0.5, "prompts"),
        ("tail-14b-16k", 4, 16384, 0.5, "race"),
        ("tail-14b-16k", 32, 4096, 0.5, "off"),
    ],
)
def test_a_round_that_waits_for_rewards_is_foreseen_with_that_wait(model, gpus, cap, exponent, mode):
    """Rewards as the scenarios have them: scored beside generation or after it, and up to two thirds of a round."""
    played = rounds(model, gpus, cap, exponent, mode, planned=True, free=())["short"]
    assert median(predicted / took for took, predicted in played if predicted) == pytest.approx(1.0, abs=0.2)


def test_wider_engines_are_used_where_they_pay():
    case = ("synchronous-7b-8k", 8, 8192, 0.7, "off")
    planned, alone = (rounds(*case, planned=planned)["short"] for planned in (True, False))
    assert fmean(took for took, _ in planned) < 0.7 * fmean(took for took, _ in alone)


def test_an_engine_is_no_wider_than_a_server():
    limited = ["parallelism.enabled=true", "parallelism.max_tp=2", "engine.tp_exponent=0.9", "trainer.num_devices=8"]
    sim = Simulation(
        load_scenario("synchronous-7b-8k", [*SMALL, *FREE_REWARDS, *limited, "trainer.local_workers=8"]), 0
    )
    sim.run()
    assert {worker.num_devices for worker in sim.scheduler.desk.state.fleet.local()} == {2}


def test_one_place_says_how_fast_engines_are_and_what_they_hold():
    with pytest.raises(ConfigError, match=r"parallelism.speed: a scenario's engines are described in \[engine\]"):
        load_scenario(
            "synchronous-7b-8k", ["parallelism.speed={fixed_s=1, per_sample_s=0, per_context_token_s=0, tp_exponent=0}"]
        )
    with pytest.raises(ConfigError, match=r"engine\.kv_tokens: parallelism\.model says what fits"):
        load_scenario("synchronous-7b-8k", ["engine.kv_tokens=100000"])
    assert load_scenario("synchronous-14b-16k").kv_tokens(2) == 521_341
