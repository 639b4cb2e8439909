"""`polyrl train` with real processes: a short run, rewards that fail, Ctrl+C, and what is refused before it starts."""

import asyncio
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from tests.builtin.tiny_models import save_tiny

from polyrl.cli.main import main
from polyrl.cli.training.tasks import load_tasks
from polyrl.config.recipe_files import load_recipe
from polyrl.rewards.reward import RewardFailed
from polyrl.telemetry.metrics import read_metrics

LETTERS = [chr(0x4E00 + number) for number in range(3, 60)]
RECIPE: dict[str, dict[str, Any]] = {
    "model": {"path": "model"},
    "train": {"steps": 2},
    "rollout": {"max_new_tokens": 16},
    "data": {"source": "rows.jsonl", "reward": "their_reward:score", "prompts_per_step": 3},
    "validation": {"at_start": False},
    "rounds": {"samples_per_prompt": 4},
    "rewards": {"processes": 1},
    "manager": {"port": 0},
    "seeding": {"initial_s": 0.2, "max_step_s": 1.0},
}
REWARD = """
def score(given):
    if given.num_tokens % 4 == 3 or given.row["number"] == 1:
        raise ValueError("a bad day")
    return 1.0 + given.num_tokens % 2 + (given.finish == "length")
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny("qwen3", tmp_path_factory.mktemp("model"), tokenizer=True, vocab_size=64)


@pytest.fixture
def desk(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with all that a run needs, and we are in it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").symlink_to(model)
    (tmp_path / "their_reward.py").write_text(REWARD)
    with (tmp_path / "rows.jsonl").open("w", encoding="utf-8") as file:
        for number in range(20):
            file.write(json.dumps({"prompt": "".join(LETTERS[number : number + 4]), "number": number}) + "\n")
    write_recipe(tmp_path)
    return tmp_path


def write_recipe(folder: Path) -> None:
    lines = ['name = "tiny"']
    for section, keys in RECIPE.items():
        lines += [f"[{section}]", *(f"{key} = {json.dumps(value)}" for key, value in keys.items())]
    (folder / "recipe.toml").write_text("\n".join(lines) + "\n")


def start(*settings: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-m", "polyrl", "train", "recipe.toml", *settings],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2] / "src")},
    )  # fmt: skip


def processes_in(folder: Path) -> list[str]:
    """Command lines of whoever works in this folder."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                if Path(os.readlink(entry / "cwd")) == folder:
                    found.append((entry / "cmdline").read_bytes().replace(b"\0", b" ").decode())
            except OSError:
                continue
    return found


def test_a_run_trains_its_steps_and_samples_without_a_reward_are_dropped_never_zero(
    desk: Path, capsys: pytest.CaptureFixture[str]
):
    process = start()
    said, errors = process.communicate(timeout=100)
    assert process.returncode == 0, errors
    assert "done: all 2 steps are trained" in said and "polyrl worker --join http://127.0.0.1:" in said
    assert "Traceback" not in errors and "no reward for sample" in errors and "ValueError: a bad day" in errors
    lines = read_metrics(desk / "runs/tiny/metrics.jsonl")
    assert [line["step"] for line in lines] == [0, 1]
    lowest = [value for line in lines if isinstance(value := line["reward/min"], float)]
    assert lowest and min(lowest) >= 1.0
    assert processes_in(desk) == []
    assert main(["ledger", "runs/tiny", "--verify", "--json"]) == 0
    ledger = json.loads(capsys.readouterr().out)
    assert ledger["broken_laws"] == []
    assert ledger["samples"]["discarded"]["reward_failed"] > 0


def test_a_reward_that_never_succeeds_is_told_from_one_that_fails_now_and_then(desk: Path):
    (desk / "two_rewards.py").write_text("async def score(given):\n    return 1 / (given.num_tokens - 1)\n")

    async def is_hopeless(first: list[int]) -> bool:
        tasks = load_tasks(load_recipe("recipe.toml", ["data.reward=two_rewards:score"]))
        watching = asyncio.create_task(tasks.hopeless())
        for answer in (first, *[[5]] * 32):
            with contextlib.suppress(RewardFailed):
                await tasks.score(0, 0, answer, "stop", validation=False)
        await asyncio.wait((watching,), timeout=0.1)
        watching.cancel()
        await tasks.close()
        return watching.done()

    assert asyncio.run(is_hopeless([5]))
    assert not asyncio.run(is_hopeless([5, 6]))


@pytest.mark.long
def test_a_reward_that_never_succeeds_ends_the_run_with_its_reason(desk: Path):
    (desk / "their_reward.py").write_text("def score(given):\n    return given.row['no such column']\n")
    process = start("--quiet")
    _, errors = process.communicate(timeout=100)
    assert process.returncode == 2, errors
    last = errors.strip().splitlines()[-1]
    assert last == (
        "polyrl: error: the reward their_reward:score failed for all of 32 answers: KeyError: 'no such column'"
    )
    assert processes_in(desk) == []


def test_ctrl_c_ends_the_run_in_good_order_and_leaves_no_process(desk: Path):
    process = start("train.steps=100000")
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("step:1"):
            break
    began = time.monotonic()
    os.kill(process.pid, signal.SIGINT)
    said, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert "stopped; what was trained is in runs/tiny" in said and "Traceback" not in errors
    assert time.monotonic() - began < 20
    assert processes_in(desk) == []


def test_a_dry_run_shows_the_recipe_and_the_plan_and_starts_nothing(desk: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["train", "recipe.toml", "--dry-run", "algorithm.kl=loss", "model.dtype=bfloat16"]) == 0
    said = capsys.readouterr().out
    assert "samples_per_prompt = 4" in said and 'old_logprobs = "recompute"' in said
    assert "82,304 parameters, bfloat16" in said and "3 prompts (at most 496 tokens) x 4 = 12 samples" in said
    for part in ("weights", "masters", "moments", "gradients", "activations", "reference"):
        assert re.search(rf"\b{part} [\d.]+ MiB", said)
    assert not (desk / "runs").exists()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["train.step=3"], "train.step: unknown key; did you mean train.steps?"),
        (["data.source=gone.jsonl"], "gone.jsonl: no such file"),
        (["data.prompt_key=question"], "rows.jsonl:1: no column 'question', which data.prompt_key names"),
        (["data.reward=math"], "rows.jsonl:1: answer: got nothing, expected the answer"),
        (["data.reward=their_reward:scor"], 'data.reward: "their_reward:scor": their_reward has no function scor'),
        (["data.reward=mth"], 'data.reward: unknown name "mth"'),
        (["data.max_prompt_tokens=3"], "rows.jsonl: none of its 20 prompts can be used: no token, or more than 3"),
        (["rollout.max_new_tokens=512"], "rollout.max_new_tokens: 512 leaves no room for a prompt, expected less than"),
        (["data.chat=true"], "its tokenizer has no chat template"),
        (["model.path=gone"], "model.path: gone: no config.json there"),
    ],
)
def test_what_cannot_run_is_one_line_before_anything_is_started(
    desk: Path, capsys: pytest.CaptureFixture[str], settings: list[str], message: str
):
    assert main(["train", "recipe.toml", *settings]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.startswith("polyrl: error: ") and error.count("\n") == 1
    assert processes_in(desk) == []


def test_a_run_is_not_written_over(desk: Path, capsys: pytest.CaptureFixture[str]):
    (desk / "runs/tiny/journal").mkdir(parents=True)
    assert main(["train", "recipe.toml"]) == 2
    assert "runs/tiny: there is a run already" in capsys.readouterr().err
