"""`polyrl train` with real processes: a short run, rewards that fail, Ctrl+C, and what is refused before it starts."""

import asyncio
import contextlib
import json
import os
import pty
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from tests.builtin.tiny_models import save_tiny
from tests.integration.desks import LETTERS, bare_desk, commands_in, join, model, processes_in, start
from tests.trainer.test_validator import ToldFleet

from polyrl.cli.main import main
from polyrl.config import apply_overrides, build
from polyrl.config.recipe_files import load_recipe
from polyrl.engines.builtin.config import BuiltinConfig
from polyrl.errors import ConfigError
from polyrl.rewards.reward import RewardFailed
from polyrl.run.plan import fit
from polyrl.run.settings import weight_settings
from polyrl.run.task_contract import Answered
from polyrl.run.tasks import load_tasks
from polyrl.run.validation import validator
from polyrl.run.workers import doctor_command, join_command, worker_arguments
from polyrl.telemetry.metrics import read_metrics
from polyrl.trainer.devices import Devices
from polyrl.trainer.local_engine import LocalAnswer, LocalPrompt
from polyrl.weights.interfaces import listening_addresses
from polyrl.wire.frames import Sampling

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
__all__ = ["bare_desk", "model"]  # fixtures
REWARD = """
def score(given):
    if given.num_tokens % 4 == 3 or given.row["number"] == 1:
        raise ValueError("a bad day")
    return 1.0 + given.num_tokens % 2 + (given.finish == "length")
"""


@pytest.fixture
def desk(bare_desk: Path) -> Path:
    """A folder with all that a run needs, and we are in it."""
    (bare_desk / "their_reward.py").write_text(REWARD)
    write_recipe(bare_desk)
    return bare_desk


def write_recipe(folder: Path) -> None:
    lines = ['name = "tiny"']
    for section, keys in RECIPE.items():
        lines += [f"[{section}]", *(f"{key} = {json.dumps(value)}" for key, value in keys.items())]
    (folder / "recipe.toml").write_text("\n".join(lines) + "\n")


@pytest.mark.parametrize(
    "settings",
    [
        (),
        ("train.mode=async", "train.max_staleness=2"),
        pytest.param(
            ("train.mode=synchronous", "rounds.tail_batching=race", "rounds.prompt_factor=1.5"),
            marks=pytest.mark.chaos,  # test_loop.py has the mode, in one process
        ),
    ],
    ids=["streaming", "async", "synchronous-race"],
)
def test_a_run_trains_its_steps_and_samples_without_a_reward_are_dropped_never_zero(
    desk: Path, capsys: pytest.CaptureFixture[str], settings: tuple[str, ...]
):
    process = start(*settings)
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
        watching = asyncio.create_task(tasks.failed())
        for answer in (first, *[[5]] * 32):
            with contextlib.suppress(RewardFailed):
                await tasks.score(0, 0, Answered(answer, "stop"))
        await asyncio.wait((watching,), timeout=0.1)
        is_over = watching.done()
        watching.cancel()
        await tasks.close()
        return is_over

    assert asyncio.run(is_hopeless([5]))
    assert not asyncio.run(is_hopeless([5, 6]))


@pytest.mark.long
def test_a_reward_that_never_succeeds_ends_the_run_with_its_reason(desk: Path):
    (desk / "their_reward.py").write_text("def score(given):\n    return given.row['no such column']\n")
    process = start("--quiet", "train.local_generation=false")
    worker = join(desk / "runs/tiny")
    _, errors = process.communicate(timeout=100)
    assert process.returncode == 2, errors
    last = errors.strip().splitlines()[-1]
    whole = r"polyrl: error: the reward their_reward:score failed for all of \d+ answers: KeyError: 'no such column'"
    assert re.fullmatch(whole, last), "all 32, or all of a round that had fewer"
    try:
        said, _ = worker.communicate(timeout=20)  # it was told, and does not dial on
    finally:
        worker.kill()
    assert worker.returncode == 0, said
    assert processes_in(desk) == []


def test_ctrl_c_ends_the_run_in_good_order_and_leaves_no_process(desk: Path):
    process = start("train.steps=100000")
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("step    1 "):
            break
    began = time.monotonic()
    os.kill(process.pid, signal.SIGINT)
    said, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert "stopped; go on with `polyrl train --resume runs/tiny`" in said and "Traceback" not in errors
    assert time.monotonic() - began < 30, "who does not end by then is killed"
    assert processes_in(desk) == []


def test_after_ctrl_c_nothing_of_the_display_stays(desk: Path):
    """A warning that went through the display would shift it, and its upper lines would stay for good."""
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "polyrl", "train", "recipe.toml", "train.steps=100000", "manager.port=0"]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(Path(__file__).parents[2] / "src"),
        "TERM": "xterm",
    }
    process = subprocess.Popen(
        command, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True, env=environment
    )
    os.close(theirs)
    said, interrupted = b"", False
    with contextlib.suppress(OSError):  # the other end is closed
        while chunk := os.read(ours, 65536):
            said += chunk
            if not interrupted and b"step    1 " in re.sub(rb"\x1b\[[0-9;]*m", b"", said):
                os.kill(process.pid, signal.SIGINT)
                interrupted = True
    os.close(ours)
    assert process.wait(60) == 130
    text = said.decode(errors="replace")
    warning = text.index("polyrl.train: SIGINT: stopping")
    assert text[:warning].rpartition("\n")[2].endswith("\x1b[2K"), "the line above the display, which was erased before"


def test_a_worker_that_ends_before_the_run_is_one_line_and_those_that_end_with_it_are_none(desk: Path):
    process = start("train.steps=100000", "fleet.workers=2", "fleet.wait=true", "fleet.replace=false")
    assert process.stdout is not None
    said = ""
    for line in process.stdout:
        said += line
        if line.startswith("step    0 "):
            os.kill(pid_in(desk, "worker-1"), signal.SIGKILL)
        if "worker-1" in line or line.startswith("step  200 "):
            break
    os.kill(process.pid, signal.SIGINT)
    rest, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    why = "(SIGKILL), see runs/tiny/logs/worker-1.log; the run goes on, and does not start it again: another joins"
    assert f"worker-1 has ended {why} with the command above\n" in said
    assert (said + rest).count("has ended") == 1


@pytest.mark.long
def test_a_run_that_nobody_has_joined_says_so_once_and_when_it_goes_on(desk: Path):
    process = start("train.local_generation=false", "train.steps=100000")
    assert process.stdout is not None
    lines = [process.stdout.readline() for _ in range(3)]
    worker = join(desk / "runs/tiny")
    try:
        for line in process.stdout:
            lines.append(line)
            if "goes on, after" in line or line.startswith("step  200 "):
                break
        os.kill(process.pid, signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    finally:
        worker.kill()
        worker.communicate()
    assert process.returncode == 130, errors
    said = [line for line in lines[2:] if not line.startswith("step ")]
    assert len(said) == 2, said
    assert said[0].startswith("waits: step 0 lacks 3 groups of 3, and the trainer has had nothing to do for 1")
    assert said[0].endswith("12 samples wait, and there is no worker; `polyrl doctor runs/tiny` says what to do\n")
    assert re.fullmatch(r"goes on, after [\d.]+ s\n", said[1])


def test_the_command_that_says_why_a_run_waits_knows_how_its_manager_is_reached(desk: Path):
    run_dir, url = Path("runs/ti ny"), "https://host:5000"
    assert doctor_command(load_recipe("recipe.toml", []), run_dir, url) == "polyrl doctor 'runs/ti ny'"
    tls = load_recipe("recipe.toml", ["manager.tls_cert=its.pem", "manager.tls_key=key.pem", "manager.ca=ours.pem"])
    assert doctor_command(tls, run_dir, url) == f"polyrl doctor 'runs/ti ny' --manager {url} --ca ours.pem"


def pid_in(folder: Path, word: str) -> int:
    """Of the only process there whose command line has this word."""
    [pid] = [pid for pid, line in commands_in(folder).items() if word in line.split()]
    return pid


def manager_of(folder: Path) -> int:
    """The pid of the manager that was started there, as soon as there is one."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                is_here = entry.name.isdigit() and Path(os.readlink(entry / "cwd")) == folder
                if is_here and b"\0manager\0" in (entry / "cmdline").read_bytes():
                    return int(entry.name)
        time.sleep(0.005)
    raise AssertionError("no manager was started")


@pytest.mark.long
def test_ctrl_c_is_heard_while_the_manager_starts(desk: Path):
    process = start()
    manager = manager_of(desk)
    os.kill(manager, signal.SIGSTOP)  # it takes as long as it likes
    os.kill(process.pid, signal.SIGINT)
    assert process.stderr is not None
    told = process.stderr.readline()
    assert "SIGINT: stopping" in told
    time.sleep(0.2)
    with contextlib.suppress(ProcessLookupError):  # it is killed already
        os.kill(manager, signal.SIGCONT)
    said, errors = process.communicate(timeout=60)
    assert process.returncode == 130, told + errors
    assert said == "stopped; there is no checkpoint to go on from\n" and "Traceback" not in errors
    assert processes_in(desk) == []


def test_a_worker_of_the_fleet_gets_its_settings_as_the_recipe_has_them(desk: Path):
    given = {"compile": False, "slots": 3, "device": "cpu", "after_install": "keep"}
    table = ", ".join(f"{key} = {json.dumps(value)}" for key, value in given.items())
    arguments = worker_arguments(
        fit(load_recipe("recipe.toml", [f"fleet.settings={{ {table} }}"])), desk, "http://x:1", "w"
    )
    settings = [one for one in arguments if "=" in one]
    config = build({"model": "model", **apply_overrides({}, settings)}, BuiltinConfig)
    assert (config.compile, config.slots, config.device, config.after_install) == (False, 3, "cpu", "keep")
    assert config.dtype == "float32"


def test_the_command_to_join_names_an_address_that_another_machine_can_dial(desk: Path):
    recipe = load_recipe("recipe.toml")

    def dialled(url: str) -> str:
        words = shlex.split(join_command(recipe, desk, url))
        return words[words.index("--join") + 1]

    ours = [f"http://[{one}]:5000" if ":" in one else f"http://{one}:5000" for one in listening_addresses(())]
    assert dialled("http://0.0.0.0:5000") == next(one for one in ours if "[" not in one)
    assert dialled("http://[::]:5000") in [*ours, "http://[::]:5000"]
    for url in ("http://10.1.2.3:5000", "http://[fd00::1]:5000", "https://trainer.lan:5000"):
        assert dialled(url) == url


def test_what_a_recipe_says_of_weights_is_what_they_are_served_with(desk: Path):
    given = ["weights.hash=blake3", "weights.port=5100", "weights.egress_mb_s=3", "weights.mooncake=tcp"]
    settings = weight_settings(load_recipe("recipe.toml", given))
    assert (settings.hash, settings.port, settings.egress_mb_s, settings.mooncake) == ("blake3", 5100, 3.0, "tcp")
    assert settings.interfaces == ("127.0.0.0/8",)
    with pytest.raises(ConfigError, match=r"weights\.mooncake: is not encrypted"):
        load_recipe("recipe.toml", [*given, "manager.tls_cert=a", "manager.tls_key=b"])


class OneEngine:
    """Notes what it is asked for, and whether it holds its cache."""

    def __init__(self) -> None:
        self.is_awake = False
        self.asked: list[LocalPrompt] = []

    async def answer(self, questions: list[LocalPrompt]) -> list[LocalAnswer]:
        self.is_awake = True
        self.asked += questions
        return [LocalAnswer([1, 2], "stop") for _ in questions]

    async def sleep(self) -> None:
        self.is_awake = False

    async def wake(self) -> None:
        self.is_awake = True


class NoDisplay:
    def knows(self, version: int) -> bool:
        return False

    async def validates(self) -> None: ...

    async def validated(self, version: int, rates: dict[str, float]) -> None:
        self.rates = rates


@pytest.mark.parametrize("generates", [True, False])
def test_validation_draws_as_the_rollout_does_and_gives_the_memory_back_where_nobody_else_generates(
    desk: Path, *, generates: bool
):
    (desk / "sure.py").write_text("async def score(given):\n    return 1.0\n")
    settings = [
        "rollout.top_k=7",
        "rollout.min_p=0.1",
        "validation.temperature=0.5",
        "rollout.impose_lengths.kind=lognormal",
    ]
    settings += ["validation.at_start=true", "data.validation=rows.jsonl", "data.reward=sure:score"]
    recipe = load_recipe("recipe.toml", [*settings, f"train.local_generation={json.dumps(generates)}"])
    engine, told = OneEngine(), NoDisplay()

    async def scenario() -> None:
        tasks = load_tasks(recipe)
        devices = Devices(engine, generates=generates)
        validate = validator(recipe, cast("Any", engine), devices, tasks, cast("Any", told), cast("Any", ToldFleet()))
        assert validate is not None
        await validate(0)
        devices.close()
        await tasks.close()

    asyncio.run(scenario())
    assert set(told.rates.values()) == {1.0} and "validation/pass@1" in told.rates
    assert {one.sampling for one in engine.asked} == {Sampling(temperature=0.5, top_k=7, min_p=0.1)}
    assert engine.is_awake == generates


def test_a_dry_run_shows_the_recipe_and_the_plan_and_starts_nothing(desk: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["train", "recipe.toml", "--dry-run", "algorithm.kl=loss", "model.dtype=bfloat16"]) == 0
    said = capsys.readouterr().out
    assert "samples_per_prompt = 4" in said and 'old_logprobs = "recompute"' in said
    assert "82,304 parameters, bfloat16" in said and "3 prompts (at most 496 tokens) x 4 = 12 samples" in said
    for part in ("weights", "masters", "moments", "gradients", "activations", "reference"):
        assert re.search(rf"\b{part} [\d.]+ MiB", said)
    assert not (desk / "runs").exists()


def test_a_clip_that_cannot_act_is_a_line_of_the_plan_and_of_the_run(
    desk: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
):
    line = "algorithm.clip_high: has no effect: the importance ratio is 1 with one update a step"
    assert main(["train", "recipe.toml", "--dry-run", "algorithm.clip_high=0.28"]) == 0
    assert capsys.readouterr().out.count(line) == 1
    assert main(["train", "recipe.toml", "--dry-run", "algorithm.clip_high=0.28", "train.mode=async"]) == 0
    assert "has no effect" not in capsys.readouterr().out
    assert main(["train", "recipe.toml", "algorithm.clip_high=0.28", "data.source=nowhere.jsonl"]) == 2
    assert caplog.text.count(line) == 1


def test_fewer_prompts_than_a_step_wants_are_a_line_of_the_plan_and_of_the_run(
    desk: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
):
    num = len(Path("rows.jsonl").read_text().splitlines())
    line = f"data.prompts_per_step: {num + 3}, and rows.jsonl has only {num} prompts to train on: a step has {num} of"
    settings = [f"data.prompts_per_step={num + 3}", "data.source=rows.jsonl"]
    assert main(["train", "recipe.toml", "--dry-run", *settings]) == 0
    said = capsys.readouterr().out
    assert line in said and f"{num} prompts (at most 496 tokens) x 4 = {4 * num} samples" in said
    load_tasks(load_recipe("recipe.toml", settings))
    assert line in caplog.text
    caplog.clear()
    load_tasks(load_recipe("recipe.toml", [f"data.prompts_per_step={num}", "data.source=rows.jsonl"]))
    assert "prompts_per_step" not in caplog.text


def test_a_dry_run_of_imposed_lengths_says_so(desk: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["train", "recipe.toml", "--dry-run", "rollout.impose_lengths.kind=lognormal"]) == 0
    assert "warning  lengths of answers are imposed (lognormal)" in capsys.readouterr().out


def test_a_dry_run_of_rounds_ahead_says_how_far_behind_and_what_is_done_about_it(
    desk: Path, capsys: pytest.CaptureFixture[str]
):
    assert main(["train", "recipe.toml", "--dry-run", "train.mode=async", "train.max_staleness=2"]) == 0
    said = capsys.readouterr().out
    assert "async (at most 2 versions behind), 2 steps" in said and 'old_logprobs = "engine"' in said


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"num_hidden_layers": 3}, "missing keys in its weights: model.layers.2."),
        ({"num_hidden_layers": 1}, "unexpected keys in its weights: model.layers.1."),
        ({"vocab_size": 128}, "mismatched keys in its weights: "),
    ],
)
def test_a_dry_run_refuses_a_model_whose_weights_are_not_those_of_its_config(
    desk: Path, capsys: pytest.CaptureFixture[str], config: dict[str, int], message: str
):
    shutil.copytree(desk / "model", desk / "other")
    path = desk / "other" / "config.json"
    known = json.loads(path.read_text())
    known.pop("layer_types", None)
    path.write_text(json.dumps(known | config))
    assert main(["train", "recipe.toml", "--dry-run", "model.path=other"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("polyrl: error: model.path: other: " + message) and error.count("\n") == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("dry", [(), ("--dry-run",)], ids=["run", "dry-run"])
def test_a_gpu_that_is_not_there_is_one_line(desk: Path, capsys: pytest.CaptureFixture[str], dry: tuple[str, ...]):
    assert main(["train", "recipe.toml", *dry, "model.device=cuda"]) == 2
    line = "polyrl: error: model.device: cuda: no GPU is visible here; expected cpu, or auto\n"
    assert capsys.readouterr().err == line
    assert not (desk / "runs").exists()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["train.step=3"], "train.step: unknown key; did you mean train.steps?"),
        (["data.source=gone.jsonl"], "gone.jsonl: no such file"),
        (["data.source=empty.jsonl"], "empty.jsonl: there is no row"),
        (["data.validation=empty.jsonl", "validation.at_start=true"], "empty.jsonl: there is no row"),
        (["data.prompt_key=question"], "rows.jsonl:1: no column 'question', which data.prompt_key names"),
        (["data.reward=math"], "rows.jsonl:1: answer: got nothing, expected the answer"),
        (["data.reward=their_reward:scor"], 'data.reward: "their_reward:scor": their_reward has no function scor'),
        (["data.reward=mth"], 'data.reward: unknown name "mth"'),
        (["data.max_prompt_tokens=3"], "rows.jsonl: none of its 20 prompts can be used: no token, or more than 3"),
        (["rollout.max_new_tokens=512"], "rollout.max_new_tokens: 512 leaves no room for a prompt, expected less than"),
        (["data.chat=true"], "its tokenizer has no chat template"),
        (["model.path=gone"], "model.path: gone: no config.json there"),
        (["fleet.settings.model=x"], "fleet.settings.model: workers have that of model.path; expected none"),
        (["fleet.settings.kv_tokens=16"], "fleet.settings.kv_tokens: got 16, expected at least block_tokens=32"),
        (["fleet.settings={ slot = 3 }"], "fleet.settings.slot: unknown key; did you mean slots?"),
        (["fleet.settings.slots=many"], 'fleet.settings.slots: got "many", expected an integer >= 1 and <= 4096'),
        (["fleet.settings.in_sleep=of"], 'fleet.settings.in_sleep: got "of", expected one of "keep", "offload"'),
    ],
)
@pytest.mark.parametrize("dry", [(), ("--dry-run",)], ids=["run", "dry-run"])
def test_what_cannot_run_is_one_line_before_anything_is_started(
    desk: Path, capsys: pytest.CaptureFixture[str], settings: list[str], message: str, dry: tuple[str, ...]
):
    (desk / "empty.jsonl").touch()
    assert main(["train", "recipe.toml", *dry, *settings]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.startswith("polyrl: error: ") and error.count("\n") == 1
    assert processes_in(desk) == [] and not (desk / "runs").exists()


REFERENCE, CRITIC = ("algorithm.kl=loss", "algorithm.reference"), ("algorithm.advantage=gae", "algorithm.critic.path")


@pytest.mark.parametrize(("use", "key"), [REFERENCE, CRITIC])
@pytest.mark.parametrize("dry", [(), ("--dry-run",)], ids=["run", "dry-run"])
def test_a_model_of_other_tokens_is_refused_beside_the_policy(
    desk: Path, capsys: pytest.CaptureFixture[str], use: str, key: str, dry: tuple[str, ...]
):
    def refused(other: str, *settings: str) -> str:
        assert main(["train", "recipe.toml", *dry, use, f"{key}={other}", *settings]) == 2
        error = capsys.readouterr().err
        assert error.startswith(f"polyrl: error: {key}: {other}: ") and error.count("\n") == 1
        return error

    shutil.copytree(desk / "model", desk / "swapped")
    path = desk / "swapped/tokenizer.json"
    words = json.loads(path.read_text())
    vocabulary = words["model"]["vocab"]
    vocabulary[LETTERS[0]], vocabulary[LETTERS[1]] = vocabulary[LETTERS[1]], vocabulary[LETTERS[0]]
    path.write_text(json.dumps(words))
    number = vocabulary[LETTERS[1]]
    assert f"{LETTERS[0]!r} is token {number} here, and {number + 1} there; expected" in refused("swapped")
    assert "no config.json there" in refused("gone")

    small = save_tiny("qwen3", desk / "small", vocab_size=32)
    assert "has 32 tokens (vocab_size), and model.path, model, uses 64; expected" in refused(str(small))


@pytest.mark.parametrize(("use", "key"), [REFERENCE, CRITIC])
def test_a_model_of_the_same_tokens_may_be_larger_and_say_them_otherwise(desk: Path, use: str, key: str):
    other = save_tiny("qwen3", desk / "other", tokenizer=True, vocab_size=96)
    path = other / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "chat_template": "{{ messages }}"}))
    assert main(["train", "recipe.toml", "--dry-run", use, f"{key}={other}"]) == 0


def test_a_run_is_not_written_over(desk: Path, capsys: pytest.CaptureFixture[str]):
    (desk / "runs/tiny/journal").mkdir(parents=True)
    (desk / "runs/tiny/journal/events-000001.bin").touch()
    assert main(["train", "recipe.toml"]) == 2
    assert "runs/tiny: there is a run already; name another with --run-dir\n" in capsys.readouterr().err


def test_a_manager_that_could_not_listen_is_not_in_the_way_of_the_next_run(
    desk: Path, capsys: pytest.CaptureFixture[str]
):
    (desk / "runs/tiny/journal").mkdir(parents=True)
    (desk / "runs/tiny/journal/payload-000001.bin").write_bytes(b"a journal of no run")
    assert main(["train", "recipe.toml", "model.path=gone"]) == 2
    assert "no config.json there" in capsys.readouterr().err  # and not: there is a run already


def test_a_manager_that_cannot_listen_is_one_line_before_anything_is_started(
    desk: Path, capsys: pytest.CaptureFixture[str]
):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["train", "recipe.toml", f"manager.port={port}"]) == 2
    error = capsys.readouterr().err
    assert error.startswith(
        f"polyrl: error: the manager cannot listen on 127.0.0.1:{port}: address already in use; another"
    )
    assert error.endswith(": manager.port=0\n")
    assert main(["train", "recipe.toml", "manager.host=203.0.113.9"]) == 2
    error += capsys.readouterr().err
    assert error.count("\n") == 2 and "cannot listen on 203.0.113.9:0: " in error
    assert not (desk / "runs").exists()


def test_weights_that_cannot_be_served_are_one_line_before_anything_is_started(
    desk: Path, capsys: pytest.CaptureFixture[str]
):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["train", "recipe.toml", f"weights.port={port}"]) == 2
    line = f"polyrl: error: weights: cannot listen on 127.0.0.1 port {port}: Address already in use\n"
    assert capsys.readouterr().err == line
    assert main(["train", "recipe.toml", 'weights.interfaces=["203.0.113.0/24"]']) == 2
    assert "weights.interfaces[0]: no address of this machine is in 203.0.113.0/24" in capsys.readouterr().err
    assert not (desk / "runs").exists()


@pytest.mark.parametrize(
    ("library", "setting"), [("tensorboardX", "track.tensorboard=true"), ("wandb", "track.wandb=offline")]
)
def test_a_tracker_that_is_not_installed_is_one_line_before_anything_is_started(
    desk: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    library: str,
    setting: str,
):
    monkeypatch.setitem(sys.modules, library, None)
    assert main(["train", "recipe.toml", setting]) == 2
    key = setting.partition("=")[0]
    assert capsys.readouterr().err == f"polyrl: error: {key}: needs {library}: pip install 'polyrl[track]'\n"
    assert not (desk / "runs").exists()


REFUSED_LATE = (
    (["lora.rank=4", 'lora.targets=["q_prj"]'], "lora.targets: no layer of the model is called q_prj"),
    (["model.path=broken"], "broken/model.safetensors: a header of "),
    (["--run-dir", "far/away/run", "model.path=broken"], "broken/model.safetensors: a header of "),
)


@pytest.mark.parametrize(("settings", "message"), REFUSED_LATE)
def test_a_start_that_is_refused_late_leaves_nothing_empty_behind(
    desk: Path, capsys: pytest.CaptureFixture[str], settings: list[str], message: str
):
    shutil.copytree(desk / "model", desk / "broken")
    os.truncate(desk / "broken/model.safetensors", 100)
    before = set(desk.rglob("*"))
    assert main(["train", "recipe.toml", *settings]) == 2
    assert message in capsys.readouterr().err
    assert set(desk.rglob("*")) - before <= set(desk.glob("__pycache__/**/*")) | {desk / "__pycache__"}


def test_a_start_that_is_refused_late_leaves_what_was_there(desk: Path):
    for name in ("notes.txt", "logs/train.log", "logs/rank-1.log"):
        (desk / "runs/tiny" / name).parent.mkdir(parents=True, exist_ok=True)
        (desk / "runs/tiny" / name).touch()
    before = set((desk / "runs").rglob("*"))
    assert main(["train", "recipe.toml", "lora.rank=4", 'lora.targets=["q_prj"]']) == 2
    assert set((desk / "runs").rglob("*")) == before


def test_a_file_where_the_run_should_go_is_one_line(desk: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["train", "recipe.toml", "--run-dir", "rows.jsonl"]) == 2
    assert capsys.readouterr().err == "polyrl: error: rows.jsonl/logs: cannot be made: Not a directory\n"
