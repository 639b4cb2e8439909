"""KL estimators: how far the policy is from a reference, token by token.

With d = log p(token) - log p_reference(token), and tokens drawn from p:

    k1 = d                  unbiased, high variance, and negative half the time
    k2 = d^2 / 2            low variance, some bias; its gradient is that of the true KL
    k3 = exp(-d) + d - 1    unbiased, low variance, never negative

In the loss, the gradient flows through p: that of k1 is zero on average, that of k2 is the true KL's. In the reward,
the estimate is a plain number that is subtracted: there k1 gives the true KL's gradient, while k2 and k3 give gradients
of the order of d^2 near the reference, which is almost nothing.
"""

import torch

from polyrl.config.recipe import KlEstimator

Tensor = torch.Tensor

_MAX_LOG_RATIO = 20.0


def estimate(logprobs: Tensor, reference: Tensor, estimator: KlEstimator | None) -> Tensor:
    apart = logprobs - reference
    if estimator == "k1":
        return apart
    if estimator == "k2":
        return 0.5 * apart.square()
    return torch.expm1((-apart).clamp(max=_MAX_LOG_RATIO)) + apart  # expm1 is exact near zero
