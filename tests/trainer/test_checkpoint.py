"""Checkpoints: whole or not at all, verified when read, kept by rule."""

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from polyrl.errors import UserError
from polyrl.trainer.state import checkpoint
from polyrl.trainer.state.checkpoint import Best, Keep, TrainerState


def tensors(seed: int) -> dict[str, torch.Tensor]:
    made = torch.Generator().manual_seed(seed)
    return {"master/a": torch.randn(64, 33, generator=made), "updates/a": torch.tensor(3.0)}


def save(run_dir: Path, step: int, **options) -> Path:
    state = TrainerState(next_step=step, fingerprint="ab")
    return checkpoint.save(run_dir, state, tensors(step), **options)


def test_what_is_saved_is_loaded(tmp_path: Path):
    state, found = checkpoint.load(save(tmp_path, 7))
    assert (state.next_step, state.fingerprint) == (7, "ab")
    assert all(torch.equal(found[name], one) for name, one in tensors(7).items())


def test_only_the_last_are_kept_and_a_step_may_be_saved_again(tmp_path: Path):
    for step in (1, 2, 3, 3):
        save(tmp_path, step)
        checkpoint.prune(tmp_path, Keep(2))
    assert [one.name for one in checkpoint.found(tmp_path)] == ["step-000002", "step-000003"]


def test_checkpoints_are_kept_by_rule(tmp_path: Path):
    for step in range(8):
        save(tmp_path, step)
        checkpoint.prune(tmp_path, Keep(last=1, every=3))
        if step in (2, 4, 5):
            value = {2: 0.5, 4: 0.5, 5: 0.7}[step]
            assert checkpoint.note_best(tmp_path, Best(step, "validation/pass@1", value)) is (step != 4)
        assert checkpoint.found(tmp_path)[-1].name == checkpoint.name_of(step), "the newest is always there"
    assert [checkpoint.step_of(one) for one in checkpoint.found(tmp_path)] == [3, 5, 6, 7]
    assert checkpoint.read_best(tmp_path) == Best(5, "validation/pass@1", 0.7)


@pytest.mark.parametrize(
    ("keep", "best", "expected"),
    [
        (Keep(1), None, [9]),
        (Keep(2), None, [8, 9]),
        (Keep(20), None, list(range(10))),
        (Keep(1, 4), None, [4, 8, 9]),
        (Keep(1), 0, [0, 9]),
        (Keep(2, 3), 7, [3, 6, 7, 8, 9]),
    ],
)
def test_the_rules(keep: Keep, best: int | None, expected: list[int]):
    assert checkpoint.kept(range(10), keep, best) == expected


def test_another_metric_begins_anew_and_a_best_that_is_gone_is_none(tmp_path: Path):
    save(tmp_path, 1)
    assert checkpoint.note_best(tmp_path, Best(1, "validation/pass@1", 0.9))
    save(tmp_path, 2)
    assert checkpoint.note_best(tmp_path, Best(2, "validation/pass@8", 0.1))
    shutil.rmtree(tmp_path / checkpoint.FOLDER / checkpoint.name_of(2))
    assert checkpoint.read_best(tmp_path) is None


@pytest.mark.parametrize(
    "damage", [b"{", b'{"step":1,"metric":"\xff","value":0.9}', None], ids=["cut", "byte", "folder"]
)
def test_a_best_that_cannot_be_read_is_none(tmp_path: Path, damage: bytes | None):
    save(tmp_path, 1)
    path = tmp_path / checkpoint.FOLDER / "best.json"
    path.mkdir() if damage is None else path.write_bytes(damage)
    assert checkpoint.read_best(tmp_path) is None


def test_an_id_with_a_damaged_byte_is_that_of_another_run(tmp_path: Path):
    checkpoint.note_run(tmp_path, "ab")
    (tmp_path / checkpoint.FOLDER / "run-id").write_bytes(b"a\xff\n")
    with pytest.raises(UserError, match="is a checkpoint of another run"):
        checkpoint.check_run(tmp_path, TrainerState(next_step=0, run="ab"))


def test_steps_are_in_order_whatever_their_number(tmp_path: Path):
    for step in (999_999, 1_000_000):
        save(tmp_path, step)
    (tmp_path / checkpoint.FOLDER / "step-of-mine").mkdir()
    assert [checkpoint.step_of(one) for one in checkpoint.found(tmp_path)] == [999_999, 1_000_000]


def test_a_disk_that_is_full_in_the_middle_leaves_the_old_one_usable(tmp_path: Path):
    """A process that may write no file beyond 6 kB: what a full disk answers, at the same place."""
    save(tmp_path, 1)
    code = (
        "import resource, sys; from pathlib import Path; from tests.trainer.test_checkpoint import save\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (6000, 6000))\n"
        "try: save(Path(sys.argv[1]), 2)\n"
        "except OSError as error: print(error)"
    )
    root = Path(__file__).parents[2]
    child = subprocess.run([sys.executable, "-c", code, str(tmp_path)], cwd=root, capture_output=True, check=True)
    assert b"File too large" in child.stdout
    assert [one.name for one in (tmp_path / checkpoint.FOLDER).iterdir()] == ["step-000001"], "and nothing is left over"
    state, found = checkpoint.load(checkpoint.found(tmp_path)[-1])
    assert state.next_step == 1
    assert torch.equal(found["master/a"], tensors(1)["master/a"])


@pytest.mark.parametrize("place", [0.0, 0.3, 0.999])
@pytest.mark.parametrize("name", ["optimizer.safetensors", "state.json"])
def test_a_flipped_bit_is_found(tmp_path: Path, name: str, place: float):
    folder = save(tmp_path, 1)
    path = folder / name
    data = bytearray(path.read_bytes())
    data[int(place * (len(data) - 1))] ^= 1
    path.write_bytes(data)
    with pytest.raises(UserError, match=str(folder)):
        checkpoint.load(folder)


@pytest.mark.parametrize("left", [0, 10, 4000])
def test_a_truncated_file_is_found(tmp_path: Path, left: int):
    folder = save(tmp_path, 1)
    os.truncate(folder / "optimizer.safetensors", left)
    with pytest.raises(UserError, match="is damaged"):
        checkpoint.load(folder)


def test_a_foreign_directory_and_a_missing_file_are_a_line(tmp_path: Path):
    with pytest.raises(UserError, match="expected a checkpoint"):
        checkpoint.load(tmp_path)
    (tmp_path / "state.json").write_text("{}")
    with pytest.raises(UserError, match="not a checkpoint"):
        checkpoint.load(tmp_path)
    folder = save(tmp_path / "run", 1)
    (folder / "optimizer.safetensors").unlink()
    with pytest.raises(UserError, match="is missing"):
        checkpoint.load(folder)


def test_a_save_that_is_broken_off_leaves_the_old_ones_and_no_rest(tmp_path: Path):
    save(tmp_path, 1)
    stop = threading.Event()
    stop.set()
    with pytest.raises(checkpoint.Stopped):
        save(tmp_path, 2, stop=stop)
    assert [one.name for one in (tmp_path / checkpoint.FOLDER).iterdir()] == ["step-000001"]
    checkpoint.load(checkpoint.found(tmp_path)[-1])


def test_what_a_killed_process_left_half_written_goes_with_the_next_one(tmp_path: Path):
    rest = tmp_path / checkpoint.FOLDER / ".step-000007"
    rest.mkdir(parents=True)
    (rest / "optimizer.safetensors").write_bytes(b"half")
    assert checkpoint.found(tmp_path) == []
    save(tmp_path, 9)
    assert not rest.exists()


def test_every_kind_of_tensor_comes_back_as_it_was(tmp_path: Path):
    given = {
        "large": torch.randn(5_000_000).double(),
        "larger": torch.randint(0, 255, (150_000_000,), dtype=torch.uint8),
        "codes": torch.arange(251, dtype=torch.uint8),
        "half": torch.randn(7, 3).bfloat16(),
        "count": torch.tensor(3.0),
        "none": torch.zeros(0, 4),
        "wide": torch.randn(5, 9).t(),
        "whole": torch.arange(60),
    }
    state, found = checkpoint.load(checkpoint.save(tmp_path, TrainerState(next_step=1), given))
    assert found.keys() == given.keys() and state.files
    assert all(torch.equal(found[name], one) and found[name].dtype == one.dtype for name, one in given.items())


def test_before_the_first_step_there_is_a_state_without_tensors(tmp_path: Path):
    folder = checkpoint.save(tmp_path, TrainerState(next_step=0, models="cd"), {})
    assert checkpoint.load(folder) == (checkpoint.read_state(folder), {})
    assert [one.name for one in folder.iterdir()] == ["state.json"]


def test_all_digests_of_a_version_are_kept_and_damage_is_found(tmp_path: Path):
    assert checkpoint.read_published(tmp_path) == {}
    save(tmp_path, 1)
    checkpoint.note_published(tmp_path, {0: ("ab",), 1: ("cd", "ef")})
    assert checkpoint.read_published(tmp_path) == {0: ("ab",), 1: ("cd", "ef")}
    path = tmp_path / checkpoint.FOLDER / "published.json"
    path.write_bytes(path.read_bytes().replace(b"cd", b"ce"))
    with pytest.raises(UserError, match=r"published\.json: is damaged"):
        checkpoint.read_published(tmp_path)


SAVES_UNTIL_KILLED = """
import os, sys
from pathlib import Path
from tests.trainer.test_checkpoint import save
for _ in sys.stdin:
    if child := os.fork():  # torch is imported once
        os.waitpid(child, 0)
        print("gone", flush=True)
    else:
        print(os.getpid(), flush=True)
        for step in range(1, 100000):
            save(Path(sys.argv[1]), step)
            print(step, flush=True)
"""


def test_killed_at_any_moment_the_last_one_is_whole(tmp_path: Path):
    with subprocess.Popen(
        [sys.executable, "-c", SAVES_UNTIL_KILLED, str(tmp_path)],
        cwd=Path(__file__).parents[2],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        text=True,
        bufsize=1,
    ) as parent:
        assert parent.stdin is not None and parent.stdout is not None
        for turn in range(6):
            parent.stdin.write("go\n")
            child = int(parent.stdout.readline())
            assert parent.stdout.readline() == "1\n", "it has saved one"
            time.sleep(0.003 * turn)
            os.kill(child, signal.SIGKILL)
            while (line := parent.stdout.readline()) != "gone\n":
                assert line.strip().isdecimal(), "a step that it saved in between"
            for one in checkpoint.found(tmp_path):
                state, found = checkpoint.load(one)
                assert torch.equal(found["master/a"], tensors(state.next_step)["master/a"])
        parent.stdin.close()
