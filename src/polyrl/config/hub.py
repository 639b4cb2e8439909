"""Models and data sets by their names on the Hugging Face hub: fetched once, and from then on a directory here.

    Qwen/Qwen3-0.6B              a model
    openai/gsm8k/main#test       a data set: a folder of it, and a split, where it has several

Rules kept here: what is there as a file or a directory is that, whatever it is called; so is what lies in a folder that
is there, since that is a mistyped path. All else that looks like a name of the hub is asked for there, once, before
anything is started. What cannot be had is one line. `huggingface_hub` keeps what it has fetched (HF_HOME), and knows
tokens and mirrors (HF_TOKEN, HF_ENDPOINT).
"""

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal, TypeVar

from msgspec.structs import replace

from polyrl.config.plugins import is_own
from polyrl.config.recipe import ARITHMETIC, DomainFields, Recipe
from polyrl.errors import ConfigError, one_line

RepoKind = Literal["model", "dataset"]
FetchFiles = Callable[[str, RepoKind, Sequence[str]], str]
"""From a name, and patterns of its files, to the directory that has them."""

_NAME = re.compile(r"(?P<repository>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?P<below>(/[\w.-]+)*)")
_MODEL_FILES = ("*.json", "*.safetensors", "*.txt", "*.model", "*.jinja")
_DATA_SUFFIXES = (".jsonl", ".json", ".csv", ".parquet")
_SNAPSHOT = re.compile(r".*/models--([^/]+)--([^/]+)/snapshots/[0-9a-f]+/?")
_Fields = TypeVar("_Fields", bound=DomainFields)


def download(name: str, kind: RepoKind, patterns: Sequence[str]) -> str:
    from huggingface_hub import snapshot_download

    return snapshot_download(name, repo_type=kind, allow_patterns=list(patterns))


def local_model(path: str, key: str, fetch: FetchFiles = download) -> str:
    """A directory here. Raises ConfigError for a name that the hub does not give."""
    found = _NAME.fullmatch(path)
    if found is None or found["below"] or _is_here(path):
        return path
    return _fetched(path, key, lambda: fetch(path, "model", _MODEL_FILES))


def local_data(place: str, key: str, fetch: FetchFiles = download) -> str:
    """A file or a directory here, and its split. Raises ConfigError as `local_model`."""
    path, sign, split = place.partition("#")
    found = _NAME.fullmatch(path)
    if found is None or path == ARITHMETIC or is_own(path) or _is_here(path) or path.endswith(_DATA_SUFFIXES):
        return place
    below = found["below"].lstrip("/")
    patterns = [f"{below}/*" if below else f"*{suffix}" for suffix in _DATA_SUFFIXES]
    folder = _fetched(path, key, lambda: fetch(found["repository"], "dataset", patterns))
    return f"{Path(folder) / below}{sign}{split}"


def with_local_places(recipe: Recipe, fetch: FetchFiles = download) -> Recipe:
    """The recipe with directories for all that it names on the hub. Raises ConfigError."""
    algorithm, data = recipe.algorithm, _with_local_data(recipe.data, "data", fetch)
    critic = replace(algorithm.critic, path=local_model(algorithm.critic.path, "algorithm.critic.path", fetch))
    reference = local_model(algorithm.reference, "algorithm.reference", fetch)
    domains = tuple(_with_local_data(one, f"data.domains.{number}", fetch) for number, one in enumerate(data.domains))
    return replace(
        recipe,
        model=replace(recipe.model, path=local_model(recipe.model.path, "model.path", fetch)),
        algorithm=replace(algorithm, critic=critic, reference=reference),
        data=replace(data, domains=domains),
    )


def shown_model(path: str) -> str:
    """What somebody on another machine writes for a model: its name on the hub, where it came from there."""
    found = _SNAPSHOT.fullmatch(path)
    return path if found is None else f"{found[1]}/{found[2]}"


def _with_local_data(fields: _Fields, key: str, fetch: FetchFiles) -> _Fields:
    validation = fields.validation
    if isinstance(validation, dict):
        validation = {name: local_data(place, f"{key}.validation.{name}", fetch) for name, place in validation.items()}
    elif validation is not None:
        validation = local_data(validation, f"{key}.validation", fetch)
    source = None if fields.source is None else local_data(fields.source, f"{key}.source", fetch)
    return replace(fields, source=source, validation=validation)


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
