"""Providers by name, ours or `module:Class`, made with the arguments that a recipe gives."""

import hashlib
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

from polyrl.config.plugins import find, with_arguments
from polyrl.providers.provider import Provider, ProviderRun

PROVIDERS: Mapping[str, Callable[..., Any] | str] = {
    "local": "polyrl.providers.local:LocalProvider",
    "command": "polyrl.providers.command:CommandProvider",
    "slurm": "polyrl.providers.slurm:SlurmProvider",
    "ray": "polyrl.providers.ray_actors:RayProvider",
    "kubernetes": "polyrl.providers.kubernetes:KubernetesProvider",
}
_METHODS = ("check", "held", "start", "stop", "close")
_MAX_NAME = 24


def make_provider(name: str, args: Mapping[str, Any], run: ProviderRun) -> Provider:
    """Return the provider that `fleet.provider` names. Raises ConfigError, which begins with the setting."""
    found = find(name, "fleet.provider", PROVIDERS, what="Class", methods=_METHODS)
    make = with_arguments(found, args, "fleet.provider_args", 1)
    return cast("Provider", make(run))


def run_of(run_dir: Path, *, ends_with_us: bool) -> ProviderRun:
    """Return how providers know a run. The id is made of its directory's path: it is the same in every process."""
    place = run_dir.absolute()
    name = re.sub(r"[^a-z0-9]+", "-", place.name.lower()).strip("-")[:_MAX_NAME] or "run"
    digest = hashlib.sha256(str(place).encode()).hexdigest()[:8]
    return ProviderRun(f"{name}-{digest}", run_dir / "fleet", run_dir / "logs", ends_with_us)
