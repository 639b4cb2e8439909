"""Inside a vLLM server: log-probabilities as every engine of ours has them, after temperature and before truncation.

vLLM offers those before temperature (`raw_logprobs`), or those after top-k, top-p and min-p (`processed_logprobs`). The
trainer's are of the whole softmax at the sampling temperature, so that a ratio with the latter would not be 1 for the
same weights: each token's would be too small by the share that truncation left, and that of a long answer nothing.
So both of its samplers are wrapped: where a batch truncates, the temperature alone is applied once more, and that is
what is reported. Drawing is left as it is. Runs in the server's environment: standard library and torch only.
"""

# pyright: reportMissingImports=false
from collections.abc import Callable
from typing import Any

import torch

_MARK = "polyrl_tells_policy"
_GREEDY = 1e-5

Sample = Callable[..., tuple[Any, Any]]


def tell_policy() -> None:
    """From now on, in this process. May be called twice."""
    from vllm.v1.sample.sampler import Sampler

    wrap(Sampler, of_sampler)
    try:
        from vllm.v1.worker.gpu.sample.sampler import Sampler as NewerSampler
    except ImportError:  # its kernels are not there, and so it does not run
        return
    wrap(NewerSampler, of_newer_sampler)


def wrap(sampler: Any, how: Callable[[Sample], Sample]) -> None:
    if not hasattr(sampler, _MARK):
        sampler.sample = how(sampler.sample)
        setattr(sampler, _MARK, True)


def of_sampler(original: Sample) -> Sample:
    """Its `sample` gives log-probabilities beside the tokens, and divides the logits in place."""

    def sample(self: Any, logits: torch.Tensor, sampling_metadata: Any, *args: Any, **more: Any) -> tuple[Any, Any]:
        told = _of_policy(logits, sampling_metadata.temperature) if _truncates(sampling_metadata) else None
        tokens, processed = original(self, logits, sampling_metadata, *args, **more)
        return tokens, processed if told is None or processed is None else told

    return sample


def _truncates(metadata: Any) -> bool:
    if metadata.all_greedy:
        return False
    if metadata.top_k is not None or metadata.top_p is not None:
        return True
    return any(getattr(one, "min_p_count", 0) for one in metadata.logitsprocs.argmax_invariant)


def _of_policy(logits: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    scaled = logits / torch.where(temperature < _GREEDY, 1.0, temperature).unsqueeze(1)
    return scaled.log_softmax(-1, dtype=torch.float32)


def of_newer_sampler(original: Sample) -> Sample:
    """Its `sample` gives logits beside the tokens, which its caller makes log-probabilities of."""

    def sample(self: Any, logits: torch.Tensor, rows: Any, requests: Any, numbers: Any, *args: Any, **more: Any) -> Any:
        tokens, processed = original(self, logits, rows, requests, numbers, *args, **more)
        states = self.sampling_states
        if states.get_top_k_top_p(rows, numbers) == (None, None) and not (states.min_p.np[numbers] != 0.0).any():
            return tokens, processed
        scaled = torch.empty_like(logits, dtype=torch.float32).copy_(logits)
        states.apply_temperature(scaled, rows, numbers)
        return tokens, scaled

    return sample
