"""`polyrl train` of the arithmetic model with rewards of whole groups: a ranking, one that fails, one that is slow."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from tests.integration.desks import polyrl, processes_in

from polyrl.cli.main import main
from polyrl.config.recipe import ArithmeticTask
from polyrl.starters.arithmetic import make_model
from polyrl.telemetry.metrics import read_metrics

RECIPE = """
name = "tiny"
model = { path = "model", device = "cpu" }
train.steps = 2
algorithm.zero_variance = "ZERO_VARIANCE"
rollout.max_new_tokens = 32
data = { source = "arithmetic", prompts_per_step = 4 }
validation = { at_start = VALIDATION, num_prompts = 3, num_samples = 4 }
rounds = { samples_per_prompt = 4, tail_batching = "off" }
manager.port = 0
seeding = { initial_s = 0.2, max_step_s = 1.0 }
checkpoint.every_steps = 1
"""
RANK = """
from polyrl import RewardGroup

def rank(given: RewardGroup) -> list[dict]:
    assert len({one.prompt for one in given.answers}) == 1 and given.row
    order = sorted(range(len(given.answers)), key=lambda at: (given.answers[at].num_tokens, at))
    return [{"place": order.index(at)} for at in range(len(order))]
"""
BOTH = """
[[rewards.functions]]
name = "right"
function = "arithmetic"

[[rewards.functions]]
name = "rank"
function = "mine:rank"
weight = 0.1
whole_group = true
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "arithmetic"
    make_model(folder, seed=0, task=ArithmeticTask(), num_steps=60)
    return folder


@pytest.fixture
def desk(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").symlink_to(model)
    return tmp_path


def train(functions: str, mine: str, *settings: str, validation: bool = False, zero_variance: str = "keep") -> str:
    """Train to the end, and return what was said of errors."""
    Path("mine.py").write_text(mine)
    told = RECIPE.replace("VALIDATION", str(validation).lower()).replace("ZERO_VARIANCE", zero_variance)
    Path("recipe.toml").write_text(told + functions)
    return finish("train", "recipe.toml", *settings)


def finish(*arguments: str) -> str:
    process = polyrl(*arguments)
    said, errors = process.communicate(timeout=200)
    assert process.returncode == 0, said + errors
    assert "Traceback" not in errors
    return errors


def samples(capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    capsys.readouterr()
    assert main(["samples", "runs/tiny", "--json", "--grep", "", "--limit", "1000"]) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


@pytest.mark.timeout(400)
def test_a_ranking_is_added_to_single_rewards_in_training_validation_samples_and_a_resumed_run(
    desk: Path, capsys: pytest.CaptureFixture[str]
):
    train(BOTH, RANK, validation=True)
    finish("train", "--resume", "runs/tiny", "train.steps=3")
    lines = read_metrics(desk / "runs/tiny/metrics.jsonl")
    steps: list[dict[str, Any]] = [line for line in lines if "reward/mean" in line]
    assert [line["step"] for line in steps] == [0, 1, 2]
    for line in steps:
        assert line["reward/rank/mean"] == line["reward/rank/place/mean"] == 1.5, "places 0 to 3"
        assert line["reward/mean"] == pytest.approx(line["reward/right/mean"] + 0.15)
        assert line["reward/max"] <= 1.3 and line["reward/std"] > 0.1
    (validated,) = [line["validation/reward/mean"] for line in lines if "validation/reward/mean" in line]
    assert isinstance(validated, float)
    num_right = 12 * (validated - 0.15)
    assert num_right == pytest.approx(round(num_right), abs=1e-6), "of 12 attempts, ranked in groups of 4"
    found = samples(capsys)
    assert len(found) == 3 * 4 * 4
    for one in found:
        parts = one["parts"]
        assert one["reward"] == pytest.approx(parts["right"] + 0.1 * parts["rank"])
    for step in range(3):
        groups: dict[str, list[float]] = {}
        for one in found:
            if one["step"] == step:
                groups.setdefault(one["prompt"], []).append(one["parts"]["rank"])
        assert all(sorted(each) == sorted([0.0, 1.0, 2.0, 3.0] * (len(each) // 4)) for each in groups.values())
    assert processes_in(desk) == []


FLAKY = """
import os, time
from polyrl import Reward, RewardGroup, RewardUnavailable

def flaky(given: RewardGroup) -> list:
    kind, n = sum(given.prompt.encode()) % 7, len(given.answers)
    marker = f"{given.prompt.strip().replace('/', '_')}.asked"
    is_first = not os.path.exists(marker)
    open(marker, "a").close()
    good = [2.0 + at for at in range(n)]
    if kind == 0:
        raise KeyError("no such column")
    if kind == 1:
        return good[1:]
    if kind == 2:
        return [float("nan"), *good[1:]]
    if kind == 3 and is_first:
        raise RewardUnavailable("back in a moment")
    if kind == 4:
        return [Reward(outcome="infrastructure_failed"), *good[1:]]
    if kind == 5 and is_first:
        os._exit(7)
    if kind == 6:
        time.sleep(3600)
    return good
"""
ONE_FLAKY = """
[rewards]
timeout_s = 1.0
processes = 4
row_failures = 1000

[[rewards.functions]]
function = "mine:flaky"
whole_group = true
"""


@pytest.mark.timeout(400)
def test_a_judge_that_raises_dies_hangs_and_is_away_costs_its_own_groups_alone(
    desk: Path, capsys: pytest.CaptureFixture[str]
):
    train(ONE_FLAKY, FLAKY, "data.prompts_per_step=6", "rounds.max_refill_share=20")
    lines = read_metrics(desk / "runs/tiny/metrics.jsonl")
    assert [line["step"] for line in lines] == [0, 1]
    trained = [one for one in samples(capsys) if one["state"] == "trained"]
    by_group: dict[str, list[float]] = {}
    for one in trained:
        by_group.setdefault(f"{one['step']} {one['sample'].partition('/')[0]}", []).append(one["reward"])
    assert len(by_group) == 2 * 6
    assert {tuple(sorted(each)) for each in by_group.values()} <= {(2.0, 3.0, 4.0, 5.0), (3.0, 4.0, 5.0)}
    log = (desk / "runs/tiny/logs/train.log").read_text()
    reasons = re.findall(r"no reward for group \d+, which is rejected: mine:flaky: (.*)", log)
    assert reasons, "some were rejected"
    known = ("KeyError: 'no such column'", "returned 3 rewards, expected 4, one", "answer 0 of the group: returned nan",
             "took longer than 1 s", "its process ended: exit code 7")  # fmt: skip
    assert all(one.startswith(known) for one in reasons), reasons
    assert main(["ledger", "runs/tiny", "--verify", "--json"]) == 0
    ledger = json.loads(capsys.readouterr().out)
    assert ledger["broken_laws"] == []
    alone = re.findall(r"no reward for sample \S+: infrastructure_failed, in a whole group", log)
    assert ledger["prompts"]["dropped"] == {"reward_failed": len(reasons)}
    assert ledger["samples"]["discarded"]["reward_failed"] == 4 * len(reasons) + len(alone)
    assert ledger["samples"]["trained"] == len(trained)
    assert processes_in(desk) == []


SLOW = """
import asyncio, time
from polyrl import RewardGroup

async def slow(given: RewardGroup) -> list[float]:
    began = time.monotonic()
    await asyncio.sleep(3.0)
    with open("times", "a") as file:
        file.write(f"{began} {time.monotonic()}\\n")
    return [float(at) for at in range(len(given.answers))]
"""
ONE_SLOW = """
[rewards]
processes = 1

[[rewards.functions]]
function = "mine:slow"
whole_group = true
"""


@pytest.mark.timeout(300)
def test_a_slow_judge_scores_the_groups_of_a_round_together(desk: Path):
    train(ONE_SLOW, SLOW, "train.steps=1", "data.prompts_per_step=6")
    times = [tuple(map(float, line.split())) for line in (desk / "times").read_text().splitlines()]
    assert len(times) == 6
    most = max(sum(began <= at <= ended for began, ended in times) for at, _ in times)
    assert most >= 4, times


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "mode", ["streaming", *(pytest.param(one, marks=pytest.mark.chaos) for one in ("synchronous", "async"))]
)
def test_groups_with_equal_rewards_are_filtered_by_their_final_reward_in_every_mode(desk: Path, mode: str):
    train(BOTH, RANK, f"train.mode={mode}", zero_variance="filter")
    lines = read_metrics(desk / "runs/tiny/metrics.jsonl")
    assert [line["rounds/filtered_groups"] for line in lines] == [0, 0], "no two answers of a group have the same place"
    assert [line["reward/rank/mean"] for line in lines] == [1.5, 1.5]


def test_a_judge_that_always_fails_ends_the_run_with_the_reason(desk: Path):
    Path("mine.py").write_text("def rank(given):\n    return [1.0]\n")
    Path("recipe.toml").write_text(RECIPE.replace("VALIDATION", "false").replace("ZERO_VARIANCE", "keep") + BOTH)
    process = polyrl("train", "recipe.toml")
    _, errors = process.communicate(timeout=100)
    assert process.returncode == 2
    assert "the reward mine:rank failed for all of 32 answers: mine:rank: returned 1 rewards, expected 4" in errors
