"""The settings of the builtin engine, and those that follow from its device unless they are given."""

from typing import Annotated, Literal, NamedTuple

from msgspec import Meta, Struct

Dtype = Literal["float32", "bfloat16", "float16"]
MAX_SLOTS = 4096
MAX_DRAFT = 7


class BuiltinConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of the builtin engine. None: chosen by the device (`fit`)."""

    model: str
    """A Hugging Face directory."""
    dtype: Dtype | None = None
    device: str = "auto"
    """`auto` is `cuda` where there is one, otherwise `cpu`."""
    slots: Annotated[int, Meta(ge=1, le=MAX_SLOTS)] = 32
    """Samples that run at once."""
    kv_tokens: Annotated[int, Meta(ge=16)] = 65_536
    """Tokens that fit into the cache."""
    block_tokens: Annotated[int, Meta(ge=1, le=1024)] = 32
    chunk_tokens: Annotated[int, Meta(ge=1)] | None = None
    """Prompt tokens that are computed in one step at most, so that running samples do not wait long."""
    max_context: Annotated[int, Meta(ge=2)] | None = None
    """Prompt and answer together; none: what the model can."""
    threads: Annotated[int, Meta(ge=1, le=256)] = 1
    """CPU threads. Two on a busy machine have been seen to be 20 times slower than one."""
    batch_invariant: bool = False
    """On a GPU: a sample's tokens do not depend on the other samples of the batch; slower. On the CPU they never do."""
    compile: bool = True
    """On a GPU: compile the layers, which takes a while at the start. Off: slower, ready at once."""
    after_install: Literal["keep", "recompute"] = "recompute"
    """Whether running samples keep their KV cache when weights change, or recompute it."""
    in_sleep: Literal["keep", "offload"] = "keep"
    """Where weights are while a GPU's engine sleeps: where they were, or in the host's memory."""
    speculation: Literal["auto", "always", "off"] = "auto"
    """Verify drafts from other answers where that is measured to be faster; always, for measurements; or never."""
    draft_tokens: Annotated[int, Meta(ge=1, le=MAX_DRAFT)] = MAX_DRAFT
    """Tokens of a draft at most."""
    version: Annotated[int, Meta(ge=0)] | None = 0
    """Which version the directory holds; none: it may not be used before another is installed."""

    def __post_init__(self) -> None:
        if self.kv_tokens < self.block_tokens:
            raise ValueError(f"kv_tokens: got {self.kv_tokens}, expected at least block_tokens={self.block_tokens}")


class Fit(NamedTuple):
    """The settings that suit a device."""

    dtype: Dtype
    chunk_tokens: int
    """Running samples wait for a chunk: some 100 ms for the GPU's default and two billion parameters."""
    invariant_tokens: int = 0
    """The fixed size of prompt chunks for batch-invariant results on a GPU; 0: chunks of any size."""


_CPU = Fit("float32", 512)
_GPU = Fit("bfloat16", 16_384)
_INVARIANT_CHUNK = 512


def fit(config: BuiltinConfig, device: str) -> Fit:
    """Return the configured settings, with the device's defaults for the rest. `device` is not `auto`."""
    is_gpu = device.startswith("cuda")
    own = _GPU if is_gpu else _CPU
    chunk_tokens = own.chunk_tokens if config.chunk_tokens is None else config.chunk_tokens
    return Fit(
        own.dtype if config.dtype is None else config.dtype,
        chunk_tokens,
        min(chunk_tokens, _INVARIANT_CHUNK) if config.batch_invariant and is_gpu else 0,
    )


def choose_device(wanted: str) -> str:
    """Choose the device: `auto` is a GPU where there is one."""
    if wanted != "auto":
        return wanted
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"
