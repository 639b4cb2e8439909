"""Options of commands that run the builtin engine, and the settings they make."""

import importlib.util
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from polyrl.errors import UserError

if TYPE_CHECKING:
    from polyrl.engines.builtin.config import BuiltinConfig

_LIBRARIES = ("torch", "transformers", "safetensors")


def check_libraries() -> None:
    """Raises UserError where the extra is not installed. Imports nothing."""
    missing = [name for name in _LIBRARIES if importlib.util.find_spec(name) is None]
    if missing:
        raise UserError(f"the builtin engine needs {' and '.join(missing)}: pip install 'polyrl[train]'")


def settings(
    tree: dict[str, Any], model: str | None, source: str = "", overrides: Sequence[str] = ()
) -> "BuiltinConfig":
    """`tree` holds the keys that were given; `--model` comes before its own. Raises UserError."""
    from polyrl.config import build
    from polyrl.config.hub import local_model
    from polyrl.config.model_dir import check_model_dir
    from polyrl.engines.builtin.config import BuiltinConfig

    if model is not None:
        tree = {**tree, "model": local_model(model, "--model")}
    if "model" not in tree:
        raise UserError("--model: missing; the builtin engine needs a Hugging Face model directory")
    config = build(tree, BuiltinConfig, source=source, overrides=overrides)
    check_model_dir(config.model, "--model")
    return config
