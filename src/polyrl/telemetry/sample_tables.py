"""Answers of a step as a table, for trackers that show tables.

Rules kept here: a table has a few answers, from the lowest reward to the highest, and of long texts the ends. A model's
words are text in every tracker: nothing in it becomes markup.
"""

import html
from collections.abc import Sequence
from typing import NamedTuple

_MOST_ROWS = 16
_MOST_CHARACTERS = 600


class SampleRow(NamedTuple):
    step: int
    sample: str
    reward: float | None
    """None: it is not scored."""
    tokens: int
    finish: str
    prompt: str
    answer: str
    parts: str
    """The named parts of the reward."""


COLUMNS = list(SampleRow._fields)


def spread(rows: Sequence[SampleRow]) -> list[SampleRow]:
    """Return a few rows, from the lowest reward to the highest."""
    scored = sorted(rows, key=lambda one: (one.reward is None, one.reward or 0.0))
    if len(scored) <= _MOST_ROWS:
        return scored
    return [scored[place * (len(scored) - 1) // (_MOST_ROWS - 1)] for place in range(_MOST_ROWS)]


def shorten_text(text: str) -> str:
    """Return a text, or its ends."""
    half = _MOST_CHARACTERS // 2
    return text if len(text) <= _MOST_CHARACTERS else f"{text[:half]} … {text[-half:]}"


def as_markdown(rows: Sequence[SampleRow]) -> str:
    """Return a table in Markdown, as TensorBoard shows it."""
    lines = [" | ".join(COLUMNS), " | ".join("---" for _ in COLUMNS)]
    return "\n".join([*lines, *(" | ".join(_cell(value) for value in row) for row in rows)])


_MARKUP = str.maketrans({one: f"&#{ord(one)};" for one in "|`*_[]()#!~\\"})
"""Characters that Markdown reads, as HTML writes them."""


def _cell(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:g}"
    text = html.escape(str(value)).replace("\r", "")
    escaped = text.translate(_MARKUP).replace("\n", "<br>")
    return "".join(one if one.isprintable() else f"\\u{{{ord(one):x}}}" for one in escaped)
