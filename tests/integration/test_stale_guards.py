"""Guards against stale samples in a real run: alarms lower the lag by themselves, and VCPO trains beside them."""

from pathlib import Path

from tests.integration.desks import bare_desk, model, start
from tests.integration.test_train import desk

from polyrl.telemetry.metrics import read_metrics

__all__ = ["bare_desk", "desk", "model"]  # fixtures

VCPO = (
    "algorithm.baseline=optimal",
    "algorithm.scale_lr_by_sample_size=true",
    "algorithm.correction=tis-sequence",
    "algorithm.correction_high=8",
)
LAG, LR, NUM_STEPS = 3, 0.01, 9


def test_alarms_lower_the_lag_and_later_rounds_are_written_by_newer_weights(desk: Path):
    (desk / "their_reward.py").write_text("def score(given):\n    return given.num_tokens % 2\n")
    process = start(
        "train.mode=async", f"train.max_staleness={LAG}", f"train.steps={NUM_STEPS}", "train.min_sample_size=1",
        f"optimizer.lr={LR}", "algorithm.zero_variance=keep", "algorithm.max_mismatch=0", *VCPO,
    )  # fmt: skip
    _, errors = process.communicate(timeout=100)
    assert process.returncode == 0, errors
    assert "weights may be 1 behind, not 3" in errors and "weights may be 0 behind, not 1" in errors
    lines = read_metrics(desk / "runs/tiny/metrics.jsonl")
    told = [{name: float(str(value)) for name, value in line.items() if name in KEPT} for line in lines]
    assert [one["staleness/allowed"] for one in told] == sorted(
        (one["staleness/allowed"] for one in told), reverse=True
    )
    first_without = next(number for number, one in enumerate(told) if not one["staleness/allowed"])
    assert first_without <= 2 + LAG
    assert max(one["staleness/max"] for one in told[:first_without]) >= 1
    assert [one["staleness/max"] for one in told[first_without + 2 :]] == [0.0] * (NUM_STEPS - first_without - 2)
    for one in told:
        assert one["actor/lr"] <= LR * one["actor/effective_sample_size"] ** 0.5 + 1e-9
    assert min(one["actor/lr"] for one in told) < 0.99 * LR


KEPT = ("staleness/allowed", "staleness/max", "actor/lr", "actor/effective_sample_size")
