"""The forward pass of plain decoders on the CPU, written out: the parameters of the transformers model, in fewer and
larger operations than its modules take. On a small model the modules cost more than the arithmetic.

Products that share their input are one, and their matrices are copies that oneDNN has packed: two to three times faster
for a few rows. Where a norm, a scale or a bias can be multiplied into a matrix, it is. The two numbers that a position
turns lie side by side in our queries and keys, as one complex number. Results for a row do not depend on the other
rows, if there are at least MIN_ROWS; oneDNN needs no more on any processor (tests/builtin/test_exactness.py).

Rules it keeps:
- The parameters are neither changed nor moved. The copies are made and dropped as a whole (`pack`, `drop`), and are
  stale from a change of the parameters until they are packed again. They take as much memory as the matrices.
- A model that is not known to be a plain decoder (`find`) runs through its own modules, as every model does on a GPU.

Left out: soft-capped and scaled layers (Gemma), layers without positions (SmolLM3), experts, other types than float32.
"""

from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.functional import embedding, silu

from polyrl.engines.builtin.attention import AttentionStep, PagedKeysAndValues, attend_parts
from polyrl.engines.builtin.model_config import FIXED_ROTATIONS

PLAIN_DECODERS = frozenset({"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"})

Tensor = torch.Tensor
_reorder: Any = getattr(torch.ops.mkldnn, "_reorder_linear_weight", None)
_multiply: Any = getattr(getattr(torch.ops.mkldnn, "_linear_pointwise", None), "default", None)


class Matrix(NamedTuple):
    """Packed, with oneDNN."""

    packed: Tensor
    bias: Tensor | None

    def times(self, rows: Tensor) -> Tensor:
        return _multiply(rows, self.packed, self.bias, "none", [], "")


class _Layer(NamedTuple):
    inputs: Matrix
    """The merged projection of queries, keys and values, in this order; queries and keys in pairs."""
    head_norm: Tensor | None
    """(heads + kv heads, dim): of queries and keys, in pairs."""
    window: int | None
    output: Matrix
    gate_and_up: Matrix
    down: Matrix


class Decoder:
    """The forward pass of a model that `find` knows. At first no matrix is packed."""

    def __init__(self, model: Any) -> None:
        config = model.config.get_text_config()
        self._model = model
        self._num_heads: int = config.num_attention_heads
        self._num_kv: int = config.num_key_value_heads
        self._dim: int = getattr(config, "head_dim", None) or config.hidden_size // self._num_heads
        self._eps = torch.tensor(config.rms_norm_eps)
        self._layers: list[_Layer] = []
        self._head: Matrix | None = None
        self._has_numbers = True
        self._pairs = torch.arange(self._dim).view(2, -1).t().flatten()
        """Which number of a head comes where: each of the first half before its partner of the second."""
        self._rotations = torch.empty((0, 1, self._dim // 2), dtype=torch.complex64)
        """The rotations, by position."""

    @staticmethod
    def find(model: Any) -> "Decoder | None":
        return Decoder(model) if _is_plain(model) else None

    # Weights

    @torch.inference_mode()
    def pack(self) -> None:
        """Pack copies of the current parameters."""
        self.drop()  # not a third copy beside the parameters and the old one
        model = self._model.model
        self._layers = [self._pack_layer(layer) for layer in model.layers]
        self._head = _merge([self._model.lm_head], norm=model.norm.weight)
        self._has_numbers = all(_gives_numbers(layer.self_attn) for layer in model.layers)

    def drop(self) -> None:
        self._layers, self._head = [], None

    def _pack_layer(self, layer: Any) -> _Layer:
        attention, mlp = layer.self_attn, layer.mlp
        scale, head_norm = float(attention.scaling), None
        if hasattr(attention, "q_norm"):
            norms = (
                (attention.q_norm.weight * scale).expand(self._num_heads, -1),
                attention.k_norm.weight.expand(self._num_kv, -1),
            )
            scale, head_norm = 1.0, torch.cat(norms)[:, self._pairs]
        return _Layer(
            _merge(
                [attention.q_proj, attention.k_proj, attention.v_proj],
                norm=layer.input_layernorm.weight,
                first_scale=scale,
                order=self._order(),
            ),
            head_norm,
            window_of(attention),
            _merge([attention.o_proj]),
            _merge([mlp.gate_proj, mlp.up_proj], norm=layer.post_attention_layernorm.weight),
            _merge([mlp.down_proj]),
        )

    def _order(self) -> Tensor:
        """Return the order of the rows that make queries, keys and values."""
        heads = torch.arange(self._num_heads + 2 * self._num_kv).unsqueeze(1) * self._dim
        order = heads + torch.arange(self._dim)
        order[: -self._num_kv] = heads[: -self._num_kv] + self._pairs
        return order.flatten()

    # Steps

    @torch.inference_mode()
    def reach(self, num_positions: int) -> None:
        """Prepare the rotations of the first `num_positions` positions, before a step at any of them."""
        if num_positions > len(self._rotations):
            wanted = torch.arange(max(1024, 2 * num_positions)).unsqueeze(0)
            cos, sin = self._model.model.rotary_emb(self._eps, wanted)
            half = self._dim // 2
            self._rotations = torch.complex(cos[0, :, :half], sin[0, :, :half]).unsqueeze(1)

    def logits(
        self, tokens: Tensor, positions: Tensor, rows: Tensor | None, step: AttentionStep, paged: PagedKeysAndValues
    ) -> Tensor:
        """Return the logits of `rows`; None: of all rows."""
        assert self._head is not None, "it is asleep"
        num_rows, num_heads, num_turned = len(tokens), self._num_heads, self._num_heads + self._num_kv
        rotations = self._rotations.index_select(0, positions)
        x = embedding(tokens, self._model.model.embed_tokens.weight)
        for number, layer in enumerate(self._layers):
            heads = layer.inputs.times(self._normed(x)).view(num_rows, -1, self._dim)
            turned = heads[:, :num_turned]
            if layer.head_norm is not None:
                turned.mul_(self._shrinking(turned)).mul_(layer.head_norm)
            torch.view_as_complex(turned.unflatten(2, (-1, 2))).mul_(rotations)
            paged.write(number, step.cells, heads[:, num_heads:])
            found = attend_parts(heads[:, :num_heads], number, step, paged, layer.window)
            x = x + layer.output.times(found.view(num_rows, -1))
            gate, up = layer.gate_and_up.times(self._normed(x)).chunk(2, -1)
            x += layer.down.times(silu(gate).mul_(up))
        paged.has_numbers &= bool(x.sum().isfinite())
        logits = self._head.times(self._normed(x if rows is None else x.index_select(0, rows)))
        return logits if self._has_numbers else logits.fill_(torch.nan)

    def _normed(self, x: Tensor) -> Tensor:
        """Root mean square 1, over the last dimension."""
        return x * self._shrinking(x)

    def _shrinking(self, x: Tensor) -> Tensor:
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        return torch.addcmul(self._eps, length, length, value=1 / x.shape[-1]).rsqrt_()


def window_of(attention: Any) -> int | None:
    """Return a layer's sliding window. Mistral's modules look it up as they run, Qwen's know it, and Llama's have none,
    whatever is configured."""
    if type(attention).__name__ == "MistralAttention":
        return attention.config.sliding_window
    return getattr(attention, "sliding_window", None)


def _gives_numbers(attention: Any) -> bool:
    """Return whether the value projection is finite. The cache drops NaN values, so a row would not show them."""
    return all(bool(one.isfinite().all()) for one in attention.v_proj.parameters())


def _merge(
    parts: list[nn.Linear], *, norm: Tensor | None = None, first_scale: float = 1.0, order: Tensor | None = None
) -> Matrix:
    """Merge `parts` into one matrix. `norm` scales its input, `first_scale` the result of the first part; `order` is
    the order of the rows."""
    weight = torch.cat([one.weight for one in parts])
    if norm is not None:
        weight *= norm
    bias = torch.cat([one.bias for one in parts]) if parts[0].bias is not None else None
    for one in (weight, bias):
        if one is not None and first_scale != 1.0:
            one[: parts[0].out_features] *= first_scale
    if order is not None:
        weight, bias = weight[order], None if bias is None else bias[order]
    return pack(weight, bias)


def pack(weight: Tensor, bias: Tensor | None) -> Matrix:
    return Matrix(_reorder(weight, None), bias)


def can_pack() -> bool:
    return torch.backends.mkldnn.is_available() and _reorder is not None and _multiply is not None


def _is_plain(model: Any) -> bool:
    parameter = next(model.parameters())
    if type(model).__name__ not in PLAIN_DECODERS or (parameter.dtype, parameter.device.type) != (torch.float32, "cpu"):
        return False
    config = model.config.get_text_config()
    if not can_pack() or config.hidden_act != "silu" or model.model.rotary_emb.rope_type not in FIXED_ROTATIONS:
        return False
    return all(_is_plain_layer(layer) for layer in model.model.layers) and type(model.lm_head) is nn.Linear


def _is_plain_layer(layer: Any) -> bool:
    """Return whether all projections are plain linear layers, without an adapter."""
    attention, mlp = layer.self_attn, layer.mlp
    groups = (
        [attention.q_proj, attention.k_proj, attention.v_proj],
        [attention.o_proj],
        [mlp.gate_proj, mlp.up_proj],
        [mlp.down_proj],
    )
    return all(
        all(type(one) is nn.Linear for one in group) and len({one.bias is None for one in group}) == 1
        for group in groups
    )
