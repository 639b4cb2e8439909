"""How a vLLM server takes weights: through its public hooks only. served/__init__.py says how."""

from collections.abc import Mapping
from typing import Any

from polyrl.engines.engine import EngineError, Weights
from polyrl.engines.served.http import Http
from polyrl.engines.served.server import ServedConfig


class VllmWeighing:
    def __init__(self, http: Http, config: ServedConfig) -> None:
        self._http = http
        self._config = config

    def flags(self) -> list[str]:
        return []

    def environment(self) -> Mapping[str, str]:
        return {}

    async def stage(self, weights: Weights) -> Any:
        raise EngineError(f"version {weights.version}: a vLLM server takes no weights yet")

    async def pause(self) -> None:
        raise EngineError("a vLLM server does not pause yet")

    async def put(self, staged: Any) -> None:
        raise EngineError("a vLLM server takes no weights yet")

    async def resume(self) -> None:
        raise EngineError("a vLLM server does not resume yet")
