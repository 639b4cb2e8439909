"""The mathematics reward: 1 if math-verify finds the text's last answer equal to the expected one, otherwise 0.

Rules kept here: thoughts before `</think>` do not count, and of several boxed answers the last one does; math-verify
would take all of them together. An answer in which nothing can be parsed is wrong and scores 0. An expected answer that
cannot be parsed is a fault of the data, and the reward fails. math-verify's own time limits are off, because it counts
a comparison that it cuts short as wrong. Instead, a comparison gets a limit of CPU time (9^9^9^9 exceeds it), and the
process survives. Beyond a limit that was learned from right answers the answer is wrong; beyond the function's own,
which may be the row's doing, there is no reward. Reading the expected answer has that limit, too. The first answer
imports the library, which is no time of its own.
"""

import importlib.util
import logging
import re
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from types import FrameType
from typing import Any

from polyrl.rewards.reward import Reward, RewardFailed, RewardInput, RewardTimedOut
from polyrl.scheduling.core.bounds import Positive

if importlib.util.find_spec("math_verify") is None:
    raise ImportError("math-verify is missing: pip install 'polyrl[train]'")

_BOXED = "\\boxed{"
_FULL_STOP = re.compile(r"(\d)\.(\s*\})")
_THIN_SPACE = re.compile(r"(?<=\d)(?:\\[,;! ]|\{,\})(?=\d{3}(?!\d))")
"""The separators of thousands."""
_AGAIN_S = 0.5
"""The interval of further interrupts, in case the library catches the first one."""


class _TooLong(BaseException):
    """Derives from BaseException because libraries catch Exception."""


def score(given: RewardInput, *, limit_s: Positive = 5.0) -> float | Reward:
    """Compare the answer with the expected one, in at most `limit_s` of CPU time, or the learned limit if less."""
    signal.setitimer(signal.ITIMER_PROF, 0)  # the process's own for the learned limit: it would end the import as well
    from math_verify import parse, verify

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns about every limit that is off
    try:
        with _limited(limit_s):
            expected = _read_expected(given.expected)
    except _TooLong:
        raise RewardFailed(f"{_named(given.expected)} could not be read in {limit_s:g} s of CPU time") from None
    is_learned = 0 < given.limit_s < limit_s
    try:
        with _limited(given.limit_s if is_learned else limit_s):
            said = last_answer(given.answer)
            answer = parse(said, parsing_timeout=None)  # type: ignore[arg-type]  none is what turns it off
            if not answer:
                return 0.0
            how: dict[str, Any] = {"timeout_seconds": None, "raise_on_error": True}
            return float(verify(expected, answer, allow_set_relation_comp=True, **how))  # x < 3 is an interval, too
    except _TooLong:
        if is_learned:
            return Reward(outcome="timed_out", cpu_s=given.limit_s, correct=False)
        raise RewardTimedOut(f"the answer could not be compared in {limit_s:g} s of CPU time") from None


def last_answer(text: str) -> str:
    """Return the part of an answer that is compared, in the form that math-verify reads."""
    said = text.rpartition("</think>")[2].replace("\\fbox{", _BOXED)
    boxed = said.rfind(_BOXED)
    if boxed >= 0:
        said = said[boxed:]
    return _THIN_SPACE.sub("", _FULL_STOP.sub(r"\1\2", said))


@contextmanager
def _limited(limit_s: float) -> Iterator[None]:
    """Raise _TooLong inside the block after `limit_s` of CPU time.

    Only the main thread gets signals. In another thread there is no limit here, and the caller has to enforce one.
    """
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
    """Parse the expected answer: unchanged if it marks its formula, otherwise all of it as one formula."""
    from math_verify import parse

    marked = text if "$" in text or "\\boxed" in text else f"${text}$"
    read: Any = None
    if text.strip():
        try:
            read = parse(marked, parsing_timeout=None, raise_on_error=True)  # type: ignore[arg-type]
        except Exception as error:  # the library's own, sympy's, Python's
            raise RewardFailed(f"{_named(text)} cannot be read as mathematics") from error
    if not read:
        raise RewardFailed(f"{_named(text)} cannot be read as mathematics")
    return read


def _named(expected: str) -> str:
    return f"the expected answer {expected[:80]!r}"
