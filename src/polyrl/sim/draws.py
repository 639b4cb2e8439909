"""Randomness as data: a draw is a function of its key and of nothing else.

Rules it keeps: the same key gives the same number in every process and on every machine; the order in which draws are
made never matters, so a simulation that loses a worker still meets the same answers afterwards. Keys are integers; the
first ones are, by custom, the run's seed and a constant that names the stream. It leaves out cryptographic strength.
"""

from hashlib import blake2b
from math import log
from statistics import NormalDist

_MASK = (1 << 64) - 1
_NORMAL_QUANTILE = NormalDist().inv_cdf


def mix64(*key: int) -> int:
    """64 well mixed bits of a key (the finaliser of splitmix64 after each integer)."""
    state = 0
    for part in key:
        state = (state + part + 0x9E3779B97F4A7C15) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state


def unit(*key: int) -> float:
    """Uniform in the open interval (0, 1): its logarithm and its normal quantile are finite."""
    # 52 bits and a half are exact in a double; with 53 the largest value would round to 1.
    return ((mix64(*key) >> 12) + 0.5) * 2.0**-52


def normal(*key: int) -> float:
    """Standard normal."""
    return _NORMAL_QUANTILE(unit(*key))


def exponential(mean: float, *key: int) -> float:
    """Exponential with that mean."""
    return -mean * log(unit(*key))


def key_of(text: str) -> int:
    """An integer to stand for a name in a key. (`hash` differs from process to process.)"""
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big")
