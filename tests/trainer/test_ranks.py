"""Several ranks train one model: the same losses, gradients, weights and checkpoints as one, to rounding."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tests.processes import made_once, run_module
from tests.trainer.ranks_at_work import (
    WITH_CRITIC,
    Recording,
    every_case,
    make_crew,
    make_models,
    samples,
    save,
    two_steps,
)
from tests.trainer.small import draw_groups

from polyrl.errors import UserError
from polyrl.trainer.batch import TrainSample, TrainSegment, decode_groups, encode_groups
from polyrl.trainer.lora import LoraPolicy
from polyrl.trainer.packing import make_parts, num_rows, plan_passes
from polyrl.trainer.state import checkpoint

Tensors = dict[str, torch.Tensor]


pytestmark = pytest.mark.timeout(400)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return made_once(tmp_path_factory.getbasetemp(), "two-ranks", play_two_ranks)


def play_two_ranks(place: Path) -> None:
    make_models(place)
    leave_a_checkpoint(place)
    run_module("tests.trainer.ranks_at_work", str(place))


def leave_a_checkpoint(place: Path) -> None:
    learner = make_crew(place, None, WITH_CRITIC, {})
    two_steps(learner.steps, samples(place, {}))
    save(place / "from-one", learner.state())


def part(tensors: Tensors, prefix: str) -> Tensors:
    return {name.removeprefix(prefix): one for name, one in tensors.items() if name.startswith(prefix)}


def apart(ours: Tensors, theirs: Tensors) -> float:
    """As a share of the whole."""
    assert ours.keys() == theirs.keys()
    whole = torch.cat([one.double().flatten() for one in theirs.values()]).norm()
    return float(torch.cat([(ours[name].double() - theirs[name].double()).flatten() for name in ours]).norm() / whole)


@pytest.mark.parametrize("case", [name for name in every_case() if name != "nothing"])
def test_two_ranks_have_the_gradients_metrics_and_weights_of_one(folder: Path, case: str):
    config, shape = every_case()[case]
    learner = make_crew(folder, None, config, shape)
    metrics = two_steps(learner.steps, samples(folder, shape))
    found = load_file(folder / f"{case}.safetensors")
    half = shape.get("dtype") == "bfloat16"
    assert isinstance(learner.optimizer, Recording) and learner.optimizer.first
    assert apart(part(found, "first/"), learner.optimizer.first) < (2e-2 if half else 2e-5)
    state = learner.state()
    for kind in ("policy/", "critic/"):
        if part(state, kind):
            moments = f"{kind}exp_avg/"
            assert apart(part(found, moments), part(state, moments)) < (5e-2 if half else 1e-4)
            assert apart(part(found, f"{kind}master/"), part(state, f"{kind}master/")) < (1e-3 if half else 1e-5)
    told = json.loads((folder / f"{case}.json").read_text())
    assert told.keys() == metrics.keys()
    for name, value in metrics.items():
        if name != "perf/micro_batches":
            assert told[name] == pytest.approx(value, rel=5e-2 if half else 2e-4, abs=5e-3 if half else 2e-6), name


def test_a_step_without_samples_moves_nothing(folder: Path):
    config, shape = every_case()["nothing"]
    learner = make_crew(folder, None, config, shape)
    assert json.loads((folder / "nothing.json").read_text()) == two_steps(learner.steps, [])
    found = part(load_file(folder / "nothing.safetensors"), "policy/master/")
    assert all(torch.equal(found[name], one) for name, one in learner.policy.parameters().items())


@pytest.mark.parametrize("case", ["token-mean", "tied", "bfloat16"])
def test_what_is_served_are_the_weights_of_all_ranks(folder: Path, case: str):
    found = load_file(folder / f"{case}.safetensors")
    served, masters = part(found, "served/"), part(found, "policy/master/")
    assert served.keys() == masters.keys()
    kind = torch.bfloat16 if case == "bfloat16" else torch.float32
    assert all(one.dtype == kind and torch.equal(one, masters[name].to(kind)) for name, one in served.items())


@pytest.mark.parametrize("case", ["lora", "lora, bfloat16", "lora, adapter"])
def test_ranks_serve_and_run_the_sums_that_one_rank_would_make_of_their_changes(folder: Path, case: str):
    found = load_file(folder / f"{case}.safetensors")
    served, masters = part(found, "served/"), part(found, "policy/master/")
    engine = part(served, "engine/")
    published = {name: one for name, one in served.items() if not name.startswith("engine/")}
    config, shape = every_case()[case]
    alone = make_crew(folder, None, config, shape)
    alone.restore({f"policy/master/{name}": one for name, one in masters.items()})
    assert isinstance(alone.policy, LoraPolicy)
    alone.policy.merge()
    sums = dict(alone.policy.loaded.model.named_parameters())
    assert engine.keys() == sums.keys()
    assert all(torch.equal(one, sums[name]) for name, one in engine.items())
    wanted = masters if case == "lora, adapter" else sums
    assert published.keys() == wanted.keys()
    assert all(one.dtype == wanted[name].dtype and torch.equal(one, wanted[name]) for name, one in published.items())


def test_a_checkpoint_of_one_rank_is_gone_on_with_by_two(folder: Path):
    given, again = saved(folder / "from-one"), saved(folder / "from-one-again")
    assert given.keys() == again.keys()
    assert all(torch.equal(one, again[name]) for name, one in given.items())
    assert_goes_on(folder, "from-one")


def test_a_checkpoint_of_two_ranks_is_gone_on_with_by_one(folder: Path):
    learner = make_crew(folder, None, WITH_CRITIC, {})
    given = saved(folder / "from-two")
    learner.restore(given)
    assert all(torch.equal(one, given[name]) for name, one in learner.state().items())
    assert_goes_on(folder, "from-two")


def test_what_two_ranks_write_in_shards_is_read_by_two_and_by_one(folder: Path):
    whole, run_dir = saved(folder / "from-two-later"), folder / "from-two-later-in-shards"
    (step,) = checkpoint.found(run_dir)
    names = sorted(one.name for one in step.iterdir())
    assert names == ["shard-00001-of-00002.safetensors", "shard-00002-of-00002.safetensors", "state.json"]
    sizes = [(step / name).stat().st_size for name in names[:2]]
    assert max(sizes) < 0.6 * sum(sizes), "each holds about a half"
    in_shards, again = saved(run_dir), saved(folder / "in-shards-again")
    assert in_shards.keys() == again.keys() == whole.keys()
    assert all(torch.equal(one, in_shards[name]) and torch.equal(one, again[name]) for name, one in whole.items())
    learner = make_crew(folder, None, WITH_CRITIC, {})
    learner.restore(checkpoint.load(step)[1])
    assert all(torch.equal(one, whole[name]) for name, one in learner.state().items())


def test_a_shard_that_is_damaged_or_missing_is_named(folder: Path, tmp_path: Path):
    shutil.copytree(folder / "from-two-later-in-shards", tmp_path / "run")
    (step,) = checkpoint.found(tmp_path / "run")
    shard = step / "shard-00002-of-00002.safetensors"
    with shard.open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"\x7f")
    with pytest.raises(UserError, match=r"shard-00002-of-00002.safetensors: is damaged"):
        checkpoint.load(step)
    shard.unlink()
    with pytest.raises(UserError, match=r"shard-00002-of-00002.safetensors: is missing"):
        checkpoint.load(step)


def saved(run_dir: Path) -> Tensors:
    return dict(checkpoint.load(checkpoint.found(run_dir)[-1])[1])


def assert_goes_on(folder: Path, run: str) -> None:
    """One rank from here ends where two ended."""
    learner = make_crew(folder, None, WITH_CRITIC, {})
    learner.restore(saved(folder / run))
    two_steps(learner.steps, samples(folder, {}), 2)
    state, later = learner.state(), saved(folder / f"{run}-later")
    for kind in ("policy/exp_avg/", "critic/exp_avg/", "policy/master/", "critic/master/"):
        assert apart(part(later, kind), part(state, kind)) < 1e-4


MEETING_NOBODY = """
import subprocess, sys
from pathlib import Path
from polyrl.run.ranks import _meet
from polyrl.trainer.ranks import RankInfo
folder = Path(sys.argv[1])
_meet(RankInfo(0, 2, str(folder / "meeting-point")), folder, [subprocess.Popen(["false"])])
"""


def test_a_rank_that_ends_before_all_have_met_is_said_at_once(tmp_path: Path):
    done = subprocess.run(
        [sys.executable, "-c", MEETING_NOBODY, str(tmp_path)], capture_output=True, text=True, timeout=60, check=False
    )
    last = done.stderr.strip().splitlines()[-1]
    assert "RankLost: rank 1 has ended (exit code 1): it said nothing" in last, done.stderr
    assert last.endswith("nothing is trained yet: the same command begins again")


def test_samples_cross_as_they_are():
    arrays = {"prompt": np.arange(3, dtype=np.int32), "answer": np.arange(2, dtype=np.int32)}
    logprobs: dict[str, Any] = {"logprobs": np.array([-1.5, -0.1], np.float32), "old_logprobs": np.zeros(2, np.float32)}
    turns = (TrainSegment(3, 1, "vllm"), TrainSegment(4, 1, "builtin"))
    given = [[TrainSample(**arrays, **logprobs, reward=0.1, group=7, finish="length", written_by=turns)], []]
    (found,), nobody = decode_groups(encode_groups(given))
    assert nobody == []
    for name in TrainSample._fields:
        ours, theirs = getattr(found, name), getattr(given[0][0], name)
        assert type(ours) is type(theirs)
        if isinstance(ours, np.ndarray):
            assert ours.dtype == theirs.dtype
            assert ours.flags.writeable
            assert np.array_equal(ours, theirs)
        else:
            assert ours == theirs


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("max_tokens", [5, 30, 1000])
def test_turns_hold_every_sample_once_and_are_balanced(num_ranks: int, max_tokens: int):
    given = [one for group in draw_groups(3, (5, 9, 20)) for one in group]
    rows = num_rows(given)
    turns = plan_passes(rows, max_tokens, num_ranks)
    packs = [members for turn in turns for members in turn]
    assert all(len(turn) == num_ranks for turn in turns)
    assert sorted(number for members in packs for number in members) == list(range(len(given)))
    assert all(len(one) < 2 or sum(rows[number] for number in one) <= max_tokens for one in packs)
    parts = [make_parts(given, turns, rank) for rank in range(num_ranks)]
    assert {len(one) for one in parts} == {len(turns)}
    if max_tokens == 1000 and num_ranks > 1:
        loads = [sum(len(one.pack.tokens) for one in its) for its in parts]
        assert max(loads) - min(loads) <= max(rows)
        assert len(turns) == 1


def test_ranks_that_have_no_sample_repeat_the_shortest_and_count_nothing():
    given = [one for group in draw_groups(1, (3,)) for one in group]
    turns = plan_passes(num_rows(given), 1000, 4)
    parts = [make_parts(given, turns, rank)[0] for rank in range(4)]
    assert sorted(one.is_spare for one in parts) == [False, False, False, True]
    spare = next(one for one in parts if one.is_spare)
    assert sum(spare.pack.lengths) == min(num_rows(given))
    assert plan_passes([], 1000, 4) == []
