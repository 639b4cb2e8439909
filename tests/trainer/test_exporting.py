"""Exports are there whole, or not at all; what a disk does not take is one line."""

from pathlib import Path

import pytest
from tests.full_disk import files_of_at_most
from tests.trainer.small import save_small
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from polyrl.config.recipe import Recipe
from polyrl.config.recipe_files import load_recipe
from polyrl.errors import UserError
from polyrl.trainer import exporting
from polyrl.trainer.model import Policy
from polyrl.trainer.state import checkpoint
from polyrl.trainer.state.checkpoint import TrainerState

MB = 1 << 20


@pytest.fixture
def trained(tmp_path: Path) -> tuple[Path, Recipe]:
    """A checkpoint, and the recipe of its run."""
    folder = save_small(tmp_path / "model")
    (folder / "tokenizer.json").write_text("its tokenizer")
    policy = Policy.load(str(folder))
    state = TrainerState(next_step=1, fingerprint=checkpoint.fingerprint(policy.parameters()))
    masters = {f"policy/master/{name}": one.detach() + 1.0 for name, one in policy.parameters().items()}
    return checkpoint.save(tmp_path, state, masters), load_recipe(
        "arithmetic", [f"model.path={folder}", "model.dtype=float32"]
    )


@pytest.mark.parametrize("num_bytes", [MB, 10_000], ids=["tokenizer", "weights"])
def test_a_disk_that_is_full_is_one_line_and_leaves_nothing_in_the_way(
    tmp_path: Path, trained: tuple[Path, Recipe], num_bytes: int
):
    folder, recipe = trained
    out = tmp_path / "out"
    with (tmp_path / "model" / "vocab.txt").open("wb") as vocabulary:
        vocabulary.truncate(2 * MB)
    with files_of_at_most(num_bytes), pytest.raises(UserError, match=rf"^{out}: cannot be written: .*too large"):
        exporting.export(folder, recipe, out)
    assert not list(tmp_path.glob("*out*"))
    exporting.export(folder, recipe, out)
    assert (out / "tokenizer.json").read_text() == "its tokenizer" and (out / "vocab.txt").stat().st_size == 2 * MB
    before, after = (AutoModelForCausalLM.from_pretrained(one).state_dict() for one in (tmp_path / "model", out))
    assert all(bool((after[name] == one + 1.0).all()) for name, one in before.items())


def test_a_users_folder_of_nearly_that_name_stays(tmp_path: Path, trained: tuple[Path, Recipe]):
    folder, recipe = trained
    (kept := tmp_path / ".cache").mkdir()
    (kept / "mine").write_text("kept")
    out = tmp_path / "cache"
    with files_of_at_most(10_000), pytest.raises(UserError, match=f"^{out}: cannot be written"):
        exporting.export(folder, recipe, out)
    exporting.export(folder, recipe, out)
    assert (kept / "mine").read_text() == "kept" and (out / "tokenizer.json").exists()
    assert sorted(one.name for one in tmp_path.glob("*cache*")) == [".cache", "cache"]


def test_no_progress_bar_is_shown(
    tmp_path: Path, trained: tuple[Path, Recipe], capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(transformers_logging, "_tqdm_active", True)  # other tests have switched it off
    exporting.export(*trained, tmp_path / "out")
    assert capfd.readouterr() == ("", "")
