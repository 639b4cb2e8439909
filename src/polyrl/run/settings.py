"""Translate a recipe into the settings of each part: the scheduler, engines, the weight server, the manager.

A resumed run gives the scheduler the same settings: the manager's journal was written with them.
"""

import json
import math
from collections.abc import Sequence
from pathlib import Path

from msgspec import structs

from polyrl.config.recipe import Recipe
from polyrl.scheduling.core.parameters import DomainData, ParallelismConfig, RewardConfig, SchedulerConfig
from polyrl.scheduling.rules.parallelism import ModelShape
from polyrl.telemetry.metric_names import IMPOSED_LENGTHS
from polyrl.weights.settings import WeightSettings
from polyrl.wire.dial import is_loopback_host
from polyrl.wire.frames import Sampling
from polyrl.wire.imposed import ImposedLengths

MAX_ATTEMPTS = 3
"""How often a reward is tried that could not be had through no fault of the answer's."""
_WAITS_S = 30 * 86_400.0
"""The scheduler's limit where all rewards run on reward workers: they are waited for, as workers are."""
_LOOPBACK = ("127.0.0.0/8",)


def scheduler_config(recipe: Recipe, num_prompts: Sequence[int], prompt_tokens: int = 512) -> SchedulerConfig:
    """Return the scheduler's configuration. `num_prompts` counts the rows of each domain that can be used.

    Raises ValueError for a domain that cannot fill a single step.
    """
    data = recipe.data
    domains = []
    for domain, available in zip(data.all_domains, num_prompts, strict=True):
        if available < 1:
            raise ValueError(f"{domain.source}: domain {domain.name!r} has no prompt that can be used")
        domains.append(
            DomainData(
                name=domain.name,
                prompts_per_step=domain.prompts_per_step,
                num_prompts=available,
                environment=recipe.environment_of(domain),
                scores_episodes=bool(domain.environment and recipe.rewards_of(domain)),
            )
        )
    streaming = recipe.train.mode != "synchronous"
    return SchedulerConfig(
        domains=tuple(domains),
        seed=recipe.train.seed if data.shuffle_seed is None else data.shuffle_seed,
        num_epochs=data.num_epochs,
        max_new_tokens=recipe.rollout.max_new_tokens,
        max_staleness=recipe.max_staleness,
        streaming=streaming,
        trainer_usd_per_hour=recipe.train.price_usd_per_hour,
        prompt_tokens=max(1, prompt_tokens),
        rounds=recipe.rounds,
        routing=recipe.routing,
        seeding=recipe.seeding,
        hand_back=recipe.hand_back,
        parallelism=_parallelism(recipe),
        rewards=_reward_rules(recipe, as_finished=streaming),
        fleet_rules=recipe.fleet_rules,
        weight_delivery=recipe.weight_delivery,
        scaling=recipe.scaling,
        environments=recipe.environments.rules,
    )


def _parallelism(recipe: Recipe) -> ParallelismConfig:
    """Return how the widths of the fleet's servers are planned, with what is known of the model."""
    from polyrl.run.plan import read_shape

    if not recipe.parallelism.enabled:
        return recipe.parallelism
    found = json.loads((Path(recipe.model.path) / "config.json").read_text(encoding="utf-8"))
    config = found.get("text_config", found)
    heads = int(config["num_attention_heads"])
    dtype_bytes = 4 if recipe.model.dtype == "float32" else 2
    shape = ModelShape(
        num_layers=int(config["num_hidden_layers"]),
        num_kv_heads=int(config.get("num_key_value_heads") or heads),
        head_dim=int(config.get("head_dim") or int(config["hidden_size"]) // heads),
        dtype_bytes=dtype_bytes,
        weight_bytes=dtype_bytes * read_shape(recipe.model.path).num_parameters,
        activation_bytes=0,
    )
    fleet = recipe.fleet
    return structs.replace(
        recipe.parallelism, engines="fleet", num_devices=fleet.num_devices, start_tp=fleet.tensor_parallel, model=shape
    )


def _reward_rules(recipe: Recipe, *, as_finished: bool) -> RewardConfig:
    """Return the scheduler's limits. The pool ends a function that takes too long; the scheduler's own limit is for a
    pool that does not answer at all: it is later than the last of the queue, if a process starts anew for each before
    it, and each of a domain's functions takes all of its time. Functions of whole groups have as many places of their
    own. Without processes the wait for a place is unknown."""
    rewards, slots = recipe.rewards, recipe.rewards.max_under_way
    chosen = [recipe.rewards_of(domain) for domain in recipe.data.all_domains]
    functions = max(1, *map(len, chosen))
    queue = 2 * slots if any(one.whole_group for each in chosen for one in each) else slots
    longest_s = _WAITS_S
    if rewards.processes:
        longest_s = functions * (rewards.start_timeout_s + rewards.wall_s) * (1 + math.ceil(queue / rewards.processes))
    adaptive = rewards.adaptive
    return RewardConfig(
        adaptive=adaptive,
        t_min_s=rewards.t_min_s if adaptive else min(2.0, longest_s),
        t_max_s=rewards.t_max_s if adaptive else longest_s,
        wall_s=longest_s if adaptive else 0.0,
        max_attempts=MAX_ATTEMPTS,
        slots=slots,
        as_finished=as_finished,
    )


def sampling_of(recipe: Recipe) -> Sampling:
    rollout = recipe.rollout
    wanted = rollout.impose_lengths
    imposed = None
    if wanted.kind != "off":
        quantiles = wanted.quantiles if wanted.kind == "quantiles" else ()
        imposed = ImposedLengths(wanted.median, wanted.sigma, quantiles, wanted.correlation)
    return Sampling(
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        min_p=rollout.min_p,
        stop=rollout.stop,
        imposed=imposed,
    )


def caveat_of(recipe: Recipe) -> str:
    """Return the caveat that every output of the run repeats; empty unless lengths are imposed."""
    kind = recipe.rollout.impose_lengths.kind
    return "" if kind == "off" else f"{IMPOSED_LENGTHS} ({kind})"


def manager_options(recipe: Recipe) -> list[str]:
    """Return the options of `polyrl manager`, other than its address."""
    options: list[str] = []
    if (Path(recipe.model.path) / "tokenizer.json").is_file():  # it can answer OpenAI's clients
        options += ["--tokenizer", recipe.model.path]
    if recipe.manager.tls_cert:
        options += ["--tls-cert", recipe.manager.tls_cert, "--tls-key", recipe.manager.tls_key]
    bounds = ("max_price_usd_per_hour", "max_starting_s")
    return [*options, *(f"limits.{key}={getattr(recipe.manager, key):g}" for key in bounds)]


def serves_from_every_node(recipe: Recipe) -> bool:
    """Return whether each node of a trainer serves its share of a version. The certificate is the first node's alone;
    so is what workers reach on loopback; and mooncake moves whole versions."""
    away = recipe.manager.tls_cert or recipe.weights.mooncake or is_loopback_host(recipe.manager.host)
    return recipe.weights.every_node and not away


def weight_settings(recipe: Recipe) -> WeightSettings:
    wanted = recipe.weights
    own = _LOOPBACK if is_loopback_host(recipe.manager.host) else ()
    return WeightSettings(
        interfaces=wanted.interfaces or own,
        port=wanted.port,
        groups=wanted.groups,
        hash=recipe.weights_hash,
        mooncake=wanted.mooncake,
        egress_mb_s=0.0 if wanted.egress_mb_s is None else wanted.egress_mb_s,
    )
