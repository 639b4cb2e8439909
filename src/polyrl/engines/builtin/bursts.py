"""How many decoding steps follow each other before the engine plans again: a *burst*."""

from collections.abc import Sequence

from polyrl.engines.builtin.batching import Batching, Chunk
from polyrl.engines.builtin.steps import MAX_BURST

_BLIND_BURST, _CROWDED_BURST = 16, 8
"""Steps between two looks at the drawn tokens, for few samples and for more than _CROWD. Tokens drawn after a sample's
end are thrown away; with many samples that costs more than a look."""
_CROWD = 32


def num_steps(chunks: Sequence[Chunk], batch: Batching, *, shows_bursts: bool) -> int:
    """Return how many, and reserve blocks for them: several, while all that run only decode. 0: as they come."""
    if not all(chunk.decodes for chunk in chunks):
        return 0
    if shows_bursts and any(member.data.job.sampling.truncates for member, _, _, _ in chunks):
        return 0
    # On a GPU a row that is over costs next to nothing, and a look at all of them does.
    last = max if shows_bursts else min
    left = last(member.max_total - len(member.tokens) for member, _, _, _ in chunks)
    blind = _BLIND_BURST if len(chunks) <= _CROWD else _CROWDED_BURST
    num = min(left, MAX_BURST if shows_bursts and not batch.waits_for_blocks else blind)
    while num > 1 and not batch.reserve(num):
        num //= 2
    return max(1, num)
