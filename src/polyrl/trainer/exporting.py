"""Exports a checkpoint as a Hugging Face directory, or its LoRA changes as a peft directory: complete, or not at all.

The directory is written under a temporary name next to its final one, so that a full disk leaves nothing behind.
"""

import shutil
from pathlib import Path

import torch
from safetensors import SafetensorError

from polyrl.config.recipe import Recipe
from polyrl.data.tokens import TOKENIZER_FILES
from polyrl.disk import whole_folder
from polyrl.engines.builtin.quiet import quiet
from polyrl.errors import UserError
from polyrl.trainer import lora
from polyrl.trainer.lora import LoraPolicy
from polyrl.trainer.model import Policy
from polyrl.trainer.state import checkpoint

_MASTER = "policy/master/"
_COPIED = (*TOKENIZER_FILES, "generation_config")


def choose(run_dir: Path, step: int | None) -> Path:
    """Return the newest checkpoint, or that of a step. Raises UserError if there is none."""
    found = checkpoint.found(run_dir)
    if not found:
        raise UserError(f"{run_dir}: no checkpoint there; expected the directory of a run that `polyrl train` began")
    if step is None:
        return found[-1]
    wanted = [one for one in found if one.name == checkpoint.name_of(step)]
    if not wanted:
        known = ", ".join(str(checkpoint.step_of(one)) for one in found)
        raise UserError(f"--step: no checkpoint of step {step}; there are {known}")
    return wanted[0]


def export(folder: Path, recipe: Recipe, out: Path, *, adapter: bool = False) -> None:
    """Write the model with the checkpoint's weights, and with the config and tokenizer of the recipe's model.

    `adapter`: write only the LoRA changes, in peft's format; otherwise they are merged. Raises UserError.
    """
    state, tensors = checkpoint.load(folder)
    if not tensors:
        raise UserError(f"{folder}: nothing is trained yet: the weights are those of {recipe.model.path}, as they are")
    policy = _load(recipe)
    if adapter and not isinstance(policy, LoraPolicy):
        raise UserError(f"--adapter: {folder} is of a run that trains all weights (lora.rank = 0)")
    checkpoint.check_model(state, policy, recipe.model.path)
    with torch.no_grad():
        for name, parameter in policy.parameters().items():
            parameter.copy_(tensors[_MASTER + name])
    try:
        with whole_folder(out) as fresh, quiet():
            _write(policy, fresh, adapter=adapter)
            for path in sorted(Path(recipe.model.path).iterdir()):
                if path.is_file() and path.name.startswith(_COPIED) and not (fresh / path.name).exists():
                    shutil.copyfile(path, fresh / path.name)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{out}: cannot be written: {getattr(error, 'strerror', None) or error}") from error


def _write(policy: Policy, out: Path, *, adapter: bool) -> None:
    if not isinstance(policy, LoraPolicy):
        policy.model.save_pretrained(out)
    elif adapter:
        policy.save_adapter(out)
    else:
        policy.save_merged(out)


def _load(recipe: Recipe) -> Policy:
    model = recipe.model
    if recipe.lora.rank:
        return lora.load(model.path, model.dtype, "cpu", recipe.lora, seed=recipe.train.seed)
    return Policy.load(model.path, model.dtype, "cpu")
