"""The output of `polyrl train --dry-run`: the recipe with every default, the processes, and their memory.

Rules kept here: nothing is started or written. Data is opened as in a run, but only as many rows are read as one
step needs. From a model directory only config.json, the headers of the weights and the tokenizer are read. Sizes of
tensors are exact; the other memory of training is an estimate, and marked as one.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from msgspec.structs import replace

from polyrl.config import dump_toml
from polyrl.config.inert import inert
from polyrl.config.model_dir import read_facts, read_object
from polyrl.config.places import check_model_dir, with_local_places
from polyrl.config.recipe import Recipe, TrainSection
from polyrl.cores import num_cores
from polyrl.engines.builtin.config import BuiltinConfig, choose_device
from polyrl.engines.builtin.model_config import load_config
from polyrl.engines.builtin.models import check_headers
from polyrl.engines.engine import EngineError
from polyrl.errors import ConfigError, plain, shorten
from polyrl.run.encryption import encryption
from polyrl.run.models import check_device, check_family, check_tokenizers, gpu_bytes, others, uses_engine
from polyrl.run.nodes import remembered
from polyrl.run.plugins import check_plugins
from polyrl.run.settings import caveat_of
from polyrl.run.tasks import DomainOfStep, look_at_a_step, too_few
from polyrl.run.training_rows import prompt_room
from polyrl.run.workers import check_settings
from polyrl.trainer.families import is_of_engine
from polyrl.weights import folder as folders
from polyrl.weights.manifest import is_table

_FLOAT32_BYTES = 4
_BLOCK = 256
"""Elements that share a scale in eight bits."""
_GIB = 1 << 30
_SHOWN_TOKENS = 64
_SHOWN_LINES = 40
_FEW_PARAMETERS = 10_000_000
"""Below this many parameters the matrices are so small that a second thread only waits."""
_FILLED = 0.8
"""The largest planned share of a GPU's memory; the rest is for the engine's KV cache and for the unforeseen."""


class ModelEstimates(NamedTuple):
    """The facts of a model directory that the estimates need."""

    architecture: str
    num_parameters: int
    num_layers: int
    hidden: int
    intermediate: int
    query: int
    """Elements of a token's queries; `key` of its keys."""
    key: int
    context: int | None
    matrices: dict[str, tuple[int, int]]
    """The shapes of the layers' matrices by name, which LoRA can change."""


class MemoryPlan(NamedTuple):
    """The memory of training in bytes, on the trainer's device and on the host."""

    weights: int
    changes: int
    """The changes of LoRA; `sums` are the local engine's own merged matrices beside them."""
    sums: int
    masters: int
    moments: int
    gradients: int
    activations: int
    reference: int
    critic: int
    """With its optimizer, as if it were as large as the policy."""
    deltas: int
    """The version that the next one is compared with."""
    offloaded: int

    @property
    def total(self) -> int:
        return sum(self) - self.offloaded


def show_plan(recipe: Recipe, run_dir: Path) -> str:
    """Raises UserError for a device, settings, code, a model directory, a reward, or data, that cannot be used."""
    check_device(recipe)
    check_settings(recipe)
    check_plugins(recipe)
    shape = read_shape(recipe.model.path)
    for key, path in others(recipe).items():
        read_shape(path, key)
    check_tokenizers(recipe)
    room = prompt_room(recipe, shape.context)
    step = look_at_a_step(recipe)
    num_prompts = [one.num_prompts for one in step]
    rows = [*_processes(recipe, run_dir), *_sizes(recipe, shape, room, sum(num_prompts)), *_memory(recipe, shape)]
    warnings = (*inert(recipe.algorithm), *too_few(recipe, num_prompts), caveat_of(recipe))
    rows += [("warning", line) for line in warnings if line]
    width = max(len(name) for name, _ in rows)
    lines = [f"# {name:<{width}}  {text}" for name, text in rows]
    return "\n".join([dump_toml(recipe), "# The plan", *lines, *_first_prompts(step)])


def _first_prompts(step: list[DomainOfStep]) -> list[str]:
    """Show the first prompt of each domain as the model would see it."""
    lines: list[str] = []
    for one in step:
        ids = " ".join(map(str, one.tokens[:_SHOWN_TOKENS]))
        more = f" and {len(one.tokens) - _SHOWN_TOKENS} more" if len(one.tokens) > _SHOWN_TOKENS else ""
        shown = [*one.written.splitlines()[:_SHOWN_LINES]]
        if len(one.written.splitlines()) > _SHOWN_LINES:
            shown.append("...")
        lines += ["#", f"# The first prompt of {one.name}, {len(one.tokens)} tokens, as the model sees it"]
        lines += [f"#   | {shorten(plain(line))}" for line in shown]
        lines.append(f"#   tokens: {ids}{more}")
        lines.append(f"#   expected: {shorten(plain(one.expected)) or 'nothing'}")
    return lines


def read_shape(path: str, key: str = "model.path") -> ModelEstimates:
    check_model_dir(path, key)
    place = Path(path) / "config.json"
    try:
        read_object(path, "config.json")
        config = read_facts(path).config if is_of_engine(path) else _sizes_of(path)
        hidden, heads = int(config["hidden_size"]), int(config["num_attention_heads"])
        width = int(config.get("head_dim") or hidden // heads)
        layers, inner = int(config["num_hidden_layers"]), int(config["intermediate_size"])
        kv_heads = int(config.get("num_key_value_heads") or heads)
    except ConfigError as error:
        raise ConfigError(f"{key}: {error}") from error
    except (ValueError, KeyError, TypeError, ArithmeticError) as error:  # a size may be Infinity, or 0
        raise ConfigError(f"{key}: {place} cannot be used: {type(error).__name__}: {error}") from error
    layout = folders.layout_in(Path(path))
    try:
        check_headers(path, {one.name: one.shape for one in layout.tensors})
    except EngineError as error:
        raise ConfigError(f"{key}: {error}") from error
    num = sum(one.num_elements for one in layout.tensors)
    context = config.get("max_position_embeddings")
    matrices = {
        one.name.removesuffix(".weight"): (one.shape[0], one.shape[1])
        for one in layout.tensors
        if len(one.shape) == 2 and not is_table(one.name)
    }
    return ModelEstimates(
        layout.architecture, num, layers, hidden, inner, heads * width, kv_heads * width, context, matrices
    )


def _sizes_of(path: str) -> dict[str, Any]:
    """Return the sizes of a model of any family, whose config.json may call them something else."""
    try:
        config = load_config(path, any_family=True).get_text_config()
    except EngineError as error:
        raise ConfigError(str(error)) from error
    sizes = {"num_attention_heads": 1, "intermediate_size": 4 * config.hidden_size}
    keys = ("hidden_size", "head_dim", "num_hidden_layers", "num_key_value_heads", "max_position_embeddings", *sizes)
    return {key: getattr(config, key, None) or sizes.get(key) for key in keys}


def estimate_memory(recipe: Recipe, shape: ModelEstimates) -> MemoryPlan:
    """Estimate the memory of rank zero while a micro-batch trains; the engine's KV cache is released meanwhile."""
    width = 2 if recipe.model.dtype == "bfloat16" else _FLOAT32_BYTES
    num = shape.num_parameters
    tokens = recipe.train.micro_batch_tokens
    layer = 6 * shape.hidden + 3 * shape.query + 4 * shape.key + 4 * shape.intermediate  # what its backward pass reads
    if recipe.model.gradient_checkpointing:
        elements = (shape.hidden + shape.query) * shape.num_layers + layer  # attention's results stay, of long samples
    else:
        elements = layer * shape.num_layers
    ranks = recipe.train.ranks // recipe.train.replicas
    part, has_masters = num // ranks, width == 2 or ranks > 1
    copy = width * num if ranks == 1 or uses_engine(recipe) else 0  # of several ranks, rank zero's for its engine
    if recipe.lora.rank and ranks > 1:
        copy += width * part  # the shard of the frozen base
    wanted, gae = recipe.lora, recipe.algorithm.advantage == "gae"
    changed = _changed(recipe, shape)
    num_changes = sum(wanted.rank * (rows + columns) for rows, columns in changed) // ranks
    ours = _optimizer(recipe, num_changes, half=False) if wanted.rank else _optimizer(recipe, part, half=has_masters)
    critics = _optimizer(recipe, part, half=has_masters) if gae else _Optimizer(0, 0, 0)
    offload = recipe.optimizer.offload
    stays = ranks > 1 or not offload  # masters that ranks share are what layers are gathered from
    has_reference = recipe.algorithm.kl != "none" and not (wanted.rank and not recipe.algorithm.reference)
    return MemoryPlan(
        weights=copy,
        changes=_FLOAT32_BYTES * num_changes,
        sums=width * sum(rows * columns for rows, columns in changed) if ranks == 1 else 0,
        masters=ours.masters if stays else 0,
        moments=0 if offload else ours.moments,
        gradients=ours.gradients,
        activations=width * tokens * elements,
        reference=width * part if has_reference else 0,
        critic=(width * num if ranks == 1 else 0) + critics.on_device(offload, stays) if gae else 0,
        deltas=_published(recipe, width * num, num_changes) if recipe.weights.encode_on == "device" else 0,
        offloaded=sum(one.moments + (0 if stays else one.masters) for one in (ours, critics)) if offload else 0,
    )


def _published(recipe: Recipe, num_bytes: int, num_changes: int) -> int:
    return _FLOAT32_BYTES * num_changes if recipe.lora.rank and recipe.lora.publish == "adapter" else num_bytes


class _Optimizer(NamedTuple):
    masters: int
    moments: int
    gradients: int

    def on_device(self, offload: bool, masters_stay: bool) -> int:
        return self.gradients + (0 if offload else self.moments) + (self.masters if masters_stay else 0)


def _optimizer(recipe: Recipe, num: int, *, half: bool) -> _Optimizer:
    """Return the optimizer's memory for `num` parameters. Half-precision parameters need float32 masters."""
    moment = 1 + _FLOAT32_BYTES / _BLOCK if recipe.optimizer.kind == "adamw8bit" else _FLOAT32_BYTES
    return _Optimizer(_FLOAT32_BYTES * num if half else 0, int(2 * moment * num), _FLOAT32_BYTES * num)


def _changed(recipe: Recipe, shape: ModelEstimates) -> list[tuple[int, int]]:
    """Return the matrices that LoRA changes. Raises ConfigError for a target that matches no matrix."""
    wanted = recipe.lora
    if not wanted.rank:
        return []
    if wanted.targets == "all-linear":
        return list(shape.matrices.values())
    found: dict[str, tuple[int, int]] = {}
    for target in wanted.targets:
        its = {name: size for name, size in shape.matrices.items() if f".{name}".endswith(f".{target}")}
        if not its:
            ends = dict.fromkeys(name.rpartition(".")[2] for name in shape.matrices)
            raise ConfigError(f"lora.targets: no matrix of a layer is called {target}; there are {', '.join(ends)}")
        found |= its
    return list(found.values())


def _processes(recipe: Recipe, run_dir: Path) -> list[tuple[str, str]]:
    generates = "trains and generates" if recipe.train.local_generation else "trains"
    port = recipe.manager.port or ("any free port" if recipe.manager.port == 0 else "5000, or any free port")
    wanted = recipe.fleet
    workers = f"{wanted.workers} on this machine, {wanted.engine} engine" if wanted.workers else "none to start with"
    ranks = "" if recipe.train.ranks == 1 else f"{recipe.train.ranks} ranks, "
    trains = f"{generates}, {_mode(recipe)}, {recipe.train.steps} steps"
    boxed = ", in a sandbox" if recipe.rewards.sandbox else ""
    scores = f"{_reward_places(recipe)}{boxed}, {recipe.rewards.timeout_s:g} s an answer"
    return [
        ("run", str(run_dir)),
        ("trainer", f"{ranks}{_device(recipe)}: {trains}; serves weights"),
        ("manager", f"a process, CPU, {recipe.manager.host}, {port}{_encrypted(recipe)}"),
        ("workers", f"{workers}; others may join at any time"),
        ("rewards", scores),
    ]


def _reward_places(recipe: Recipe) -> str:
    num = recipe.rewards.processes
    return f"up to {num} processes, CPU" if num else "on reward workers alone"


def _device(recipe: Recipe) -> str:
    device, threads = choose_device(recipe.model.device), recipe.train.threads
    return device if device != "cpu" or threads is None else f"cpu, {threads} thread{'s' if threads > 1 else ''}"


def _encrypted(recipe: Recipe) -> str:
    tls = encryption(recipe.manager)
    return "" if tls is None else f", TLS as {tls.host}"


def _mode(recipe: Recipe) -> str:
    most = recipe.max_staleness
    return f"async (at most {most} version{'s' if most > 1 else ''} behind)" if most else recipe.train.mode


def _sizes(recipe: Recipe, shape: ModelEstimates, room: int | None, prompts: int) -> list[tuple[str, str]]:
    samples = prompts * recipe.rounds.samples_per_prompt
    longest = recipe.rollout.max_new_tokens
    token_bytes = cache_bytes(recipe, shape)
    limit = "any length" if room is None else f"at most {room:,} tokens"
    return [
        ("model", f"{shape.architecture}, {shape.num_parameters:,} parameters, {recipe.model.dtype}"),
        ("round", f"{prompts} prompts ({limit}) x {recipe.rounds.samples_per_prompt} = {samples} samples"),
        ("tokens", f"at most {longest:,} a sample, {samples * longest:,} a round, without prompts"),
        (
            "cache",
            f"{token_bytes:,} bytes a token; {_size(samples * longest * token_bytes)} if all were longest at once",
        ),
    ]


def cache_bytes(recipe: Recipe, shape: ModelEstimates) -> int:
    """Return the bytes of a token in an engine's KV cache."""
    width = 2 if recipe.model.dtype == "bfloat16" else _FLOAT32_BYTES
    return 2 * shape.key * shape.num_layers * width


def _memory(recipe: Recipe, shape: ModelEstimates) -> list[tuple[str, str]]:
    memory = estimate_memory(recipe, shape)
    sizes = {name: size for name, size in memory._asdict().items() if size and name != "offloaded"}
    parts = ", ".join(f"{name} {_size(size)}" for name, size in sizes.items())
    tokens = recipe.train.micro_batch_tokens
    whose = "" if recipe.train.ranks == 1 else " of rank zero"
    rows = [("memory", f"about {_size(memory.total)}{whose} while {tokens:,} tokens train (an estimate): {parts}")]
    host = [f"{_size(memory.offloaded)} of the optimizer's state"] if memory.offloaded else []
    if recipe.checkpoint.enabled:
        host.append(f"{_size(snapshot_bytes(recipe, shape))} to write a checkpoint from")
    if host:
        rows.append(("host", ", ".join(host)))
    return rows


def snapshot_bytes(recipe: Recipe, shape: ModelEstimates) -> int:
    """Return the size of the trained weights and their moments, over all ranks."""
    num = shape.num_parameters
    if recipe.lora.rank:
        num = sum(recipe.lora.rank * (rows + columns) for rows, columns in _changed(recipe, shape))
    size = _optimizer(recipe, num, half=True)
    return (size.masters + size.moments) * (2 if recipe.algorithm.advantage == "gae" else 1)


def _size(num_bytes: int) -> str:
    return f"{num_bytes / _GIB:.1f} GiB" if num_bytes >= _GIB / 10 else f"{num_bytes / (1 << 20):.1f} MiB"


# Choices that a recipe leaves to the machine: the dtype, the threads, and whether one of several ranks also generates.
# A run writes down what was chosen, and goes on with that, wherever it is resumed.


def fit(recipe: Recipe) -> Recipe:
    """Return the recipe with nothing left open, names of the hub fetched. Raises ConfigError for a model directory that
    cannot be used."""
    recipe = with_local_places(recipe)
    device = choose_device(recipe.model.device)
    if recipe.model.dtype == "auto":
        dtype = "bfloat16" if device == "cuda" else "float32"
        recipe = replace(recipe, model=replace(recipe.model, dtype=dtype))
    shape = read_shape(recipe.model.path)
    check_family(recipe)
    if device == "cpu" and recipe.train.threads is None:
        recipe = _with(recipe, replace(recipe.train, threads=choose_threads(recipe, shape.num_parameters)))
    if recipe.train.local_generation is None:
        has_room = device == "cpu" or fits_beside(recipe, shape, gpu_bytes())
        recipe = _with(recipe, replace(recipe.train, local_generation=has_room))
    if recipe.validation.at_start is None:
        at_start = bool(recipe.train.local_generation)
        recipe = replace(recipe, validation=replace(recipe.validation, at_start=at_start))
    return recipe


def _with(recipe: Recipe, train: TrainSection) -> Recipe:
    return replace(recipe, train=train)


def choose_threads(
    recipe: Recipe, num_parameters: int, cores: int | None = None, environment: Mapping[str, str] = os.environ
) -> int:
    """Choose the CPU threads of one rank: the ranks of a node share its cores.

    Two threads on one core have been measured 20 times slower than one.
    """
    said = environment.get("OMP_NUM_THREADS", "")
    if said.isdecimal() and int(said) > 0:
        return int(said)
    if num_parameters < _FEW_PARAMETERS:
        return 1
    others = 1 + recipe.fleet.workers * _worker_threads(recipe)
    there = remembered(environment)
    num_ranks = recipe.train.ranks if there is None else -(-recipe.train.ranks // there.num)
    said = environment.get("LOCAL_WORLD_SIZE", "")  # torchrun's
    num_ranks = int(said) if said.isdecimal() and int(said) > 0 else num_ranks
    return max(1, ((num_cores() if cores is None else cores) - others) // num_ranks)


def _worker_threads(recipe: Recipe) -> int:
    said = recipe.fleet.settings.get("threads")
    return said if isinstance(said, int) else BuiltinConfig(model="").threads


def fits_beside(recipe: Recipe, shape: ModelEstimates, num_bytes: int) -> bool:
    """Return whether a GPU of `num_bytes` has room for the engine's whole model beside rank zero's shard."""
    generating = _with(recipe, replace(recipe.train, local_generation=True))
    return estimate_memory(generating, shape).total <= _FILLED * num_bytes
