"""How an SGLang server takes weights: through its public hooks only. served/__init__.py says how."""

from collections.abc import Mapping
from typing import Any

from polyrl.engines.engine import EngineError, Weights
from polyrl.engines.served.http import Http
from polyrl.engines.served.server import ServedConfig


class SglangWeighing:
    def __init__(self, http: Http, config: ServedConfig) -> None:
        self._http = http
        self._config = config

    def flags(self) -> list[str]:
        return []

    def environment(self) -> Mapping[str, str]:
        return {}

    async def stage(self, weights: Weights) -> Any:
        raise EngineError(f"version {weights.version}: an SGLang server takes no weights yet")

    async def pause(self) -> None:
        raise EngineError("an SGLang server does not pause yet")

    async def put(self, staged: Any) -> None:
        raise EngineError("an SGLang server takes no weights yet")

    async def resume(self) -> None:
        raise EngineError("an SGLang server does not resume yet")
