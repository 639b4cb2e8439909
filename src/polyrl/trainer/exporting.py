"""Writing a checkpoint as a Hugging Face directory."""

from pathlib import Path

import torch

from polyrl.config.recipe import Recipe
from polyrl.errors import UserError
from polyrl.trainer import checkpoint
from polyrl.trainer.model import Policy

_MASTER = "policy/master/"


def choose(run_dir: Path, step: int | None) -> Path:
    """The newest checkpoint, or that of a step. Raises UserError."""
    found = checkpoint.found(run_dir)
    if not found:
        raise UserError(f"{run_dir}: no checkpoint there; expected the directory of a run that `polyrl train` began")
    if step is None:
        return found[-1]
    wanted = [one for one in found if one.name == checkpoint.name_of(step)]
    if not wanted:
        known = ", ".join(str(int(one.name.rpartition("-")[2])) for one in found)
        raise UserError(f"--step: no checkpoint of step {step}; there are {known}")
    return wanted[0]


def export(folder: Path, recipe: Recipe, out: Path) -> None:
    """The model's own directory says what it is; the checkpoint has its weights."""
    state, tensors = checkpoint.load(folder)
    policy = Policy.load(recipe.model.path, recipe.model.dtype, "cpu")
    if state.fingerprint != checkpoint.fingerprint(policy.parameters()):
        raise UserError(f"{folder}: is of another model than {recipe.model.path}")
    with torch.no_grad():
        for name, parameter in policy.parameters().items():
            parameter.copy_(tensors[_MASTER + name])
    try:
        policy.model.save_pretrained(out)
    except OSError as error:
        raise UserError(f"{out}: cannot be written: {error.strerror or error}") from error
