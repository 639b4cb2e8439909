"""How far the policy is from a reference, token by token: three estimators of one quantity.

With d = log p(token) - log p_reference(token), and tokens drawn from p:

    k1 = d                  no bias, much noise, and negative half the time
    k2 = d^2 / 2            little noise, some bias; its gradient is that of the true KL
    k3 = exp(-d) + d - 1    no bias, little noise, never negative

In the loss the gradient goes through p: that of k1 is zero on average there, that of k2 is the true KL's. In the
reward it does not, and the estimate is a number that is subtracted: there k1 has the true KL's gradient, while those of
k2 and k3 are of the order of d^2 near the reference, which is nearly nothing.
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
    return torch.expm1((-apart).clamp(max=_MAX_LOG_RATIO)) + apart  # exact near zero, where both are
