"""Engines by name: builtin, emulated, vllm, sglang, or a person's own as `module:Class`.

    polyrl worker --engine my_package.engine:MyEngine --model DIR depth=3
    fleet.engine = "my_package.engine:MyEngine"          with fleet.settings = { depth = 3 }

An engine of a person's own is called with `model`, where there is one, and with its settings as keyword arguments; it
keeps the contract of engine.py. Rules kept here: a name, a setting or an option that an engine cannot use is one line,
said before anything is started. Nothing heavy is imported before an engine is made.
"""

import importlib.util
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from polyrl.config import build
from polyrl.config.places import check_model_dir, local_model
from polyrl.config.plugins import check_arguments, find, is_own, with_arguments
from polyrl.engines.builtin.config import BuiltinConfig
from polyrl.engines.engine import Engine
from polyrl.engines.served.server import NAMES, ServedConfig, ServerKind
from polyrl.errors import ConfigError, UserError

if TYPE_CHECKING:
    from polyrl.engines.served.engine import ServedEngine

ENGINES = ("emulated", "builtin", *NAMES)
METHODS = ("start", "generate", "abort", "install", "stats", "health", "close")
"""The methods of the contract; engine.py says what each does."""

_LIBRARIES = ("torch", "transformers", "safetensors")
_CACHED = Path("~/.cache/polyrl/engines").expanduser()
"""Where benchmarks/install_*.sh put servers."""
_OF_WORKERS = ("--host", "--port", "--model", "--model-path", "--served-model-name", "--api-key", "--admin-api-key")
"""Flags that a server gets from its worker alone."""


class Wanted(NamedTuple):
    """An engine as a command line asks for it."""

    name: str
    settings: dict[str, Any]
    model: str | None = None
    python: str | None = None
    """For a server: its Python environment. `url`: the address of a running one. `flags`: passed to it unchanged."""
    url: str | None = None
    flags: Sequence[str] = ()
    source: str = ""
    """The file that settings come from; `overrides` are those of the command line."""
    overrides: Sequence[str] = ()


def make_engine(wanted: Wanted) -> Engine:
    """Raises UserError."""
    name = wanted.name
    if name in NAMES:
        return _served(wanted)
    for option, given in (("--engine-python", wanted.python), ("--engine-url", wanted.url), ("--", wanted.flags)):
        if given:
            raise UserError(f"{option}: the {name} engine has no server; did you mean --engine vllm?")
    if name == "builtin":
        check_libraries()
        from polyrl.engines.builtin.engine import BuiltinEngine

        return BuiltinEngine(builtin_config(wanted.settings, wanted.model, wanted.source, wanted.overrides))
    if name == "emulated":
        from polyrl.engines.emulated import EmulatedConfig, EmulatedEngine

        if wanted.model is not None:
            raise UserError("--model: the emulated engine has no model; did you mean --engine builtin?")
        return EmulatedEngine(build(wanted.settings, EmulatedConfig, source=wanted.source, overrides=wanted.overrides))
    return _own(wanted)


def _own(wanted: Wanted) -> Engine:
    found = find(wanted.name, "--engine", {}, also=ENGINES, what="Class", methods=METHODS)
    model = {} if wanted.model is None else {"model": local_model(wanted.model, "--model")}
    engine = with_arguments(found, {**model, **wanted.settings}, wanted.name, 0)()
    for method in METHODS:
        if not callable(getattr(engine, method, None)):
            raise ConfigError(f'--engine: "{wanted.name}" made {type(engine).__name__}, which has no method {method}')
    return engine


def check_settings(engine: str, settings: Mapping[str, Any], model: str, key: str = "fleet") -> None:
    """Raise ConfigError for what a worker of a recipe's fleet would end with, and only its log would say why.

    `key` is the section that names the engine and its settings.
    """
    place = f"{key}.settings"
    if "model" in settings:
        raise ConfigError(f"{place}.model: workers have that of model.path; expected none")
    given = {**settings, "model": model}
    if is_own(engine):
        check_arguments(find(engine, f"{key}.engine", {}, what="Class", methods=METHODS), given, place, 0)
        return
    try:
        config = build(given, BuiltinConfig if engine == "builtin" else ServedConfig)
    except ConfigError as error:
        raise ConfigError(f"{place}.{error}") from error
    if isinstance(config, ServedConfig):
        if config.url or config.python:
            raise ConfigError(
                f"{place}.{'url' if config.url else 'python'}: a worker of the fleet has a server of its own"
            )
        if flag := _flag_of_workers(config.flags):
            raise ConfigError(f"{place}.flags: {flag}: the worker chooses it; leave it out")


# The builtin engine


def check_libraries() -> None:
    """Raise UserError where what the builtin engine and the trainer need is not installed. Imports nothing."""
    missing = [name for name in _LIBRARIES if importlib.util.find_spec(name) is None]
    if missing:
        raise UserError(f"the builtin engine needs {' and '.join(missing)}: pip install 'polyrl[train]'")


def builtin_config(
    tree: dict[str, Any], model: str | None, source: str = "", overrides: Sequence[str] = ()
) -> BuiltinConfig:
    """Build the builtin engine's configuration. `tree` holds the keys that were given; `--model` comes before its own.
    Raises UserError."""
    if model is not None:
        tree = {**tree, "model": local_model(model, "--model")}
    if "model" not in tree:
        raise UserError("--model: missing; the builtin engine needs a Hugging Face model directory")
    config = build(tree, BuiltinConfig, source=source, overrides=overrides)
    check_model_dir(config.model, "--model")
    return config


# Engines with a server of their own


def _served(wanted: Wanted) -> "ServedEngine":
    from polyrl.engines.served.engine import ServedEngine

    kind: ServerKind = "vllm" if wanted.name == "vllm" else "sglang"
    model = wanted.model and local_model(wanted.model, "--model")
    given = {"model": model, "url": wanted.url, "python": wanted.python, "flags": wanted.flags}
    tree = {**wanted.settings, **{key: value for key, value in given.items() if value}}
    if "model" not in tree:
        raise UserError(f"--model: missing; a {NAMES[kind]} server needs a Hugging Face model directory")
    config = build(tree, ServedConfig, source=wanted.source, overrides=wanted.overrides)
    check_model_dir(config.model, "--model")
    if config.url:
        _check_attached(config)
        return ServedEngine(kind, config)
    if flag := _flag_of_workers(config.flags):
        raise UserError(f"{flag}: the worker chooses it; leave it out after --")
    config = build({**tree, "python": python_for(kind, config.python)}, ServedConfig, source=wanted.source)
    return ServedEngine(kind, config)


def _flag_of_workers(flags: Sequence[str]) -> str | None:
    """Return the first flag that a server gets from its worker alone."""
    return next((flag for flag in flags if flag.partition("=")[0] in _OF_WORKERS), None)


def _check_attached(config: ServedConfig) -> None:
    if not config.url.startswith(("http://", "https://")):
        raise UserError(f"--engine-url: {config.url!r} is no URL; expected http://HOST:PORT")
    if config.flags or config.python:
        raise UserError("--engine-url: that server runs already; it takes no flags and no --engine-python")


def python_for(kind: ServerKind, given: str = "", options: tuple[str, str] = ("--engine", "--engine-python")) -> str:
    """Return the interpreter that has the server: the one that was named, ours, or the one that our script installs.

    `options` are the command-line options to name in an error: the engine's, and its interpreter's.
    """
    if given:
        path = Path(given).expanduser()
        path = path / "bin" / "python" if path.is_dir() else path
        if not path.is_file():
            raise UserError(f"{options[1]}: {given} is not there; expected a Python, or a virtual environment")
        return str(path)
    if importlib.util.find_spec(kind) is not None:
        return sys.executable
    cached = _CACHED / kind / "bin" / "python"
    if cached.is_file():
        return str(cached)
    raise UserError(
        f"{options[0]} {kind}: {NAMES[kind]} is neither installed here nor in {_CACHED / kind}; "
        f"name its environment with {options[1]}, or see docs/guides/engines.md"
    )
