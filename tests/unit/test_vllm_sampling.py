"""What is put around vLLM's samplers, on fakes that keep to what theirs do: one divides logits in place, one copies."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from polyrl.engines.served import inside

TEMPERATURES = torch.tensor([0.5, 1.0, 2.0])


def logits() -> torch.Tensor:
    return torch.randn(3, 20, generator=torch.Generator().manual_seed(0)) * 3


def expected(temperatures: torch.Tensor = TEMPERATURES) -> torch.Tensor:
    return torch.log_softmax(logits() / temperatures.unsqueeze(1), -1)


def keep(scaled: torch.Tensor, top_k: int) -> torch.Tensor:
    return scaled.masked_fill(scaled < torch.topk(scaled, top_k).values[:, -1:], float("-inf"))


def make_sampler() -> Any:
    """As vllm.v1.sample.sampler has it: log-probabilities after temperature and truncation."""

    class Sampler:
        def sample(self, logits: torch.Tensor, sampling_metadata: Any, logprobs_mode_override: Any = None) -> Any:
            if sampling_metadata.all_greedy:
                return logits.argmax(-1), logits.log_softmax(-1)
            safe = torch.where(sampling_metadata.temperature < 1e-5, 1.0, sampling_metadata.temperature)
            scaled = logits.div_(safe.unsqueeze(1))
            for one in sampling_metadata.logitsprocs.argmax_invariant:
                scaled = keep(scaled, one.min_p_count) if one.min_p_count else scaled
            if sampling_metadata.top_k is not None:
                scaled = keep(scaled, sampling_metadata.top_k)
            return scaled.argmax(-1), scaled.log_softmax(-1)

    return Sampler


def metadata(top_k: int | None = None, min_p_count: int = 0, temperatures: torch.Tensor | None = TEMPERATURES) -> Any:
    processors = SimpleNamespace(argmax_invariant=[SimpleNamespace(min_p_count=min_p_count)])
    return SimpleNamespace(
        all_greedy=temperatures is None, temperature=temperatures, top_k=top_k, top_p=None, logitsprocs=processors
    )


@pytest.mark.parametrize("how", [{"top_k": 1}, {"top_k": 5}, {"min_p_count": 2}, {"top_k": 3, "min_p_count": 2}])
def test_what_is_reported_is_before_truncation_and_what_is_drawn_stays(how):
    plain, sampler = make_sampler(), make_sampler()
    inside.wrap(sampler, inside.of_sampler)
    drawn, after = plain().sample(logits(), metadata(**how))
    tokens, told = sampler().sample(logits(), metadata(**how))
    assert torch.equal(tokens, drawn)
    torch.testing.assert_close(told, expected())
    assert not torch.allclose(told.gather(1, tokens.unsqueeze(1)), after.gather(1, drawn.unsqueeze(1)))


def test_rows_that_are_greedy_have_that_at_temperature_1():
    sampler = make_sampler()
    inside.wrap(sampler, inside.of_sampler)
    mixed = torch.tensor([0.0, 1.0, 2.0])
    torch.testing.assert_close(
        sampler().sample(logits(), metadata(top_k=4, temperatures=mixed))[1], expected(torch.tensor([1.0, 1.0, 2.0]))
    )
    torch.testing.assert_close(sampler().sample(logits(), metadata(temperatures=None))[1], logits().log_softmax(-1))


def test_what_is_not_truncated_is_left_as_it_is_and_wrapping_twice_is_wrapping_once():
    sampler = make_sampler()
    for _ in range(2):
        inside.wrap(sampler, inside.of_sampler)
    first = sampler.sample
    inside.wrap(sampler, inside.of_sampler)
    assert sampler.sample is first
    torch.testing.assert_close(sampler().sample(logits(), metadata())[1], expected())


class States:
    """Of requests: how each is sampled."""

    def __init__(self, top_k: int | None, min_p: float) -> None:
        self.top_k, self.min_p = top_k, SimpleNamespace(np=np.array([min_p, 0.0, 0.0]))

    def get_top_k_top_p(self, rows: Any, numbers: Any) -> tuple[int | None, None]:
        return self.top_k, None

    def apply_temperature(self, logits: torch.Tensor, rows: Any, numbers: Any) -> None:
        logits.div_(TEMPERATURES.unsqueeze(1))


def make_newer_sampler(states: States) -> Any:
    """As vllm.v1.worker.gpu.sample.sampler has it: logits after both, which its caller makes log-probabilities of."""

    class Sampler:
        sampling_states = states

        def sample(self, logits: torch.Tensor, rows: Any, requests: Any, numbers: Any, pos: Any, **more: Any) -> Any:
            scaled = logits.clone()
            self.sampling_states.apply_temperature(scaled, rows, numbers)
            kept = scaled if states.top_k is None else keep(scaled, states.top_k)
            kept = kept if not states.min_p.np.any() else keep(kept, 2)
            return kept.argmax(-1), kept

    return Sampler


@pytest.mark.parametrize(("top_k", "min_p"), [(3, 0.0), (None, 0.1), (None, 0.0)])
def test_so_is_what_the_newer_sampler_reports(top_k, min_p):
    sampler = make_newer_sampler(States(top_k, min_p))
    inside.wrap(sampler, inside.of_newer_sampler)
    numbers = np.arange(3)
    given = logits()
    tokens, told = sampler().sample(given, torch.arange(3), torch.arange(3), numbers, None, return_logprobs=True)
    torch.testing.assert_close(told.log_softmax(-1), expected())
    assert torch.equal(tokens, logits().argmax(-1))
    assert torch.equal(given, logits())
