"""From token losses to one number: a weight for each token now, one denominator when all samples are known.

| aggregation         | a token's weight        | denominator            | averages over                       |
|---------------------|-------------------------|------------------------|-------------------------------------|
| token-mean          | 1                       | tokens                 | drawn tokens                        |
| seq-mean-token-sum  | 1                       | samples                | samples, each the sum of its tokens |
| seq-mean-token-mean | 1 / its sample's tokens | samples                | samples, each the mean of its tokens |
| fixed               | 1                       | samples x fixed_tokens | samples, each its sum / fixed_tokens |

An episode is one sample, however many calls and training sequences it has: its tokens are the drawn tokens of all of
them, and it counts once. Tokens that an environment gave count nowhere.

A token's weight is known as soon as its sample is. So gradients of weighted sums can be accumulated while the round
still runs, and divided once. Only trained samples count: a masked sample is in no denominator.
"""

import torch

from polyrl.config.recipe import AlgorithmConfig

Tensor = torch.Tensor


def token_weights(sample: Tensor, num_tokens: Tensor, config: AlgorithmConfig) -> Tensor | None:
    """Return each token's weight, (tokens,), from the index of its sequence, and for each sequence the drawn tokens of
    its whole sample. None: all are 1."""
    if config.aggregation != "seq-mean-token-mean":
        return None
    return num_tokens.float().reciprocal().index_select(0, sample)


def denominator(num_tokens: int, num_samples: int, fixed_tokens: int, config: AlgorithmConfig) -> float:
    """Return the denominator of one update."""
    if config.aggregation == "token-mean":
        return float(num_tokens)
    if config.aggregation == "fixed":
        return float(num_samples) * fixed_tokens
    return float(num_samples)
