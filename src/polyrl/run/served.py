"""Options of commands that run an engine with a server of its own, and the engine they make."""

import argparse
import importlib.util
import sys
from pathlib import Path
from typing import Any

from polyrl.config import build
from polyrl.config.hub import local_model
from polyrl.config.model_dir import check_model_dir
from polyrl.engines.served.engine import NAMES, ServedEngine, ServerKind
from polyrl.engines.served.server import ServedConfig
from polyrl.errors import UserError

_CACHED = Path("~/.cache/polyrl/engines").expanduser()
"""Where benchmarks/install_*.sh put them."""
_OURS = ("--host", "--port", "--model", "--model-path", "--served-model-name", "--api-key", "--admin-api-key")
"""Flags that a server gets from us alone."""


def engine(args: argparse.Namespace, tree: dict[str, Any], source: str) -> ServedEngine:
    """`tree` holds the keys that were given; options come before them. Raises UserError."""
    model = args.model and local_model(args.model, "--model")
    given = {"model": model, "url": args.engine_url, "python": args.engine_python, "flags": args.rest}
    tree = {**tree, **{key: value for key, value in given.items() if value}}
    if "model" not in tree:
        raise UserError(f"--model: missing; a {NAMES[args.engine]} server needs a Hugging Face model directory")
    config = build(tree, ServedConfig, source=source, overrides=args.settings)
    check_model_dir(config.model, "--model")
    if config.url:
        _check_attached(config)
        return ServedEngine(args.engine, config)
    for flag in config.flags:
        if flag.partition("=")[0] in _OURS:
            raise UserError(f"{flag}: the worker chooses it; leave it out after --")
    config = build({**tree, "python": python_for(args.engine, config.python)}, ServedConfig, source=source)
    return ServedEngine(args.engine, config)


def _check_attached(config: ServedConfig) -> None:
    if not config.url.startswith(("http://", "https://")):
        raise UserError(f"--engine-url: {config.url!r} is no URL; expected http://HOST:PORT")
    if config.flags or config.python:
        raise UserError("--engine-url: that server runs already; it takes no flags and no --engine-python")


def check_settings(kind: ServerKind, config: ServedConfig, key: str) -> None:
    """Raises UserError for what a worker would end with; `key` is what names the settings."""
    if config.url or config.python:
        raise UserError(f"{key}.{'url' if config.url else 'python'}: a worker of the fleet has a server of its own")
    for flag in config.flags:
        if flag.partition("=")[0] in _OURS:
            raise UserError(f"{key}.flags: {flag}: the worker chooses it; leave it out")


def python_for(kind: ServerKind, given: str = "", options: tuple[str, str] = ("--engine", "--engine-python")) -> str:
    """The interpreter that has the server: the one that was named, ours, or the one that our script installs.

    `options` are what name the engine and its environment.
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
