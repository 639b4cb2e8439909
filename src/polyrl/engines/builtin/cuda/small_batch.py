"""A decode step of few samples on one NVIDIA GPU, written out for plain decoders: five kernels a layer.

With few samples a step is the time to read the weights, and the modules' thirteen kernels a layer leave the memory idle
between them. Here norms, biases, rotations, activations and residual sums are part of the five:

    queries, keys, values     norm, product, bias
    attention                 head norms, rotation, the cache, the shares of a context put together by the last of them
    attention's output        product, residual
    gate and up               norm, product, activation
    down                      product, residual

Each kernel is launched while the one before it runs (programmatic dependent launch), asks for its weights, which depend
on no other kernel, and only then waits. The parameters are those of the modules, merged (merging.py), and read where
they are.

Rows do not depend on each other, and are added up in one order whatever their number.

Left out: everything that `find` does not know, which runs through its modules (runner.py).
"""

from typing import Any, NamedTuple

import torch

# Triton's kernels are not Python that a type checker knows: see kernels.py.
# pyright: reportMissingImports=false, reportCallIssue=false, reportArgumentType=false
# pyright: reportOperatorIssue=false, reportIndexIssue=false
import triton
from torch import nn

from polyrl.engines.builtin.cuda import small_kernels
from polyrl.engines.builtin.cuda.kernels import EVERYTHING, DecodeStep
from polyrl.engines.builtin.cuda.merging import merged
from polyrl.engines.builtin.decoder import PLAIN_DECODERS, window_of

Tensor = torch.Tensor

MOST_ROWS = 16
"""The rows of one tile of the tensor cores."""
_ONE_BY_ONE = 2
"""Up to this many rows are multiplied without tensor cores, which are slower for them."""
_MOST_SPLITS = 16
_NUM_PROGRAMS = 132
"""Programs that fill a GPU: a processor each, of an H200."""
_COLS = 64
"""Columns of one program of the tensor cores: what they multiply at once."""


class Tuning(NamedTuple):
    """How a product of the tensor cores runs; measured on an H200 (docs/results/builtin-engine.md)."""

    step: int
    """Input numbers at a time."""
    stages: int
    splits: int
    """Shares of a sum."""


class SmallBatch:
    """The forward pass of a model that `find` knows, from tokens to logits."""

    def __init__(self, model: Any, num_positions: int) -> None:
        config = model.config.get_text_config()
        self._model = model
        self._num_heads: int = config.num_attention_heads
        self._num_kv: int = config.num_key_value_heads
        self._eps: float = config.rms_norm_eps
        table = model.model.embed_tokens.weight
        self._is_dependent = table.is_cuda and torch.cuda.get_device_capability(table.device) >= (9, 0)
        self._launch = {"launch_pdl": True} if self._is_dependent else {}
        cos, sin = model.model.rotary_emb(table[:1], torch.arange(num_positions, device=table.device).unsqueeze(0))
        self._half = cos.shape[-1] // 2
        self._cos, self._sin = (one[0, :, : self._half].contiguous() for one in (cos, sin))
        layer = model.model.layers[0]
        widths = [(merged(layer.self_attn.q_proj) or (table,))[0].shape[0], config.hidden_size]
        self._squares = table.new_empty((config.hidden_size // _COLS, MOST_ROWS), dtype=torch.float32)
        self._arrived, self._waiting = (
            torch.zeros(num, dtype=torch.int32, device=table.device)
            for num in (max(widths) // _COLS, MOST_ROWS * self._num_kv)
        )
        self._parts = table.new_empty(_MOST_SPLITS * MOST_ROWS * max(widths), dtype=torch.float32)

    @staticmethod
    def find(model: Any, num_positions: int) -> "SmallBatch | None":
        """After its products are merged."""
        return SmallBatch(model, num_positions) if _is_plain(model) else None

    def logits(self, tokens: Tensor, step: DecodeStep) -> Tensor:
        """Return (rows, vocabulary)."""
        model = self._model.model
        table = model.embed_tokens.weight
        width, num = table.shape[1], len(tokens)
        x = table.new_empty((num, width))
        wide = triton.next_power_of_2(width)
        small_kernels.embed_kernel[(num,)](tokens, table, x, self._squares, ROWS=MOST_ROWS, K=width, WIDE=wide)
        num_tiles = 1
        for layer in model.layers:
            attention, mlp = layer.self_attn, layer.mlp
            heads = self._times(x, merged(attention.q_proj), layer.input_layernorm.weight, num_tiles=num_tiles)
            found = self._attend(attention, heads, step)
            x = self._times(found, _plain(attention.o_proj), residual=x)
            num_tiles = width // _COLS
            norm = layer.post_attention_layernorm.weight
            inner = self._times(x, merged(mlp.gate_proj), norm, num_tiles=num_tiles, gated=True)
            x = self._times(inner, _plain(mlp.down_proj), residual=x)
        out = torch.empty_like(x)
        small_kernels.norm_kernel[(num,)](
            x, model.norm.weight, out, self._eps, K=width, WIDE=wide, DEPENDENT=self._is_dependent, **self._launch
        )
        return self._model.lm_head(out)

    def _times(
        self,
        x: Tensor,
        matrix: tuple[Tensor, Tensor | None] | None,
        norm: Tensor | None = None,
        residual: Tensor | None = None,
        num_tiles: int = 1,
        *,
        gated: bool = False,
    ) -> Tensor:
        assert matrix is not None, "it was not merged"
        weight, bias = matrix
        num, width = len(x), weight.shape[0] // (2 if gated else 1)
        out = x.new_empty((num, width))
        inputs = (x, weight if norm is None else norm, weight, weight if bias is None else bias)
        inputs = (*inputs, x if residual is None else residual, out)
        sizes = {"K": weight.shape[1], "N": width}
        parts = {"NORMED": norm is not None, "BIASED": bias is not None, "ADDED": residual is not None, "GATED": gated}
        if num <= _ONE_BY_ONE:
            step = min(2048, triton.next_power_of_2(weight.shape[1]))
            small_kernels.one_by_one_kernel[(width // 4,)](
                *inputs, self._eps, **sizes, ROWS=num, COLS=4, STEP=step, **parts, DEPENDENT=self._is_dependent,
                num_warps=4, **self._launch,
            )  # fmt: skip
            return out
        tuning = tune(weight.shape[1], width, gated=gated)
        small_kernels.tiles_kernel[(width // _COLS, tuning.splits)](
            *inputs, self._squares, self._parts, self._arrived, num, self._eps, **sizes, ROWS=MOST_ROWS, COLS=_COLS,
            STEP=tuning.step, SPLITS=tuning.splits, TILES=triton.next_power_of_2(num_tiles), NUM_TILES=num_tiles,
            **parts, PRECISION=_precision(x), DEPENDENT=self._is_dependent, num_warps=4, num_stages=tuning.stages,
            **self._launch,
        )  # fmt: skip
        return out

    def _attend(self, attention: Any, heads: Tensor, step: DecodeStep) -> Tensor:
        num, num_kv, dim, splits = len(heads), self._num_kv, 2 * self._half, step.splits
        group = self._num_heads // num_kv
        out = heads.new_empty((num, self._num_heads * dim))
        parts, sums = out, step.positions
        if splits > 1:
            parts = heads.new_empty((num, self._num_heads, splits, dim), dtype=torch.float32)
            sums = heads.new_empty((num, self._num_heads, splits, 2), dtype=torch.float32)
        norms = [
            getattr(attention, name).weight if hasattr(attention, name) else heads for name in ("q_norm", "k_norm")
        ]
        window = window_of(attention)
        small_kernels.attention_kernel[(num, num_kv, splits)](
            heads, *norms, self._cos, self._sin, attention.paged_keys, attention.paged_values, step.tables,
            step.positions, out, parts, sums, self._waiting, step.tables.stride(0), float(attention.scaling),
            self._eps, EVERYTHING if window is None else window,
            NUM_KV=num_kv, GROUP=group, ROWS=max(16, triton.next_power_of_2(group)), HALF=self._half,
            BLOCK=attention.paged_keys.shape[2], SPLITS=splits, NORMED=hasattr(attention, "q_norm"),
            PRECISION=_precision(heads), DEPENDENT=self._is_dependent, num_warps=1, num_stages=3, **self._launch,
        )  # fmt: skip
        return out


def tune(num_inputs: int, num_outputs: int, *, gated: bool) -> Tuning:
    """Return as many shares as fill the GPU, each of whole steps. A gated product has two matrices, and one share."""
    step = next(one for one in (256, 128, 64) if num_inputs % one == 0)
    if gated:
        return Tuning(step, 2, 1)
    stages = 3
    if num_inputs > 2 * num_outputs and num_inputs % 128 == 0:
        step, stages = 128, 6
    tiles, num_steps = num_outputs // _COLS, num_inputs // step
    shares = [one for one in range(1, _MOST_SPLITS + 1) if num_steps % one == 0]
    return Tuning(step, stages, min(shares, key=lambda one: abs(tiles * one - _NUM_PROGRAMS)))


def _precision(x: Tensor) -> str:
    return "ieee" if x.dtype == torch.float32 else "tf32"


def _plain(linear: nn.Linear) -> tuple[Tensor, Tensor | None]:
    return linear.weight, linear.bias


def _is_plain(model: Any) -> bool:
    """Return whether the model is a decoder as we know it: plain linear layers whose sizes are those of whole tiles."""
    if type(model).__name__ not in PLAIN_DECODERS or type(model.lm_head) is not nn.Linear:
        return False
    config = model.config.get_text_config()
    sizes = (config.hidden_size, config.intermediate_size, config.num_attention_heads * _head_dim(config))
    if config.hidden_act != "silu" or _head_dim(config) < 32 or any(size % _COLS for size in sizes):
        return False
    return all(_is_plain_layer(layer) for layer in model.model.layers)


def _head_dim(config: Any) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def _is_plain_layer(layer: Any) -> bool:
    inputs, gate_and_up = merged(layer.self_attn.q_proj), merged(layer.mlp.gate_proj)
    if inputs is None or gate_and_up is None or gate_and_up[1] is not None or inputs[0].shape[0] % _COLS:
        return False
    return type(layer.self_attn.o_proj) is nn.Linear and type(layer.mlp.down_proj) is nn.Linear
