"""The plan's estimate of memory knows LoRA, a reference, a critic, offloading and eight bits."""

import json
import math
import shutil
from pathlib import Path

import pytest
from tests.trainer.small import save_small

from polyrl.config import build
from polyrl.config.recipe import Recipe
from polyrl.data.characters import save_tokenizer
from polyrl.data.tokens import ModelTokenizer
from polyrl.errors import ConfigError, UserError
from polyrl.run.plan import MemoryPlan, estimate_memory, read_shape, show_plan
from polyrl.trainer import lora
from polyrl.trainer.model import Policy


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save_small(tmp_path_factory.mktemp("model"))
    save_tokenizer(folder)
    return folder


def plan(folder: Path, dtype: str = "bfloat16", **sections: dict[str, object]) -> MemoryPlan:
    tree = {"name": "x", "model": {"path": str(folder), "dtype": dtype}, "data": {"source": "arithmetic"}, **sections}
    return estimate_memory(build(tree, Recipe, source="test"), read_shape(str(folder)))


def test_all_weights_offloaded_and_in_eight_bits(folder):
    num = sum(one.numel() for one in Policy.load(str(folder)).parameters().values())
    plain, away = plan(folder), plan(folder, optimizer={"offload": True})
    assert (plain.weights, plain.masters, plain.moments, plain.gradients) == (2 * num, 4 * num, 8 * num, 4 * num)
    assert (away.masters, away.moments, away.offloaded) == (0, 0, 12 * num)
    assert away.total == plain.total - 12 * num
    small = plan(folder, optimizer={"kind": "adamw8bit"})
    assert 2 * num < small.moments < 2.1 * num
    assert plan(folder, dtype="float32").masters == 0


def test_of_ranks_that_share_a_model_only_the_moments_are_offloaded(folder):
    ranks = {"train": {"ranks": 2}, "algorithm": {"advantage": "gae"}}
    plain, away = plan(folder, **ranks), plan(folder, **ranks, optimizer={"offload": True})
    assert (away.masters, away.moments) == (plain.masters, 0)
    assert (away.offloaded, away.critic) == (2 * plain.moments, plain.critic - plain.moments)
    assert away.total == plain.total - 2 * plain.moments


def test_deltas_made_on_the_device_need_one_more_version_there(folder):
    device: dict[str, object] = {"encode_on": "device"}
    plain, ours = plan(folder), plan(folder, weights=device)
    assert (plain.deltas, ours.deltas, ours.total) == (0, plain.weights, plain.total + plain.weights)
    lora = {"rank": 4, "publish": "adapter"}
    assert plan(folder, weights=device, lora=lora).deltas == plan(folder, lora=lora).changes
    with pytest.raises(
        ConfigError, match=r'weights\.encode_on: expected "host", since train\.ranks divide the weights'
    ):
        plan(folder, weights=device, train={"ranks": 2})


def test_changes_of_lora_are_counted_as_they_are_and_need_no_reference(folder):
    config = {"rank": 4, "targets": ["q_proj", "down_proj"]}
    found = plan(folder, lora=config, algorithm={"kl": "loss"})
    policy = lora.load(str(folder), "bfloat16", "cpu", build(config, lora.LoraSection, source="test"), seed=0)
    changes = sum(one.numel() for one in policy.parameters().values())
    assert (found.changes, found.gradients, found.moments, found.masters) == (4 * changes, 4 * changes, 8 * changes, 0)
    assert found.sums == 2 * sum(its.base.numel() for its in policy._changed)
    assert found.reference == 0
    assert plan(folder, algorithm={"kl": "loss"}).reference == found.weights
    assert plan(folder, lora=config, algorithm={"kl": "loss", "reference": "other"}).reference == found.weights


@pytest.mark.parametrize("target", ["q_prj", "lm_head", "embed_tokens"])
def test_a_target_that_is_none_is_seen_before_anything_is_started(folder, target):
    with pytest.raises(
        ConfigError, match=f"lora.targets: no matrix of a layer is called {target}; there are down_proj"
    ):
        plan(folder, lora={"rank": 4, "targets": ["q_proj", target]})


def test_a_critic_has_an_optimizer_of_its_own(folder):
    sections = {"algorithm": {"advantage": "gae"}, "lora": {"rank": 2}}
    found = plan(folder, **sections)
    num = found.weights // 2
    assert found.critic == (2 + 4 + 8 + 4) * num
    away = plan(folder, **sections, optimizer={"offload": True})
    assert away.critic == (2 + 4) * num
    assert away.offloaded == 12 * num + found.moments


def test_the_copy_that_a_checkpoint_is_written_from_is_in_the_plan(folder: Path):
    num = read_shape(str(folder)).num_parameters
    tree: dict[str, object] = {"name": "x", "model": {"path": str(folder)}, "data": {"source": "arithmetic"}}
    tree["rollout"] = {"max_new_tokens": 64}
    text = show_plan(build(tree, Recipe, source="test"), Path("run"))
    assert f"{12 * num / (1 << 20):.1f} MiB to write a checkpoint from" in text
    off = build({**tree, "checkpoint": {"enabled": False}}, Recipe, source="test")
    assert "to write a checkpoint from" not in show_plan(off, Path("run"))


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({"prompt_key": "question"}, "no column 'question', which data.prompt_key names; the row has problem, total"),
        ({"answer_key": "totl"}, "no column 'totl', which data.answer_key names; the row has problem, total; did you"),
        ({"reward": "math"}, "answer: got nothing, expected the answer"),
        ({"reward": "no_such_module:right"}, 'data.reward: "no_such_module:right": no_such_module cannot be imported'),
    ],
)
def test_a_row_or_a_reward_that_a_run_would_refuse_is_refused_by_the_plan(folder, tmp_path, data, words):
    (tmp_path / "sums.jsonl").write_text('{"problem": "a1b2=", "total": 3}\n')
    own = {"source": str(tmp_path / "sums.jsonl"), "prompt_key": "problem", "reward": "math:sqrt", **data}
    tree = {"name": "x", "model": {"path": str(folder)}, "rollout": {"max_new_tokens": 64}, "data": own}
    with pytest.raises(UserError) as refused:
        show_plan(build(tree, Recipe, source="test"), Path("run"))
    assert words in str(refused.value)


def test_the_plan_shows_the_first_prompt_of_each_domain_as_the_model_sees_it(folder: Path, tmp_path: Path):
    (tmp_path / "sums.jsonl").write_text('{"problem": "a1b2=", "total": 3}\n{"problem": "a3b4=", "total": 7}\n')
    own = {"source": str(tmp_path / "sums.jsonl"), "prompt_key": "problem", "answer_key": "total", "reward": "math"}
    tree = {"name": "x", "model": {"path": str(folder)}, "rollout": {"max_new_tokens": 64}, "data": own}
    tokens = ModelTokenizer(str(folder)).tokens(["a1b2="])[0].tolist()
    assert show_plan(build(tree, Recipe, source="test"), Path("run")).splitlines()[-5:] == [
        "#",
        f"# The first prompt of sums, {len(tokens)} tokens, as the model sees it",
        "#   | a1b2=",
        f"#   tokens: {' '.join(map(str, tokens))}",
        "#   expected: 3",
    ]


@pytest.mark.parametrize(
    "lie",
    [{"hidden_size": math.inf}, {"num_attention_heads": 0}, {"architectures": []}, {"num_hidden_layers": -math.inf}],
)
def test_a_model_whose_sizes_are_none_is_one_line(folder: Path, tmp_path: Path, lie: dict[str, object]):
    strange = shutil.copytree(folder, tmp_path / "strange")
    config = json.loads((strange / "config.json").read_text())
    config.pop("head_dim", None)
    (strange / "config.json").write_text(json.dumps({**config, **lie}))
    with pytest.raises(ConfigError) as caught:
        read_shape(str(strange))
    assert str(caught.value).startswith("model.path: ") and "\n" not in str(caught.value)
