"""How a run ends: by itself, by a signal, or by a part of it that fails.

The first Ctrl+C (or SIGTERM) takes the run apart in good order; the second one ends the process at once. Where a
person's own code may run in the trainer, the first one does so too if good order takes longer than a moment: the run
goes on from what is on disk, as after a kill.
"""

import asyncio
import contextlib
import logging
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

from polyrl.config.plugins import is_own
from polyrl.config.recipe import Recipe
from polyrl.errors import UserError
from polyrl.run.event_loop import EXIT_INTERRUPTED
from polyrl.worker.agent import Left

log = logging.getLogger("polyrl.train")

T = TypeVar("T")

_MOMENT_S = 1.5
_TOO_LATE_S = 2.0

_LISTENER = """
import os, select, signal, sys

class Heard(Exception):
    pass

def hear(*_):
    raise Heard

try:
    signal.signal(signal.SIGINT, hear)
    os.read(0, 1)  # returns when the run is over
except Heard:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if not select.select([0], [], [], float(sys.argv[2]))[0]:
        os.kill(int(sys.argv[1]), signal.SIGKILL)
        os.write(2, sys.argv[3].encode())
"""


class Interrupted(Exception):
    """SIGINT, from Ctrl+C, or SIGTERM was received."""


async def until_interrupted(run: Coroutine[Any, Any, str], leave: Callable[[], None] | None = None) -> str:
    """Return what `run` returns. After a signal, at whatever moment, cancel it, wait for its end, raise Interrupted.

    `leave`: called where that end is not there in a moment. A thread with a person's own code cannot be stopped.
    """
    interrupted = _listen_for_signals()
    running, stopping = asyncio.ensure_future(run), asyncio.ensure_future(interrupted.wait())
    try:
        await asyncio.wait((running, stopping), return_when=asyncio.FIRST_COMPLETED)
        if running.done():
            return running.result()
        raise Interrupted
    finally:
        for task in (running, stopping):
            task.cancel()
        if leave is not None and not (await asyncio.wait((running,), timeout=_MOMENT_S))[0]:
            leave()
        await asyncio.gather(running, stopping, return_exceptions=True)


async def first_of(
    run: Coroutine[Any, Any, T],
    failures: Sequence[Coroutine[Any, Any, None]],
    worker: "asyncio.Task[Left] | None" = None,
) -> T:
    """Return the run's result, or raise what ends it before: a failure, or the trainer's own worker leaving."""
    running = asyncio.ensure_future(run)
    failing = [asyncio.ensure_future(one) for one in failures]
    waited = {running, *failing, *([] if worker is None else [worker])}
    try:
        await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
        if running.done():
            return running.result()
        if worker is not None and worker.done():
            raise UserError(f"the trainer's own worker has left: {worker.result()}")
        for one in failing:
            if one.done():
                one.result()
        raise AssertionError("these wait until something fails")
    finally:
        for task in (running, *failing):
            task.cancel()
        await asyncio.gather(running, *failing, return_exceptions=True)


@asynccontextmanager
async def meanwhile(*running: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Run these beside the block. At its end they are cancelled, and what one of them failed of is raised."""
    tasks = [asyncio.create_task(one) for one in running]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        for task in tasks:
            with contextlib.suppress(asyncio.CancelledError):
                await task


def _listen_for_signals() -> asyncio.Event:
    """Set by the first signal; the second one ends the process."""
    interrupted = asyncio.Event()
    loop = asyncio.get_running_loop()

    def hear(number: signal.Signals) -> None:
        if not interrupted.is_set():
            log.warning("%s: stopping; once more to leave at once", number.name)
        interrupted.set()
        loop.remove_signal_handler(number)
        signal.signal(number, signal.SIG_DFL)

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, hear, number)
    return interrupted


def leaving(recipe: Recipe, run_dir: Path) -> Callable[[], None] | None:
    """Return what ends the process within a step's own code that does not end; None where there is none."""
    if not _has_own_steps(recipe):
        return None

    def leave() -> None:
        os.write(2, _stopped(run_dir).encode())
        os._exit(EXIT_INTERRUPTED)  # what it has started ends with it

    return leave


@contextlib.contextmanager
def ended_from_outside(recipe: Recipe, run_dir: Path) -> Iterator[None]:
    """Have Ctrl+C end the process where nothing of it can hear that: a regular expression in a person's own loss, say,
    lets no other thread run. A terminal sends Ctrl+C to all processes of a command, so a small child hears it."""
    if not _has_own_steps(recipe):
        yield
        return
    words = (str(os.getpid()), str(_TOO_LATE_S), _stopped(run_dir))
    child = subprocess.Popen([sys.executable, "-S", "-E", "-s", "-P", "-c", _LISTENER, *words], stdin=subprocess.PIPE)
    try:
        yield
    finally:
        child.communicate()


def _has_own_steps(recipe: Recipe) -> bool:
    named = (recipe.algorithm.loss, recipe.algorithm.advantage, recipe.optimizer.kind)
    return any(is_own(name) and not name.startswith("torch.") for name in named)


def _stopped(run_dir: Path) -> str:
    again = f"go on with `polyrl train --resume {shlex.quote(str(run_dir))}`"
    return f"stopped within a step, whose own code did not end; {again}\n"
