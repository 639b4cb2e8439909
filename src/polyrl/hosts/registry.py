"""Environments by name: a public package's adapter, or a class of a person's own as `module:Class`.

Rules kept here: a name and its arguments are checked before anything is played, with one line for a mistake. The
package itself is looked for when the environment starts.
"""

from collections.abc import Callable, Mapping
from typing import Any

from polyrl.config.plugins import check_arguments, find, with_arguments
from polyrl.hosts.episode import PlayedEnvironment
from polyrl.hosts.own import HostParts, OwnEnvironment

TURN_BY_TURN: Mapping[str, str] = {
    "openenv": "polyrl.hosts.adapters.openenv:OpenEnvSession",
    "reasoning-gym": "polyrl.hosts.adapters.reasoning_gym:ReasoningGym",
    "skyrl-gym": "polyrl.hosts.adapters.skyrl_gym:SkyRLGym",
    "textarena": "polyrl.hosts.adapters.textarena:TextArenaGame",
    "calculator": "polyrl.starters.environments:Calculator",
    "treasure": "polyrl.starters.environments:Treasure",
}
"""Classes that are played turn by turn, as a person's own are."""
WITH_A_HARNESS: Mapping[str, str] = {"verifiers": "polyrl.hosts.adapters.verifiers:VerifiersEnvironment"}
"""Classes that play whole episodes through the front. They get the host's parts first."""


def find_environment(
    name: str,
    args: Mapping[str, Any],
    parts: HostParts,
    *,
    max_turns: int | None = None,
    key: str = "environment",
) -> PlayedEnvironment:
    """Return an environment that has not started. Raises ConfigError for a name or arguments that cannot be used."""
    if name in WITH_A_HARNESS:
        made: Callable[..., Any] = find(name, key, WITH_A_HARNESS, what="Class")
        check_arguments(made, args, f"{key}_args", 1)
        return made(parts, **args)
    found = find(name, key, TURN_BY_TURN, also=tuple(WITH_A_HARNESS), what="Class")
    return OwnEnvironment(with_arguments(found, args, f"{key}_args", 0), parts, name=name, max_turns=max_turns)
