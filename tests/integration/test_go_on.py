"""`polyrl train --resume` with real processes: from the log alone, and from files that are damaged or missing."""

import os
import shlex
import shutil
import socket
import time
from pathlib import Path

import pytest
import torch
from tests.integration.desks import bare_desk, model, start
from tests.integration.test_train import desk
from tests.warm import run_warm

from polyrl.cli import train
from polyrl.cli.main import main
from polyrl.run.checkpoints import read_recipe
from polyrl.telemetry import breaks, metrics
from polyrl.trainer.state import checkpoint, redo

__all__ = ["bare_desk", "desk", "model"]  # fixtures
pytestmark = pytest.mark.timeout(300)  # several runs, of which each may take 100 s

RUN = Path("runs/tiny")
SETTINGS = (
    "train.steps=5", "train.mode=synchronous", "checkpoint.every_steps=2", "data.reward=own:score",
    "algorithm.kl=loss", "algorithm.mini_batches=2",
)  # fmt: skip


def go_on(*settings: str, run: Path = RUN, folder: Path | None = None) -> tuple[int, str, str]:
    """Code, output and errors of `polyrl train --resume`, in a process of its own."""
    places = os.pathsep.join([str(Path(__file__).parents[2] / "src"), os.getcwd()])
    arguments = ("train", "--resume", str(run), *settings)
    done = run_warm(*arguments, folder=folder, environment={"PYTHONPATH": places}, timeout_s=100)
    return done.returncode, done.stdout, done.stderr


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The line that says why."""
    capsys.readouterr()
    assert main(list(arguments)) == 2
    return capsys.readouterr().err.strip()


def flip_a_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def test_a_run_goes_on_without_its_newest_checkpoint_and_port_and_says_what_is_damaged(
    desk: Path, capsys: pytest.CaptureFixture[str]
):
    (desk / "own.py").write_text("def score(given):\n    return float(given.num_tokens % 3)\n")
    process = start(*SETTINGS)
    _, errors = process.communicate(timeout=100)
    assert process.returncode == 0, errors
    newest = RUN / checkpoint.FOLDER / checkpoint.name_of(5)
    expected = {name: one.clone() for name, one in checkpoint.load(newest)[1].items()}  # they lie in the file
    assert "all 5 steps of runs/tiny are trained" in refused(capsys, "train", "--resume", str(RUN))

    flip_a_bit(newest / "optimizer.safetensors")
    before = checkpoint.found(RUN)[-2]
    assert refused(capsys, "train", "--resume", str(RUN)) == (
        f"polyrl: error: {newest}/optimizer.safetensors: is damaged: its digest is not the one in state.json; the "
        f"checkpoint cannot be used; remove {newest}, and --resume trains the steps since {before.name} again"
    )

    shutil.rmtree(newest)
    assert main(["export", str(RUN), "out"]) == 0
    later = redo.num_after(RUN, checkpoint.step_of(before))
    shown = capsys.readouterr().out
    assert f"out: the weights of {before.name}, in float32\n{later} later steps are only in the log; " in shown
    old_port = int((RUN / "port").read_text())
    with socket.create_server(("127.0.0.1", old_port)):
        code, said, errors = go_on()
    assert code == 0, errors
    assert errors.count(f"port {old_port}, which the run had, is taken") == 1
    assert int((RUN / "port").read_text()) != old_port
    assert f"going on with {RUN} at step 5\ntrains step" in said and "all 5 steps are trained" in said
    _, found = checkpoint.load(newest)
    assert expected.keys() == found.keys() and all(torch.equal(one, found[name]) for name, one in expected.items())
    assert "bit for bit" not in errors

    shutil.rmtree(newest)
    entry = RUN / checkpoint.FOLDER / "redo" / checkpoint.name_of(4)
    flip_a_bit(entry)
    line = refused(capsys, "train", "--resume", str(RUN))
    assert line.startswith(f"polyrl: error: {entry}: is damaged, or cut short; the run cannot go on without that step")
    entry.unlink()
    code, _, errors = go_on()
    assert code == 2 and errors.strip().splitlines()[-1] == (
        "polyrl: error: checkpoint and log go up to step 4, and the manager's journal to step 5: they are not of one "
        "run, or the newest were removed"
    )


def test_killed_as_its_manager_hears_of_it_a_run_goes_on_from_any_folder_and_keeps_no_setting_that_failed(
    desk: Path, capsys: pytest.CaptureFixture[str]
):
    process = start()
    until = time.monotonic() + 60
    while not list((RUN / "journal").glob("events-*")) and time.monotonic() < until:
        time.sleep(0.001)
    process.kill()
    process.communicate()
    assert "there is a run already; go on with --resume" in refused(capsys, "train", "recipe.toml")
    assert [one.name for one in checkpoint.found(RUN)] == ["step-000000"]
    elsewhere, run = desk / "elsewhere", desk / RUN
    elsewhere.mkdir()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        code, _, errors = go_on(f"manager.port={taken.getsockname()[1]}", run=run, folder=elsewhere)
    assert code == 2 and "address already in use" in errors and errors.count("\n") == 1
    code, said, errors = go_on("train.steps=1", run=run, folder=elsewhere)
    assert code == 0 and "done: all 1 steps are trained" in said, errors
    assert read_recipe(run, [])[0].train.steps == 1


def test_a_run_whose_data_has_ended_says_so_and_keeps_no_more_than_it_was_asked_to(
    desk: Path, capsys: pytest.CaptureFixture[str]
):
    """Begun by --resume: what was killed had written its recipe, and no checkpoint."""
    RUN.mkdir(parents=True)
    text = (desk / "recipe.toml").read_text()
    (RUN / "recipe.toml").write_text(text.replace("[data]\n", "[data]\nnum_epochs = 1\n"))
    code, said, errors = go_on("train.steps=50", "checkpoint.keep_last=1")
    assert code == 0 and f"beginning with {RUN}: nothing is trained there yet" in said, errors
    num_steps = checkpoint.step_of(checkpoint.found(RUN)[-1])
    assert 0 < num_steps < 50 and f"done: the data has ended, after {num_steps} steps" in said
    shutil.copytree(
        checkpoint.found(RUN)[-1], RUN / checkpoint.FOLDER / "step-000001"
    )  # as one leaves it who is killed
    assert refused(capsys, "train", "--resume", str(RUN)) == (
        f"polyrl: error: data.num_epochs: the data of {RUN} has ended, after {num_steps} steps, and a run that goes on "
        f"cannot have more; begin anew with `polyrl train {RUN}/recipe.toml --run-dir OTHER`, from its weights with "
        f"model.path=DIR after `polyrl export {RUN} DIR`"
    )
    assert [checkpoint.step_of(one) for one in checkpoint.found(RUN)] == [num_steps]
    shutil.rmtree(RUN / checkpoint.FOLDER)
    assert "no checkpoint there to go on from: it was removed, or" in refused(capsys, "train", "--resume", str(RUN))


def test_before_the_first_checkpoint_there_is_nothing_to_export(desk: Path, capsys: pytest.CaptureFixture[str]):
    checkpoint.save(RUN, checkpoint.TrainerState(next_step=0), {})
    shutil.copy(desk / "recipe.toml", RUN)
    line = refused(capsys, "export", str(RUN), "out")
    model = desk / "model"  # recipes are read with whole paths
    assert line.endswith(f"step-000000: nothing is trained yet: the weights are those of {model}, as they are"), line
    checkpoint.note_best(RUN, checkpoint.Best(0, "validation/pass@1", 0.25))
    assert refused(capsys, "export", str(RUN), "out", "--best") == (
        f"polyrl: error: --best: no step of {RUN} has validated better than what it began with (validation/pass@1: "
        f"0.25): that is {model}, as it is"
    )


@pytest.mark.parametrize("why", [None, "all 2 steps are trained"])
def test_a_command_that_is_told_can_be_copied_whatever_the_directory_is_called(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], why: str | None
):
    run_dir = tmp_path / "my first run"
    checkpoint.save(run_dir, checkpoint.TrainerState(next_step=0), {})
    assert train.conclude(run_dir, why) == (130 if why is None else 0)
    commands = capsys.readouterr().out.split("`")[1::2]
    assert commands and all(shlex.split(one)[-1] == str(run_dir) for one in commands)


@pytest.mark.chaos
def test_a_run_goes_on_with_another_learning_rate_as_a_break_that_is_written_down(
    desk: Path, capsys: pytest.CaptureFixture[str]
):
    """Killed while steps are in the log alone: they come out as they were, and what follows is trained otherwise."""
    (desk / "own.py").write_text("def score(given):\n    return float(given.num_tokens % 3)\n")
    process = start("train.steps=50", *SETTINGS[1:], "checkpoint.every_steps=50")
    until = time.monotonic() + 90
    while len(list((RUN / checkpoint.FOLDER / "redo").glob("step-*"))) < 2 and time.monotonic() < until:
        time.sleep(0.01)
    process.kill()
    process.communicate()
    num = redo.num_after(RUN, 0)
    assert num >= 2
    shutil.copytree(RUN, plain := Path("runs/plain"))
    code, _, errors = go_on(f"train.steps={num}", run=plain)
    assert code == 0, errors
    changes = ("optimizer.lr=0.5", "rollout.temperature=0.7", "rewards.timeout_s=7", "rewards.processes=1")
    code, said, errors = go_on(f"train.steps={num + 1}", *changes)
    assert code == 0, errors
    shown = f"optimizer.lr {read_recipe(plain, [])[0].optimizer.lr:g} -> 0.5, rollout.temperature 1 -> 0.7"
    assert f"from step {num} on, the curve has a break: {shown}" in " ".join(said.split())
    expected, found = (checkpoint.load(one / checkpoint.FOLDER / checkpoint.name_of(num))[1] for one in (plain, RUN))
    assert all(torch.equal(one, found[name]) for name, one in expected.items())
    line = metrics.read_steps(RUN / metrics.FILE_NAME)[num]
    assert (line["step"], line["actor/lr"], line["run/breaks"], line["run/changed"]) == (num, 0.5, 2, shown)
    assert [str(one) for one in breaks.read(RUN)] == shown.split(", ")
    capsys.readouterr()
    assert main(["replay", str(RUN)]) == 0  # the manager's journal says that its rules were changed
    assert "begin anew with `polyrl train" in refused(
        capsys, "train", "--resume", str(RUN), "rounds.samples_per_prompt=7"
    )
