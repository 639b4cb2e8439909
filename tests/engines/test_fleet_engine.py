"""A recipe starts vLLM or SGLang workers: with the stand-in of a server, and once with the real one."""

import sys
from pathlib import Path

import pytest
from tests.builtin.tiny_models import save_tiny
from tests.engines import standins
from tests.engines.servers import python_of
from tests.integration.desks import bare_desk, model, start
from tests.integration.test_train import desk

from polyrl.cli.main import main
from polyrl.config.recipe_files import load_recipe
from polyrl.errors import ConfigError, UserError
from polyrl.run.plan import fit
from polyrl.run.workers import check_settings, worker_arguments
from polyrl.telemetry.metrics import read_steps

__all__ = ["bare_desk", "desk", "model"]  # fixtures

SETTINGS = ("fleet.workers=1", "train.local_generation=false", "data.reward=own:score", "train.mismatch_warning=0")


def train_with(desk: Path, python: str, patience_s: float, *settings: str) -> None:
    (desk / "own.py").write_text("def score(given):\n    return float(given.num_tokens % 3)\n")
    process = start(*SETTINGS, f"fleet.engine_python={python}", *settings)
    try:
        _, errors = process.communicate(timeout=patience_s)
    finally:
        process.kill()
    log = desk / "runs/tiny/logs/worker-0.log"
    assert process.returncode == 0, errors + (log.read_text() if log.exists() else "")
    steps = read_steps(desk / "runs/tiny/metrics.jsonl")
    assert len(steps) == 2 and all("actor/mismatch_kl/vllm/0" in one for one in steps)
    assert (desk / "runs/tiny/logs/worker-0-server.log").exists()


@pytest.mark.timeout(300)
def test_a_recipe_starts_vllm_workers(desk: Path):
    settings = ("fleet.engine=vllm", 'fleet.settings={ slots = 8, flags = ["--tokens-per-s", "2000"] }')
    invented = "algorithm.max_mismatch=0"  # the stand-in has no model: its log-probabilities are nobody's
    train_with(desk, standins.python(desk), 200.0, *settings, "algorithm.zero_variance=keep", invented)


@pytest.mark.engines
@pytest.mark.timeout(1800)
def test_a_recipe_starts_real_vllm_workers(desk: Path):
    (desk / "model").unlink()
    save_tiny("qwen3", desk / "model", tokenizer=True, vocab_size=64, head_dim=32)  # it has no kernels for smaller ones
    settings = ("fleet.engine=vllm", "fleet.settings={ slots = 8, kv_tokens = 8192 }")
    train_with(desk, python_of("vllm"), 1500.0, *settings, "algorithm.zero_variance=keep")


def test_a_worker_of_the_fleet_has_the_runs_dtype_and_its_own_log_and_flags(desk: Path):
    recipe = fit(
        load_recipe("recipe.toml", ["fleet.engine=sglang", 'fleet.settings={ flags = ["--tp", "2"], slots = 3 }'])
    )
    arguments = worker_arguments(recipe, desk, "http://x:1", "worker-0")
    assert arguments[arguments.index("--") :] == ["--", "--dtype", "float32", "--tp", "2"]
    assert arguments[arguments.index("--engine") :][:6] == [
        "--engine",
        "sglang",
        "--model",
        "model",
        "--name",
        "worker-0",
    ]
    assert f'log="{desk}/logs/worker-0-server.log"' in arguments and "slots=3" in arguments


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (["fleet.engine=vllm", "fleet.settings={ dtype = 1 }"], "fleet.settings.dtype: unknown"),
        (["fleet.engine=vllm", 'fleet.settings={ url = "http://x" }'], "fleet.settings.url: a worker of the fleet has"),
        (
            ["fleet.engine=vllm", 'fleet.settings={ flags = ["--port=1"] }'],
            "fleet.settings.flags: --port=1: the worker",
        ),
        (
            ["fleet.engine=vllm", "fleet.workers=1", "fleet.engine_python=/nowhere"],
            "fleet.engine_python: /nowhere is not there; expected a Python, or a virtual environment",
        ),
    ],
)
def test_what_a_server_could_not_start_with_is_said_before_anything_is_started(
    desk: Path, settings: list[str], said: str, capsys: pytest.CaptureFixture[str]
):
    with pytest.raises(UserError, match=f"^{said}"):
        check_settings(load_recipe("recipe.toml", settings))
    assert main(["train", "recipe.toml", *settings, "--dry-run"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ([f"fleet.engine_python={sys.executable}"], 'fleet.engine_python: is for engine = "vllm" and "sglang"'),
        (["fleet.engine=emulated"], "fleet.engine: "),
        (
            ["fleet.engine=vllm", "fleet.workers=1", "lora.rank=2", "lora.publish=adapter"],
            'lora.publish: expected "merged", since vllm servers',
        ),
    ],
)
def test_what_does_not_go_together_is_refused_by_its_name(desk: Path, settings: list[str], said: str):
    with pytest.raises(ConfigError, match=f"^{said}"):
        load_recipe("recipe.toml", settings)
