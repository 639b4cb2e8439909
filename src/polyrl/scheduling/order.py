"""The order in which prompts are read, and random numbers as data.

Rules kept here:
- The order of an epoch is a permutation of the data set: every prompt comes once, none is left out.
- It is a function of (seed, epoch, num_prompts) and needs no memory: any position is answered alone, so a data cursor
  is three integers and a resumed run reads on where it stopped.
- `mix64` and `unit` are the only source of "randomness" in scheduling. The same integers give the same number on every
  machine and in every release: a journal replays to the same decisions.

How: a balanced Feistel network permutes the smallest power of four that holds the data set; a result outside the data
set is sent through again until it falls inside (cycle walking, under four turns on average).

Left out: which data set, which domain, and where the cursor stands (tail_batching). This is mixing, not cryptography.
"""

from polyrl.ids import PromptId

_MASK = (1 << 64) - 1
_GAMMA = 0x9E3779B97F4A7C15  # the odd number nearest 2^64 / golden ratio; splitmix64's increment
_NUM_ROUNDS = 8  # with four, a data set of two prompts starts with the same one for 55% of seeds
_MIN_HALF_BITS = 2


def mix64(*numbers: int) -> int:
    """A 64-bit hash of integers, each taken modulo 2^64. Order and number of arguments count."""
    mixed = 0
    for number in numbers:
        mixed = _finalize(((mixed + _GAMMA) & _MASK) ^ (number & _MASK))
    return mixed


def unit(*numbers: int) -> float:
    """A number in [0, 1), uniform over `mix64`: its upper 53 bits, all that a float holds."""
    return (mix64(*numbers) >> 11) * 2.0**-53


def position_to_prompt(position: int, *, num_prompts: int, seed: int, epoch: int) -> PromptId:
    """The prompt at this position of this epoch. Raises ValueError when the position is not in the epoch."""
    if not 0 <= position < num_prompts:
        raise ValueError(f"a position in a data set of {num_prompts} prompts was expected; got {position}")
    if num_prompts == 1:
        return PromptId(0)
    half_bits = max(_MIN_HALF_BITS, ((num_prompts - 1).bit_length() + 1) // 2)
    key = mix64(seed, epoch, num_prompts)
    place = _permute(position, half_bits, key)
    while place >= num_prompts:
        place = _permute(place, half_bits, key)
    return PromptId(place)


def _permute(place: int, half_bits: int, key: int) -> int:
    """A bijection of range(4 ** half_bits)."""
    mask = (1 << half_bits) - 1
    left, right = place >> half_bits, place & mask
    for _ in range(_NUM_ROUNDS):
        key = (key + _GAMMA) & _MASK
        left, right = right, left ^ (_finalize(key ^ right) & mask)
    return left << half_bits | right


def _finalize(number: int) -> int:
    """splitmix64's finaliser (Stafford's mix 13): a bijection of 64-bit integers in which every bit moves every bit."""
    number = ((number ^ (number >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    number = ((number ^ (number >> 27)) * 0x94D049BB133111EB) & _MASK
    return number ^ (number >> 31)
