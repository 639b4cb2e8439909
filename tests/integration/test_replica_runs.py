"""Whole runs of `polyrl train` with several replicas: each generates and trains by itself, and all train one model."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tests.warm import run_warm

from polyrl.config.recipe import ArithmeticTask
from polyrl.journal.files import open_journals
from polyrl.journal.records import resume_scheduler
from polyrl.scheduling.core import commands as c
from polyrl.scheduling.core import events as e
from polyrl.starters import arithmetic
from polyrl.telemetry.metrics import read_metrics
from polyrl.trainer.state import checkpoint

pytestmark = pytest.mark.timeout(400)
SETTINGS = (
    "manager.port=0", "data.prompts_per_step=8", "rounds.samples_per_prompt=4", "algorithm.zero_variance=keep",
    "validation.every_steps=0", "validation.at_start=false", "train.min_micro_batch_samples=4",
    "checkpoint.every_steps=1",
)  # fmt: skip
TAIL = (
    "rollout.max_new_tokens=200", "rollout.impose_lengths.kind=lognormal", "rollout.impose_lengths.median=40",
    "rollout.impose_lengths.sigma=1.0",
)  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "tiny"
    arithmetic.make_model(folder, seed=0, task=ArithmeticTask(), num_steps=30)
    return folder


def train(model: Path, run_dir: Path, *more: str) -> None:
    arguments = ("train", "arithmetic", f"model.path={model}", *SETTINGS, *more, "--run-dir", str(run_dir))
    done = run_warm(*arguments, timeout_s=180)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert "Traceback" not in done.stderr


def told(run_dir: Path) -> Iterator[e.Event | c.Command]:
    """Yield every event of the run, each followed by the commands that the scheduler answers it with."""
    scheduler = None
    for header, records in open_journals(run_dir):
        scheduler = resume_scheduler(header, scheduler)
        for record in records:
            yield record.event
            yield from scheduler.handle(record.event, record.now)


def test_replicas_generate_side_by_side_and_one_is_handed_back_to_training_while_the_round_goes_on(
    model: Path, tmp_path: Path
):
    eager = ("hand_back.enabled=true", "hand_back.max_slowdown=8")
    long = (
        "rounds.samples_per_prompt=32",
        "rollout.max_new_tokens=480",
    )  # no device is given back before speeds are known
    train(model, tmp_path, "train.steps=8", "train.replicas=2", "--ranks", "2", *eager, *TAIL, *long)
    wrote, trained, early = set[str](), set[str](), 0
    is_open = False
    for one in told(tmp_path):
        match one:
            case c.OpenRound():
                is_open = True
            case c.CloseRound():
                is_open = False
            case c.Generate():
                wrote.add(one.worker)
            case c.HandOver():
                assert one.why == "1 of 2 local workers hold what still runs"
            case e.GroupsTaken():
                trained.add(one.worker)
                early += is_open
            case _:
                pass
    assert wrote == trained == {"trainer", "trainer-1"}
    assert early > 0, "groups were trained while their round still generated"


@pytest.mark.parametrize(("ranks", "replicas"), [(2, 2), pytest.param(4, 2, marks=pytest.mark.chaos)])
def test_a_run_of_replicas_learns_what_a_run_of_one_rank_learns(model: Path, tmp_path: Path, ranks: int, replicas: int):
    common = ("train.mode=synchronous", "train.steps=2", "rollout.max_new_tokens=12", "optimizer.lr=1e-3")
    train(model, tmp_path / "one", *common)
    train(model, tmp_path / "replicas", *common, "--ranks", str(ranks), f"train.replicas={replicas}")
    ours, theirs = (
        [row["reward/mean"] for row in read_metrics(tmp_path / name / "metrics.jsonl") if "reward/mean" in row]
        for name in ("replicas", "one")
    )
    assert ours == theirs and len(ours) == 2
    found, expected = (checkpoint.load(checkpoint.found(tmp_path / name)[-1])[1] for name in ("replicas", "one"))
    assert found.keys() == expected.keys()
    moments = [name for name in expected if "/exp_avg/" in name]
    whole = torch.cat([expected[name].double().flatten() for name in moments])
    apart = torch.cat([found[name].double().flatten() for name in moments]) - whole
    assert float(apart.norm() / whole.norm()) < 1e-3
