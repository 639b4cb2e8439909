"""The cheapest way from the version a worker holds to the one it wants: one delta, several, or a full version first.

Versions are nodes, named by their digests. A delta is an edge whose cost is its bytes, and a full version is an edge
from nothing. The path with the fewest bytes is taken; ties are broken by the fewest steps and then by name, so the
choice depends only on the offers.

Left out: where the bytes come from, and how fast.
"""

import heapq
from collections.abc import Iterable
from typing import NamedTuple, TypeAlias


class Full(NamedTuple):
    """A full version, which needs no base."""

    target: str
    num_bytes: int


class Delta(NamedTuple):
    """A blob that turns one version into another."""

    blob: str
    base: str
    target: str
    num_bytes: int


ChainStep: TypeAlias = Full | Delta


class Chain(NamedTuple):
    """The steps in the order in which they are taken; empty when the target is held already."""

    steps: tuple[ChainStep, ...]
    num_bytes: int


def cheapest(held: Iterable[str], target: str, offers: Iterable[ChainStep]) -> Chain | None:
    """Return the cheapest chain to `target` from any held version, or from nothing; None if no offer leads there."""
    from_nothing: list[Full] = []
    leaving: dict[str, list[Delta]] = {}
    for offer in offers:
        match offer:
            case Full():
                from_nothing.append(offer)
            case Delta():
                leaving.setdefault(offer.base, []).append(offer)
    waiting: list[_Reached] = [((0, 0, digest, ()), ()) for digest in held]
    waiting += [((full.num_bytes, 1, full.target, ("full",)), (full,)) for full in from_nothing]
    heapq.heapify(waiting)
    left: dict[str, None] = {}
    while waiting:
        (num_bytes, num_steps, digest, names), steps = heapq.heappop(waiting)
        if digest == target:
            return Chain(steps, num_bytes)
        if digest in left:
            continue
        left[digest] = None
        for delta in leaving.get(digest, ()):
            if delta.target not in left:
                key = (num_bytes + delta.num_bytes, num_steps + 1, delta.target, (*names, f"delta {delta.blob}"))
                heapq.heappush(waiting, (key, (*steps, delta)))
    return None


_Reached: TypeAlias = tuple[tuple[int, int, str, tuple[str, ...]], tuple[ChainStep, ...]]
"""A version that can be reached: its sort key (bytes, steps, digest, names of the steps), and the steps to it."""
