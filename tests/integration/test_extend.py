"""Parts of a person's own, from outside the package: the files of docs/guides/extend.md, as they stand there, in a real
run, in a real worker, and under the contract suite.
"""

import csv
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors import safe_open
from tests.warm import run_warm

from polyrl.config.recipe import ArithmeticTask
from polyrl.starters.arithmetic import make_model
from polyrl.telemetry.metrics import read_metrics

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "guides" / "extend.md"
PATIENCE_S = 240.0
SMALL = """
from polyrl.engines.builtin.config import BuiltinConfig
from polyrl.engines.builtin.engine import BuiltinEngine


class Small(BuiltinEngine):
    def __init__(self, model: str, slots: int):
        super().__init__(BuiltinConfig(model=model, slots=slots, kv_tokens=2048))
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "arithmetic"
    make_model(folder, seed=0, task=ArithmeticTask(), num_steps=60)
    return folder


@pytest.fixture
def theirs(tmp_path: Path) -> Path:
    """A folder with the page's files. Nobody works in it."""
    folder = tmp_path / "theirs"
    shown = re.findall(r"^```(?:python|toml)\n# (\S+)\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    for name, text in shown:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    assert len(shown) == 9
    (folder / "my_rl" / "small.py").write_text(SMALL)
    (tmp_path / "elsewhere").mkdir()
    return folder


def polyrl(folder: Path, *argv: str) -> "subprocess.CompletedProcess[str]":
    return run_warm(*argv, folder=folder, timeout_s=PATIENCE_S)


@pytest.mark.timeout(600)
def test_a_run_trains_with_parts_of_a_persons_own_and_goes_on_with_them(theirs: Path, model: Path, tmp_path: Path):
    elsewhere, run = tmp_path / "elsewhere", tmp_path / "run"
    settings = [
        f"model.path={model}", "manager.port=0", "train.steps=2", "train.local_generation=false", "fleet.workers=1",
        "fleet.engine=my_rl.small:Small", "fleet.settings={ slots = 4 }", "rewards.processes=1",
        "validation.at_start=false", "checkpoint.every_steps=1",
    ]  # fmt: skip
    trained = polyrl(elsewhere, "train", str(theirs / "recipe.toml"), *settings, "--run-dir", str(run))
    assert trained.returncode == 0, trained.stderr + (run / "logs" / "worker-0.log").read_text()
    metrics = read_metrics(run / "metrics.jsonl")
    assert [one["step"] for one in metrics] == [0, 1]
    assert all("actor/held_frac" in one for one in metrics)
    with (run / "tracked.csv").open() as file:
        assert [float(row[1]) for row in csv.reader(file)] == [one["reward/mean"] for one in metrics]
    newest = max((run / "checkpoints").rglob("*.safetensors"), key=lambda path: path.stat().st_mtime)
    with safe_open(newest, "pt") as saved:
        assert any(name.startswith("policy/state/momentum/") for name in saved.keys())  # noqa: SIM118
    again = polyrl(tmp_path, "train", "--resume", str(run), "train.steps=3")
    assert again.returncode == 0, again.stderr
    assert [one["step"] for one in read_metrics(run / "metrics.jsonl")] == [0, 1, 2]
    assert len((run / "tracked.csv").read_text().splitlines()) == 3


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        (
            "algorithm.loss_args={ widht = 0.1 }",
            "algorithm.loss_args.widht: unknown key; did you mean width? (bounded)",
        ),
        ('algorithm.advantage_args={ middle = "0" }', 'algorithm.advantage_args.middle: got "0", expected a number'),
        ("algorithm.loss=my_rl.losses:bouned", 'algorithm.loss: "my_rl.losses:bouned": my_rl.losses has no function'),
        ("data.source_args={}", "data.source_args.num: missing, expected an integer (sums)"),
        ("data.source=my_rl.nowhere:sums", 'data.source: "my_rl.nowhere:sums": my_rl.nowhere cannot be imported'),
        ("optimizer.args={ betas = 1 }", "optimizer.args.betas: unknown key; did you mean beta? (SignMomentum"),
        ("optimizer.args={ lr = 1 }", "optimizer.args.lr: is set by the schedule; expected optimizer.lr"),
        ("optimizer.kind=lion", 'optimizer.kind: got "lion", expected adamw, adamw8bit or module:Class'),
        ("rewards.functions.0.args={ scale = true }", "rewards.functions.0.args.scale: got true, expected a number"),
        ("track.trackers.0.args={}", "track.trackers.0.args.metric: missing, expected a string (Csv"),
        ("track.trackers.0.tracker=my_rl.data:random", 'track.trackers.0.tracker: "my_rl.data:random": my_rl.data has'),
        ("fleet.engine=my_rl.trackers:Csv", 'fleet.engine: "my_rl.trackers:Csv": has no method start'),
        ("fleet.settings={ slot = 1 }", "fleet.settings.slot: unknown key; did you mean slots?"),
    ],
)
def test_what_cannot_be_used_is_one_line_before_anything_is_started(
    theirs: Path, model: Path, setting: str, said: str, capsys: pytest.CaptureFixture[str]
):
    from polyrl.cli.main import main

    argv = ["train", str(theirs / "recipe.toml"), f"model.path={model}", "fleet.engine=my_rl.engine:Parrot", setting]
    assert main([*argv, "--dry-run"]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"polyrl: error: {said}") and error.count("\n") == 1


def test_a_worker_runs_an_engine_of_a_persons_own_and_says_what_it_does_not_take(theirs: Path):
    checking = ("worker", "--check", "--engine", "my_rl.engine:Parrot")
    fine = polyrl(theirs, *checking, "slots=4")
    assert fine.returncode == 0, fine.stdout + fine.stderr
    assert "parrot" in fine.stdout
    found = polyrl(theirs.parent, *checking, "--modules", str(theirs), "slot=4")
    assert found.returncode == 2
    assert found.stderr == "polyrl: error: my_rl.engine:Parrot.slot: unknown key; did you mean slots? (Parrot)\n"
    unknown = polyrl(theirs, "worker", "--check", "--engine", "vlm")
    assert "vllm, sglang, or module:Class; did you mean vllm?" in unknown.stderr


def test_an_engine_of_a_persons_own_is_held_to_the_contract_by_the_suite_of_the_package(theirs: Path):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT / "src"), str(theirs)))}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_parrot.py"]
    ran = subprocess.run(
        command, cwd=theirs, capture_output=True, text=True, env=environment, timeout=PATIENCE_S, check=False
    )
    assert ran.returncode == 0, ran.stdout
    assert re.search(r"\b(\d+) passed", ran.stdout)


def test_torchs_own_optimizers_are_named_the_same_way_and_their_state_comes_back():
    import torch

    from polyrl.config import build
    from polyrl.config.recipe import OptimizerConfig
    from polyrl.trainer.optimizer import Optimizer

    def make() -> tuple[torch.nn.Parameter, Optimizer]:
        weights = torch.nn.Parameter(torch.ones(3, 3))
        config = build(json.loads('{"kind": "torch.optim:SGD", "lr": 0.1, "args": {"momentum": 0.9}}'), OptimizerConfig)
        return weights, Optimizer({"w": weights}, config, 10)

    def update(weights: torch.nn.Parameter, optimizer: Optimizer, step: int) -> None:
        (weights**2).sum().backward()
        optimizer.update(step, 1.0)

    weights, optimizer = make()
    update(weights, optimizer, 0)
    saved = {name: one.clone() for name, one in optimizer.state_dict().items()}
    update(weights, optimizer, 1)
    other, restored = make()
    restored.load_state_dict(saved)
    update(other, restored, 1)
    assert torch.equal(other, weights)
    assert "state/momentum_buffer/w" in saved
