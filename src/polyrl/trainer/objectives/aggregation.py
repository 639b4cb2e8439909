"""From token losses to one number: a weight for each token now, one denominator when all samples are known.

| aggregation           | a token's weight       | denominator                    |
|-----------------------|------------------------|--------------------------------|
| token-mean            | 1                      | tokens                         |
| seq-mean-token-sum    | 1                      | samples                        |
| seq-mean-token-mean   | 1 / its sample's tokens | samples                        |
| fixed                 | 1                      | samples x fixed_tokens         |

A token's weight is known as soon as its sample is. So gradients of weighted sums can be accumulated while the round
still runs, and divided once. Only trained samples count: a masked sample is in no denominator.
"""

import torch

from polyrl.config.recipe import AlgorithmConfig

Tensor = torch.Tensor


def token_weights(sample: Tensor, num_tokens: Tensor, config: AlgorithmConfig) -> Tensor | None:
    """Return each token's weight, (tokens,), from its sample's index and the tokens per sample. None: all are 1."""
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
