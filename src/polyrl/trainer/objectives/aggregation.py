"""From losses of tokens to one number: a weight for each token now, one denominator when all are known.

| aggregation           | a token's weight       | denominator                    |
|-----------------------|------------------------|--------------------------------|
| token-mean            | 1                      | tokens                         |
| seq-mean-token-sum    | 1                      | samples                        |
| seq-mean-token-mean   | 1 / its sample's tokens | samples                        |
| fixed                 | 1                      | samples x fixed_tokens         |

Weights are known as soon as a sample is; so gradients of weighted sums can be added up while the round still runs, and
divided once. Only samples that are trained count: a masked one is in no denominator.
"""

import torch

from polyrl.config.recipe import AlgorithmConfig

Tensor = torch.Tensor


def token_weights(sample: Tensor, num_tokens: Tensor, config: AlgorithmConfig) -> Tensor | None:
    """(tokens,), from the number of each token's sample and the tokens of each sample. None: all are one."""
    if config.aggregation != "seq-mean-token-mean":
        return None
    return num_tokens.float().reciprocal().index_select(0, sample)


def denominator(num_tokens: int, num_samples: int, fixed_tokens: int, config: AlgorithmConfig) -> float:
    """Of the whole step."""
    if config.aggregation == "token-mean":
        return float(num_tokens)
    if config.aggregation == "fixed":
        return float(num_samples) * fixed_tokens
    return float(num_samples)
