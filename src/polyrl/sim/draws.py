"""Randomness as data: a draw is a function of its key and of nothing else.

Rules it keeps: the same key gives the same number in every process and on every machine; the order in which draws are
made never matters, so a simulation that loses a worker still meets the same answers afterwards. Keys are integers; the
first ones are, by custom, the run's seed and a constant that names the stream. It leaves out cryptographic strength.
"""

from hashlib import blake2b
from math import log
from statistics import NormalDist

from polyrl.scheduling.rules.order import finalize

_MASK = (1 << 64) - 1
_GAMMA = 0x9E3779B97F4A7C15
_NORMAL_QUANTILE = NormalDist().inv_cdf


def unit(*key: int) -> float:
    """Uniform in the open interval (0, 1): its logarithm and its normal quantile are finite."""
    state = 0
    for part in key:  # not `mix64`, which takes its numbers in otherwise: figures on record are of these draws
        state = finalize((state + part + _GAMMA) & _MASK)
    # 52 bits and a half are exact in a double; with 53 the largest value would round to 1.
    return ((state >> 12) + 0.5) * 2.0**-52


def normal(*key: int) -> float:
    """Standard normal."""
    return _NORMAL_QUANTILE(unit(*key))


def exponential(mean: float, *key: int) -> float:
    """Exponential with that mean."""
    return -mean * log(unit(*key))


def key_of(text: str) -> int:
    """Return an integer to stand for a name in a key. (`hash` differs from process to process.)"""
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big")
