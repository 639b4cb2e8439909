"""Run an event loop, and handle Ctrl+C during imports. Nothing heavy is imported here: `polyrl --help` needs this.

A KeyboardInterrupt during the initialisation of an extension module has unpredictable results: of two at the same
moment of importing torch, one aborted the process (`terminate called ...`), and one was swallowed and came back as a
ModuleNotFoundError with a traceback. So none is raised there: the process ends at once, with the same line and exit
code as for any other interrupt. Processes that it started by then end with their parent.
An event loop handles interrupts itself, and needs Python's own handler to be installed (`as_usual`).
"""

import contextlib
import os
import signal
import threading
from collections.abc import Coroutine, Iterator
from types import FrameType
from typing import Any, TypeVar

from polyrl import descriptors

Result = TypeVar("Result")

LINE = "polyrl: interrupted"
EXIT_INTERRUPTED = 130  # 128 + SIGINT, as a shell reports it

_IMPORTER = "<frozen importlib._bootstrap>"


def _end(number: int, frame: FrameType | None) -> None:
    while frame is not None:
        if frame.f_code.co_filename == _IMPORTER:
            os.write(2, f"{LINE}\n".encode())
            os._exit(EXIT_INTERRUPTED)
        frame = frame.f_back
    raise KeyboardInterrupt


@contextlib.contextmanager
def that_end_imports() -> Iterator[None]:
    """End the process on Ctrl+C during imports. A SIGINT that is ignored or has another handler is left alone."""
    with _handled(_end, instead_of=signal.default_int_handler):
        yield


@contextlib.contextmanager
def as_usual() -> Iterator[None]:
    with _handled(signal.default_int_handler, instead_of=_end):
        yield


@contextlib.contextmanager
def _handled(handler: object, *, instead_of: object) -> Iterator[None]:
    is_ours = threading.current_thread() is threading.main_thread()  # only there it can be set
    if not is_ours or signal.getsignal(signal.SIGINT) is not instead_of:
        yield
        return
    signal.signal(signal.SIGINT, handler)  # type: ignore[arg-type]
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGINT) is handler:  # a run that was interrupted once ends at the next
            signal.signal(signal.SIGINT, instead_of)  # type: ignore[arg-type]


def run_loop(main: Coroutine[Any, Any, Result]) -> Result:
    """Run `main` to its end, on uvloop where there is one."""
    try:
        from uvloop import run
    except ImportError:
        from asyncio import run
    descriptors.raise_limit()  # a process that runs a loop here is dialled by others, or dials many
    with as_usual():  # the loop cancels what it runs, if the signal is still Python's
        return run(main)
