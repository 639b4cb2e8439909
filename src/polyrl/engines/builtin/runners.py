"""Which runner a model gets: by its device, if that can run it and has memory for the cache."""

import math

import torch

from polyrl.engines.builtin import models, packed
from polyrl.engines.builtin.config import BuiltinConfig
from polyrl.engines.builtin.kv_cache import KvCache
from polyrl.engines.builtin.models import Loaded
from polyrl.engines.builtin.runner import Runner
from polyrl.engines.builtin.steps import StepRunner
from polyrl.engines.engine import EngineError
from polyrl.errors import one_line
from polyrl.weights.buffers import available_bytes


def make(loaded: Loaded, config: BuiltinConfig, cache: KvCache, max_context: int, invariant_tokens: int) -> StepRunner:
    """Raises EngineError, in a line."""
    parameter = next(loaded.model.parameters())
    is_on_gpu = parameter.is_cuda
    num_tokens = cache.num_blocks * cache.block_tokens
    size = num_tokens * loaded.token_bytes(parameter.element_size())
    try:
        if is_on_gpu:
            return _on_gpu(loaded, config, cache, max_context, invariant_tokens)
        if size > (free := _free_bytes()):
            raise MemoryError(f"{free:,} bytes are free")
        return Runner(loaded, cache.num_blocks, cache.block_tokens)
    except (RuntimeError, MemoryError) as error:  # torch's own is a RuntimeError, of a GPU too
        raise EngineError(
            f"kv_tokens: no cache of {num_tokens:,} tokens, {size:,} bytes, could be made: {one_line(error)}"
        ) from error


def _free_bytes() -> float:
    """Return the host's free memory. The host grants more than it has, layer by layer, until it kills a process."""
    try:
        return available_bytes()
    except OSError:  # not Linux
        return math.inf


def _on_gpu(
    loaded: Loaded, config: BuiltinConfig, cache: KvCache, max_context: int, invariant_tokens: int
) -> StepRunner:
    why_not = models.why_not_on_gpu(
        loaded,
        cache.block_tokens,
        batch_invariant=config.batch_invariant,
        capability=torch.cuda.get_device_capability(next(loaded.model.parameters()).device),
        has_windows=packed.has_windows(),
    )
    if why_not:
        raise EngineError(f"{loaded.name}: {why_not}")
    from polyrl.engines.builtin.cuda.runner import CudaRunner

    return CudaRunner(
        loaded,
        cache.num_blocks,
        cache.block_tokens,
        config.slots,
        max_context,
        compile_layers=config.compile,
        invariant_tokens=invariant_tokens,
        offload=config.in_sleep == "offload",
    )
