"""The reward of mathematics: 1 if math-verify finds the last answer of the text equal to the expected one, otherwise 0.

Rules kept here: an answer without anything that can be read is wrong, a 0. An expected answer that cannot be read is
the data's fault, and fails. math-verify's own time limits are off, since what they cut short counts as wrong there. An
answer may take so many seconds of CPU time instead (9^9^9^9 is such a one), and then there is no reward; the process
lives, and is not started anew. The library is imported by the first answer.
"""

import importlib.util
import logging
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from types import FrameType
from typing import Any

from polyrl.rewards.reward import RewardFailed, RewardInput, RewardTimedOut

if importlib.util.find_spec("math_verify") is None:
    raise ImportError("math-verify is missing: pip install 'polyrl[train]'")

_AGAIN_S = 0.5
"""A library that catches everything is interrupted once more."""


class _TooLong(BaseException):
    """No Exception: libraries catch those."""


def score(given: RewardInput, *, limit_s: float = 5.0) -> float:
    """`limit_s` is CPU time."""
    from math_verify import parse, verify

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns of every limit that is off
    expected = _read_expected(given.expected)
    try:
        with _limited(limit_s):
            answer = parse(given.answer, parsing_timeout=None)  # type: ignore[arg-type]  none is what turns it off
            if not answer:
                return 0.0
            return 1.0 if verify(expected, answer, timeout_seconds=None, raise_on_error=True) else 0.0
    except _TooLong:
        raise RewardTimedOut(f"the answer could not be compared in {limit_s:g} s of CPU time") from None


@contextmanager
def _limited(limit_s: float) -> Iterator[None]:
    """Raises _TooLong within. Signals are the main thread's: in another one, whoever runs it has to end it."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise _TooLong

    before = signal.signal(signal.SIGPROF, interrupt)
    try:
        signal.setitimer(signal.ITIMER_PROF, limit_s, _AGAIN_S)
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


@lru_cache(maxsize=4096)
def _read_expected(text: str) -> Any:
    """As it is, if it says by itself where the formula is; otherwise all of it is one."""
    from math_verify import parse

    marked = text if "$" in text or "\\boxed" in text else f"${text}$"
    read: Any = None
    if text.strip():
        read = parse(marked, parsing_timeout=None, raise_on_error=True)  # type: ignore[arg-type]
    if not read:
        raise RewardFailed(f"the expected answer {text[:80]!r} cannot be read as mathematics")
    return read
