"""A real model for the tests that want one, made once and kept in the cache.

python -m tests.builtin.smollm2        prints the directory
"""

import os
from pathlib import Path

from examples.smollm2 import make_model


def cache_directory() -> Path:
    given = os.environ.get("POLYRL_CACHE")
    return Path(given) if given else Path.home() / ".cache" / "polyrl"


def model_directory() -> Path:
    """Raises UserError when something cannot be downloaded or converted."""
    made = cache_directory() / "smollm2"
    if not (made / "config.json").exists():
        make_model(made)
    return made


if __name__ == "__main__":
    print(model_directory())
