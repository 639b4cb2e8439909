"""What may be changed in a run that goes on: freely, as a break in its curve, or not at all."""

import shutil
from pathlib import Path
from typing import Any, cast

import msgspec
import numpy as np
import pytest
import torch
from tests.trainer.small import save_small

from polyrl.config import load_toml
from polyrl.config.recipe import Recipe
from polyrl.config.recipe_files import find_recipe, load_recipe, load_tree
from polyrl.errors import ConfigError, UserError
from polyrl.run.changes import RULES, breaks
from polyrl.run.checkpoints import (
    ResumePoint,
    check_prompts,
    check_resume_point,
    check_that_it_fits,
    check_that_something_is_left,
    describe,
    models_digest,
    read_recipe,
    read_resume_point,
    tokenizer_digest,
    write_recipe,
)
from polyrl.run.settings import scheduler_config
from polyrl.telemetry.metrics import MetricsFile
from polyrl.trainer.model import Policy
from polyrl.trainer.reports import StepReport
from polyrl.trainer.state import checkpoint, redo
from polyrl.trainer.state.checkpoint import TrainerState
from polyrl.trainer.step_stats import Added, StepStats
from polyrl.wire.control import RunReply


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    write_recipe(tmp_path, load_recipe("arithmetic"))
    return tmp_path


@pytest.mark.parametrize(
    "override",
    [
        "train.steps=7",
        "train.stop_at_reward=0.5",
        "train.micro_batch_tokens=99999",
        "train.min_micro_batch_samples=3",
        "name=other",
        "fleet.workers=3",
        "fleet.price_usd_per_hour=3",
        "manager.host=0.0.0.0",
        "weights.groups=2",
        "track.tensorboard=true",
        "validation.every_steps=3",
        "checkpoint.keep_last=9",
        "checkpoint.keep_every=9",
        "checkpoint.every_steps=3",
        "train.ranks=2",
        "train.local_generation=false",
        "rewards.processes=3",
        "rewards.timeout_s=5",
        "rewards.slots=5",
        "fleet_rules.heartbeat_timeout_s=9",
        "weight_delivery.trainer_uploads=9",
        "scaling.max_workers=9",
    ],
)
def test_what_is_free_changes_no_step_and_nothing_that_the_manager_cannot_change(run_dir: Path, override: str):
    before, after = read_recipe(run_dir, [override])
    assert before != after
    assert breaks(before, after, 3) == []
    told = scheduler_config(after, [50])
    assert scheduler_config(before, [50]).with_rules_of(told) == told


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("optimizer.lr=0.5", "optimizer.lr 1e-06 -> 0.5"),
        ("algorithm.kl=loss", "algorithm.kl none -> loss, algorithm.kl_estimator none -> k3"),
        ("algorithm.kl_coef=0.5", "algorithm.kl_coef 0.001 -> 0.5"),
        ("algorithm.clip_high=0.28", "algorithm.clip_high none -> 0.28"),
        ("rollout.temperature=0.5", "rollout.temperature 1 -> 0.5"),
        ("rollout.top_k=5", "rollout.top_k 0 -> 5"),
    ],
)
def test_what_trains_otherwise_is_a_break_with_its_name_and_both_values(tmp_path: Path, override: str, said: str):
    write_recipe(tmp_path, load_recipe("arithmetic", ["optimizer.lr=1e-6"]))
    before, after = read_recipe(tmp_path, [override])
    assert ", ".join(str(one) for one in breaks(before, after, 3)) == said
    assert scheduler_config(before, [50]) == scheduler_config(after, [50])


@pytest.mark.parametrize(
    ("override", "why"),
    [
        ("train.price_usd_per_hour=3", "the ledger prices all of the run with it"),
        ("train.seed=4", "what the run draws at random follows from it"),
        ("train.mode=synchronous", "the manager opened the run with it"),
        ("fleet_rules.migrate=false", "the manager opened the run with it"),
        ("algorithm.advantage=dr_grpo", "with gae the checkpoint holds a critic"),
        ("optimizer.kind=adamw8bit", "the checkpoint holds the tensors"),
        ("rounds.samples_per_prompt=5", "the manager opened the run with it"),
        ("rollout.max_new_tokens=5", "the manager opened the run with it"),
        ("data.template={prompt} =", "the open round is half made with it"),
        ("lora.rank=4", "the checkpoint holds the tensors"),
        ("checkpoint.enabled=false", "the steps that follow could not be resumed"),
    ],
)
def test_everything_else_is_refused_by_its_name_with_the_reason(run_dir: Path, override: str, why: str):
    with pytest.raises(
        UserError, match=f"^{override.partition('=')[0]}: cannot be changed in a run .*: {why}"
    ) as error:
        read_recipe(run_dir, [override])
    assert f"or begin anew with `polyrl train {run_dir}/recipe.toml --run-dir OTHER`, from its" in str(error.value)


def write_two_domains(run_dir: Path) -> None:
    named = (f'{{name = "{one}", source = "arithmetic", prompts_per_step = 4}}' for one in ("short", "long"))
    tree = load_toml(find_recipe("arithmetic"))
    write_recipe(run_dir, load_tree({**tree, "data": {}}, [f"data.domains=[{', '.join(named)}]"]))


def test_a_domain_s_prompts_for_validation_may_change_and_what_it_trains_on_may_not(tmp_path: Path):
    write_two_domains(tmp_path)
    before, after = read_recipe(tmp_path, ["data.domains.long.validation=/other.jsonl"])
    assert before.data.domains[0] == after.data.domains[0]
    assert after.data.domains[1].validation_sets == {"long": "/other.jsonl"}
    assert breaks(before, after, 3) == []
    with pytest.raises(UserError, match=r"^data\.domains\.1\.prompts_per_step: cannot be changed .*the manager opened"):
        read_recipe(tmp_path, ["data.domains.long.prompts_per_step=5"])
    with pytest.raises(UserError, match=r"^data\.domains\.0\.template: cannot be changed .*half made with it"):
        read_recipe(tmp_path, ["data.domains.0.template={prompt} ="])


def test_a_default_is_derived_again_from_another_loss_unless_somebody_had_set_it(tmp_path: Path):
    derived, said = tmp_path / "derived", tmp_path / "said"
    for folder, overrides in ((derived, []), (said, ["algorithm.aggregation=token-mean"])):
        folder.mkdir()
        write_recipe(folder, load_recipe("arithmetic", overrides))
    before, after = read_recipe(derived, ["algorithm.loss=gspo"])
    assert (before.algorithm.aggregation, after.algorithm.aggregation) == ("token-mean", "seq-mean-token-mean")
    assert [one.key for one in breaks(before, after, 3)] == ["algorithm.loss", "algorithm.aggregation"]
    _, kept = read_recipe(said, ["algorithm.loss=gspo"])
    assert kept.algorithm.aggregation == "token-mean"
    _, named = read_recipe(derived, ["algorithm.loss=gspo", "algorithm.aggregation=token-mean"])
    assert named.algorithm.aggregation == "token-mean" and "algorithm.aggregation" not in named.derived
    write_recipe(derived, after)
    assert read_recipe(derived, ["algorithm.loss=ppo_clip"])[1].algorithm.aggregation == "token-mean"


def test_a_recipe_that_was_written_before_derived_keys_were_named_goes_on_as_it_was(tmp_path: Path):
    write_recipe(tmp_path, load_recipe("arithmetic"))
    file = tmp_path / "recipe.toml"
    file.write_text("".join(line for line in file.read_text().splitlines(True) if not line.startswith("derived")))
    before, after = read_recipe(tmp_path, ["algorithm.loss=gspo"])
    assert [one.key for one in breaks(before, after, 3)] == ["algorithm.loss"]


def test_a_derived_default_stays_as_it_is_written_while_nothing_that_it_follows_from_changes(tmp_path: Path):
    write_recipe(tmp_path, load_recipe("arithmetic"))
    file = tmp_path / "recipe.toml"
    file.write_text(file.read_text().replace('aggregation = "token-mean"', 'aggregation = "seq-mean-token-sum"'))
    for overrides in ([], ["train.steps=99", "optimizer.lr=0.5"]):
        _, after = read_recipe(tmp_path, overrides)
        assert after.algorithm.aggregation == "seq-mean-token-sum" and "algorithm.aggregation" in after.derived


def test_every_section_of_the_recipe_is_free_or_has_a_reason():
    recipe = msgspec.to_builtins(load_recipe("arithmetic"))
    assert recipe.keys() <= RULES.keys()
    for key in RULES:
        section, *rest = key.split(".")
        known = recipe[section]
        for name in rest:
            known = known[name]  # a key that is gone is a KeyError


def test_a_checkpoint_goes_with_its_own_model_and_tokenizer(tmp_path: Path):
    folder = save_small(tmp_path / "model")
    (folder / "tokenizer.json").write_text("one")
    recipe = load_recipe("arithmetic", [f"model.path={folder}"])
    policy = Policy.load(str(folder))
    ours = checkpoint.fingerprint(policy.parameters())
    state = TrainerState(next_step=3, fingerprint=ours, tokenizer=tokenizer_digest(folder))
    check_resume_point(past := ResumePoint(tmp_path / "step-000003", state, {}, [], {}, 0), recipe, policy)
    (folder / "tokenizer.json").write_text("two")
    with pytest.raises(UserError, match=f"^{folder}: its tokenizer is not the one that .*step-000003 was trained with"):
        check_resume_point(past, recipe, policy)
    (folder / "tokenizer.json").write_text("one")
    other = Policy.load(str(save_small(tmp_path / "other", "llama")))
    with pytest.raises(UserError, match=f"^the checkpoint is of another model than {folder}: names or shapes"):
        check_resume_point(past, recipe, other)


@pytest.mark.parametrize("changed", ["model", "critic", "reference"])
def test_a_run_without_tensors_goes_on_from_the_models_that_it_began_with(tmp_path: Path, changed: str):
    folders = {name: save_small(tmp_path / name) for name in ("model", "critic", "reference")}
    paths = [f"model.path={folders['model']}", f"algorithm.critic.path={folders['critic']}"]
    paths += [f"algorithm.reference={folders['reference']}", "algorithm.kl=loss", "algorithm.advantage=gae"]
    recipe = load_recipe("arithmetic", paths)
    policy = Policy.load(str(folders["model"]))
    ours = checkpoint.fingerprint(policy.parameters())
    state = TrainerState(next_step=0, fingerprint=ours, models=models_digest(recipe))
    check_resume_point(past := ResumePoint(tmp_path / "step-000000", state, {}, [], {}, 0), recipe, policy)
    (folders[changed] / "README.md").write_text("it says nothing of weights")
    check_resume_point(past, recipe, policy)
    save_small(folders[changed], seed=1)
    with pytest.raises(UserError, match=r"its files, .* are not the ones that .*step-000000 began with"):
        check_resume_point(past, recipe, policy)


@pytest.mark.parametrize("named", [True, False], ids=["named", "the model that it began with"])
def test_the_reference_of_kl_stays_what_it_was(tmp_path: Path, *, named: bool):
    folders = {name: save_small(tmp_path / name, seed=0) for name in ("model", "reference")}
    for one in folders.values():
        (one / "tokenizer.json").write_text("same")
    without = load_recipe("arithmetic", [path := f"model.path={folders['model']}"])
    settings = ["algorithm.kl=loss", *([f"algorithm.reference={folders['reference']}"] if named else [])]
    recipe = load_recipe("arithmetic", [path, *settings])
    policy = Policy.load(str(folders["model"]))

    def past(recipe: Recipe) -> ResumePoint:
        """Of a run with checkpoints, which began with this recipe."""
        state = msgspec.structs.replace(describe(recipe, policy, ()), next_step=3, models="")
        return ResumePoint(tmp_path / "step-000003", state, {"a": torch.zeros(1)}, [], {}, 0)

    before, unmeasured = past(recipe), past(without)
    save_small(folders["model" if named else "reference"], seed=1)  # nobody measures anything against that one
    check_resume_point(before, recipe, policy)
    changed = folders["reference" if named else "model"]
    save_small(changed, seed=2)
    with pytest.raises(UserError, match=f"^{changed}: its files are not those of the reference that .*step-000003 was"):
        check_resume_point(before, recipe, policy)
    check_resume_point(unmeasured, without, policy)
    check_resume_point(before, without, policy)  # it is measured no more, and may be again later


def test_a_prompt_keeps_its_number(tmp_path: Path):
    recipe = load_recipe("arithmetic", ["data.source=rows.jsonl", "data.reward=math", "validation.every_steps=0"])
    state = TrainerState(next_step=3, prompts=("ab",))
    past = ResumePoint(tmp_path / "step-000003", state, {}, [], {}, 0)
    check_prompts(past, recipe, ("ab",), tmp_path)
    with pytest.raises(
        UserError, match=r"^rows.jsonl: its prompts are not those that .*step-000003 was trained with, or"
    ):
        check_prompts(past, recipe, ("ba",), tmp_path)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["validation.every_steps=0"], "nothing is compared while validation.every_steps = 0"),
        (
            ["validation.every_steps=2", "checkpoint.keep_best=reward/mean"],
            'got "reward/mean", expected validation/reward/mean, validation/pass@1',
        ),
    ],
)
def test_the_best_is_by_a_metric_that_validation_has(overrides: list[str], message: str):
    load_recipe("arithmetic", ["validation.every_steps=5", "checkpoint.keep_best=validation/pass@1"])
    with pytest.raises(ConfigError, match=f"^checkpoint.keep_best: {message}"):
        load_recipe("arithmetic", ["checkpoint.keep_best=validation/pass@1", *overrides])


def test_ranks_divide_weights_and_low_rank_changes_and_the_plain_optimizer():
    load_recipe("arithmetic", ["train.ranks=2"])
    load_recipe("arithmetic", ["train.ranks=2", "lora.rank=4"])
    load_recipe("arithmetic", ["train.ranks=2", "optimizer.offload=true"])
    with pytest.raises(ConfigError, match=r"^train\.ranks: expected 1, since"):
        load_recipe("arithmetic", ["train.ranks=2", "optimizer.kind=adamw8bit"])


def test_a_disk_that_is_full_leaves_the_recipe_whole(run_dir: Path, monkeypatch: pytest.MonkeyPatch):
    before, _ = read_recipe(run_dir, [])

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint.os, "fsync", full)
    with pytest.raises(UserError, match=r"recipe\.toml: cannot be written: No space left on device"):
        write_recipe(run_dir, load_recipe("arithmetic", ["train.steps=7"]))
    assert read_recipe(run_dir, [])[0] == before


def report(step: int) -> StepReport:
    stats = StepStats(step, Added(), metrics={"actor/pg_loss": cast("Any", np.float32(0.5))})
    return StepReport(step, stats, None, [1.0], [3], [2], {0: 3}, 0, 0, {"total": 2.0})


def test_what_was_not_told_of_the_last_step_is_found_also_when_a_checkpoint_covers_it(tmp_path: Path):
    checkpoint.save(tmp_path, TrainerState(next_step=0), {})
    for step in range(2):
        redo.append(tmp_path, step, 9, [], report(step).encode())
    past = read_resume_point(tmp_path)
    assert (past.last, past.is_told) == (report(1), False)
    file = MetricsFile(tmp_path / "metrics.jsonl", first_step=2)
    file.log(0, {"reward/mean": 1.0})
    checkpoint.save(tmp_path, TrainerState(next_step=2), {"a": torch.zeros(1)})
    past = read_resume_point(tmp_path)
    assert (past.next_step, past.log, past.last, past.is_told) == (2, [], report(1), False)
    file.log(1, {"reward/mean": 1.0})
    file.close()
    assert read_resume_point(tmp_path) == past._replace(is_told=True, tensors={"a": torch.zeros(1)})


def test_a_run_is_over_when_its_last_step_has_a_checkpoint_and_is_told_and_validated(tmp_path: Path):
    def check(*settings: str) -> None:
        check_that_something_is_left(read_resume_point(tmp_path), load_recipe("arithmetic", list(settings)), tmp_path)

    def refused(*settings: str) -> str:
        with pytest.raises(UserError) as error:
            check(*settings)
        return str(error.value)

    validated = ("train.steps=2", "validation.every_steps=2")
    unvalidated = ("train.steps=2", "validation.every_steps=0")
    checkpoint.save(tmp_path, TrainerState(next_step=0), {})
    for step in range(2):
        redo.append(tmp_path, step, 9, [], report(step).encode())
    file = MetricsFile(tmp_path / "metrics.jsonl")
    for step in range(2):
        file.log(step, {"reward/mean": 1.0})
    check(*unvalidated)  # its last step has no checkpoint
    checkpoint.save(tmp_path, TrainerState(next_step=2), {"a": torch.zeros(1)})
    assert refused(*unvalidated) == f"train.steps: all 2 steps of {tmp_path} are trained; ask for more: train.steps=4"
    check(*validated)
    file.log(2, {"validation/pass@1": 0.5})
    file.close()
    assert refused(*validated) == refused(*unvalidated)
    check("train.steps=3", "validation.every_steps=0")
    assert refused("train.steps=1") == (
        f"train.steps: got 1, and 2 steps of {tmp_path} are trained already; expected more"
    )
    assert refused("train.steps=3", "validation.every_steps=0", "train.stop_at_reward=0.9") == (
        f"train.stop_at_reward: the run in {tmp_path} has ended: step 1: the mean reward has reached 0.9; ask for more "
        "to go on"
    )
    check("train.steps=3", "validation.every_steps=0", "train.stop_at_reward=1.1")
    checkpoint.note_data_ended(tmp_path, 3)
    check("train.steps=3", "validation.every_steps=0")  # it was removed since
    checkpoint.note_data_ended(tmp_path, 2)
    assert refused("train.steps=3", "validation.every_steps=0") == (
        f"data.num_epochs: the data of {tmp_path} has ended, after 2 steps, and a run that goes on cannot have more; "
        f"begin anew with `polyrl train {tmp_path}/recipe.toml --run-dir OTHER`, from its weights with model.path=DIR "
        f"after `polyrl export {tmp_path} DIR`"
    )
    (tmp_path / "metrics.jsonl").write_text('{"step":0,"reward/mean":1.0}\n')
    check(*unvalidated)  # nobody has told of step 1


def test_a_checkpoint_of_another_run_is_refused_and_what_to_do_is_said(tmp_path: Path):
    def save(run_dir: Path, run: str, step: int) -> Path:
        tensors = {"a": torch.zeros(1)} if step else {}
        return checkpoint.save(run_dir, TrainerState(next_step=step, run=run), tensors)

    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    checkpoint.note_run(ours, "aa")
    save(ours, "aa", 0)
    for step in range(3):
        redo.append(ours, step, 9, [])
    before = save(ours, "aa", 2)
    assert read_resume_point(ours).next_step == 3
    shutil.copytree(save(theirs, "bb", 3), foreign := before.with_name("step-000003"))
    with pytest.raises(UserError) as error:
        read_resume_point(ours)
    assert str(error.value) == (
        f"{foreign}: is a checkpoint of another run: its id is not that in {ours}/checkpoints/run-id; "
        f"remove {foreign}, and --resume trains the steps since step-000002 again"
    )
    with pytest.raises(UserError, match=r"step-000003: is a checkpoint of another run"):
        read_resume_point(theirs)  # whose own name nobody knows


def opened(*, last_requested: int, published: int, open_steps: tuple[int, ...] = ()) -> RunReply:
    return RunReply(
        session="s", fresh=last_requested < 0, published=published, last_requested=last_requested, open_steps=open_steps
    )


@pytest.mark.parametrize(
    ("manager", "ahead"),
    [
        (opened(last_requested=-1, published=-1), 0),
        (opened(last_requested=5, published=5, open_steps=(5,)), 0),
        (opened(last_requested=5, published=6), 0),
        (opened(last_requested=6, published=6, open_steps=(6,)), 0),
        (opened(last_requested=8, published=6, open_steps=(6, 7, 8)), 2),
    ],
)
def test_a_manager_that_is_a_step_apart_fits(manager: RunReply, ahead: int):
    check_that_it_fits(manager, 0 if manager.fresh else 6, ahead)


@pytest.mark.parametrize(
    ("manager", "journal", "why"),
    [
        (opened(last_requested=-1, published=-1), -1, "power failed"),
        (opened(last_requested=4, published=5, open_steps=(4,)), 5, "power failed"),
        (opened(last_requested=7, published=6, open_steps=(7,)), 7, "the newest were removed"),
        (opened(last_requested=6, published=7), 7, "the newest were removed"),
    ],
)
def test_a_manager_that_is_further_apart_is_of_another_run(manager: RunReply, journal: int, why: str):
    line = (
        f"^checkpoint and log go up to step 6, and the manager's journal to step {journal}: they .* one run, or {why}"
    )
    with pytest.raises(UserError, match=line):
        check_that_it_fits(manager, 6, 0)
