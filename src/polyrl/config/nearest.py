"""A name that nobody knows, and the known one that was probably meant."""

import difflib
from collections.abc import Callable, Iterable


def did_you_mean(name: str, known: Iterable[str], show: Callable[[str], str] = str) -> str:
    """`did you mean X?` of the known name that is nearest; empty where none is near."""
    near = difflib.get_close_matches(name, list(known), n=1)
    return f"did you mean {show(near[0])}?" if near else ""
