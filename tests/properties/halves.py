"""Worlds of a property in two halves: the first for `make test`, the second for `make test-chaos`."""

from typing import Any

import pytest


def first_seeds(num: int, chunk: int) -> list[Any]:
    """Return the first seed of each chunk of worlds, those of the second half marked."""
    return [pytest.param(one, marks=[pytest.mark.chaos] if one >= num // 2 else []) for one in range(0, num, chunk)]
