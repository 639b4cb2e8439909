"""A recipe: its defaults, what follows from what it says, and what is refused, with the dotted path."""

import re
import tomllib
from typing import Any

import pytest

from polyrl.config import apply_overrides, build, dump_toml
from polyrl.config.recipe import Recipe
from polyrl.errors import ConfigError

SMALLEST: dict[str, Any] = {"name": "small", "model": {"path": "model"}, "data": {"source": "arithmetic"}}
TWO_DOMAINS: dict[str, Any] = {
    **SMALLEST,
    "data": {
        "domains": [
            {"name": "math", "source": "math.jsonl", "reward": "math", "prompts_per_step": 24},
            {"name": "sums", "source": "arithmetic", "prompts_per_step": 8},
        ]
    },
}


def recipe(*overrides: str, tree: dict[str, Any] = SMALLEST) -> Recipe:
    return build(apply_overrides(tree, overrides), Recipe)


def test_the_smallest_recipe_is_a_model_and_data():
    small = recipe()
    assert small.run_dir == "runs/small"
    (domain,) = small.data.all_domains
    assert (domain.name, [one.function for one in small.rewards_of(domain)]) == ("arithmetic", ["arithmetic"])


def test_a_single_domain_may_be_written_right_into_data():
    (domain,) = recipe("data.source=folder/sums.jsonl", "data.reward=my:own", "data.chat=true").data.all_domains
    assert (domain.name, domain.source, domain.reward, domain.chat) == (
        "sums",
        "folder/sums.jsonl",
        "my:own",
        True,
    )


def test_a_resolved_recipe_reads_back_as_itself():
    for one in (recipe(), recipe(tree=TWO_DOMAINS), recipe("rollout.stop=['x']", "train.stop_at_reward=0.9")):
        assert build(tomllib.loads(dump_toml(one)), Recipe) == one


@pytest.mark.parametrize(
    ("overrides", "correction"),
    [
        ([], "none"),
        (["train.mode=async"], "none"),
        (["train.mode=async", "algorithm.old_logprobs=engine"], "none"),
        (["train.mode=async", "algorithm.old_logprobs=recompute"], "tis-token"),
        (["train.mode=async", "algorithm.correction=none"], "none"),
        (["train.mode=async", "algorithm.correction_high=3"], "tis-token"),
        (["algorithm.correction=icepop"], "icepop"),
    ],
)
def test_what_older_versions_wrote_is_weighed_unless_the_recipe_says_otherwise(overrides: list[str], correction: str):
    one = recipe(*overrides)
    assert one.algorithm.correction == correction
    assert build(tomllib.loads(dump_toml(one)), Recipe) == one


@pytest.mark.parametrize(
    ("overrides", "anchor"),
    [
        ([], "recompute"),
        (["train.mode=async"], "engine"),
        (["train.mode=async", "algorithm.mini_batches=2"], "engine"),
        (["train.mode=async", "algorithm.correction=none"], "engine"),
        (["train.mode=async", "algorithm.correction=icepop"], "recompute"),
        (["train.mode=async", "algorithm.correction_high=3"], "recompute"),
        (["train.mode=async", "algorithm.old_logprobs=recompute"], "recompute"),
        (["algorithm.old_logprobs=engine"], "engine"),
    ],
)
def test_in_async_the_ratio_starts_where_a_clip_can_act(overrides: list[str], anchor: str):
    one = recipe(*overrides)
    assert one.algorithm.old_logprobs == anchor
    assert build(tomllib.loads(dump_toml(one)), Recipe) == one


@pytest.mark.parametrize(
    ("overrides", "aggregation", "estimator"),
    [
        ([], "token-mean", None),
        (["algorithm.kl=loss"], "token-mean", "k3"),
        (["algorithm.kl=reward"], "token-mean", "k1"),
        (["algorithm.kl=reward", "algorithm.kl_estimator=k3"], "token-mean", "k3"),
        (["algorithm.loss=cispo"], "token-mean", None),
        (["algorithm.loss=gspo"], "seq-mean-token-mean", None),
        (["algorithm.loss=gspo", "algorithm.aggregation=token-mean"], "token-mean", None),
        (["algorithm.advantage=dr_grpo"], "fixed", None),
        (["algorithm.advantage=dr_grpo", "algorithm.fixed_tokens=9"], "fixed", None),
        (["algorithm.advantage=dr_grpo", "algorithm.loss=gspo"], "seq-mean-token-mean", None),
        (["algorithm.advantage=reinforce_plus_plus_baseline", "algorithm.kl=loss"], "token-mean", "k2"),
        (["algorithm.advantage=reinforce_plus_plus_baseline", "algorithm.kl=reward"], "token-mean", "k1"),
    ],
)
def test_defaults_are_the_papers_by_loss_and_by_where_kl_is(
    overrides: list[str], aggregation: str, estimator: str | None
):
    one = recipe(*overrides)
    assert (one.algorithm.aggregation, one.algorithm.kl_estimator) == (aggregation, estimator)
    assert build(tomllib.loads(dump_toml(one)), Recipe) == one


@pytest.mark.parametrize(
    ("overrides", "chosen"),
    [
        ([], "filter"),
        (["algorithm.advantage=reinforce_plus_plus_baseline"], "filter"),
        (["algorithm.overlong=penalty", "algorithm.overlong_buffer_tokens=9"], "filter"),
        (["algorithm.kl=reward"], "keep"),
        (["algorithm.kl=reward", "algorithm.zero_variance=filter"], "filter"),
        (["algorithm.advantage=gae", "rounds.samples_per_prompt=1"], "keep"),
        (["algorithm.advantage=reinforce_plus_plus"], "keep"),
        (["algorithm.advantage=mine:own"], "keep"),
        (["algorithm.zero_variance=keep"], "keep"),
    ],
)
def test_equal_rewards_are_filtered_where_they_teach_nothing_unless_the_recipe_says_otherwise(
    overrides: list[str], chosen: str
):
    one = recipe(*overrides)
    assert one.algorithm.zero_variance == chosen
    assert build(tomllib.loads(dump_toml(one)), Recipe) == one


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (["train.step=3"], "train.step: unknown key; did you mean train.steps?"),
        (["train.mode=sync"], 'train.mode: got "sync", expected one of "async", "streaming", "synchronous"'),
        *(
            ([f"{key}={value}"], f'{key}: is for train.mode = "async" alone, not for "streaming"')
            for key, value in (
                ("train.min_sample_size", "0.5"),
                ("train.max_norm_growth", "5"),
                ("algorithm.scale_lr_by_sample_size", "true"),
            )
        ),
        (
            ["train.mode=async", "train.max_norm_growth=1"],
            "train.max_norm_growth: got 1, expected 0 or a number above 1: half of all steps are above the median",
        ),
        (["train.max_staleness=1"], 'train.max_staleness: is for train.mode = "async" alone, not for "streaming"'),
        (["train.mode=async", "train.max_staleness=0"], "train.max_staleness: got 0, expected an integer >= 1"),
        (['rollout.stop=["x", ""]'], "rollout.stop.1: got an empty text, which every answer has at once"),
        (["name=.."], "name: got '..', expected a name that a directory can have"),
        (["name=a/b"], "name: got 'a/b', expected a name that a directory can have"),
        (
            ["data.source=file.jsonl"],
            "data.reward: missing, expected arithmetic, math, code, judge, reward_model or",
        ),
        (["data.source="], 'data.source: missing, expected a file, a directory or "arithmetic"'),
        (["data.template=Solve it."], "data.template: has no {prompt}, expected the place where the prompt goes"),
        (["data.template={prompt} {"], "data.template: Single '{' encountered in format string"),
        (["data.template={prompt} {0}"], "data.template: got {0}, expected the name of a column"),
        (["data.system=Be brief."], "data.system: is for chat = true alone"),
        (["data.arithmetic.max_terms=2"], "data.arithmetic.max_terms: 2 is below min_terms = 3"),
        (["algorithm.overlong=penalty"], "algorithm.overlong_buffer_tokens: missing"),
        (["algorithm.fixed_tokens=5"], 'algorithm.fixed_tokens: is for aggregation = "fixed" alone'),
        (
            ["algorithm.baseline=optimal", "algorithm.advantage=rloo"],
            'algorithm.baseline: expected "mean" with advantage = "rloo"',
        ),
        (
            ["algorithm.baseline=optimal", "train.ranks=2"],
            'algorithm.baseline: expected "mean", since ranks that share a model (train.ranks)',
        ),
        (["algorithm.reference=old"], 'algorithm.reference: nothing is measured against it while kl = "none"'),
        (["algorithm.loss=gspo", "algorithm.dual_clip=3"], 'algorithm.dual_clip: is for loss = "ppo_clip" alone'),
        (["algorithm.correction=tis"], 'algorithm.correction: got "tis", expected one of "icepop", "none"'),
        (["algorithm.correction=icepop", "algorithm.old_logprobs=engine"], 'algorithm.correction: expected "none"'),
        (["algorithm.correction_high=2"], "algorithm.correction_high: nothing is corrected"),
        (
            ["train.mode=async", "algorithm.correction_low=0.5"],
            'algorithm.correction_low: is for correction = "icepop" and "sequence-mask", not for "tis-token"',
        ),
        (
            ["algorithm.correction=tis-token", "algorithm.correction_low=0.5"],
            'algorithm.correction_low: is for correction = "icepop" and "sequence-mask"',
        ),
        (["algorithm.critic.lr=0.1"], 'algorithm.critic: is for advantage = "gae" alone, not for "grpo"'),
        (["algorithm.critic.gamma=0"], "algorithm.critic.gamma: got 0, expected a number > 0"),
        (["algorithm.mini_batches=33"], "algorithm.mini_batches: 33 is more than the 32 groups of a step"),
        (
            ["algorithm.advantage=gae", "algorithm.zero_variance=filter", "rounds.samples_per_prompt=1"],
            'algorithm.zero_variance: expected "keep"',
        ),
        (["algorithm.advantage=reinforce_plus_plus_baseline", "rounds.samples_per_prompt=1"], "rounds.samples"),
        (["rounds.samples_per_prompt=1"], "rounds.samples_per_prompt: expected at least 2, for grpo"),
        (["train.micro_batch_tokens=64"], "train.micro_batch_tokens: expected at least rollout.max_new_tokens, 1024"),
        (["model.max_context=1024"], "model.max_context: expected room for a prompt"),
        (["train.mode=synchronous", "train.local_generation=false"], "train.local_generation: expected true"),
        (["validation.pass_at=[1, 8]", "validation.num_samples=4"], "validation.num_samples: 4 is below 8"),
        (["rollout.impose_lengths.kind=quantiles"], "rollout.impose_lengths.quantiles: expected at least two"),
        (["rollout.temperature=0"], "rollout.temperature: got 0, expected a number > 0"),
    ],
)
def test_what_is_wrong_is_one_line_with_its_dotted_path(overrides, line):
    with pytest.raises(ConfigError) as caught:
        recipe(*overrides)
    assert str(caught.value).startswith(line)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (["data.domains.1.name=math"], "data.domains.1.name: 'math' is there twice"),
        (["data.chat=true"], "data.chat: say it in each of data.domains, or leave data.domains out"),
        (["data.domains.0.name="], "data.domains.0.name: got an empty text"),
    ],
)
def test_several_domains_have_names_of_their_own_and_nothing_beside_them(overrides, line):
    with pytest.raises(ConfigError) as caught:
        recipe(*overrides, tree=TWO_DOMAINS)
    assert str(caught.value).startswith(line)


FILE: dict[str, Any] = {**SMALLEST, "data": {"source": "rows.jsonl", "reward": "math"}}


@pytest.mark.parametrize(
    "overrides", [["validation.every_steps=3"], ["validation.every_steps=3", "checkpoint.keep_best=validation/pass@1"]]
)
def test_validation_without_prompts_for_it_is_refused(overrides: list[str]):
    with pytest.raises(
        ConfigError, match=r"validation\.every_steps: 3, and no domain has prompts for validation; expected"
    ):
        recipe(*overrides, tree=FILE)
    assert not recipe(tree=FILE).validates and recipe("data.validation=v.jsonl", *overrides[:1], tree=FILE).validates


def test_the_best_checkpoint_may_be_that_of_the_best_mean_reward_and_of_one_set():
    sets = [
        "data.validation={easy = 'e.jsonl', hard = 'h.jsonl'}",
        "validation.every_steps=1",
        "validation.pass_at=[1, 4]",
    ]
    for place in ("validation", "validation/easy", "validation/hard"):
        for metric in ("reward/mean", "pass@1", "pass@4"):
            assert recipe(*sets, f"checkpoint.keep_best={place}/{metric}", tree=FILE).checkpoint.keep_best
    with pytest.raises(
        ConfigError, match=r"checkpoint\.keep_best: got \"validation/rows/pass@1\", expected validation/reward"
    ):
        recipe(*sets, "checkpoint.keep_best=validation/rows/pass@1", tree=FILE)


def test_two_sets_for_validation_have_names_of_their_own():
    with pytest.raises(ConfigError, match=r"data\.validation: two sets are called 'sums', expected a name of its own"):
        recipe("data.domains.0.validation={sums = 'v.jsonl'}", tree=TWO_DOMAINS)
    with pytest.raises(ConfigError, match=r"^data\.validation: a set has no name"):
        recipe("data.validation={'' = 'v.jsonl'}", tree=FILE)
    with pytest.raises(ConfigError, match=r"^data\.domains\.1\.validation: a set has no name"):
        recipe("data.domains.1.validation={'' = 'v.jsonl'}", tree=TWO_DOMAINS)


@pytest.mark.parametrize(
    ("changes", "hash"),
    [
        ({}, "xxh3-128"),
        ({"manager": {"host": "localhost"}}, "xxh3-128"),
        ({"manager": {"host": "0.0.0.0"}}, "blake3"),
        ({"manager": {"host": "10.0.0.5"}}, "blake3"),
        ({"manager": {"host": "trainer.example"}}, "blake3"),
        ({"weights": {"interfaces": ["10.0.0.0/8"]}}, "blake3"),
        ({"weights": {"interfaces": ["127.0.0.0/8"]}}, "xxh3-128"),
        ({"weights": {"hash": "blake3"}}, "blake3"),
        ({"manager": {"host": "0.0.0.0"}, "weights": {"hash": "xxh3-128"}}, "blake3"),
        ({"manager": {"host": "0.0.0.0"}, "weight_delivery": {"relay": False}}, "xxh3-128"),
        ({"manager": {"host": "0.0.0.0", "tls_cert": "c", "tls_key": "k"}}, "xxh3-128"),
    ],
)
def test_chunks_are_known_by_blake3_wherever_another_machines_worker_could_touch_them(changes, hash):
    assert build({**SMALLEST, **changes}, Recipe).weights_hash == hash


def test_a_fleet_that_would_be_refused_for_its_price_is_refused_with_the_recipe():
    with pytest.raises(ConfigError, match=r"fleet.price_usd_per_hour: 2000 is above manager.max_price_usd_per_hour"):
        build({**SMALLEST, "fleet": {"price_usd_per_hour": 2000.0}}, Recipe)


def test_servers_that_keep_caches_over_installs_are_refused_for_episodes():
    tree = {
        "name": "agents",
        "model": {"path": "model"},
        "data": {"environment": "calculator"},
        "fleet": {"engine": "vllm", "settings": {"after_install": "keep"}},
    }
    with pytest.raises(ConfigError, match=r"after_install: expected .recompute."):
        build(tree, Recipe)


@pytest.mark.parametrize(
    ("data", "line"),
    [
        (
            {"environment": "calculator", "reward": "math"},
            "data.reward: math needs rows, and the environment brings its own",
        ),
        (
            {"environment": "calculator", "validation": "more.jsonl"},
            "data.validation: the environment brings its tasks",
        ),
        (
            {"environment": "calculator", "source": "a.jsonl", "validation": "held-out"},
            'data.validation: "held-out" is for tasks that an environment brings',
        ),
        ({"environment": "calculator", "validation_args": {"largest": 3}}, "data.validation_args: is for a source"),
        ({"environment": "calculator", "source": "arithmetic"}, 'data.source: "arithmetic" has prompts of its own'),
        ({"source": "a.jsonl", "environment_args": {"size": 3}}, "data.environment_args: is for data.environment"),
        ({}, "data.source: missing"),
    ],
)
def test_a_domain_of_episodes_has_what_episodes_need_and_nothing_else(data, line):
    with pytest.raises(ConfigError, match=re.escape(line)):
        build({"name": "agents", "model": {"path": "model"}, "data": data}, Recipe)


@pytest.mark.parametrize(
    ("manager", "why"),
    [
        ({"address": "http://trainer:5000"}, "manager.address: got 'http://trainer:5000', expected a name"),
        ({"address": "trainer", "tls_cert": "a", "tls_key": "b"}, "manager.address: peers dial a name of tls_cert"),
    ],
)
def test_an_address_that_nobody_could_dial_is_one_line(manager: dict[str, str], why: str):
    tree = {"name": "x", "model": {"path": "m"}, "data": {"source": "arithmetic"}, "manager": manager}
    with pytest.raises(ConfigError, match=why):
        build(tree, Recipe)
