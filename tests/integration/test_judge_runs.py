"""Runs whose answers a judge scores: one that fails in every way, one with a budget, and the run's own fleet."""

import hashlib
import json
import math
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from tests.integration.desks import polyrl, processes_in
from tests.rewards.judge_server import Act, Asked, stand_in
from tests.rewards.test_reward_model import references, save
from tests.weights.test_tls import certificate

from polyrl.cli.main import main
from polyrl.config.recipe import ArithmeticTask
from polyrl.starters.arithmetic import make_model
from polyrl.telemetry.metrics import read_metrics

RECIPE = """
name = "judged"
model = { path = "model", device = "cpu" }
train = { steps = 3 }
rollout = { max_new_tokens = 32 }
data = { source = "arithmetic", prompts_per_step = 4 }
validation = { at_start = false, every_steps = 0 }
rounds = { samples_per_prompt = 6, tail_batching = "off", min_group_samples = 2 }
manager.port = 0
seeding = { initial_s = 0.2, max_step_s = 1.0 }
checkpoint.every_steps = 1

[rewards]
slots = 32
timeout_s = 6.0
row_failures = 1000
environment = ["JUDGE_KEY"]

[[rewards.functions]]
function = "judge"
args = { ARGS }
"""
STEP_S = 60.0
"""An answer that keeps failing takes three times six seconds; the rest is for a busy machine."""


@pytest.fixture(scope="module")
def starter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("starter") / "model"
    make_model(folder, seed=1, task=ArithmeticTask(), num_steps=400)
    return folder


@pytest.fixture
def desk(tmp_path: Path, starter: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("JUDGE_KEY", "sk-very-secret")
    (tmp_path / "model").symlink_to(starter)
    return tmp_path


def train(args: str, *settings: str) -> "subprocess.Popen[str]":
    Path("recipe.toml").write_text(RECIPE.replace("ARGS", args))
    return polyrl("train", "recipe.toml", *settings)


def finished(process: "subprocess.Popen[str]", code: int = 0) -> str:
    said, errors = process.communicate(timeout=200)
    assert process.returncode == code, said + errors
    assert "Traceback" not in errors
    return errors


def samples(capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    assert main(["samples", "runs/judged", "--json", "--grep", ""]) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def flaky(number: int, asked: Asked) -> Act:
    """Half of the requests fail, each in its way; some answers never have a verdict. A score is 1 to 4."""
    digest = hashlib.blake2b(asked.text.partition("<prompt")[2].encode(), digest_size=2).digest()
    if digest[0] % 8 == 0:
        return Act(text='The answer says {"score": 10}, and I say nothing.')
    faults = (
        Act(after_s=1.5),
        Act(status=500),
        Act(status=429, headers=(("Retry-After", "0.2"),)),
        Act(raw=b"{"),
        Act(reset=True),
        Act(raw=b"x" * (2 << 20)),
    )
    if number % 2:
        return faults[number // 2 % len(faults)]
    return Act(text=f'Not {{"score": 10}} but {{"score": {1 + digest[1] % 4}}}')


@pytest.mark.timeout(400)
def test_a_judge_that_fails_in_every_way_costs_samples_and_never_poisons_a_step(
    desk: Path, capsys: pytest.CaptureFixture[str]
):
    with stand_in(flaky) as service:
        args = 'model = "m", api_key_env = "JUDGE_KEY", timeout_s = 0.8, pause_s = 0.05, attempts = 6'
        errors = finished(train(f'url = "{service.url}", {args}'))
        assert {one.key for one in service.asked} == {"Bearer sk-very-secret"}
    lines = read_metrics(Path("runs/judged/metrics.jsonl"))
    assert [line["step"] for line in lines] == [0, 1, 2]
    for line in lines:
        total, norm = line["time/step_total"], line["actor/grad_norm"]
        assert isinstance(total, float) and total < STEP_S
        assert isinstance(norm, float) and math.isfinite(norm)
    found = samples(capsys)
    rewards = {one["reward"] for one in found if one["state"] == "trained"}
    assert len(rewards) > 1 and rewards <= {1.0, 2.0, 3.0, 4.0}, rewards  # no zero, and never the 10 that is quoted
    assert main(["ledger", "runs/judged", "--verify", "--json"]) == 0
    ledger = json.loads(capsys.readouterr().out)
    assert ledger["broken_laws"] == []
    log = Path("runs/judged/logs/train.log").read_text()
    tries = re.findall(r"no reward for sample (\S+): judge: http", log)
    lost = {name for name in tries if tries.count(name) == 3}  # what the pool has tried again
    assert ledger["samples"]["discarded"]["reward_failed"] == len(lost) > 0
    assert "sk-very-secret" not in log + errors
    last: Any = lines[-1]
    requests = last["reward/judge/requests"]
    assert 0 <= requests - len(service.asked) <= 2  # cut off on their way
    assert last["reward/judge/retries"] > 0
    assert last["reward/judge/tokens_in"] == 5 * last["reward/judge/tokens_out"] > 0
    assert isinstance(last["reward/judge/latency_s/mean"], float) and last["reward/judge/usd"] == 0.0
    assert processes_in(desk) == []


@pytest.mark.chaos
@pytest.mark.timeout(400)
def test_a_budget_ends_the_run_with_one_line_and_more_of_it_lets_the_run_go_on(desk: Path):
    def act(_: int, asked: Asked) -> Act:
        return Act(text=f'{{"score": {len(asked.text) % 7}}}')

    with stand_in(act) as service:
        prices = "usd_per_million_in = 100.0, usd_per_million_out = 500.0"  # two cents an answer
        process = train(f'url = "{service.url}", model = "m", {prices}', "rewards.max_usd=0.7")
        errors = finished(process, 2).strip().splitlines()
        num = len(service.asked)
        assert 35 <= num <= 35 + 32
        spent = re.fullmatch(
            r"polyrl: error: judge: judges have spent \$([\d.]+) of rewards\.max_usd = 0\.7: ([\d,]+) tokens in and "
            r"([\d,]+) out in (\d+) requests; raise it to go on with --resume",
            errors[-1],
        )
        assert spent is not None, errors
        assert float(spent[1]) >= 0.7 and int(spent[4]) <= num
        account = json.loads(Path("runs/judged/judge.json").read_text())
        again = finished(polyrl("train", "--resume", "runs/judged"), 2)
        assert "judges have spent $" in again and len(service.asked) == num, "no request more"
        finished(polyrl("train", "--resume", "runs/judged", "rewards.max_usd=100"))
        assert len(service.asked) > num
    after = json.loads(Path("runs/judged/judge.json").read_text())
    assert after["usd"] == pytest.approx(0.02 * after["replies"]) and after["usd"] > account["usd"]
    assert after["requests"] == after["replies"] == len(service.asked)
    assert [line["step"] for line in read_metrics(Path("runs/judged/metrics.jsonl"))] == [0, 1, 2]


@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    ("settings", "status", "line"),
    [
        ((), 401, r"http://\S+/v1/models answered 401: who\?; check args\.url .* and the key in JUDGE_KEY"),
        (("rewards.environment=[]",), 200, r"args\.api_key_env: JUDGE_KEY is not in the environment of rewards; .*"),
    ],
)  # fmt: skip
def test_a_wrong_key_ends_the_run_at_its_first_answer(desk: Path, settings: tuple[str, ...], status: int, line: str):
    with stand_in() as service:
        service.models = (status, {"error": {"message": "who?"}})
        errors = finished(train(f'url = "{service.url}", model = "m", api_key_env = "JUDGE_KEY"', *settings), 2)
        assert re.fullmatch(f"polyrl: error: judge: {line}", errors.strip().splitlines()[-1]), errors
        assert service.asked == []


@pytest.mark.timeout(400)
@pytest.mark.parametrize("is_encrypted", [False, pytest.param(True, marks=pytest.mark.chaos)])
def test_the_runs_own_fleet_judges_its_answers(desk: Path, capsys: pytest.CaptureFixture[str], is_encrypted: bool):
    """The policy goes on after each answer, and the last number that it writes is the score."""
    settings = ["fleet.workers=1", "rewards.timeout_s=60", "train.steps=2"]
    if is_encrypted:
        cert, key = certificate(desk, "DNS:localhost")
        settings += [f"manager.tls_cert={cert}", f"manager.tls_key={key}", f"manager.ca={cert}"]
    args = """fleet = true, chat = false, template = "{prompt}{answer}="
        pattern = '\\d+', max_score = 999999999, reply_tokens = 8"""
    errors = finished(train(args.replace("\n", ","), *settings))
    assert "no reward" not in errors
    found = [one for one in samples(capsys) if one["state"] == "trained"]
    assert len(found) == 2 * 4 * 6 and all(one["reward"] == int(one["reward"]) >= 0 for one in found)
    first, last = found[0], read_metrics(Path("runs/judged/metrics.jsonl"))[-1]
    assert "=" in first["answer"] and isinstance(num := last["reward/judge/requests"], int) and num >= 24
    assert main(["ledger", "runs/judged", "--verify", "--json"]) == 0
    ledger = json.loads(capsys.readouterr().out)
    assert ledger["broken_laws"] == [] and ledger["samples"]["answered"] == last["reward/judge/requests"]
    assert processes_in(desk) == []


@pytest.mark.timeout(300)
def test_a_reward_model_scores_a_run_in_batches(desk: Path, capsys: pytest.CaptureFixture[str]):
    save(desk / "classifier", "llama", template=None)
    Path("recipe.toml").write_text(RECIPE.replace("judge", "reward_model").replace("ARGS", 'path = "classifier"'))
    settings = ("train.steps=2", "rewards.processes=1", "rewards.timeout_s=60", 'name="judged"')
    finished(polyrl("train", "recipe.toml", *settings))
    found = [one for one in samples(capsys) if one["state"] == "trained"]
    assert len(found) == 2 * 4 * 6 and len({one["reward"] for one in found}) > 4
    expected = references(desk / "classifier", [(one["prompt"], one["answer"]) for one in found])
    assert [one["reward"] for one in found] == pytest.approx([row[0] for row in expected], abs=1e-4)


@pytest.mark.timeout(200)
def test_a_file_of_answers_is_judged_without_a_run_and_a_budget_holds_there_too(
    desk: Path, capsys: pytest.CaptureFixture[str]
):
    lines = [json.dumps({"prompt": 0, "answer": str(number)}) for number in range(6)]
    Path("answers.jsonl").write_text("\n".join(lines))
    with stand_in() as service:
        Path("recipe.toml").write_text(RECIPE.replace("ARGS", f'url = "{service.url}"'))
        asked = ["rewards", "recipe.toml", "answers.jsonl", "--json", "rewards.processes=1"]
        assert main(asked) == 0
        assert [json.loads(line)["reward"] for line in capsys.readouterr().out.splitlines()] == [7.0] * 6
        assert main([*asked, "rewards.max_tokens=300", "rewards.slots=1"]) == 1
        found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        assert [one["reward"] for one in found] == [7.0] * 3 + [None] * 3
        assert "judges have used 360 tokens of rewards.max_tokens = 300" in found[-1]["why"]
    assert not Path("runs").exists()
