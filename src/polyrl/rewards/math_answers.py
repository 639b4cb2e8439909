"""The reward of mathematics: 1 if math-verify finds the last answer of the text equal to the expected one, otherwise 0.

Rules kept here: an answer without anything that can be read is wrong, a 0. An expected answer that cannot be read is
the data's fault, and fails. math-verify's own time limits are off, since what they cut short counts as wrong there;
the pool's limit ends it instead, and then there is no reward.
"""

from functools import lru_cache
from typing import Any

from polyrl.rewards.reward import RewardFailed, RewardInput


def score(given: RewardInput) -> float:
    parse, verify = _library()
    expected = _read_expected(given.expected)
    answer = parse(given.answer, parsing_timeout=None)
    if not answer:
        return 0.0
    return 1.0 if verify(expected, answer, timeout_seconds=None, raise_on_error=True) else 0.0


@lru_cache(maxsize=4096)
def _read_expected(text: str) -> Any:
    """As it is, if it says by itself where the formula is; otherwise all of it is one."""
    parse, _ = _library()
    marked = text if "$" in text or "\\boxed" in text else f"${text}$"
    read = parse(marked, parsing_timeout=None, raise_on_error=True) if text.strip() else None
    if not read:
        raise RewardFailed(f"the expected answer {text[:80]!r} cannot be read as mathematics")
    return read


def _library() -> Any:
    try:
        from math_verify import parse, verify
    except ImportError as error:
        raise RewardFailed("the reward `math` needs math-verify: pip install 'polyrl[train]'") from error
    return parse, verify
