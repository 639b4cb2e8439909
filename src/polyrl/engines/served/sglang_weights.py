"""How an SGLang server takes weights: through its public hooks only. docs/guides/engine-versions.md lists them.

/update_weights_from_tensor calls a loader that the server was started with, which fetches a version out of our memory
and gives it to the model's own `load_weights`. The request carries no tensors, and nothing but an empty list a rank is
unpickled. /pause_generation with mode=retract throws the cache of running samples away, to be computed anew; in_place
keeps it.
"""

import base64
import os
import pickle
from collections.abc import Mapping
from typing import Any

from polyrl.engines.engine import EngineError, Weights
from polyrl.engines.served.between import SOCKET_VARIABLE
from polyrl.engines.served.handing import new_name
from polyrl.engines.served.http import Http, ServerAnswered
from polyrl.engines.served.server import ServedConfig, ServerBroken
from polyrl.engines.served.staging import PUT_S, OurModules, Staged, hand_over, labelled, stage

_ANSWER_S = 60.0
_LOADER = "polyrl.engines.served.sglang_loader.load"
_NO_TENSORS = base64.b64encode(pickle.dumps([])).decode()


class SglangWeighing:
    def __init__(self, http: Http, config: ServedConfig) -> None:
        self._http = http
        self._config = config
        self._modules = OurModules()
        self._socket_name = os.environ.get(SOCKET_VARIABLE, "") or new_name()
        self._num_ranks: int | None = None

    def flags(self) -> list[str]:
        flags = ["--custom-weight-loader", _LOADER]
        # A cache of prompts cannot be emptied while samples run: one shared by all would stay at the first version.
        return flags if self._config.after_install == "recompute" else [*flags, "--disable-radix-cache"]

    def environment(self) -> Mapping[str, str]:
        return {"PYTHONPATH": self._modules.path, SOCKET_VARIABLE: self._socket_name}

    async def stage(self, weights: Weights) -> Staged:
        if self._num_ranks is None:
            said: dict[str, Any] = await self._http.get("/server_info", timeout_s=_ANSWER_S)
            self._num_ranks = int(said.get("tp_size", 1))
        return await stage(weights, self._config.model)

    async def pause(self) -> None:
        mode = "retract" if self._config.after_install == "recompute" else "in_place"
        await self._http.post("/pause_generation", {"mode": mode}, timeout_s=_ANSWER_S)

    async def put(self, staged: Staged) -> None:
        await self._http.post("/begin_weight_update", {}, timeout_s=_ANSWER_S)
        try:
            await hand_over(staged, self._socket_name, self._update())
        finally:
            await self._end()
        label = {"new_version": str(staged.version), "abort_all_requests": False}
        await labelled(self._http.post("/update_weight_version", label, timeout_s=_ANSWER_S))

    async def _update(self) -> None:
        body = {
            "serialized_named_tensors": [_NO_TENSORS] * (self._num_ranks or 1),
            "load_format": _LOADER,
            "flush_cache": self._config.after_install == "recompute",
        }
        await self._http.post("/update_weights_from_tensor", body, timeout_s=PUT_S)

    async def _end(self) -> None:
        try:
            await self._http.post("/end_weight_update", {}, timeout_s=_ANSWER_S)
        except EngineError as error:
            raise ServerBroken(f"an update of weights could not be ended: {error}") from error

    async def resume(self) -> None:
        await self._http.post("/continue_generation", {}, timeout_s=_ANSWER_S)

    async def is_paused(self) -> bool:
        """A server that is up and not ready for requests is one that pauses."""
        try:
            await self._http.get("/ready", timeout_s=_ANSWER_S, text=True)
        except ServerAnswered:
            return True
        return False
