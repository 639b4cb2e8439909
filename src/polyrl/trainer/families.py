"""Models that the builtin engine does not run: any causal language model of transformers, trained while a served engine
generates.

A model is tried once, on a few tokens, when it is loaded. That shows how the trainer may run it:

    packed    several samples in one row, with our attention, as models that the builtin engine runs
    padded    samples of about equal length side by side, with the model's own attention; padding comes last, so that no
              real token sees it
    alone     one sample at a time, where the angles of positions depend on the longest sample

Rules kept here: what was tried must agree with the model's own forward pass on one sample, or it is not used. A model
whose tokens see later ones, or whose logits are no linear function of its last hidden states, is refused in one line.
Dropout is off, as for every model. `in_files` gives tensors the names that they have in the model's own files, which
are those that vLLM and SGLang load.
"""

import inspect
from collections.abc import Iterator
from typing import Any

import torch
from transformers.core_model_loading import revert_weight_conversion
from transformers.modeling_layers import GradientCheckpointingLayer

from polyrl.config.model_dir import read_or_nothing
from polyrl.engines.builtin import attention, models, packed
from polyrl.engines.builtin.model_config import ARCHITECTURES, load_config, rope_kinds
from polyrl.engines.builtin.models import Loaded
from polyrl.errors import UserError, one_line

Tensor = torch.Tensor

LONGEST_DECIDES = frozenset({"dynamic", "longrope"})
_OWN_MASKS = ("sliding_window", "attention_chunk_size")
_UNBOUNDED = 1 << 20
_FIRST, _SECOND = 5, 7
"""The number of tokens of the samples that a model is tried on."""
_APART = {torch.float32: 1e-3, torch.float64: 1e-6}
_APART_IN_HALF = 0.06
"""How far two ways to compute the same may be apart, as a share of the numbers' spread."""


def is_of_engine(folder: str) -> bool:
    """Return whether the builtin engine runs the model too. True for a directory that says nothing."""
    names = read_or_nothing(folder, "config.json").get("architectures")
    return not (isinstance(names, list) and names and isinstance(names[0], str)) or names[0] in ARCHITECTURES


def load(folder: str, dtype: str, device: str) -> Loaded:
    """Load a model, and find out how it can be run. Raises EngineError, or UserError; both name the directory."""
    config = load_config(folder, any_family=True)
    for key, value in config.to_dict().items():
        if "drop" in key and isinstance(value, float):
            setattr(config, key, 0.0)
    model: Any = models.load_weights(folder, config, dtype, device)
    if model.base_model is model and isinstance(getattr(model, "model", None), torch.nn.Module):
        model.base_model_prefix = "model"  # the text model of a larger one may name its decoder as that one does
    loaded = _describe(model, folder)
    try:
        with torch.no_grad():
            _check_causal(loaded)
            scale = _scale_of_logits(loaded)
            return loaded._replace(rows=_rows(loaded), logit_scale=scale)
    except (TypeError, ValueError, LookupError, AttributeError, RuntimeError) as error:  # code of any family
        kind, why = type(model).__name__, one_line(error)
        raise UserError(f"{folder}: {kind} cannot be trained: it fails on a few tokens: {why}") from error


def layers_of(model: Any) -> list[Any]:
    """Return the layers of a decoder of any family, outermost ones alone."""
    found: list[Any] = []
    inner: set[int] = set()
    for one in model.base_model.modules():
        if isinstance(one, GradientCheckpointingLayer) and id(one) not in inner:
            found.append(one)
            inner.update(id(part) for part in one.modules())
    return found


def in_files(model: Any, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield a parameter as the tensors that it is in the files of its model: transformers holds all experts of a layer
    in one."""
    yield from revert_weight_conversion(model, {name: tensor}).items()


def _describe(model: Any, folder: str) -> Loaded:
    config = model.config.get_text_config()
    head = model.get_output_embeddings()
    if getattr(head, "weight", None) is None or head.weight.dim() != 2 or not layers_of(model):
        raise UserError(f"{folder}: {type(model).__name__} cannot be trained: no decoder layers, or no output matrix")
    heads = getattr(config, "num_attention_heads", None)
    heads = heads if isinstance(heads, int) and heads > 0 else 1
    return Loaded(
        model=model,
        name=folder,
        vocab=config.vocab_size,
        max_context=getattr(config, "max_position_embeddings", None) or _UNBOUNDED,
        num_layers=config.num_hidden_layers,
        num_kv_heads=heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        end_ids=frozenset(),
        logit_softcap=getattr(config, "final_logit_softcapping", getattr(config, "logits_soft_cap", None)),
        has_experts=any(getattr(config, name, None) for name in ("num_experts", "num_local_experts")),
    )


def _tokens(loaded: Loaded, num: int, seed: int) -> Tensor:
    drawn = torch.randint(0, loaded.vocab, (1, num), generator=torch.Generator().manual_seed(seed))
    return drawn.to(next(loaded.model.parameters()).device)


def _hidden(loaded: Loaded, tokens: Tensor, **more: Any) -> Tensor:
    return loaded.model.base_model(input_ids=tokens, use_cache=False, **more)[0]


def _agree(one: Tensor, other: Tensor) -> bool:
    allowed = _APART.get(other.dtype, _APART_IN_HALF) * float(other.float().std())
    return one.shape == other.shape and float((one.float() - other.float()).abs().max()) <= allowed


def _scale_of_logits(loaded: Loaded) -> float:
    """Return what a model multiplies its logits by, 1 for most."""
    tokens = _tokens(loaded, _SECOND, 1)
    said = loaded.model(input_ids=tokens, use_cache=False).logits.float()
    plain = loaded.model.get_output_embeddings()(_hidden(loaded, tokens)).float()
    cap = loaded.logit_softcap
    if cap is not None:
        plain = torch.tanh(plain / cap) * cap
    scale = 1.0 if cap is not None else float((said * plain).sum() / plain.square().sum())
    scale = 1.0 if abs(scale - 1) < 1e-2 and _agree(plain, said) else scale
    if scale <= 0 or not _agree(plain * scale, said):
        kind = type(loaded.model).__name__
        raise UserError(
            f"{loaded.name}: {kind} cannot be trained: its logits are no linear function of its last hidden states"
        )
    return scale


def _check_causal(loaded: Loaded) -> None:
    tokens = _tokens(loaded, _SECOND, 1)
    other = tokens.clone()
    other[0, -1] = (other[0, -1] + 1) % loaded.vocab
    if not _agree(_hidden(loaded, other)[:, :-1], _hidden(loaded, tokens)[:, :-1]):
        raise UserError(f"{loaded.name}: {type(loaded.model).__name__} cannot be trained: its tokens see later ones")


def _rows(loaded: Loaded) -> str:
    """Choose how samples go through a model. Its attention is ours afterwards if they are packed."""
    config = loaded.model.config.get_text_config()
    if rope_kinds(config) & LONGEST_DECIDES:
        return "alone"
    first, second = _tokens(loaded, _FIRST, 2), _tokens(loaded, _SECOND, 1)
    wanted = torch.cat([_hidden(loaded, first), _hidden(loaded, second)], 1)
    if _may_be_packed(loaded.model, config):
        before = config._attn_implementation
        loaded.model.set_attn_implementation(attention.NAME)
        if _agree(_packed(loaded, first, second), wanted):
            return "packed"
        loaded.model.set_attn_implementation(before)
    beside = torch.cat([torch.cat([first, second[:, : _SECOND - _FIRST]], 1), second])
    found = _hidden(loaded, beside)
    if not _agree(torch.cat([found[:1, :_FIRST], found[1:]], 1), wanted):
        raise UserError(f"{loaded.name}: {type(loaded.model).__name__} cannot be trained: samples see each other")
    return "padded"


def _may_be_packed(model: Any, config: Any) -> bool:
    """Return whether it is worth trying. Anything that a mask alone tells layers, beside which tokens are earlier, our
    attention would not know."""
    kinds = set(getattr(config, "layer_types", None) or ()) - {"full_attention"}
    masks = kinds or any(getattr(config, key, None) for key in _OWN_MASKS)
    takes = inspect.signature(model.base_model.forward).parameters
    return bool(model._supports_attention_backend) and not masks and "position_ids" in takes


def _packed(loaded: Loaded, *samples: Tensor) -> Tensor:
    tokens = torch.cat(samples, 1)
    positions = torch.cat([torch.arange(one.shape[1], device=one.device) for one in samples]).unsqueeze(0)
    like = next(loaded.model.parameters())
    layout = packed.lay_out([one.shape[1] for one in samples], like.device, flash=False)
    mask = torch.zeros((1, 1, 1, 1), dtype=like.dtype, device=like.device)
    try:
        return _hidden(loaded, tokens, position_ids=positions, attention_mask=mask, pack=layout)
    except (TypeError, ValueError, RuntimeError, AttributeError) as error:  # of a family that takes none of these
        if isinstance(error, torch.OutOfMemoryError):
            raise
        return tokens[:0]
