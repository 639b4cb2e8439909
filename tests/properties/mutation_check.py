"""Looks for a bug in the polyrl that PYTHONPATH names: in hostile worlds and in the scripted scenarios.

Run by test_mutations.py on mutated copies of the package. Exit code 1 and the error's name mean that a bug was found, 0
that none was.
"""

import importlib
import sys
from collections.abc import Callable
from functools import partial

import polyrl
from tests.properties.hostile import play

FIRST_WORLDS = range(8)
OTHER_WORLDS = range(8, 120)
SCENARIOS = ("test_scheduler", "test_devices", "test_ledger")


def find_bug() -> str | None:
    """What was found first, or None."""
    for look in (*_worlds(FIRST_WORLDS), *_scenarios(), *_worlds(OTHER_WORLDS)):
        try:
            look()
        except Exception as error:  # noqa: BLE001  whatever it raises, the bug was noticed
            return f"{look}: {type(error).__name__}: {str(error)[:200]}"
    return None


def _worlds(seeds: range) -> list[Callable[[], object]]:
    return [partial(play, seed) for seed in seeds]


def _scenarios() -> list[Callable[[], object]]:
    """The scripted tests that take no parameters: the plain ones are enough."""
    found: list[Callable[[], object]] = []
    for name in SCENARIOS:
        members = vars(importlib.import_module(f"tests.unit.{name}"))
        found += [one for key, one in members.items() if key.startswith("test_") and not hasattr(one, "pytestmark")]
    return found


if __name__ == "__main__":
    print(polyrl.__file__)
    bug = find_bug()
    print(bug or "no bug was found")
    sys.exit(1 if bug else 0)
