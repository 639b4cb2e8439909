"""Finding scenarios: by the name of one that ships with the package, or by the path of a TOML file.

A file may say `extends = "NAME or path"`: it then starts from that scenario and changes what it names. Tables are
merged, lists and values replaced. `[[domains]]` are a list, and replace all others; `[domains.NAME]` changes keys of
the domain of that name. Overrides of the command line come last, and name domains likewise. The path of a trace starts
from the file that names it, in an override from the current folder.
"""

from importlib import resources
from pathlib import Path
from typing import Any

from polyrl.config.load import apply_overrides, build, find_shipped, list_shipped, load_toml
from polyrl.errors import ConfigError
from polyrl.sim.scenario import Scenario

_MAX_DEPTH = 8


def scenario_folder() -> Path:
    return Path(str(resources.files("polyrl.sim") / "scenarios"))


def list_scenarios() -> list[tuple[str, str]]:
    """Return the name and the summary of every scenario that ships with the package, by name."""
    return list_shipped(scenario_folder())


def find_scenario(name: str, folder: Path | None = None) -> Path:
    """Return the file of a scenario: a path (relative to `folder`), or the name of one in the package."""
    return find_shipped(name, scenario_folder(), "scenario", folder)


def load_scenario(name: str, overrides: list[str] | None = None) -> Scenario:
    """Load a scenario, with overrides applied. Paths in it are absolute."""
    path = find_scenario(name)
    tree = apply_overrides(_load_tree(path, 0), overrides or [])
    _find_traces(tree, Path())
    source = str(path if path.parent != scenario_folder() else name)
    return build(tree, Scenario, source=source, overrides=overrides or [])


def _load_tree(path: Path, depth: int) -> dict[str, Any]:
    tree = load_toml(path)
    _find_traces(tree, path.parent)
    base = tree.pop("extends", None)
    if base is None:
        return tree
    if not isinstance(base, str):
        raise ConfigError(f"extends: expected the name or path of a scenario, got {base!r} (in {path})")
    if depth >= _MAX_DEPTH:
        raise ConfigError(f"extends: scenarios extend each other more than {_MAX_DEPTH} deep (in {path})")
    return _merge(_load_tree(find_scenario(base, path.parent), depth + 1), tree)


def _find_traces(tree: dict[str, Any], folder: Path) -> None:
    """Make the paths of recordings absolute, so that they mean the same wherever the scenario is read again."""
    for section in ("workload", "supply"):
        table = tree.get(section)
        if isinstance(table, dict) and isinstance(table.get("trace"), str):
            table["trace"] = str((folder / table["trace"]).absolute())


def _merge(base: dict[str, Any], change: dict[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in change.items():
        known = merged.get(key)
        if isinstance(known, list) and isinstance(value, dict):
            merged[key] = _merge_named(known, value, key)
        else:
            merged[key] = _merge(known, value) if isinstance(known, dict) and isinstance(value, dict) else value
    return merged


def _merge_named(base: list[Any], change: dict[str, Any], key: str) -> list[Any]:
    """Change tables of a list, each by its `name`."""
    names = [table.get("name") if isinstance(table, dict) else None for table in base]
    for name, value in change.items():
        if name not in names:
            known = ", ".join(str(one) for one in names)
            raise ConfigError(f"{key}.{name}: the scenario that is extended has no such one; expected one of: {known}")
        if not isinstance(value, dict):
            raise ConfigError(f"{key}.{name}: expected a table, got {value!r}")
    return [_merge(table, change[name]) if name in change else table for table, name in zip(base, names, strict=True)]
