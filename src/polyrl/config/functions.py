"""Functions that a setting names: one of ours by its name, or a person's own as `module:function`.

Modules are looked up where Python looks, and then in the current folder. Whatever goes wrong is one line that begins
with the setting: a module of the person's own may raise anything while it is imported.
"""

import importlib
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

from polyrl.config.nearest import did_you_mean
from polyrl.errors import ConfigError, one_line


def find_function(
    name: str, key: str, known: Mapping[str, Callable[..., Any] | str], also: tuple[str, ...] = ()
) -> Callable[..., Any]:
    """The function that `key` names. `known` are ours: themselves, or as `module:function`, imported when asked for.

    `also` are names that are no function and may be written there too. Raises ConfigError.
    """
    ours = known.get(name, name)
    if not isinstance(ours, str):
        return ours
    module_name, colon, function_name = ours.partition(":")
    if not colon:
        names = [*known, *also]
        hint, expected = did_you_mean(name, names), f"{', '.join(names)}, or module:function"
        raise ConfigError(f'{key}: unknown name "{name}"; expected {expected}{hint and f"; {hint}"}')
    _look_in(os.getcwd())
    try:
        function = getattr(importlib.import_module(module_name), function_name, None)
    except Exception as error:
        raise ConfigError(f'{key}: "{name}": {module_name} cannot be imported: {one_line(error)}') from error
    if not callable(function):
        raise ConfigError(f'{key}: "{name}": {module_name} has no function {function_name}')
    return function


def _look_in(folder: str) -> None:
    """After all other places: no file in it hides a library."""
    if folder not in sys.path:
        sys.path.append(folder)
