"""The reward of mathematics: 1 if math-verify finds the last answer of the text equal to the expected one, otherwise 0.

Rules kept here: an answer without anything that can be read is wrong, a 0. An expected answer that cannot be read is
the data's fault, and fails. math-verify's own time limits are off, since what they cut short counts as wrong there;
the pool's limit ends it instead, and then there is no reward. The library is imported by the first answer: the trainer,
which only looks the function up, does without its second.
"""

import importlib.util
from functools import lru_cache
from typing import Any

from polyrl.rewards.reward import RewardFailed, RewardInput

if importlib.util.find_spec("math_verify") is None:
    raise ImportError("math-verify is missing: pip install 'polyrl[train]'")


def score(given: RewardInput) -> float:
    from math_verify import parse, verify

    expected = _read_expected(given.expected)
    answer = parse(given.answer, parsing_timeout=None)  # type: ignore[arg-type]  none is what turns it off
    if not answer:
        return 0.0
    return 1.0 if verify(expected, answer, timeout_seconds=None, raise_on_error=True) else 0.0


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
