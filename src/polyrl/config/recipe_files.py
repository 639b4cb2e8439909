"""Finding recipes: by the name of one that ships with the package, or by the path of a TOML file.

Overrides of the command line come last. Paths in a recipe start from the current folder, wherever the recipe lies.
"""

from importlib import resources
from pathlib import Path

from polyrl.config.load import apply_overrides, build, load_toml
from polyrl.config.recipe import Recipe
from polyrl.config.shipped import find_shipped, list_shipped


def recipe_folder() -> Path:
    return Path(str(resources.files("polyrl") / "recipes"))


def list_recipes() -> list[tuple[str, str]]:
    """(name, what it is about) of every recipe that ships with the package, by name."""
    return list_shipped(recipe_folder())


def find_recipe(name: str) -> Path:
    return find_shipped(name, recipe_folder(), "recipe")


def load_recipe(name: str, overrides: list[str] | None = None) -> Recipe:
    """A recipe with overrides applied. Raises ConfigError."""
    path = find_recipe(name)
    tree = apply_overrides(load_toml(path), overrides or [])
    return build(tree, Recipe, source=str(name if path.parent == recipe_folder() else path))
