"""Log-probabilities and entropies in chunks are those of the whole, and so are their gradients."""

import pytest
import torch
from tests.builtin.tiny_models import save_tiny

from polyrl.engines.builtin import models
from polyrl.trainer.logprobs import HeadSettings, of_tokens

ROWS, WIDTH, VOCAB = 37, 16, 50


def inputs(dtype):
    torch.manual_seed(1)
    hidden, weight = torch.randn(ROWS, WIDTH, dtype=dtype), torch.randn(VOCAB, WIDTH, dtype=dtype)
    return hidden.requires_grad_(), weight.requires_grad_(), torch.randint(0, VOCAB, (ROWS,))


def plain(hidden, weight, targets, settings):
    """In float64, at once."""
    logits = hidden.double() @ weight.double().t()
    if settings.softcap is not None:
        logits = torch.tanh(logits / settings.softcap) * settings.softcap
    all_logprobs = torch.log_softmax(logits / settings.temperature, -1)
    entropy = -(all_logprobs.exp() * all_logprobs).sum(-1)
    return all_logprobs.gather(1, targets.unsqueeze(1)).squeeze(1), entropy


@pytest.mark.parametrize("chunk_rows", [None, 8, 37])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("with_entropy", [False, True])
def test_values_and_gradients_are_those_of_all_logits_at_once(chunk_rows, temperature, softcap, with_entropy):
    hidden, weight, targets = inputs(torch.float32)
    settings = HeadSettings(temperature, softcap, chunk_rows)
    ours = of_tokens(hidden, weight, targets, settings, entropy_grad=with_entropy)
    theirs = plain(hidden, weight, targets, settings)
    up = torch.randn(2, ROWS)
    found, expected = (
        torch.autograd.grad((one[0] * up[0]).sum() + ((one[1] * up[1]).sum() if with_entropy else 0), (hidden, weight))
        for one in (ours, theirs)
    )
    for a, b in zip((*ours, *found), (*theirs, *expected), strict=True):
        torch.testing.assert_close(a.double(), b.double(), rtol=1e-4, atol=1e-4)


def test_the_gradient_is_that_of_finite_differences():
    torch.manual_seed(2)
    hidden = torch.randn(5, 4, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(7, 4, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(0, 7, (5,))
    for softcap in (None, 3.0):
        settings = HeadSettings(0.8, softcap, chunk_rows=2)
        assert torch.autograd.gradcheck(
            lambda a, b, its=settings: of_tokens(a, b, targets, its, entropy_grad=True), (hidden, weight)
        )


def test_temperature_zero_is_scored_at_one_as_the_engine_does():
    hidden, weight, targets = inputs(torch.float32)
    cold = of_tokens(hidden, weight, targets, HeadSettings(0.0))
    assert torch.equal(cold[0], of_tokens(hidden, weight, targets, HeadSettings(1.0))[0])


def test_bfloat16_logits_are_rounded_once_and_reduced_in_float32():
    hidden, weight, targets = inputs(torch.bfloat16)
    ours, entropy = of_tokens(hidden, weight, targets, HeadSettings(chunk_rows=8))
    whole = torch.log_softmax((hidden @ weight.t()).float(), -1)
    assert ours.dtype == entropy.dtype == torch.float32
    torch.testing.assert_close(ours, whole.gather(1, targets.unsqueeze(1)).squeeze(1))
    ours.sum().backward()
    assert weight.grad is not None
    assert weight.grad.dtype == torch.bfloat16


def test_capped_logits_are_the_engines_in_half_precision_too(tmp_path):
    loaded = models.load(str(save_tiny("gemma2", tmp_path, final_logit_softcapping=3.0)), "bfloat16", "cpu")
    torch.manual_seed(0)
    hidden = 4 * torch.randn(20, loaded.model.config.hidden_size, dtype=torch.bfloat16)
    with torch.no_grad():
        engines = torch.log_softmax(loaded.logits(hidden).float(), -1)
        tokens = engines.argmax(-1)
        settings = HeadSettings(1.0, loaded.logit_softcap)
        ours, _ = of_tokens(hidden, loaded.model.lm_head.weight, tokens, settings)
    torch.testing.assert_close(ours, engines.gather(1, tokens.unsqueeze(1)).squeeze(1), atol=1e-5, rtol=0)
