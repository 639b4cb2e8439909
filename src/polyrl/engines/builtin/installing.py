"""Putting a version's weights into a model that runs: brought near while it goes on, copied in place while it stands.

On a GPU everything is sent to the device first, so that the pause is a copy within its memory. On the CPU the version
is in memory already. All of a version is put in place, or nothing. An adapter is merged with the base while the model
goes on, and its sums are put in place like any other version's tensors.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple

import torch

from polyrl.engines.builtin import model_config, models
from polyrl.engines.builtin.models import Loaded
from polyrl.engines.engine import EngineError, NotOfThisModel, Weights
from polyrl.weights import tensors
from polyrl.weights.adapters import Base
from polyrl.weights.shelf import HostCopy

Tensor = torch.Tensor


class StagedTensors(NamedTuple):
    """Tensors of the model, and what each will be."""

    pairs: list[tuple[Tensor, Tensor]]

    def put(self) -> None:
        with torch.no_grad():
            for ours, theirs in self.pairs:
                ours.copy_(theirs, non_blocking=True)
        if self.pairs and self.pairs[0][0].is_cuda:
            torch.cuda.synchronize()


class ModelInstaller:
    """Knows what was installed, so that the next version brings only what is different."""

    def __init__(self, loaded: Loaded, folder: str, dtype: str) -> None:
        self._loaded, self._folder, self._dtype = loaded, folder, dtype
        self._digest = ""
        """The digest of the version that was installed from a copy."""
        self._base: Base | None = None
        """The weights that adapters are merged with; read when the first adapter comes."""
        self._adapter_layout = ""
        """The fingerprint of the installed adapter's layout; empty while no adapter is installed."""

    def stage(self, weights: Weights) -> StagedTensors | None:
        """Bring a version near, while samples go on. None where nothing says where it is. Raises EngineError."""
        if weights.copy is not None and weights.copy.manifest.adapter is not None:
            if self._base is None:
                self._base = load_base(self._folder, self._dtype)
            is_on_base = self._adapter_layout == weights.copy.manifest.layout.fingerprint
            return stage_adapter(self._loaded, weights.copy, self._base, changed_only=is_on_base)
        if weights.copy is not None:
            return stage_copy(self._loaded, weights.copy, held=self._digest)
        if weights.folder is not None:
            return stage_folder(self._loaded, weights.folder, self._dtype)
        return None

    def installed(self, weights: Weights) -> None:
        manifest = None if weights.copy is None else weights.copy.manifest
        self._digest = "" if manifest is None else manifest.digest
        self._adapter_layout = "" if manifest is None or manifest.adapter is None else manifest.layout.fingerprint


def stage_copy(loaded: Loaded, copy: HostCopy, *, held: str) -> StagedTensors:
    """Stage a version from this machine's memory. `held` is the digest of what the model is now. Raises
    NotOfThisModel."""
    changed = copy.changed if held and copy.base == held else None
    try:
        pairs = tensors.pair_up(loaded.model.state_dict(), copy.manifest.layout, copy.view, changed)
    except tensors.BadTensors as error:
        raise NotOfThisModel(f"version {copy.manifest.version} is not of this model: {error}") from error
    return _near(pairs)


def load_base(folder: str, dtype: str) -> Base:
    """Load the base weights of adapters: those of the directory, not those installed since. Raises EngineError."""
    return Base(dict(models.load(folder, dtype, "cpu").model.named_parameters()), folder)


def stage_adapter(loaded: Loaded, copy: HostCopy, base: Base, *, changed_only: bool) -> StagedTensors:
    """Merge an adapter version with the base. `changed_only`: stage only the tensors that it changes, because the model
    already runs an adapter of the same layout. Raises NotOfThisModel."""
    model = dict(loaded.model.named_parameters())
    try:
        with _beside(next(iter(model.values()))):
            return StagedTensors(list(base.pair_up(model, copy.manifest, copy.view, changed_only=changed_only)))
    except tensors.BadTensors as error:
        raise NotOfThisModel(f"version {copy.manifest.version} is {error}") from error


def stage_folder(loaded: Loaded, folder: str, dtype: str) -> StagedTensors:
    """Stage a version from a Hugging Face directory. Raises EngineError."""
    its: Any = models.load(folder, dtype, "cpu").model
    why_not = model_config.why_another(loaded.model.config, its.config)
    if why_not:
        raise EngineError(f"{folder}: config.json is of another model: {why_not}")
    fresh: Mapping[str, Tensor] = its.state_dict()
    ours: Mapping[str, Tensor] = loaded.model.state_dict()
    if {name: one.shape for name, one in fresh.items()} != {name: one.shape for name, one in ours.items()}:
        raise EngineError(f"{folder}: its weights are not of this model")
    return _near([(one, fresh[name]) for name, one in ours.items()])


def _near(pairs: list[tuple[Tensor, Tensor]]) -> StagedTensors:
    if not pairs or not pairs[0][0].is_cuda:
        return StagedTensors(pairs)
    with _beside(pairs[0][0]):
        return StagedTensors([(ours, theirs.to(ours.device, non_blocking=True)) for ours, theirs in pairs])


@contextmanager
def _beside(ours: Tensor) -> Iterator[None]:
    """On a GPU, run the block in a separate stream while steps go on; wait at its end until all copies are done."""
    if not ours.is_cuda:
        yield
        return
    stream = _stream(ours.device)
    with torch.cuda.stream(stream):
        yield
    stream.synchronize()


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    """Return the one stream of all installs: torch does not reuse one stream's memory for another."""
    return torch.cuda.Stream(device)
