"""Loading a model from a Hugging Face directory, and what the engine must know of it. Which run: model_config.py."""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

from polyrl.config.model_dir import token_ids
from polyrl.engines.builtin import attention
from polyrl.engines.builtin.config import choose_device
from polyrl.engines.builtin.model_config import (
    ARCHITECTURES,
    FIXED_ROTATIONS,
    files_of_weights,
    load_config,
    read_object,
    rope_kinds,
    slides,
)
from polyrl.engines.builtin.quiet import quiet
from polyrl.engines.engine import EngineError
from polyrl.errors import one_line

log = logging.getLogger("polyrl.engines.builtin")

_RENAMED = frozenset({"Qwen3MoeForCausalLM", "MixtralForCausalLM"})
"""Their experts have other names in files than in the model."""

_LEFT_IN_FILES = "rotary_emb.inv_freq"
"""By older versions of transformers; newer ones pass over it."""
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_TYPES_OF_WEIGHTS = ("F32", "BF16", "F16", "F64")
"""In a file: transformers would convert any, quantised ones too, without their scales."""


class Loaded(NamedTuple):
    model: Any
    name: str
    vocab: int
    max_context: int
    num_layers: int
    num_kv_heads: int
    head_dim: int
    end_ids: frozenset[int]
    logit_softcap: float | None
    has_experts: bool
    rows: str = "packed"
    """How a trainer runs samples (trainer/families.py)."""
    logit_scale: float = 1.0
    """The factor by which the model multiplies its logits."""

    def token_bytes(self, number_bytes: int) -> int:
        """Return the bytes of a token's keys and values, in all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * number_bytes

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the logits of the last layer's results, as the model's own forward pass has them; soft-capped ones in
        float32, as a trainer has them (trainer/logprobs.py).
        """
        logits = self.model.lm_head(hidden)
        cap = self.logit_softcap
        return logits if cap is None else torch.tanh(logits.float() / cap) * cap


def load(folder: str, dtype: str, device: str) -> Loaded:
    """Load a model. `device` may be `auto`: a GPU where there is one. Raises EngineError, in a line that names the
    directory."""
    attention.register()
    return describe(load_weights(folder, load_config(folder), dtype, device, attention.NAME), folder)


def load_weights(folder: str, config: Any, dtype: str, device: str, attends: str | None = None) -> Any:
    """Return the model. `attends`: an attention that is registered, or the model's own. Raises EngineError."""
    device = choose_device(device)
    _check_device(device)
    _check_types(folder)
    attention.register()
    with quiet():
        try:
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                folder,
                config=config,
                local_files_only=True,
                use_safetensors=True,
                ignore_mismatched_sizes=True,  # they are refused below, by name
                dtype=DTYPES[dtype],
                attn_implementation=attends,
                output_loading_info=True,
            )
        except Exception as error:  # transformers has no type of its own for what it cannot load
            raise EngineError(f"{folder}: its weights cannot be loaded: {one_line(error)}") from error
    model, report = loaded
    _check_tensors(folder, report)
    try:
        return model.to(device).eval()
    except (RuntimeError, AssertionError) as error:
        raise EngineError(f"device {device} cannot be used: {one_line(error)}") from error


def check_headers(folder: str, shapes: Mapping[str, Sequence[int]]) -> None:
    """Check that these tensors are those of config.json, by name and shape; no weight is read. Raises EngineError."""
    config = load_config(folder, any_family=True)
    if config.architectures[0] in _RENAMED:
        return
    with quiet(), torch.device("meta"):
        try:
            model: Any = AutoModelForCausalLM.from_config(config)
        except Exception as error:  # as in `load`
            raise EngineError(f"{folder}: its config.json cannot be used: {one_line(error)}") from error
    if config.architectures[0] not in ARCHITECTURES:
        return  # what its tensors are called in files, transformers knows when it loads them
    load_config(folder)
    wanted = {name: tuple(one.shape) for name, one in model.state_dict().items()}
    tied = set(model._tied_weights_keys or ()) if config.tie_word_embeddings else set()
    report = {
        "missing_keys": wanted.keys() - shapes.keys() - tied,
        "unexpected_keys": {name for name in shapes.keys() - wanted.keys() if not name.endswith(_LEFT_IN_FILES)},
        "mismatched_keys": {name for name in wanted.keys() & shapes.keys() if tuple(shapes[name]) != wanted[name]},
    }
    _check_tensors(folder, report)


def _check_device(device: str) -> None:
    try:
        kind = torch.device(device).type
    except RuntimeError as error:
        raise EngineError(f"device {device} cannot be used: {one_line(error)}") from error
    if kind not in ("cpu", "cuda"):
        raise EngineError(f"device {device} cannot be used: expected cpu, cuda or auto")


def why_not_on_gpu(
    loaded: Loaded, block_tokens: int, *, batch_invariant: bool, capability: tuple[int, int], has_windows: bool
) -> str:
    """Why our kernels cannot run the model, or not as asked; empty when they can.

    `capability` of the GPU; `has_windows`: whether torch's flash attention has them.
    """
    config, dtype = loaded.model.config.get_text_config(), next(loaded.model.parameters()).dtype
    if getattr(config, "attn_logit_softcapping", None) is not None:
        return "soft-capped attention (attn_logit_softcapping) is not supported on a GPU"
    turning = rope_kinds(config) - set(FIXED_ROTATIONS)
    if turning:
        return f"rope_type {turning.pop()} is not supported on a GPU: its angles depend on the longest in a step"
    if not _is_power_of_two(loaded.head_dim):
        return f"head_dim: got {loaded.head_dim}, expected a power of two from 16 on, on a GPU"
    if not _is_power_of_two(block_tokens):
        return f"block_tokens: got {block_tokens}, expected a power of two from 16 on, on a GPU"
    if slides(config) and not has_windows and dtype != torch.float32:
        return "sliding windows in half precision need a newer torch on a GPU"
    if loaded.has_experts and (dtype != torch.bfloat16 or capability < (9, 0)):
        return "a mixture of experts needs dtype=bfloat16 and compute capability 9.0 on a GPU: others have no graph"
    if loaded.has_experts and batch_invariant:
        return "batch_invariant: experts choose their rows themselves, and a mixture's answers depend on the batch"
    return ""


def _is_power_of_two(number: int) -> bool:
    return number >= 16 and number & (number - 1) == 0


def find_tokenizer(folder: str) -> Any:
    """Return the directory's tokenizer; None when there is none, or none that can be used."""
    try:
        return load_tokenizer(folder)
    except EngineError as error:
        log.warning("%s", error)
        return None


def load_tokenizer(folder: str) -> Any:
    """Load the tokenizer; None if the directory has none. Raises EngineError for one that cannot be used."""
    if not any((Path(folder) / name).is_file() for name in _TOKENIZER_FILES):
        return None
    try:
        with quiet():
            return AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # as in `load`
        for name in ("tokenizer.json", "tokenizer_config.json"):
            if (Path(folder) / name).is_file():
                read_object(folder, name)  # which of them it is, transformers does not say
        raise EngineError(f"{folder}: its tokenizer cannot be used: {one_line(error)}") from error


def _check_types(folder: str) -> None:
    for name in files_of_weights(folder):
        try:
            with safe_open(Path(folder) / name, "pt") as file:
                types = {tensor: file.get_slice(tensor).get_dtype() for tensor in file.keys()}  # noqa: SIM118
        except (OSError, SafetensorError):
            return  # transformers says it
        for tensor, dtype in types.items():
            if dtype not in _TYPES_OF_WEIGHTS:
                raise EngineError(f"{folder}: {tensor}: weights of type {dtype} are not supported")


def _check_tensors(folder: str, report: dict[str, Any]) -> None:
    """Check keys. A mismatched one comes with its two shapes."""
    for what in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        found = sorted(one if isinstance(one, str) else one[0] for one in report.get(what) or ())
        if found:
            some = ", ".join(found[:3])
            raise EngineError(f"{folder}: {what.replace('_', ' ')} in its weights: {some}; {len(found)} in all")


def describe(model: Any, name: str) -> Loaded:
    """Describe a model that is loaded already, for example a trainer's."""
    config = model.config.get_text_config()
    attention.register()
    if config._attn_implementation != attention.NAME:
        model.set_attn_implementation(attention.NAME)
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    ends = model.generation_config.eos_token_id if model.generation_config is not None else None
    return Loaded(
        model=model,
        name=name,
        vocab=config.vocab_size,
        max_context=config.max_position_embeddings,
        num_layers=config.num_hidden_layers,
        num_kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=head_dim,
        end_ids=token_ids(config.eos_token_id if ends is None else ends),
        logit_softcap=getattr(config, "final_logit_softcapping", None),
        has_experts=any(getattr(config, name, None) for name in ("num_experts", "num_local_experts")),
    )
