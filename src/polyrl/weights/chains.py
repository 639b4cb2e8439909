"""The cheapest way from what a worker holds to the version it wants: a delta, several, or a full version first.

Versions are nodes, named by their digests; a delta is an edge that costs its bytes; a full version is an edge from
nothing. The way with the fewest bytes is taken, among those the one with the fewest steps, and then the first by name,
so that the choice is a function of what is offered.

Left out: where the bytes come from, and how fast.
"""

import heapq
from collections.abc import Iterable
from typing import NamedTuple, TypeAlias


class Full(NamedTuple):
    """A version as it is."""

    target: str
    num_bytes: int


class Delta(NamedTuple):
    """A blob that leads from one version to another."""

    blob: str
    base: str
    target: str
    num_bytes: int


ChainStep: TypeAlias = Full | Delta


class Chain(NamedTuple):
    """Steps in the order in which they are taken; none when the target is held already."""

    steps: tuple[ChainStep, ...]
    num_bytes: int


def cheapest(held: Iterable[str], target: str, offers: Iterable[ChainStep]) -> Chain | None:
    """How to get to `target` from any version that is held, or from nothing. None: what is offered leads nowhere."""
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
"""A version that can be had: bytes, steps, its digest and the names on the way, which decide; and the way."""
