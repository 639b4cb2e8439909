"""The models of a training run: the policy, the reference that KL is measured against, the critic."""

import os

import torch
from msgspec.structs import replace

from polyrl.config.recipe import Recipe
from polyrl.engines.builtin.models import choose_device
from polyrl.trainer.critic import Critic
from polyrl.trainer.model import Policy, Scorer


def load(recipe: Recipe) -> tuple[Policy, Scorer | None]:
    """The policy, and the reference if the recipe has a use for one. Raises UserError."""
    device = choose_device(recipe.model.device)
    if device == "cpu" and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)  # two on a busy machine have been seen to be 20 times slower than one
    model, wanted = recipe.model, recipe.algorithm
    settings = {"gradient_checkpointing": model.gradient_checkpointing, "compile_layers": device == "cuda"}
    unchanged: Scorer | None = None
    if recipe.lora.rank:
        from polyrl.trainer import lora

        policy = lora.load(model.path, model.dtype, device, recipe.lora, seed=recipe.train.seed, **settings)
        unchanged = policy.reference
    else:
        policy = Policy.load(model.path, model.dtype, device, **settings)
    if wanted.kl == "none":
        return policy, None
    if unchanged is not None and not wanted.reference:
        return policy, unchanged
    return policy, Policy.load(wanted.reference or model.path, model.dtype, device).freeze()


def load_critic(recipe: Recipe) -> Critic | None:
    """If the recipe has a use for one. Raises UserError."""
    if recipe.algorithm.advantage != "gae":
        return None
    device, wanted = choose_device(recipe.model.device), recipe.algorithm.critic
    trunk = Policy.load(
        wanted.path or recipe.model.path,
        recipe.model.dtype,
        device,
        gradient_checkpointing=recipe.model.gradient_checkpointing,
        compile_layers=device == "cuda",
    )
    optimizer = replace(recipe.optimizer, lr=wanted.lr, grad_clip=wanted.grad_clip)
    return Critic(trunk, optimizer, recipe.train.steps)
