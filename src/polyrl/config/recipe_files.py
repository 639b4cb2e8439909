"""Finding recipes: by the name of one that ships with the package, or by the path of a TOML file.

Overrides of the command line come last. Paths in a recipe start from the current folder, wherever the recipe lies.
Modules that it names are looked for in its own folder too.
"""

import os
from importlib import resources
from pathlib import Path
from typing import TypeVar

from msgspec.structs import replace

from polyrl.config.load import apply_overrides, build, find_shipped, list_shipped, load_toml
from polyrl.config.plugins import is_own, look_in
from polyrl.config.recipe import ARITHMETIC, DomainFields, Recipe

_Fields = TypeVar("_Fields", bound=DomainFields)


def recipe_folder() -> Path:
    return Path(str(resources.files("polyrl") / "recipes"))


def list_recipes() -> list[tuple[str, str]]:
    """(name, what it is about) of every recipe that ships with the package, by name."""
    return list_shipped(recipe_folder())


def find_recipe(name: str) -> Path:
    return find_shipped(name, recipe_folder(), "recipe")


def load_recipe(name: str, overrides: list[str] | None = None) -> Recipe:
    """Return a recipe with overrides applied; its modules can be found from now on. Raises ConfigError."""
    path = find_recipe(name)
    is_shipped = path.parent == recipe_folder()
    tree = apply_overrides(load_toml(path), overrides or [])
    recipe = build(tree, Recipe, source=str(name if is_shipped else path), overrides=overrides or [])
    if not recipe.modules and not is_shipped:
        recipe = replace(recipe, modules=os.path.abspath(path.parent))
    look_in(recipe.modules)
    return recipe


def with_whole_paths(recipe: Recipe) -> Recipe:
    """The same for whoever is in another folder."""
    algorithm, data, manager = recipe.algorithm, _with_whole_places(recipe.data), recipe.manager
    critic = replace(algorithm.critic, path=_whole(algorithm.critic.path))
    return replace(
        recipe,
        modules=_whole(recipe.modules),
        model=replace(recipe.model, path=_whole(recipe.model.path)),
        algorithm=replace(algorithm, critic=critic, reference=_whole(algorithm.reference)),
        data=replace(data, domains=tuple(_with_whole_places(one) for one in data.domains)),
        manager=replace(
            manager, tls_cert=_whole(manager.tls_cert), tls_key=_whole(manager.tls_key), ca=_whole(manager.ca)
        ),
    )


def _with_whole_places(fields: _Fields) -> _Fields:
    validation = fields.validation
    if isinstance(validation, dict):
        validation = {name: _whole_place(place) for name, place in validation.items()}
    elif validation is not None:
        validation = _whole_place(validation)
    source = None if fields.source is None else _whole_place(fields.source)
    return replace(fields, source=source, validation=validation)


def _whole_place(place: str) -> str:
    return place if place == ARITHMETIC or is_own(place) else _whole(place)


def _whole(path: str) -> str:
    return os.path.abspath(path) if path else path
