"""The order in which prompts are read, and random numbers as data.

Rules kept here:
- The order of an epoch is a permutation of the data set: every prompt comes once, none is left out.
- It is a function of (seed, epoch, num_prompts) and needs no memory: any position is answered alone, so a data cursor
  is three integers and a resumed run reads on where it stopped.
- `mix64` and `unit` are the only source of "randomness" in scheduling. The same integers give the same number on every
  machine and in every release: a journal replays to the same decisions.

How: the data set is laid out in a rectangle, row by row, nearly square; in turn every row is rotated by a hash of the
column and every column by a hash of the row (a Feistel network over the two coordinates). A place that falls outside
the data set is sent through again, which is rare: the rectangle has less than a row too many. A data set of up to 64
prompts is sorted by a hash.

Left out: which data set, which domain, and where the cursor stands (tail_batching). This is mixing, not cryptography.
"""

import math
from functools import lru_cache

from polyrl.ids import PromptId

_MASK = (1 << 64) - 1
_GAMMA = 0x9E3779B97F4A7C15  # the odd number nearest 2^64 / golden ratio; splitmix64's increment
_NUM_PASSES = 4
_SMALL = 64  # a rectangle this small mixes badly


def mix64(*numbers: int) -> int:
    """Return a 64-bit hash of integers, each taken modulo 2^64. Order and number of arguments count."""
    mixed = 0
    for number in numbers:
        mixed = finalize(((mixed + _GAMMA) & _MASK) ^ (number & _MASK))
    return mixed


def unit(*numbers: int) -> float:
    """Return a number in [0, 1), uniform over `mix64`: its upper 53 bits, all that a float holds."""
    return (mix64(*numbers) >> 11) * 2.0**-53


def quick_unit(number: int) -> float:
    """Return a number in [0, 1) from one multiplication: for draws that are only counted, such as one in fifty."""
    return (((number * _GAMMA) & _MASK) >> 11) * 2.0**-53


def position_to_prompt(position: int, *, num_prompts: int, seed: int, epoch: int) -> PromptId:
    """Return the prompt at this position of this epoch. Raises ValueError when the position is not in the epoch."""
    if not 0 <= position < num_prompts:
        raise ValueError(f"a position in a data set of {num_prompts} prompts was expected; got {position}")
    if num_prompts <= _SMALL:
        return _shuffled(num_prompts, seed, epoch)[position]
    height = math.isqrt(num_prompts - 1) + 1
    width = -(-num_prompts // height)
    keys = _keys(num_prompts, seed, epoch)
    place = position
    while True:
        row, column = divmod(place, width)
        for key_of_row, key_of_column in keys:
            row = (row + finalize(key_of_row ^ column)) % height
            column = (column + finalize(key_of_column ^ row)) % width
        place = row * width + column
        if place < num_prompts:
            return PromptId(place)


@lru_cache(maxsize=64)
def _keys(num_prompts: int, seed: int, epoch: int) -> tuple[tuple[int, int], ...]:
    key = mix64(seed, epoch, num_prompts)
    return tuple((mix64(key, 2 * number), mix64(key, 2 * number + 1)) for number in range(_NUM_PASSES))


@lru_cache(maxsize=64)
def _shuffled(num_prompts: int, seed: int, epoch: int) -> tuple[PromptId, ...]:
    order = sorted(range(num_prompts), key=lambda prompt: (mix64(seed, epoch, num_prompts, prompt), prompt))
    return tuple(map(PromptId, order))


def finalize(number: int) -> int:
    """Apply splitmix64's finaliser (Stafford's mix 13): a bijection of 64-bit integers in which every bit moves every
    bit."""
    number = ((number ^ (number >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    number = ((number ^ (number >> 27)) * 0x94D049BB133111EB) & _MASK
    return number ^ (number >> 31)
