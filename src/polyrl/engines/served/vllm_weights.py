"""How a vLLM server takes weights: through its public hooks only. docs/guides/engine-versions.md lists them.

Its workers are extended by a method that fetches a version out of our memory and gives it to `reload_weights`, which
is vLLM's own way to put weights in place, on every device and at every rank. /pause with mode=keep freezes running
samples; with clear_cache=true their cache is computed anew afterwards.
"""

from collections.abc import Mapping
from typing import Any

from polyrl.engines.engine import Weights
from polyrl.engines.served.handing import new_name
from polyrl.engines.served.http import Http
from polyrl.engines.served.server import ServedConfig
from polyrl.engines.served.staging import PUT_S, OurModules, Staged, hand_over, labelled, stage

_ANSWER_S = 60.0
_METHOD = "polyrl_install"


class VllmWeighing:
    def __init__(self, http: Http, config: ServedConfig) -> None:
        self._http = http
        self._config = config
        self._modules = OurModules()

    def flags(self) -> list[str]:
        flags = ["--worker-extension-cls", "polyrl.engines.served.vllm_extension.PolyrlExtension"]
        # A cache of prompts cannot be emptied while samples run: one shared by all would stay at the first version.
        return flags if self._config.after_install == "recompute" else [*flags, "--no-enable-prefix-caching"]

    def environment(self) -> Mapping[str, str]:
        return {"PYTHONPATH": self._modules.path, "VLLM_SERVER_DEV_MODE": "1"}

    async def stage(self, weights: Weights) -> Staged:
        return await stage(weights, self._config.model)

    async def pause(self) -> None:
        clear = "true" if self._config.after_install == "recompute" else "false"
        await self._http.post(f"/pause?mode=keep&clear_cache={clear}", timeout_s=_ANSWER_S)

    async def put(self, staged: Staged) -> None:
        name = new_name()
        body = {"method": _METHOD, "args": [name], "timeout": PUT_S}
        await hand_over(staged, name, self._http.post("/collective_rpc", body, timeout_s=PUT_S))
        label = {"new_version": str(staged.version)}
        await labelled(self._http.post("/update_weight_version", label, timeout_s=_ANSWER_S))

    async def resume(self) -> None:
        await self._http.post("/resume", timeout_s=_ANSWER_S)

    async def is_paused(self) -> bool:
        said: dict[str, Any] = await self._http.get("/is_paused", timeout_s=_ANSWER_S)
        return bool(said["is_paused"])
