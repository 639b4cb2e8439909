"""TOML files that ship with the package, beside a person's own: by name, or by path."""

from pathlib import Path

from polyrl.config.load import load_toml
from polyrl.config.nearest import did_you_mean
from polyrl.errors import ConfigError


def list_shipped(folder: Path) -> list[tuple[str, str]]:
    """(name, what it is about) of every file in a folder of the package, by name."""
    found = [(path.stem, load_toml(path)) for path in sorted(folder.glob("*.toml"))]
    return [(name, str(tree.get("about", ""))) for name, tree in found]


def show_shipped(found: list[tuple[str, str]]) -> str:
    width = max(len(name) for name, _ in found)
    return "\n".join(f"{name:<{width}}  {about}" for name, about in found)


def find_shipped(name: str, shipped: Path, kind: str, own: Path | None = None) -> Path:
    """A path (relative to the folder `own`), or the name of one in the folder `shipped`. Raises ConfigError."""
    path = (own or Path()) / name
    if path.suffix == ".toml":
        return path
    ours = shipped / f"{name}.toml"
    if ours.is_file():
        return ours
    known = [one for one, _ in list_shipped(shipped)]
    hint, expected = did_you_mean(name, known), f"a file ending in .toml, or one of: {', '.join(known)}"
    raise ConfigError(f"{name}: no such {kind}; expected {expected}{hint and f'; {hint}'}")
