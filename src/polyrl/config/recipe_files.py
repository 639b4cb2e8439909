"""Finding recipes: by the name of one that ships with the package, or by the path of a TOML file.

Overrides of the command line come last. Paths in a recipe start from the current folder, wherever the recipe lies.
"""

from importlib import resources
from pathlib import Path

from polyrl.config.load import apply_overrides, build, load_toml
from polyrl.config.recipe import Recipe
from polyrl.errors import ConfigError


def recipe_folder() -> Path:
    return Path(str(resources.files("polyrl") / "recipes"))


def list_recipes() -> list[tuple[str, str]]:
    """(name, what it is about) of every recipe that ships with the package, by name."""
    found = [(path.stem, load_toml(path)) for path in sorted(recipe_folder().glob("*.toml"))]
    return [(name, str(tree.get("about", ""))) for name, tree in found]


def find_recipe(name: str) -> Path:
    path = Path(name)
    if path.suffix == ".toml":
        return path
    shipped = recipe_folder() / f"{name}.toml"
    if shipped.is_file():
        return shipped
    known = ", ".join(one for one, _ in list_recipes())
    raise ConfigError(f"{name}: no such recipe; expected a file ending in .toml, or one of: {known}")


def load_recipe(name: str, overrides: list[str] | None = None) -> Recipe:
    """A recipe with overrides applied. Raises ConfigError."""
    path = find_recipe(name)
    tree = apply_overrides(load_toml(path), overrides or [])
    return build(tree, Recipe, source=str(name if path.parent == recipe_folder() else path))
