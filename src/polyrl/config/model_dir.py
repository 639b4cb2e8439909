"""Model directories that a setting or an option names: whether there is one, said before anything is loaded."""

from pathlib import Path

from polyrl.errors import ConfigError


def check_model_dir(folder: str, key: str) -> None:
    """Raises ConfigError where `key` names none. What it holds is looked at by who loads it."""
    if not (Path(folder) / "config.json").is_file():
        raise ConfigError(f"{key}: {folder}: no config.json there; expected a Hugging Face model directory")
