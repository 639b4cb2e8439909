"""The models of a training run: the policy, the reference that KL is measured against, the critic; what moves them."""

import logging
from typing import Any

import torch
from msgspec.structs import replace

from polyrl.config.model_dir import read_or_nothing
from polyrl.config.recipe import Recipe
from polyrl.data.tokens import check_same_tokens
from polyrl.engines.builtin import models
from polyrl.engines.builtin.config import choose_device
from polyrl.engines.builtin.model_config import load_config, rope_kinds
from polyrl.errors import ConfigError
from polyrl.trainer import families, sharding
from polyrl.trainer.contexts import in_contexts
from polyrl.trainer.critic import Critic
from polyrl.trainer.leading import Learner
from polyrl.trainer.meeting import Meeting
from polyrl.trainer.model import Divided, Policy, Scorer, load_model
from polyrl.trainer.optimizer import Optimizer
from polyrl.trainer.ranks import ALONE, RankGroup, Ranks
from polyrl.trainer.step import StepAccumulator

log = logging.getLogger("polyrl.train")

_ROWS = {
    "packed": "packed without padding",
    "padded": "side by side, padded: our packed attention does not know this family",
    "alone": "one at a time: its positions depend on the longest sample",
}


def load_learner(recipe: Recipe, ranks: Ranks | None = None) -> Learner:
    """Load all that a rank trains with. Raises UserError."""
    policy, reference = load(recipe, ranks)
    critic = load_critic(recipe, ranks)
    optimizer = Optimizer(policy.parameters(), recipe.optimizer, recipe.train.steps)
    steps = StepAccumulator(
        policy,
        optimizer,
        recipe.algorithm,
        max_tokens=recipe.train.micro_batch_tokens * recipe.train.context_ranks,
        max_new_tokens=recipe.rollout.max_new_tokens,
        temperature=recipe.rollout.temperature,
        reference=reference,
        critic=critic,
        peers=ALONE if ranks is None else in_contexts(ranks.replica),
        meeting=None if ranks is None or ranks.num_replicas == 1 else Meeting(ranks),
    )
    if not families.is_of_engine(recipe.model.path):
        how, name = policy.loaded.rows, type(policy.loaded.model).__name__
        log.log(logging.INFO if how == "packed" else logging.WARNING, "%s is trained with samples %s", name, _ROWS[how])
    return Learner(policy, optimizer, critic, steps)


def load(recipe: Recipe, ranks: Ranks | None = None) -> tuple[Policy, Scorer | None]:
    """Load the policy, and the reference if the recipe needs one. Raises UserError."""
    device = _device(recipe, ranks)
    if recipe.train.threads is not None:
        torch.set_num_threads(recipe.train.threads)
    model, wanted = recipe.model, recipe.algorithm
    unchanged: Scorer | None = None
    serves = uses_engine(recipe) and ranks is not None and ranks.replica.rank == 0
    if recipe.lora.rank:
        from polyrl.trainer import lora

        given = {"seed": recipe.train.seed, "ranks": _sharing(ranks), "serves": serves, **_settings(recipe)}
        policy = lora.load(model.path, model.dtype, device, recipe.lora, **given)
        unchanged = policy.reference
    else:
        policy = _load(recipe, model.path, ranks, serves=serves)
    if wanted.kl == "none":
        return policy, None
    if unchanged is not None and not wanted.reference:
        return policy, unchanged
    return policy, _load(recipe, wanted.reference or model.path, ranks, is_trained=False)


def load_critic(recipe: Recipe, ranks: Ranks | None = None) -> Critic | None:
    """Load the critic; None if the recipe needs none. Raises UserError."""
    if recipe.algorithm.advantage != "gae":
        return None
    wanted = recipe.algorithm.critic
    trunk = _load(recipe, wanted.path or recipe.model.path, ranks, has_head=False)
    optimizer = replace(recipe.optimizer, lr=wanted.lr, grad_clip=wanted.grad_clip)
    return Critic(trunk, optimizer, recipe.train.steps, _sharing(ranks))


def others(recipe: Recipe) -> dict[str, str]:
    """Models beside the policy, by the keys that name their paths: a recipe names none that it has no use for."""
    algorithm = recipe.algorithm
    named = {"algorithm.reference": algorithm.reference, "algorithm.critic.path": algorithm.critic.path}
    return {key: path for key, path in named.items() if path}


def check_device(recipe: Recipe) -> None:
    """Raise ConfigError if the recipe wants a GPU and none is visible."""
    if recipe.model.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("model.device: cuda: no GPU is visible here; expected cpu, or auto")


def gpus() -> list[tuple[str, int]]:
    """Return the name and the memory size of each GPU."""
    found = [torch.cuda.get_device_properties(number) for number in range(torch.cuda.device_count())]
    return [(one.name, one.total_memory) for one in found]


def gpu_bytes() -> int:
    """Return the memory size of the GPU that rank zero would use."""
    return torch.cuda.mem_get_info(0)[1]


def check_tokenizers(recipe: Recipe) -> None:
    """Check that all models have the same tokens: otherwise they would silently score nonsense. Raises ConfigError."""
    for key, path in others(recipe).items():
        check_same_tokens(recipe.model.path, path, key)


def uses_engine(recipe: Recipe) -> bool:
    """Return whether the trainer's own device generates anything."""
    return bool(recipe.train.local_generation or recipe.validates)


def is_served(recipe: Recipe) -> bool:
    """Return whether served engines generate everything, so that tensors are published as the model's files name
    them."""
    return not uses_engine(recipe) and recipe.fleet.engine != "builtin"


def check_family(recipe: Recipe) -> None:
    """Raise ConfigError if the builtin engine is to run a model that only the trainer can."""
    for key, path in {"model.path": recipe.model.path, **others(recipe)}.items():
        if families.is_of_engine(path):
            continue
        name = read_or_nothing(path, "config.json")["architectures"][0]
        if key == "model.path" and not is_served(recipe):
            raise ConfigError(
                f"model.path: {path}: the builtin engine does not run {name}; a served one may: set "
                "train.local_generation=false, fleet.engine to vllm or sglang, and no validation"
            )
        if key == "model.path" and recipe.train.replicas < recipe.train.ranks:
            alone = families.LONGEST_DECIDES & rope_kinds(load_config(path, any_family=True).get_text_config())
            if alone:
                raise ConfigError(
                    f"train.ranks: {name} with rope_type {min(alone)} is trained one sample at a time; expected "
                    "train.replicas to be as many as train.ranks"
                )


def _load(
    recipe: Recipe,
    path: str,
    ranks: Ranks | None,
    *,
    is_trained: bool = True,
    has_head: bool = True,
    serves: bool = False,
) -> Policy:
    """Load a model. `serves`: of a model that ranks share, keep a whole copy beside it for the engine."""
    settings = _settings(recipe) if is_trained else {}
    sharing = _sharing(ranks)
    if sharing is None:
        policy = Policy.load(path, recipe.model.dtype, _device(recipe, ranks), **settings)
        return policy if is_trained else policy.freeze()
    loaded = load_model(path, recipe.model.dtype, "cpu")
    model, dtype = loaded.model.requires_grad_(is_trained), models.DTYPES[recipe.model.dtype]
    if not has_head:
        model.set_output_embeddings(torch.nn.Identity())
    divided = Divided(model, sharding.shard(model, sharing, dtype), dtype, sharing.size, sharing.context)
    served = load_model(path, recipe.model.dtype, str(sharing.device)) if serves else loaded
    return Policy(served, divided=divided, **settings)


def _sharing(ranks: Ranks | None) -> RankGroup | None:
    """Return the ranks that share this rank's copy of the model; None if it has one to itself."""
    return None if ranks is None or ranks.replica.size == 1 else ranks.replica


def _device(recipe: Recipe, ranks: Ranks | None) -> str:
    return choose_device(recipe.model.device) if ranks is None else str(ranks.device)


def _settings(recipe: Recipe) -> dict[str, Any]:
    on_gpu = choose_device(recipe.model.device) == "cuda"
    return {"gradient_checkpointing": recipe.model.gradient_checkpointing, "compile_layers": on_gpu}


def free_device() -> None:
    """Give back the GPU memory of models that are gone."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
