"""Finding recipes: by the name of one that ships with the package, or by the path of a TOML file.

Overrides of the command line come last. Paths in a recipe start from the current folder, wherever the recipe lies.
Modules that it names are looked for in its own folder too.
"""

import os
from importlib import resources
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from polyrl.config.load import apply_overrides, build, find_shipped, list_shipped, load_toml
from polyrl.config.plugins import look_in
from polyrl.config.recipe import DERIVED, Recipe

_DERIVED_FROM = ("train.mode", "train.max_staleness")
"""The keys that derived keys depend on, beside the algorithm's own keys."""


def recipe_folder() -> Path:
    return Path(str(resources.files("polyrl") / "recipes"))


def list_recipes() -> list[tuple[str, str]]:
    """Return the name and the summary of every recipe that ships with the package, by name."""
    return list_shipped(recipe_folder())


def find_recipe(name: str) -> Path:
    return find_shipped(name, recipe_folder(), "recipe")


def load_recipe(name: str, overrides: list[str] | None = None) -> Recipe:
    """Return a recipe with overrides applied; its modules can be found from now on. Raises ConfigError."""
    path = find_recipe(name)
    is_shipped = path.parent == recipe_folder()
    recipe = load_tree(load_toml(path), overrides or [], source=str(name if is_shipped else path))
    if not recipe.modules and not is_shipped:
        recipe = replace(recipe, modules=os.path.abspath(path.parent))
    look_in(recipe.modules)
    return recipe


def load_tree(tree: dict[str, Any], overrides: list[str], source: str = "") -> Recipe:
    """Return a recipe of a tree of its sections, with overrides applied. Raises ConfigError.

    Keys that are not set are derived from the others (recipe.DERIVED). A tree that was written with them, as a run's
    recipe.toml is, names them in `derived`: they are derived again when an override may change what they follow from,
    and otherwise stay as they are written, whatever another release of PolyRL would derive.
    """
    before = tree.get("derived", ())
    tree = apply_overrides({key: value for key, value in tree.items() if key != "derived"}, overrides)
    algorithm = tree.get("algorithm", {})
    if not isinstance(algorithm, dict) or not isinstance(before, list | tuple):
        return build(tree, Recipe, source=source, overrides=overrides)
    given = {one.partition("=")[0].strip() for one in overrides}
    unset = [key for key in DERIVED if key in before and not given & {key, "algorithm"}]
    if any(key.partition(".")[0] == "algorithm" or key in _DERIVED_FROM for key in given):
        for key in unset:
            algorithm.pop(key.removeprefix("algorithm."), None)
    derived = [key for key in DERIVED if key in unset or key.removeprefix("algorithm.") not in algorithm]
    return build({**tree, "derived": derived}, Recipe, source=source, overrides=overrides)
