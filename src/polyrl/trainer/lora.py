"""LoRA, through peft: the base model is frozen, and low-rank changes to some of its matrices are trained.

    policy = lora.load("DIR", "bfloat16", "cuda", config, seed=0)       a Policy like any other
    policy.reference                                                    the model without its changes: no second copy

The trainer computes base and change side by side, as peft does. Engines run their sum. For that the local engine has
its own copy of the changed matrices, and shares everything else with the trainer. The alternative, merging into the
base and undoing it, is exact only with a kept copy of the base, which takes the same memory. A version holds the sums
("merged"), or the changes alone ("adapter").

Ranks shard base and changes alike. A row of a sum needs that row of the base and of B, and all of A: so each rank adds
up its own rows, to the same bits.

Rules kept here: sums are always made by weights.adapters.merge, whose bits do not depend on the machine. Changes are
float32, whatever the model's dtype. Dropout masks are a function of the tokens that they are drawn for, so a resumed
run draws the same masks.

Left out: the output head and embeddings, experts that are not single matrices.
"""

import contextlib
import copy
import difflib
import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import xxhash
from torch import nn

from polyrl.config.recipe import LoraSection
from polyrl.engines.builtin.models import Loaded
from polyrl.errors import UserError
from polyrl.trainer import sharding
from polyrl.trainer.model import Divided, Policy, Scores, load_model
from polyrl.trainer.packing import Pack
from polyrl.trainer.ranks import RankGroup
from polyrl.weights import adapters
from polyrl.weights.manifest import LORA_A, LORA_B, AdapterFacts

Tensor = torch.Tensor

_NAME = "default"
"""The name that peft gives an unnamed adapter. It is part of the names of its parameters."""
_NUM_NAMED = 6


class _Changed(NamedTuple):
    """A matrix of the base model, and its low-rank change."""

    layer: str
    base: Tensor
    a: Tensor
    b: Tensor


def load(
    folder: str,
    dtype: str,
    device: str,
    config: LoraSection,
    *,
    seed: int,
    ranks: RankGroup | None = None,
    serves: bool = False,
    **settings: Any,
) -> "LoraPolicy":
    """Load a model, and prepare LoRA on it. `ranks` share it, if given; `serves`: with a whole copy beside the shards,
    for the engine. `settings` are those of Policy.

    Raises UserError, in a line that names the directory, the key or the layer.
    """
    loaded = load_model(folder, dtype, device if ranks is None else "cpu")
    served = load_model(folder, dtype, str(ranks.device)) if ranks is not None and serves else None
    return LoraPolicy(loaded, config, seed=seed, ranks=ranks, served=served, **settings)


class LoraPolicy(Policy):
    def __init__(
        self,
        loaded: Loaded,
        config: LoraSection,
        *,
        seed: int,
        ranks: RankGroup | None = None,
        served: Loaded | None = None,
        **settings: Any,
    ) -> None:
        peft = _import_peft()
        layers = find_targets(loaded.model, config.targets)
        parameters: dict[str, Tensor] = dict(loaded.model.named_parameters())
        self.base_fingerprint = adapters.fingerprint(parameters)
        loaded.model.requires_grad_(False)
        if ranks is None:
            changed = {f"{layer}.weight" for layer in layers}
            shared = {id(one): one for name, one in parameters.items() if name not in changed}
            served = loaded._replace(model=copy.deepcopy(loaded.model, shared))
        with _seeded(seed, next(iter(parameters.values())).device):  # for the initial changes
            self._peft = peft.get_peft_model(loaded.model, _peft_config(config, layers, loaded.name))
        divided = None
        if ranks is not None:
            dtype = next(iter(parameters.values())).dtype
            divided = Divided(
                loaded.model, sharding.shard(loaded.model, ranks, dtype), dtype, ranks.size, ranks.context
            )
        super().__init__(loaded, divided=divided, **settings)
        self.loaded = loaded if served is None else served
        self._config = config
        self._changed = [self._find(layer) for layer in layers]
        self._dropouts = [one for name, one in self.model.named_modules() if name.endswith(f"lora_dropout.{_NAME}")]
        if not config.dropout:
            self._dropouts = []
        for one in self._dropouts:
            one.train()  # always on, for layers that run again in the backward pass
        if config.publish == "adapter":
            dtype = str(self.dtype).removeprefix("torch.")
            self.adapter = AdapterFacts(self.base_fingerprint, dtype, config.scaling)

    def _find(self, layer: str) -> _Changed:
        module = self.model.get_submodule(layer)
        return _Changed(layer, module.base_layer.weight, module.lora_A[_NAME].weight, module.lora_B[_NAME].weight)

    def parameters(self) -> dict[str, Tensor]:
        return {name: one for its in self._changed for name, one in _named(its)}

    # Scores

    def score(self, pack: Pack, temperature: float = 1.0, *, entropy_grad: bool = False) -> Scores:
        if not (self._dropouts and torch.is_grad_enabled()):
            return super().score(pack, temperature, entropy_grad=entropy_grad)
        with _seeded(xxhash.xxh3_64_intdigest(pack.tokens.tobytes()) >> 1, self.device):
            return super().score(pack, temperature, entropy_grad=entropy_grad)

    @torch.no_grad()
    def score_only(self, pack: Pack, temperature: float = 1.0) -> Scores:
        for one in self._dropouts:
            one.eval()
        try:
            return super().score(pack, temperature)
        finally:
            for one in self._dropouts:
                one.train()

    @property
    def reference(self) -> "Unchanged":
        return Unchanged(self)

    @contextlib.contextmanager
    def without_changes(self) -> Iterator[None]:
        """Compute with the base alone. Peft's own way also switches gradients of the changes off and on, and shards
        would remember the first of the two."""
        changed: list[Any] = [self.model.get_submodule(one.layer) for one in self._changed]
        for layer in changed:
            layer._disable_adapters = True
        try:
            yield
        finally:
            for layer in changed:
                layer._disable_adapters = False

    # For engines and workers

    def published(self) -> dict[str, Tensor]:
        if self.adapter is not None:
            return self.parameters()
        return dict(self.loaded.model.named_parameters()) if self._divided is None else self._base()

    def _base(self) -> dict[str, Tensor]:
        """Return the frozen base's parameters, by the names that they have without changes."""
        ours = {id(one) for one in self.parameters().values()}
        named: dict[str, Tensor] = dict(self.model.named_parameters())
        return {name.replace(".base_layer.", "."): one for name, one in named.items() if id(one) not in ours}

    def served_parts(self) -> Iterator[tuple[str, Tensor]]:
        changed = {f"{one.layer}.weight": one for one in self._changed}
        for name, base in self._base().items():
            change = changed.get(name)
            if change is None:
                yield name, base.detach()
                continue
            rows, b = sharding.rows_of(base.detach()), sharding.rows_of(change.b.detach())
            summed = torch.empty_like(rows)
            adapters.merge(rows, sharding.total(change.a.detach()), b, self._config.scaling, summed)
            yield name, sharding.part_like(summed, base)

    @property
    def published_dtype(self) -> str:
        """Changes are sent in float32: a worker has to merge them into the same bits as the trainer."""
        return "float32" if self.adapter is not None else super().published_dtype

    def engine_writer(self) -> Callable[[], None] | None:
        return self.merge if self._divided is None else None  # ranks write it while they gather

    def merge(self) -> None:
        """Merge base and changes into the matrices that the engine runs."""
        for layer, base, a, b in self._changed:
            adapters.merge(base, a, b, self._config.scaling, self.loaded.model.get_submodule(layer).weight.data)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def save_merged(self, out: Path) -> None:
        self.merge()
        self.loaded.model.save_pretrained(out)

    def save_adapter(self, out: Path) -> None:
        """Write the changes in peft's format."""
        self._peft.save_pretrained(str(out), save_embedding_layers=False)


class Unchanged:
    """The frozen base model of a LoRA policy, as a reference."""

    def __init__(self, policy: LoraPolicy) -> None:
        self._policy = policy

    def score_only(self, pack: Pack, temperature: float = 1.0) -> Scores:
        with self._policy.without_changes():
            return self._policy.score_only(pack, temperature)


def find_targets(model: Any, wanted: str | tuple[str, ...]) -> list[str]:
    """Return the layers to change, in the order of the model. Raises UserError for a target that cannot be changed."""
    head = model.get_output_embeddings()
    modules: dict[str, nn.Module] = dict(model.named_modules())
    linear = [name for name, one in modules.items() if type(one) is nn.Linear and one is not head]
    if not linear:
        raise UserError(f"lora.rank: {type(model).__name__} has no plain matrix that could be changed; expected 0")
    if wanted == "all-linear":
        experts = [name for name, one in model.named_parameters() if one.dim() > 2]
        if experts:
            raise UserError(
                f"lora.targets: all-linear: {experts[0]} holds experts, which are no single matrix and cannot be "
                f"changed; name the layers: {_show(_ends(linear))}"
            )
        return linear
    found: set[str] = set()
    for target in wanted:
        its = [name for name in linear if _is_called(name, target)]
        if not its:
            raise UserError(f"lora.targets: {_why_not(target, modules, linear, head)}")
        found.update(its)
    return [name for name in linear if name in found]


def _why_not(target: str, modules: dict[str, nn.Module], linear: list[str], head: Any) -> str:
    there = [one for name, one in modules.items() if name and _is_called(name, target)]
    if head in there:
        return f"{target} is the output head, which cannot be changed here; expected some of {_show(_ends(linear))}"
    if there:
        kind = type(there[0]).__name__
        return f"{target} is a {kind}, not a plain matrix; expected some of {_show(_ends(linear))}"
    near = difflib.get_close_matches(target, [*_ends(linear), *linear], n=3)
    hint = f"did you mean {' or '.join(near)}?" if near else f"expected some of {_show(_ends(linear))}"
    return f"no layer of the model is called {target}; {hint}"


def _is_called(name: str, target: str) -> bool:
    return name == target or name.endswith(f".{target}")


def _ends(names: list[str]) -> list[str]:
    return list(dict.fromkeys(name.rpartition(".")[2] for name in names))


def _show(names: list[str]) -> str:
    return ", ".join(names[:_NUM_NAMED]) + (", ..." if len(names) > _NUM_NAMED else "")


def _named(one: _Changed) -> Iterator[tuple[str, Tensor]]:
    yield one.layer + LORA_A, one.a
    yield one.layer + LORA_B, one.b


def _peft_config(config: LoraSection, layers: list[str], base: str) -> Any:
    """Return peft's settings. Its scaling is alpha / rank too. Layers are named in full: a suffix may fit others."""
    return _import_peft().LoraConfig(
        r=config.rank,
        lora_alpha=config.scaling * config.rank,
        lora_dropout=config.dropout,
        target_modules=layers,
        bias="none",
        task_type="CAUSAL_LM",
        base_model_name_or_path=base,
    )


def _import_peft() -> Any:
    if importlib.util.find_spec("peft") is None:
        raise UserError("lora.rank: LoRA needs peft: pip install 'polyrl[train]'")
    import peft

    return peft


@contextlib.contextmanager
def _seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Seed torch within this context. The random state outside is not affected."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield
