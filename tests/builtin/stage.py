"""Short ways to play a script on the builtin engine: the stage and the sink are those of the contract suite."""

from pathlib import Path
from typing import Any

import msgspec

from polyrl.engines.builtin.config import BuiltinConfig
from polyrl.engines.builtin.engine import BuiltinEngine
from polyrl.engines.contract import EngineContract, Script, Stage
from polyrl.ids import LeaseId
from polyrl.wire.frames import Sampling

GREEDY = Sampling(temperature=0.0, ignore_eos=True)


def config(folder: Path, **settings: Any) -> BuiltinConfig:
    return msgspec.convert({"model": str(folder), "kv_tokens": 4096, **settings}, BuiltinConfig)


def engine(folder: Path, **settings: Any) -> BuiltinEngine:
    return BuiltinEngine(config(folder, **settings))


def play(script: Script, folder: Path, **settings: Any) -> None:
    EngineContract().play(script, engine(folder, **settings))


async def answers(stage: Stage, leases: list[LeaseId]) -> list[list[int]]:
    """Their tokens, when all have ended by themselves."""
    for lease in leases:
        assert await stage.sink.end_of(lease) in ("stop", "length"), stage.sink.ends[lease]
    return [stage.sink.texts[lease] for lease in leases]
