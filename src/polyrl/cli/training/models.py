"""The models of a training run: the policy, and the reference that KL is measured against."""

import os

import torch

from polyrl.config.recipe import Recipe
from polyrl.trainer.model import Policy


def load(recipe: Recipe) -> tuple[Policy, Policy | None]:
    """The policy, and the reference if the recipe has a use for one. Raises UserError."""
    device = choose_device(recipe.model.device)
    if device == "cpu" and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)  # two on a busy machine have been seen to be 20 times slower than one
    model = recipe.model
    policy = Policy.load(
        model.path,
        model.dtype,
        device,
        gradient_checkpointing=model.gradient_checkpointing,
        compile_layers=device == "cuda",
    )
    if recipe.algorithm.kl == "none":
        return policy, None
    return policy, Policy.load(recipe.algorithm.reference or model.path, model.dtype, device).freeze()


def choose_device(wanted: str) -> str:
    if wanted != "auto":
        return wanted
    return "cuda" if torch.cuda.is_available() else "cpu"
