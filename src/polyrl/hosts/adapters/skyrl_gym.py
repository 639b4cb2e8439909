"""Environments of `skyrl-gym`: `init` with the row's prompt, `step` with each answer, rewards summed.

    environment = "skyrl-gym", environment_args = { env = "gsm8k" }        with data: rows as SkyRL prepares them

Rules kept here: the row is the environment's `extras`, as in SkyRL, and its `prompt` the conversation that begins.
Environments that run code which the model wrote do so on this machine, and are refused without `allow_code = true`.
Left out: `postprocessed_action`; the policy's answer stays as it was drawn.
"""

import dataclasses
import inspect
from typing import Any, get_args

from polyrl.errors import UserError, one_line
from polyrl.hosts.adapters.packages import need
from polyrl.hosts.own import Turn

_RUN_CODE = ("lcb", "searchcode")


class SkyRLGym:
    max_turns = 64

    def __init__(
        self,
        env: str,
        settings: dict[str, Any] | None = None,
        prompt_key: str = "prompt",
        allow_code: bool = False,
        num_tasks: int | None = None,
    ) -> None:
        """`settings` are the fields of the environment's `env_config`."""
        self._gym = need("skyrl_gym", "skyrl-gym")
        if env in _RUN_CODE and not allow_code:
            raise UserError(f"skyrl-gym: {env} runs the model's code on this machine; allow_code = true accepts that")
        self._registry = need("skyrl_gym.envs.registration", "skyrl-gym").registry
        if env not in self._registry:
            raise UserError(f"skyrl-gym: no environment {env!r}; expected one of {', '.join(sorted(self._registry))}")
        self._config = _config_of(env, self._registry[env].entry_point, settings or {})
        self._env_id, self._prompt_key = env, prompt_key
        self._env: Any = None
        self.num_tasks = num_tasks

    def begin(self, task: dict[str, Any], seed: int) -> Any:
        prompt = task.get(self._prompt_key)
        if not isinstance(prompt, list | str):
            raise ValueError(f"skyrl-gym needs rows with {self._prompt_key}: a text or a list of messages")
        extras = {name: value for name, value in task.items() if name != self._prompt_key}
        self._env = self._gym.make(self._env_id, env_config=self._config, extras=extras)
        begun = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        messages, _ = self._env.init(begun)
        return messages

    def step(self, text: str) -> Turn:
        said = self._env.step(text)
        return Turn(said["observations"], done=bool(said["done"]), reward=said["reward"])

    def close(self) -> None:
        if self._env is not None:
            self._env.close()


def _config_of(env: str, entry_point: Any, settings: dict[str, Any]) -> Any:
    """Return an environment's settings as it wants them: as its own class where it has one, whose fields it reads."""
    if isinstance(entry_point, str):
        module, _, name = entry_point.partition(":")
        entry_point = getattr(need(module, "skyrl-gym"), name)
    known = inspect.signature(entry_point).parameters.get("env_config")  # a creator may take all by **kwargs
    kinds = () if known is None else (known.annotation, *get_args(known.annotation))
    own = next((one for one in kinds if dataclasses.is_dataclass(one)), None)
    try:
        return settings if own is None else own(**settings)  # type: ignore[operator]
    except TypeError as error:
        raise UserError(f"skyrl-gym: {env}: {one_line(error)}") from error
