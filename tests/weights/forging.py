"""Other bytes with the same xxh3-128 digest, made in milliseconds: what a relay could do that knows the hash.

A long input goes through eight lanes of 64 bits, a stripe of 64 bytes at a time. With x = data ^ secret, a lane adds
x's lower half times its upper half to itself, and data to its neighbour; every 1,024 bytes all lanes are scrambled.
Between two scrambles both are plain sums, so most stripes can be anything if a few make up for it:

    products   one with the upper half 1 and two with 2^31 there add up to any number
    data       one with the lower half 0 and one with the upper half 0 have no product, and half of their bits free
"""

import numpy as np

_SECRET = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671fcb79e64eccc0e578825ad07dccff7221b8084674f743248e"
    "e03590e6813a264c3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8a8fa763fe39c343ff9dcbbc7c70b4f1d"
    "8a51e04bcdb45931c89f7ec9d9787364eac5ac8334d3ebc3c581a0fffa1363eb170ddd51b7f0da49d316552629d4689e2b16be587d47a1fc"
    "8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)
"""Of every xxh3 without a seed; it is in the source of all of them."""
_STRIPE, _LANES, _STRIPES_A_BLOCK = 64, 8, 16
_MASK, _HALF = (1 << 64) - 1, (1 << 32) - 1
_NUM_FIXED = 5


def forge(data: bytes, seed: int = 0) -> bytes:
    """As long as the data, of the same digest, and different in two thirds of its whole blocks."""
    rng = np.random.default_rng(seed)
    words = [int(one) for one in np.frombuffer(data[: len(data) // 8 * 8], "<u8")]
    num_blocks = (len(data) - 1) // (_STRIPE * _STRIPES_A_BLOCK)
    for block in range(num_blocks):
        for lane in range(_LANES):
            places = [(block * _STRIPES_A_BLOCK + stripe) * _LANES + lane for stripe in range(_STRIPES_A_BLOCK)]
            keys = [_key(stripe, lane) for stripe in range(_STRIPES_A_BLOCK)]
            new = _forge_lane([words[place] for place in places], keys, rng)
            for place, word in zip(places, new, strict=True):
                words[place] = word
    return np.array(words, "<u8").tobytes() + data[len(data) // 8 * 8 :]


def _key(stripe: int, lane: int) -> int:
    start = 8 * stripe + 8 * lane
    return int.from_bytes(_SECRET[start : start + 8], "little")


def _product(word: int, key: int) -> int:
    mixed = word ^ key
    return (mixed & _HALF) * (mixed >> 32)


def _forge_lane(old: list[int], keys: list[int], rng: np.random.Generator) -> list[int]:
    num_free = len(old) - _NUM_FIXED
    new = [int(one) for one in rng.integers(0, 1 << 63, num_free)]
    product = sum(map(_product, old, keys)) - sum(map(_product, new, keys))
    upper = (product & _MASK) >> 31
    first = min(upper, _HALF)
    for factor, by in ((1, product & ((1 << 31) - 1)), (1 << 31, first), (1 << 31, upper - first)):
        new.append(keys[len(new)] ^ (factor << 32 | by))
    rest = (sum(old) - sum(new)) & _MASK
    low, high = keys[-2], keys[-1]  # the last but one has the lower half free, the last the upper one
    lower = (rest - (high & _HALF)) & _HALF
    new.append((low >> 32) << 32 | lower)
    over = (rest - new[-1] - (high & _HALF)) & _MASK
    new.append((over >> 32) << 32 | (high & _HALF))
    return new
