"""Places that a recipe names: models and data sets, by a path, or by a name on the Hugging Face hub.

A name is fetched once, and from then on it is a directory here.

    Qwen/Qwen3-0.6B              a model
    openai/gsm8k/main#test       a data set: a folder of it, and a split, where it has several

Rules kept here: a name that exists as a file or a directory means that file or directory. A name within an existing
folder is a mistyped path, and is not asked for on the hub. Anything else that looks like a name of the hub is fetched
there, once, before anything is started. A failure is reported in one line. `huggingface_hub` caches downloads
(HF_HOME), and knows tokens and mirrors (HF_TOKEN, HF_ENDPOINT).
"""

import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal, TypeVar

from msgspec.structs import replace

from polyrl.config.plugins import is_own
from polyrl.config.recipe import ARITHMETIC, HELD_OUT, DomainFields, Recipe
from polyrl.errors import ConfigError, one_line

RepoKind = Literal["model", "dataset"]
FetchFiles = Callable[[str, RepoKind, Sequence[str]], str]
"""From a name, and patterns of its files, to the directory that has them."""

STARTERS = ("arithmetic", "code", "calculator", "treasure", "frozenlake")
"""Models that `polyrl data model` makes. Shipped recipes look for them in `models/`."""

_NAME = re.compile(r"(?P<repository>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?P<below>(/[\w.-]+)*)")
_MODEL_FILES = ("*.json", "*.safetensors", "*.txt", "*.model", "*.jinja")
_DATA_SUFFIXES = (".jsonl", ".json", ".csv", ".parquet")
_SNAPSHOT = re.compile(r".*/models--([^/]+)--([^/]+)/snapshots/[0-9a-f]+/?")
_Fields = TypeVar("_Fields", bound=DomainFields)


def download(name: str, kind: RepoKind, patterns: Sequence[str]) -> str:
    from huggingface_hub import snapshot_download

    return snapshot_download(name, repo_type=kind, allow_patterns=list(patterns))


def local_model(path: str, key: str, fetch: FetchFiles = download) -> str:
    """Return a directory of this machine. Raises ConfigError for a name that the hub does not give."""
    found = _NAME.fullmatch(path)
    if found is None or found["below"] or _is_here(path):
        return path
    if path in [f"models/{name}" for name in STARTERS]:
        raise ConfigError(f"{key}: {path}: not here; `polyrl data model {Path(path).name} --out {path}` makes it")
    return _fetched(path, key, lambda: fetch(path, "model", _MODEL_FILES))


def local_data(place: str, key: str, fetch: FetchFiles = download) -> str:
    """Return a file or a directory of this machine, and its split. Raises ConfigError as `local_model`."""
    path, sign, split = place.partition("#")
    found = _NAME.fullmatch(path)
    if found is None or path in (ARITHMETIC, HELD_OUT) or _is_here(path) or path.endswith(_DATA_SUFFIXES):
        return place
    below = found["below"].lstrip("/")
    patterns = [f"{below}/*" if below else f"*{suffix}" for suffix in _DATA_SUFFIXES]
    folder = _fetched(path, key, lambda: fetch(found["repository"], "dataset", patterns))
    return f"{Path(folder) / below}{sign}{split}"


def with_local_places(recipe: Recipe, fetch: FetchFiles = download) -> Recipe:
    """Return the recipe with directories for all that it names on the hub. Raises ConfigError."""
    return _with_places(
        recipe,
        lambda path, key: local_model(path, key, fetch),
        lambda place, key: local_data(place, key, fetch),
    )


def with_whole_paths(recipe: Recipe) -> Recipe:
    """Return the same recipe for a process in another folder."""
    manager = recipe.manager
    files = {key: _whole(getattr(manager, key)) for key in ("tls_cert", "tls_key", "ca")}
    whole = _with_places(
        recipe,
        lambda path, _: _whole(path),
        lambda place, _: place if place in (ARITHMETIC, HELD_OUT) or is_own(place) else _whole(place),
    )
    return replace(whole, modules=_whole(recipe.modules), manager=replace(manager, **files))


def check_model_dir(folder: str, key: str) -> None:
    """Check that `key` names a model directory. Raises ConfigError. Its loader checks the content."""
    if not (Path(folder) / "config.json").is_file():
        raise ConfigError(f"{key}: {folder}: no config.json there; expected a Hugging Face model directory")


def shown_model(path: str) -> str:
    """Return how another machine names a model: by its name on the hub if it came from there, else by its path."""
    found = _SNAPSHOT.fullmatch(path)
    return path if found is None else f"{found[1]}/{found[2]}"


def _with_places(recipe: Recipe, of_model: Callable[[str, str], str], of_data: Callable[[str, str], str]) -> Recipe:
    """Return the recipe with every place in it changed; both are given the place and its key."""
    algorithm = recipe.algorithm
    critic = replace(algorithm.critic, path=of_model(algorithm.critic.path, "algorithm.critic.path"))
    reference = of_model(algorithm.reference, "algorithm.reference")

    def of_fields(fields: _Fields, key: str) -> _Fields:
        validation = fields.validation
        if isinstance(validation, dict):
            validation = {name: of_data(place, f"{key}.validation.{name}") for name, place in validation.items()}
        elif validation is not None:
            validation = of_data(validation, f"{key}.validation")
        source = None if fields.source is None else of_data(fields.source, f"{key}.source")
        return replace(fields, source=source, validation=validation)

    data = of_fields(recipe.data, "data")
    domains = tuple(of_fields(one, f"data.domains.{number}") for number, one in enumerate(data.domains))
    return replace(
        recipe,
        model=replace(recipe.model, path=of_model(recipe.model.path, "model.path")),
        algorithm=replace(algorithm, critic=critic, reference=reference),
        data=replace(data, domains=domains),
    )


def _whole(path: str) -> str:
    return os.path.abspath(path) if path else path


def _is_here(path: str) -> bool:
    return Path(path).exists() or Path(path).parts[0] in (".", "..") or Path(Path(path).parts[0]).is_dir()


def _fetched(name: str, key: str, fetch: Callable[[], str]) -> str:
    try:
        return fetch()
    except Exception as error:
        raise ConfigError(
            f"{key}: {name}: not here, and the Hugging Face hub does not give it: {one_line(error)}; expected a path, "
            "or a name that can be fetched"
        ) from error
