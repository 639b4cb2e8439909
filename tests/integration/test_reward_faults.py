"""A live run whose rewards hang, crash, raise and are away, one answer in ten each: no poison, and all is booked."""

import json
import math
import re
from pathlib import Path

import pytest
from tests.integration.desks import bare_desk, model, polyrl, processes_in

from polyrl.cli.main import main
from polyrl.telemetry.metrics import read_metrics

__all__ = ["bare_desk", "model"]  # fixtures
RECIPE = """
name = "tiny"
model.path = "model"
train.steps = 3
rollout = { max_new_tokens = 16, temperature = 1.2 }
data = { source = "rows.jsonl", prompts_per_step = 5 }
validation.at_start = false
rounds = { samples_per_prompt = 8, tail_batching = "off", min_group_samples = 2 }
manager.port = 0
seeding = { initial_s = 0.2, max_step_s = 1.0 }

[rewards]
timeout_s = 1.0
processes = 4
row_failures = 1000

[[rewards.functions]]
function = "mine:Flaky"
args = { share = 10 }
"""
MINE = """
import hashlib, os, time
import polyrl

class Flaky:
    def __init__(self, share):
        self.share, self.asked = share, {}

    def __call__(self, given):
        key = repr((given.prompt, given.answer)).encode()
        kind = hashlib.blake2b(key, digest_size=4).digest()[0] % self.share
        if kind == 0:
            time.sleep(3600)
        if kind == 1:
            os._exit(7)
        if kind == 2:
            raise KeyError("no such column")
        if kind == 3:
            return polyrl.Reward(outcome="infrastructure_failed")
        if kind == 4:
            return polyrl.Reward(-1.0, outcome="timed_out")
        if kind == 5:
            marker = hashlib.blake2b(key).hexdigest()[:16] + ".away"
            if not os.path.exists(marker):
                open(marker, "w").close()
                raise polyrl.RewardUnavailable("back in a moment")
            return 3.0
        return 1.0 + given.num_tokens % 2
"""
STEP_S = 90.0
"""Eight of forty answers hang or crash, on four processes: ten seconds, and what a busy machine adds."""


@pytest.mark.timeout(400)
def test_rewards_that_hang_crash_raise_and_are_away_cost_their_samples_alone(
    bare_desk: Path, capsys: pytest.CaptureFixture[str]
):
    (bare_desk / "mine.py").write_text(MINE)
    (bare_desk / "recipe.toml").write_text(RECIPE)
    process = polyrl("train", "recipe.toml")
    said, errors = process.communicate(timeout=350)
    assert process.returncode == 0, said + errors
    assert "Traceback" not in errors
    lines = read_metrics(Path("runs/tiny/metrics.jsonl"))
    assert [line["step"] for line in lines] == [0, 1, 2]
    for line in lines:
        total, norm = line["time/step_total"], line["actor/grad_norm"]
        assert isinstance(total, float) and total < STEP_S
        assert isinstance(norm, float) and math.isfinite(norm)
    assert main(["samples", "runs/tiny", "--json", "--grep", ""]) == 0
    trained = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    rewards = {one["reward"] for one in trained if one["state"] == "trained"}
    assert rewards <= {-1.0, 1.0, 2.0, 3.0}, rewards  # a failure is never a zero
    assert 3.0 in rewards, rewards  # a judge that comes back is asked again
    assert main(["ledger", "runs/tiny", "--verify", "--json"]) == 0
    ledger = json.loads(capsys.readouterr().out)
    assert ledger["broken_laws"] == []
    log = Path("runs/tiny/logs/train.log").read_text()
    lost = set(re.findall(r"no reward for sample (\S+): (?!.*back in a moment)", log))
    assert ledger["samples"]["discarded"]["reward_failed"] == len(lost) > 0
    for reason in ("took longer than 1 s", "exit code 7", "KeyError: 'no such column'", "infrastructure_failed"):
        assert reason in log, reason
    assert processes_in(bare_desk) == []
