"""Generalised advantage estimation: token advantages from a critic's values and the reward at each token.

With V_t the value before token t, and 0 after the last token (also when an answer was cut off):

    d_t = r_t + gamma V_(t+1) - V_t        A_t = d_t + gamma lambda A_(t+1)        return_t = A_t + V_t

The advantages of a sample depend on that sample alone. The tokens of an episode are its drawn ones, call by call: the
value after a call's last token is that before the next call's first.
"""

from typing import Any

import numpy as np

Doubles = np.ndarray[Any, np.dtype[np.float64]]


def estimate(rewards: Doubles, values: Doubles, gamma: float, gae_lambda: float) -> tuple[Doubles, Doubles]:
    """Return the advantages, and the returns that the critic learns."""
    errors = rewards + gamma * np.append(values[1:], 0.0) - values
    gains = np.empty_like(errors)
    later = 0.0
    for t in range(len(errors) - 1, -1, -1):
        later = gains[t] = errors[t] + gamma * gae_lambda * later
    return gains, gains + values
