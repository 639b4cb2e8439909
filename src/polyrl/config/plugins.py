"""Names in a recipe that stand for code: PolyRL's own, or the user's as `module:name`, with arguments.

    loss = "my_losses:bounded"            a function, or a class, of a module
    loss_args = { width = 0.2 }           its keyword arguments

Engines, losses, advantages, rewards, data sources, optimizers and trackers are all found here. Modules are looked for
where Python looks, then in the recipe's folder, then in the current folder: no file there hides a library.

Rules kept here: a name and its arguments are checked before anything runs. A mistake is one line that begins with the
setting, whatever a module of the person's own raises while it is imported. Arguments are passed on as the recipe has
them; where a parameter is annotated with plain types, their types are checked.
"""

import importlib
import inspect
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec

from polyrl.config.explain import did_you_mean
from polyrl.config.load import build
from polyrl.errors import ConfigError, one_line

Arguments = Mapping[str, Any]

_OWN = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
_PLAIN = (int, float, str, bool, NoneType, list, dict, tuple, Any)
_MADE_OF_PLAIN = (list, dict, tuple, Sequence, Mapping, Union, UnionType)


def is_own(name: str) -> bool:
    """Return whether this is written as `module:name`."""
    return _OWN.fullmatch(name) is not None


def look_in(folder: str) -> None:
    """Add a folder to the module search path, after all other places."""
    whole = os.path.abspath(folder)
    if folder and whole not in sys.path:
        sys.path.append(whole)


def find(
    name: str,
    key: str,
    known: Mapping[str, Callable[..., Any] | str],
    *,
    also: Sequence[str] = (),
    what: str = "function",
    methods: Sequence[str] = (),
) -> Callable[..., Any]:
    """Return what the setting `key` names. Raises ConfigError.

    `known` are ours: themselves, or as `module:name`, imported when asked for. `also` are names that may be written
    there and stand for no code. `methods` are those that a class must have.
    """
    ours = known.get(name, name)
    if not isinstance(ours, str):
        return ours
    module_name, colon, own = ours.partition(":")
    if not colon:
        names = [*known, *also]
        hint, expected = did_you_mean(name, names), f"{', '.join(names)}, or module:{what}".removeprefix(", or ")
        raise ConfigError(f'{key}: unknown name "{name}"; expected {expected}{hint and f"; {hint}"}')
    look_in(os.getcwd())
    try:
        found = getattr(importlib.import_module(module_name), own, None)
    except Exception as error:
        raise ConfigError(f'{key}: "{name}": {module_name} cannot be imported: {one_line(error)}') from error
    if not callable(found):
        raise ConfigError(f'{key}: "{name}": {module_name} has no {what} {own}')
    missing = [one for one in methods if inspect.isclass(found) and not callable(getattr(found, one, None))]
    if missing:
        raise ConfigError(f'{key}: "{name}": has no method {missing[0]}; expected {", ".join(methods)}')
    return found


def with_arguments(found: Callable[..., Any], args: Arguments, key: str, num_given: int) -> Callable[..., Any]:
    """Return the function with these keyword arguments. Raises ConfigError as `check_arguments`."""
    check_arguments(found, args, key, num_given)
    return partial(found, **args) if args else found


def check_arguments(found: Callable[..., Any], args: Arguments, key: str, num_given: int) -> None:
    """Raise ConfigError unless `found` takes `num_given` arguments by position, and `args` by name.

    `key` is the setting that holds the arguments.
    """
    try:
        parameters = list(inspect.signature(found).parameters.values())
    except (TypeError, ValueError):  # code in C does not always tell
        return
    by_position = [one for one in parameters if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)]
    if len(by_position) < num_given and not any(one.kind is one.VAR_POSITIONAL for one in parameters):
        raise ConfigError(
            f"{key}: {_name_of(found)} takes {len(by_position)} arguments by position, and is called with {num_given}"
        )
    named = [one for one in parameters if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)]
    named = [one for one in named if one not in by_position[:num_given]]
    takes_any = any(one.kind is one.VAR_KEYWORD for one in parameters)
    hints = _hints_of(found)
    fields: list[Any] = [(one.name, hints.get(one.name, Any)) for one in named if one.default is one.empty]
    fields += [(one.name, hints.get(one.name, Any), None) for one in named if one.default is not one.empty]
    struct = msgspec.defstruct("Arguments", fields, kw_only=True, forbid_unknown_fields=not takes_any)
    try:
        build(dict(args), struct)
    except ConfigError as error:
        raise ConfigError(f"{key}.{error} ({_name_of(found)})") from error


def _name_of(found: Callable[..., Any]) -> str:
    return getattr(found, "__qualname__", type(found).__name__)


def _hints_of(found: Callable[..., Any]) -> dict[str, Any]:
    """Return the types of parameters, of those that TOML can hold."""
    place = found.__init__ if inspect.isclass(found) else found  # type: ignore[misc]
    try:
        hints = get_type_hints(place, include_extras=True)
    except Exception:  # noqa: BLE001  an annotation may be any expression
        return {}
    return {name: hint for name, hint in hints.items() if _is_plain(hint)}


def _is_plain(hint: Any) -> bool:
    if get_origin(hint) is Literal or hint is Ellipsis:
        return True
    if get_origin(hint) is Annotated:
        return _is_plain(get_args(hint)[0])
    return hint in _PLAIN or (get_origin(hint) in _MADE_OF_PLAIN and all(map(_is_plain, get_args(hint))))
