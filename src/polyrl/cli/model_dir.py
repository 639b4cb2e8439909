"""The model directory that was named on the command line."""

from pathlib import Path

from polyrl.errors import UserError


def check(folder: str) -> None:
    """Raises UserError where there is none. What it holds is looked at by who loads it."""
    if not (Path(folder) / "config.json").is_file():
        raise UserError(f"--model: {folder}: no config.json there; expected a Hugging Face model directory")
