"""Running an event loop: uvloop where there is one."""

from collections.abc import Coroutine
from typing import Any, TypeVar

from polyrl import descriptors
from polyrl.run import interrupts

Result = TypeVar("Result")


def run_loop(main: Coroutine[Any, Any, Result]) -> Result:
    try:
        from uvloop import run
    except ImportError:
        from asyncio import run
    descriptors.raise_limit()  # whatever runs a loop here is dialled by others, or dials many
    with interrupts.as_usual():  # the loop cancels what it runs, if the signal is still Python's
        return run(main)
