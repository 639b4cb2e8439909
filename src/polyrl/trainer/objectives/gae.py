"""Generalised advantage estimation: advantages of tokens, from a critic's values and the rewards at each token.

With V_t the value before token t, and nothing to come after the last one (also when an answer was cut off):

    d_t = r_t + gamma V_(t+1) - V_t        A_t = d_t + gamma lambda A_(t+1)        return_t = A_t + V_t

A sample's need nothing but the sample.
"""

from typing import Any

import numpy as np

Doubles = np.ndarray[Any, np.dtype[np.float64]]


def estimate(rewards: Doubles, values: Doubles, gamma: float, gae_lambda: float) -> tuple[Doubles, Doubles]:
    """Advantages, and the returns that the critic learns."""
    errors = rewards + gamma * np.append(values[1:], 0.0) - values
    gains = np.empty_like(errors)
    later = 0.0
    for t in range(len(errors) - 1, -1, -1):
        later = gains[t] = errors[t] + gamma * gae_lambda * later
    return gains, gains + values
