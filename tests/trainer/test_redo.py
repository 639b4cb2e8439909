"""The redo log: steps that are trained again move the weights as they did the first time, and damage is found."""

import asyncio
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.trainer.small import CAP, draw_groups, save_small

from polyrl.config.recipe import AlgorithmConfig, LoraSection, OptimizerConfig
from polyrl.errors import UserError
from polyrl.trainer import lora
from polyrl.trainer.critic import Critic
from polyrl.trainer.leading import Learner
from polyrl.trainer.model import Policy
from polyrl.trainer.optimizer import Optimizer
from polyrl.trainer.state import checkpoint, redo
from polyrl.trainer.step import StepAccumulator

NUM_STEPS = 5
SCHEDULE = OptimizerConfig(lr=1e-2, schedule="linear")
SHAPES: dict[str, dict[str, Any]] = {
    "plain": {},
    "mini-batches": {"mini_batches": 2},
    "epochs": {"epochs": 2, "mini_batches": 2},
    "reference": {"kl": "loss", "kl_coef": 0.1},
    "critic": {"advantage": "gae", "mini_batches": 2},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_small(tmp_path_factory.mktemp("model"))


def make_crew(model: Path, num_steps: int = NUM_STEPS, *, rank: int = 0, **algorithm: Any) -> Learner:
    config = AlgorithmConfig(**algorithm)
    policy = Policy.load(str(model))
    if rank:
        policy = lora.load(str(model), "float32", "cpu", LoraSection(rank=rank, dropout=0.2), seed=0)
    reference = None if config.kl == "none" else Policy.load(str(model)).freeze()
    critic = Critic(Policy.load(str(model)), SCHEDULE, num_steps) if config.advantage == "gae" else None
    optimizer = Optimizer(policy.parameters(), SCHEDULE, num_steps)
    steps = StepAccumulator(
        policy, optimizer, config, max_tokens=64, max_new_tokens=CAP, reference=reference, critic=critic
    )
    return Learner(policy, optimizer, critic, steps)


def train(learner: Learner, run_dir: Path, steps: range) -> None:
    """Streamed: two calls a step, and one without a group."""
    for step in steps:
        batches = [draw_groups(10 * step, (3, 2)), draw_groups(10 * step + 1, (4,))] if step != 2 else []
        learner.steps.begin(step)
        for batch in batches:
            learner.steps.add(batch)
        learner.steps.finish()
        redo.append(run_dir, step, NUM_STEPS, batches)


def train_again(learner: Learner, run_dir: Path, first_step: int) -> list[str]:
    said: list[str] = []
    asyncio.run(redo.train_again(learner.steps, redo.read(run_dir, first_step), said.append))
    return said


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(tensor, other[name]) for name, tensor in one.items())


@pytest.mark.parametrize("shape", SHAPES)
def test_steps_trained_again_give_the_same_bits_from_the_start_and_from_a_checkpoint(
    model: Path, tmp_path: Path, shape: str
):
    learner = make_crew(model, **SHAPES[shape])
    train(learner, tmp_path, range(2))
    halfway = {name: one.clone() for name, one in learner.state().items()}
    train(learner, tmp_path, range(2, 4))
    from_start, from_halfway = make_crew(model, **SHAPES[shape]), make_crew(model, **SHAPES[shape])
    said = train_again(from_start, tmp_path, 0)
    assert said[0] == "trains steps 0 to 3 again from the log" and len(said) == 4
    from_halfway.restore(halfway)
    train_again(from_halfway, tmp_path, 2)
    assert same(learner.state(), from_start.state()) and same(learner.state(), from_halfway.state())
    assert not same(learner.state(), halfway)


def test_with_lora_too_dropout_and_all(model: Path, tmp_path: Path):
    learner, again = make_crew(model, rank=4), make_crew(model, rank=4)
    train(learner, tmp_path, range(3))
    train_again(again, tmp_path, 0)
    assert same(learner.state(), again.state())


def test_they_have_the_learning_rate_that_they_had_whatever_the_run_is_to_be_now(model: Path, tmp_path: Path):
    learner = make_crew(model)
    train(learner, tmp_path, range(2))
    longer = make_crew(model, 10 * NUM_STEPS)
    train_again(longer, tmp_path, 0)
    assert same(learner.state(), longer.state())


def test_entries_are_in_order_and_are_forgotten_up_to_a_step(model: Path, tmp_path: Path):
    assert redo.read(tmp_path, 0) == [] and redo.num_after(tmp_path, 0) == 0
    train(make_crew(model), tmp_path, range(4))
    assert [one.step for one in redo.read(tmp_path, 1)] == [1, 2, 3]
    redo.forget(tmp_path, 2)
    assert [one.step for one in redo.read(tmp_path, 2)] == [2, 3]
    assert (redo.num_after(tmp_path, 3), redo.has(tmp_path, 2), redo.has(tmp_path, 1)) == (1, True, False)


@pytest.mark.parametrize("damage", ["flipped", "short", "empty", "foreign"])
def test_a_damaged_entry_is_a_line_that_says_what_can_be_done(model: Path, tmp_path: Path, damage: str):
    train(make_crew(model), tmp_path, range(3))
    path = tmp_path / checkpoint.FOLDER / "redo" / "step-000001"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes({"flipped": bytes(data), "short": data[:-7], "empty": b"", "foreign": b"hello"}[damage])
    with pytest.raises(UserError, match=rf"^{path}: is damaged, or cut short; .*polyrl export {tmp_path} DIR"):
        redo.read(tmp_path, 0)
    assert [one.step for one in redo.read(tmp_path, 2)] == [2], "what a later checkpoint needs is whole"


def test_a_missing_entry_is_a_line(model: Path, tmp_path: Path):
    train(make_crew(model), tmp_path, range(3))
    path = tmp_path / checkpoint.FOLDER / "redo" / "step-000001"
    path.unlink()
    with pytest.raises(UserError, match=rf"^{path}: is missing, and later steps are there; "):
        redo.read(tmp_path, 0)


def test_what_was_half_written_is_never_read(model: Path, tmp_path: Path):
    train(make_crew(model), tmp_path, range(2))
    folder = tmp_path / checkpoint.FOLDER / "redo"
    os.link(folder / "step-000000", folder / ".step-000002")
    assert [one.step for one in redo.read(tmp_path, 0)] == [0, 1]


@pytest.mark.parametrize("torn", [b'{"group":2,"rew', b'{"group":2,"\xff', b""])
def test_a_line_that_was_cut_short_takes_no_other_along(tmp_path: Path, torn: bytes):
    first, next_ = redo.Rejection(1, [0.0, 0.0]), redo.Rejection(3, [1.0, 1.0])
    redo.note_rejection(tmp_path, 5, first)
    with (tmp_path / checkpoint.FOLDER / "redo" / "rejected-000005").open("ab") as file:
        file.write(b"\n" + torn)
    redo.note_rejection(tmp_path, 5, next_)
    assert redo.read_rejections(tmp_path, 5) == [first, next_]


def test_a_group_of_ids_that_the_model_does_not_have_is_left_out_and_the_run_goes_on(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    """What is in a log was taken in before anybody looked, and cannot be taken back."""
    learner, again, poisoned = make_crew(model), make_crew(model), make_crew(model)
    groups = draw_groups(3, (3, 2))
    learner.steps.begin(0)
    learner.steps.add(groups)
    learner.steps.finish()
    bad = [one._replace(answer=np.full_like(one.answer, 1_000_000), group=77) for one in groups[0]]
    redo.append(tmp_path, 0, NUM_STEPS, [[*groups, bad]])
    train_again(poisoned, tmp_path, 0)
    assert same(learner.state(), poisoned.state())
    assert "step 0: group 77 is left out: token ids from 1000000 to 1000000" in caplog.text
    redo.append(tmp_path, 0, NUM_STEPS, [[bad]])
    train_again(again, tmp_path, 0)
