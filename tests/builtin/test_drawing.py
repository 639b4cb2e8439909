"""Drawing from logits: what the random number means, alone and in a crowd."""

import numpy as np
import pytest
import torch

from polyrl.engines.builtin import sampling
from polyrl.wire.frames import Sampling

VOCABS = (1, 7, 127, 128, 129, 300, 2048, 49152)
_ALMOST_ONE = 1 - 2.0**-53


def draws_of(num: int, numbers: torch.Tensor | None = None, how: Sampling | None = None) -> sampling.Draws:
    plan = sampling.plan_draws([how or Sampling()] * num, range(num), [5] * num, torch.device("cpu"))
    return plan if numbers is None else plan._replace(uniforms=numbers)


@pytest.mark.parametrize("vocab", VOCABS)
def test_the_number_cuts_the_cumulative_distribution(vocab: int):
    logits = 4 * torch.randn(40, vocab, generator=torch.Generator().manual_seed(vocab))
    draws = draws_of(40)
    tokens, logprobs = sampling.draw(logits, draws)
    true = torch.log_softmax(logits.double(), -1)
    ends = true.exp().cumsum(-1)
    expected = (ends > draws.uniforms.unsqueeze(1) * ends[:, -1:]).int().argmax(-1)
    assert torch.equal(tokens, expected)
    np.testing.assert_allclose(logprobs, true.gather(1, tokens.unsqueeze(1)).squeeze(1), atol=3e-5)


@pytest.mark.parametrize("vocab", VOCABS)
def test_a_row_alone_is_drawn_as_in_a_crowd(vocab: int):
    logits = 4 * torch.randn(9, vocab, generator=torch.Generator().manual_seed(vocab))
    draws = draws_of(9)
    tokens, logprobs = sampling.draw(logits, draws)
    for row in range(9):
        one = draws._replace(temperatures=draws.temperatures[row : row + 1], uniforms=draws.uniforms[row : row + 1])
        token, logprob = sampling.draw(logits[row : row + 1], one)
        assert (int(token), float(logprob)) == (int(tokens[row]), float(logprobs[row]))


@pytest.mark.parametrize("vocab", VOCABS)
def test_a_row_is_truncated_alone_as_in_a_crowd(vocab: int):
    ways = [Sampling(top_p=0.8), Sampling(top_k=3), Sampling(min_p=0.1), Sampling(), Sampling(top_p=0.8, top_k=9)]
    num = 2 * sampling._SORTED_ROWS * len(ways)
    logits = 2 * torch.randn(num, vocab, generator=torch.Generator().manual_seed(vocab))
    hows = [ways[row % len(ways)] for row in range(num)]
    tokens, logprobs = sampling.draw(logits, sampling.plan_draws(hows, range(num), [5] * num, torch.device("cpu")))
    for row in range(num):
        one = sampling.plan_draws([hows[row]], [row], [5], torch.device("cpu"))
        token, logprob = sampling.draw(logits[row : row + 1], one)
        assert (int(token), float(logprob)) == (int(tokens[row]), float(logprobs[row]))


@pytest.mark.parametrize("number", [0.0, 0.5, _ALMOST_ONE])
@pytest.mark.parametrize("how", [Sampling(), Sampling(top_k=1), Sampling(temperature=0.0)])
def test_a_token_without_weight_is_never_drawn(number: float, how: Sampling):
    only = torch.tensor([0, 1, 127, 128, 255, 256, 298, 299])
    logits = torch.full((len(only), 300), -1e9).scatter(1, only.unsqueeze(1), 0.0)
    numbers = torch.full((len(only),), number, dtype=torch.float64)
    tokens, logprobs = sampling.draw(logits, draws_of(len(only), numbers, how))
    assert torch.equal(tokens, only)
    assert torch.equal(logprobs, torch.zeros(len(only)))


def test_truncation_chooses_the_token_and_not_its_log_probability():
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]])
    numbers = torch.tensor([0.9], dtype=torch.float64)
    whole, _ = sampling.draw(logits, draws_of(1, numbers))
    token, logprob = sampling.draw(logits, draws_of(1, numbers, Sampling(top_k=2)))
    assert (int(whole), int(token)) == (2, 1)
    assert float(logprob) == pytest.approx(float(torch.log_softmax(logits, -1)[0, 1]), abs=1e-6)
