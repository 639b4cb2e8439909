"""Reward functions of episodes: `polyrl train` of the calculator with functions beside the environment's own reward."""

import json
from pathlib import Path
from typing import Any

import pytest
from tests.integration.desks import polyrl, processes_in

from polyrl.cli.main import main
from polyrl.starters import agents
from polyrl.telemetry.metrics import read_metrics

SETTINGS = """
name = "tiny"
model = { path = "model", device = "cpu" }
train.steps = 2
algorithm.zero_variance = "keep"
rollout.max_new_tokens = 24
rounds = { samples_per_prompt = 4, tail_batching = "off" }
validation = { at_start = VALIDATION, num_prompts = 2, num_samples = 2 }
environments.slots = 16
manager.port = 0
seeding = { initial_s = 0.2, max_step_s = 1.0 }

[data]
environment = "calculator"
environment_args = { style = "letters" }
num_prompts = 50
prompts_per_step = 2
validation = "held-out"
"""
FUNCTIONS = """
[[rewards.functions]]
function = "environment"
weight = 2.0

[[rewards.functions]]
name = "brief"
function = "mine:brief"
weight = 0.5

[[rewards.functions]]
name = "rank"
function = "mine:rank"
weight = 0.1
whole_group = true
"""
MINE = """
from polyrl import RewardGroup, RewardInput


def brief(given: RewardInput) -> dict:
    played = given.episode
    assert played is not None and given.prompt == played.calls[0].given and given.answer == played.calls[-1].drawn
    assert [call.after for call in played.calls] == list(range(-1, len(played.calls) - 1))
    assert given.conversation.startswith(played.calls[0].drawn)
    return {"calls": len(played.calls), "paid": played.reward}


def rank(given: RewardGroup) -> list[float]:
    assert all(one.episode is not None and one.prompt == given.prompt for one in given.answers)
    order = sorted(range(len(given.answers)), key=lambda at: (given.answers[at].episode.reward, at))
    return [float(order.index(at)) for at in range(len(order))]
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "calculator"
    agents.make_model("calculator", folder, seed=0, num_steps=40)
    return folder


@pytest.fixture
def desk(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").symlink_to(model)
    (tmp_path / "mine.py").write_text(MINE)
    (tmp_path / "recipe.toml").write_text(SETTINGS.replace("VALIDATION", "true") + FUNCTIONS)
    return tmp_path


def samples(capsys: pytest.CaptureFixture[str], run_dir: Path) -> list[dict[str, Any]]:
    capsys.readouterr()
    assert main(["samples", str(run_dir), "--json"]) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


@pytest.mark.timeout(240)
def test_functions_score_the_whole_conversation_beside_the_environments_reward(
    desk: Path, capsys: pytest.CaptureFixture[str]
):
    ended = polyrl("train", "recipe.toml", "--run-dir", "run")
    output, _ = ended.communicate(timeout=200)
    assert ended.returncode == 0, output[-3000:]
    found = samples(capsys, desk / "run")
    assert len(found) == 8
    for one in found:
        parts = one["parts"]
        assert {"environment", "environment/turns", "brief", "brief/calls", "brief/paid", "rank"} <= set(parts)
        assert parts["environment"] == parts["brief/paid"]
        assert parts["brief"] == parts["brief/calls"] + parts["brief/paid"]
        total = 2.0 * parts["environment"] + 0.5 * parts["brief"] + 0.1 * parts["rank"]
        assert one["reward"] == pytest.approx(total)
    groups = {one["sample"].partition("/")[0] for one in found}
    ranks = sorted(one["parts"]["rank"] for one in found)
    assert ranks == sorted([0.0, 1.0, 2.0, 3.0] * len(groups))
    step = read_metrics(desk / "run" / "metrics.jsonl")[-1]
    assert {"reward/environment/mean", "reward/brief/mean", "reward/brief/calls/mean", "reward/rank/mean"} <= set(step)
    assert not processes_in(desk)
    lines = read_metrics(desk / "run" / "metrics.jsonl")
    (validated,) = [line["validation/reward/mean"] for line in lines if "validation/reward/mean" in line]
    assert isinstance(validated, float) and validated >= 0.5  # a call is worth a half, whatever the environment pays


def test_a_file_of_episodes_is_scored(desk: Path, capsys: pytest.CaptureFixture[str]):
    calls = [{"given": "12+7=?", "drawn": "c12+7"}, {"given": "19", "drawn": "19"}]
    lines = [
        {"prompt": 3, "calls": calls, "reward": 1.0, "parts": {"turns": 2}},
        {"row": {}, "calls": calls[:1], "reward": 0.25},
    ]
    (desk / "episodes.jsonl").write_text("\n".join(map(json.dumps, lines)))
    assert main(["rewards", "recipe.toml", "episodes.jsonl", "--json"]) == 0
    first, second = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert first["reward"] == pytest.approx(2.0 * 1.0 + 0.5 * 3.0 + 0.1 * 1)
    assert first["parts"] == {
        "environment": 1.0, "environment/turns": 2.0, "brief": 3.0, "brief/calls": 2.0, "brief/paid": 1.0, "rank": 1.0,
    }  # fmt: skip
    assert second["reward"] == pytest.approx(2.0 * 0.25 + 0.5 * 1.25)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({"prompt": 0, "answer": "x"}, "episodes.jsonl:1: domain calculator: expected `calls`: it has episodes"),
        ({"prompt": 0, "calls": []}, "episodes.jsonl:1: expected `reward`, the environment's, with `calls`"),
        ({"prompt": 0}, "episodes.jsonl:1: expected either `answer`, a text, or `calls`, those of an episode"),
        (
            {"prompt": 0, "reward": 1, "calls": [{"given": "", "drawn": "", "after": 0}]},
            "episodes.jsonl:1: calls.0.after: got 0, expected an earlier call, or -1",
        ),
    ],
)
def test_a_mistake_in_a_file_of_episodes_is_one_line(
    desk: Path, capsys: pytest.CaptureFixture[str], line: dict[str, Any], message: str
):
    (desk / "episodes.jsonl").write_text(json.dumps(line))
    assert main(["rewards", "recipe.toml", "episodes.jsonl"]) == 2
    assert message in capsys.readouterr().err
