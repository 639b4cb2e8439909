"""What a server's machine is like, as far as its flags depend on it."""

import os
import sys
from pathlib import Path

from polyrl.engines.served.server import ServedConfig

_GPU_FILES = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")
_HIDERS = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")
_CPU_KV_TOKENS = 32_768
_CPU_SLOTS = 64


def is_cpu(config: ServedConfig) -> bool:
    """Whether the server is to compute on the CPU. We have no library that could ask a GPU; its driver's files tell."""
    if config.device != "auto":
        return config.device == "cpu"
    hidden = any(os.environ.get(name, "all") in ("", "-1") for name in _HIDERS)
    return hidden or not any(Path(one).exists() for one in _GPU_FILES)


def python_of(config: ServedConfig) -> str:
    return config.python or sys.executable


def cpu_kv_tokens(config: ServedConfig) -> int:
    return _CPU_KV_TOKENS if config.kv_tokens is None else config.kv_tokens


def slots(config: ServedConfig) -> int | None:
    """None: the server's own number, which is one for GPUs."""
    return _CPU_SLOTS if config.slots is None and is_cpu(config) else config.slots


def cpu_context(config: ServedConfig, model_context: int | None) -> int:
    """Prompt and answer together: no more than the model can, and than its cache can hold."""
    wanted = (config.max_context, model_context, cpu_kv_tokens(config))
    return min(one for one in wanted if one is not None)
