"""Bounds for the numbers of a configuration, and for the names of regions. Each number has two: it comes from a peer or
a file.

The bounds are far beyond any real run, and near enough that no sum or product of them overflows. They are checked
where bytes become a configuration (msgspec), and NaN is within none of them.
"""

from typing import Annotated

from msgspec import Meta

_MOST = 1e9
"""The upper bound of seconds (thirty years), dollars and ratios."""
MAX_REWARD = 1e9
"""The most that a reward is worth: a mean and a deviation of such rewards are numbers of 32 bits."""
MAX_TOKENS = 1 << 24
"""The most tokens of a prompt or an answer: token offsets have 32 bits on the wire."""

Positive = Annotated[float, Meta(gt=0, le=_MOST)]
NotNegative = Annotated[float, Meta(ge=0, le=_MOST)]
Share = Annotated[float, Meta(ge=0, le=1)]
Factor = Annotated[float, Meta(ge=1, le=8)]
Count = Annotated[int, Meta(ge=0, le=10**9)]
AtLeastOne = Annotated[int, Meta(ge=1, le=10**9)]
NumTokens = Annotated[int, Meta(ge=1, le=MAX_TOKENS)]
Bytes = Annotated[int, Meta(ge=0, le=1 << 50)]
Seed = Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)]
REGION = r"^([A-Za-z0-9][A-Za-z0-9._-]{0,63})?$(?!\n)"
Region = Annotated[str, Meta(pattern=REGION)]
"""Where workers are; empty: near the trainer."""
