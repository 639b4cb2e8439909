"""The process of a run that was started from Python, and its messages to the program that started it.

    stdin    one line, the request; then nothing. Its end, or another parent, means that the program is gone
    stdout   one JSON line per event: RunBegun, StepTold..., and how the run ended
    stderr   all that `polyrl train` would print

Rules kept here: a run is stopped by SIGTERM, as `polyrl train` is, and also when its program dies, so that nothing is
left behind and nothing is lost. No heavy module is imported before the request is read.
"""

import contextlib
import logging
import os
import select
import signal
import sys
import threading
from pathlib import Path
from typing import Any, Literal

import msgspec
from msgspec import Struct

from polyrl.errors import ConfigError, UserError, one_line

_LOOK_EVERY_S = 1.0


class RunRequested(Struct, frozen=True, kw_only=True):
    run_dir: str
    recipe: dict[str, Any] | None = None
    """None: the run that is in `run_dir` is resumed, with `overrides`."""
    overrides: list[str] = []


class RunBegun(Struct, frozen=True, tag=True):
    """Models are loaded, the manager and the workers are started, and the first round is requested."""

    recipe: dict[str, Any]
    url: str
    join_command: str
    first_step: int


class StepTold(Struct, frozen=True, tag=True):
    number: int
    metrics: dict[str, float | int | str | None]


class RunEnded(Struct, frozen=True, tag=True):
    why: str


class RunStopped(Struct, frozen=True, tag=True):
    pass


class RunBroken(Struct, frozen=True, tag=True):
    why: str
    kind: Literal["config", "user", "bug"]


RunEvent = RunBegun | StepTold | RunEnded | RunStopped | RunBroken


class _Events:
    """Keeps the contract of `reporting.Watch`."""

    def __init__(self, descriptor: int) -> None:
        self._file = os.fdopen(descriptor, "wb", buffering=0)
        self.recipe: dict[str, Any] = {}

    def begun(self, url: str, join_command: str, first_step: int) -> None:
        self.tell(RunBegun(self.recipe, url, join_command, first_step))

    def step(self, number: int, metrics: Any) -> None:
        self.tell(StepTold(number, dict(metrics)))

    def tell(self, event: RunEvent) -> None:
        with contextlib.suppress(OSError):  # the program is gone: `_stop_with_program` is about to find that out
            self._file.write(msgspec.json.encode(event, enc_hook=float) + b"\n")  # some numbers are numpy's


def main() -> int:
    events = _Events(os.dup(1))
    os.dup2(2, 1)  # what is printed is output, not an event
    request = msgspec.json.decode(sys.stdin.buffer.readline(), type=RunRequested)
    threading.Thread(target=_stop_with_program, args=(os.getppid(),), name="the program", daemon=True).start()
    try:
        events.tell(_run(request, events))
    except ConfigError as error:
        events.tell(RunBroken(str(error), "config"))
    except UserError as error:
        events.tell(RunBroken(str(error), "user"))
    except Exception as error:
        events.tell(RunBroken(one_line(error), "bug"))
        raise
    return 0


def _run(request: RunRequested, events: _Events) -> RunEvent:
    from polyrl.engines import registry

    registry.check_libraries()
    from polyrl.config import build
    from polyrl.config.plugins import look_in
    from polyrl.config.recipe import Recipe
    from polyrl.run import resuming
    from polyrl.run.supervising import Interrupted
    from polyrl.run.training import train

    run_dir, resumed = Path(request.run_dir), None
    if request.recipe is None:
        resumed = resuming.reopen(run_dir, request.overrides)
        recipe = resumed.recipe
    else:
        recipe = build(request.recipe, Recipe)
        look_in(recipe.modules)
    events.recipe = msgspec.to_builtins(recipe)
    try:
        return RunEnded(train(recipe, run_dir, resumed=resumed, watch=events))
    except Interrupted:
        return RunStopped()


def _stop_with_program(parent: int) -> None:
    """Wait for the end of stdin; a process that was forked from the program may keep it open, so look for both."""
    while os.getppid() == parent:
        ready, _, _ = select.select([0], [], [], _LOOK_EVERY_S)
        if ready and not os.read(0, 4096):
            break
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    code = main()
    logging.shutdown()
    os._exit(code)  # taking torch apart, object by object, takes seconds
