"""Which models run, and loading one from a Hugging Face directory. What does not is refused by name."""

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

from polyrl.engines.builtin import attention
from polyrl.engines.builtin.config import choose_device
from polyrl.engines.engine import EngineError
from polyrl.errors import one_line

log = logging.getLogger("polyrl.engines.builtin")

ARCHITECTURES = frozenset(
    {
        "LlamaForCausalLM",
        "MistralForCausalLM",
        "Qwen2ForCausalLM",
        "Qwen3ForCausalLM",
        "SmolLM3ForCausalLM",
        "GemmaForCausalLM",
        "Gemma2ForCausalLM",
        "Gemma3ForCausalLM",
        "Qwen3MoeForCausalLM",
        "MixtralForCausalLM",
    }
)
"""Standard decoders: their attention goes through transformers' interface, with nothing else that keeps state."""
_RENAMED = frozenset({"Qwen3MoeForCausalLM", "MixtralForCausalLM"})
"""Their experts have other names in files than in the model."""

_AT_LEAST_1 = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
    "query_pre_attn_scalar",
    "decoder_sparse_step",
    "num_experts_per_tok",
)
"""Keys of config.json."""
FIXED_ROTATIONS = ("default", "linear", "llama3", "yarn")
"""Kinds of positions whose angles depend on the position alone."""
_ROPE_TYPES = (*FIXED_ROTATIONS, "dynamic")
"""Within the model's context these turn a position by one angle, whoever else is in the step. longrope does not: its
angles follow from the longest sample."""

_INDEX = "model.safetensors.index.json"
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


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

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Of the last layer's results, as the model's own forward pass has them; soft-capped ones in float32, as a
        trainer has them (trainer/logprobs.py).
        """
        logits = self.model.lm_head(hidden)
        cap = self.logit_softcap
        return logits if cap is None else torch.tanh(logits.float() / cap) * cap


def load(folder: str, dtype: str, device: str) -> Loaded:
    """`device` may be `auto`: a GPU where there is one. Raises EngineError, in a line that names the directory."""
    device = choose_device(device)
    _check_device(device)
    config = _load_config(folder)
    _check_index(folder)
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
                attn_implementation=attention.NAME,
                output_loading_info=True,
            )
        except Exception as error:  # transformers has no type of its own for what it cannot load
            raise EngineError(f"{folder}: its weights cannot be loaded: {one_line(error)}") from error
    model, report = loaded
    _check_tensors(folder, report)
    try:
        model = model.to(device)
    except (RuntimeError, AssertionError) as error:
        raise EngineError(f"device {device} cannot be used: {one_line(error)}") from error
    return describe(model.eval(), folder)


def check_headers(folder: str, shapes: Mapping[str, Sequence[int]]) -> None:
    """Whether these tensors are those of config.json, by name and shape; no weight is read. Raises EngineError."""
    config = _load_config(folder)
    if config.architectures[0] in _RENAMED:
        return
    with quiet(), torch.device("meta"):
        try:
            model: Any = AutoModelForCausalLM.from_config(config)
        except Exception as error:  # as in `load`
            raise EngineError(f"{folder}: its config.json cannot be used: {one_line(error)}") from error
    wanted = {name: tuple(one.shape) for name, one in model.state_dict().items()}
    tied = set(model._tied_weights_keys or ()) if config.tie_word_embeddings else set()
    report = {
        "missing_keys": wanted.keys() - shapes.keys() - tied,
        "unexpected_keys": shapes.keys() - wanted.keys(),
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
    turning = _rope_kinds(config) - set(FIXED_ROTATIONS)
    if turning:
        return f"rope_type {turning.pop()} is not supported on a GPU: its angles depend on the longest in a step"
    if not _is_power_of_two(loaded.head_dim):
        return f"head_dim: got {loaded.head_dim}, expected a power of two from 16 on, on a GPU"
    if not _is_power_of_two(block_tokens):
        return f"block_tokens: got {block_tokens}, expected a power of two from 16 on, on a GPU"
    if _slides(config) and not has_windows and dtype != torch.float32:
        return "sliding windows in half precision need a newer torch on a GPU"
    if loaded.has_experts and (dtype != torch.bfloat16 or capability < (9, 0)):
        return "a mixture of experts needs dtype=bfloat16 and compute capability 9.0 on a GPU: others have no graph"
    if loaded.has_experts and batch_invariant:
        return "batch_invariant: experts choose their rows themselves, and a mixture's answers depend on the batch"
    return ""


def _slides(config: Any) -> bool:
    """Whether a layer has a sliding window."""
    kinds = getattr(config, "layer_types", None)
    return "sliding_attention" in kinds if kinds else getattr(config, "sliding_window", None) is not None


def _is_power_of_two(number: int) -> bool:
    return number >= 16 and number & (number - 1) == 0


def _load_config(folder: str) -> Any:
    if not (Path(folder) / "config.json").is_file():
        raise EngineError(f"{folder}: no config.json there; expected a Hugging Face model directory")
    _check_config(folder, _read(folder, "config.json"))
    _check_generation_config(folder)
    with quiet():
        try:
            config = AutoConfig.from_pretrained(folder, local_files_only=True)
        except Exception as error:  # as in `load`
            raise EngineError(f"{folder}: its config.json cannot be used: {one_line(error)}") from error
    _check_attention(folder, config)
    return config


def _check_config(folder: str, config: dict[str, Any]) -> None:
    """Say in our own words what is wrong, where it can be seen before transformers looks."""
    names = config.get("architectures")
    name = names[0] if isinstance(names, list) and names else "a model without a named architecture"
    if name not in ARCHITECTURES:
        known = ", ".join(sorted(one.removesuffix("ForCausalLM") for one in ARCHITECTURES))
        raise EngineError(f"{folder}: {name} is not supported; supported are {known}")
    if config.get("quantization_config") is not None:
        raise EngineError(f"{folder}: quantised weights are not supported")
    for key in _AT_LEAST_1:
        if isinstance(number := config.get(key), int) and number < 1:
            raise EngineError(f"{folder}: config.json: {key}: got {number}, expected at least 1")
    pad, vocab = config.get("pad_token_id"), config.get("vocab_size")
    if isinstance(pad, int) and isinstance(vocab, int) and pad >= vocab:
        raise EngineError(f"{folder}: config.json: pad_token_id: got {pad}, expected less than vocab_size, {vocab}")
    for key in ("dtype", "torch_dtype"):
        dtype = config.get(key)
        if dtype is not None and not isinstance(getattr(torch, str(dtype), None), torch.dtype):
            raise EngineError(f"{folder}: config.json: {key}: got {json.dumps(dtype)}, expected one such as float32")


def _check_generation_config(folder: str) -> None:
    """transformers passes over a file that it cannot read, and with it over the tokens that end an answer."""
    name = "generation_config.json"
    if not (Path(folder) / name).is_file():
        return
    ends = _read(folder, name).get("eos_token_id")
    if ends is not None and any(type(one) is not int for one in (ends if isinstance(ends, list) else [ends])):
        raise EngineError(
            f"{folder}: {name}: eos_token_id: got {json.dumps(ends)}, expected an integer or a list of integers"
        )


def _rope_kinds(config: Any) -> set[str]:
    rope: dict[str, Any] = config.rope_parameters or {}
    its = (rope, *rope.values())  # of some families, one for each type of layer
    return {one.get("rope_type", "default") for one in its if isinstance(one, dict)}


def _check_attention(folder: str, config: Any) -> None:
    for kind in sorted(_rope_kinds(config) - set(_ROPE_TYPES)):
        raise EngineError(
            f"{folder}: config.json: rope_type {kind} is not supported; supported are {', '.join(_ROPE_TYPES)}"
        )
    if getattr(config, "use_bidirectional_attention", None) or not getattr(config, "is_causal", True):
        raise EngineError(
            f"{folder}: its attention to later tokens is not supported (use_bidirectional_attention, is_causal)"
        )
    window = getattr(config, "sliding_window", None)
    if window is not None and window < 1:
        raise EngineError(f"{folder}: config.json: sliding_window: got {window}, expected at least 1")


def _check_index(folder: str) -> None:
    if (Path(folder) / "model.safetensors").is_file() or not (Path(folder) / _INDEX).is_file():
        return
    files = _read(folder, _INDEX).get("weight_map")
    if not isinstance(files, dict) or not all(isinstance(one, str) for one in files.values()):
        raise EngineError(f"{folder}: {_INDEX}: weight_map: expected the name of a file for each tensor")


def _read(folder: str, name: str) -> dict[str, Any]:
    try:
        value = json.loads((Path(folder) / name).read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise EngineError(f"{folder}: its {name} cannot be read: {one_line(error)}") from error
    if not isinstance(value, dict):
        raise EngineError(f"{folder}: its {name} holds no object")
    return value


def find_tokenizer(folder: str) -> Any:
    """The directory's tokenizer; None when there is none, or none that can be used."""
    try:
        return load_tokenizer(folder)
    except EngineError as error:
        log.warning("%s", error)
        return None


def load_tokenizer(folder: str) -> Any:
    """None when there is none. Raises EngineError for one that cannot be used."""
    if not any((Path(folder) / name).is_file() for name in _TOKENIZER_FILES):
        return None
    try:
        with quiet():
            return AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # as in `load`
        for name in ("tokenizer.json", "tokenizer_config.json"):
            if (Path(folder) / name).is_file():
                _read(folder, name)  # which of them it is, transformers does not say
        raise EngineError(f"{folder}: its tokenizer cannot be used: {one_line(error)}") from error


def _check_tensors(folder: str, report: dict[str, Any]) -> None:
    """A mismatched key comes with its two shapes."""
    for what in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        found = sorted(one if isinstance(one, str) else one[0] for one in report.get(what) or ())
        if found:
            some = ", ".join(found[:3])
            raise EngineError(f"{folder}: {what.replace('_', ' ')} in its weights: {some}; {len(found)} in all")


def describe(model: Any, name: str) -> Loaded:
    """What the engine must know of a model that is there already: a trainer's, for example."""
    config = model.config.get_text_config()
    attention.register()
    if config._attn_implementation != attention.NAME:
        model.set_attn_implementation(attention.NAME)
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    ends = model.generation_config.eos_token_id if model.generation_config is not None else None
    ends = config.eos_token_id if ends is None else ends
    end_ids = frozenset(() if ends is None else [ends] if isinstance(ends, int) else ends)
    return Loaded(
        model=model,
        name=name,
        vocab=config.vocab_size,
        max_context=config.max_position_embeddings,
        num_layers=config.num_hidden_layers,
        num_kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=head_dim,
        end_ids=end_ids,
        logit_softcap=getattr(config, "final_logit_softcapping", None),
        has_experts=any(getattr(config, name, None) for name in ("num_experts", "num_local_experts")),
    )


@contextmanager
def quiet() -> Iterator[None]:
    """No progress bars and no reports on stderr: what matters of them is in an EngineError."""
    had_bars, verbosity = transformers_logging.is_progress_bar_enabled(), transformers_logging.get_verbosity()
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if had_bars:
            transformers_logging.enable_progress_bar()
