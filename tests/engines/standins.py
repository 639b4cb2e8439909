"""The stand-in of a vLLM server as an environment: a Python that finds it, and a model directory without weights."""

import json
import stat
import sys
from pathlib import Path
from typing import Any

from polyrl.engines.served.engine import ServedEngine
from polyrl.engines.served.server import ServedConfig

_PACKAGES = Path(__file__).parent / "standin"
MODEL = {
    "vocab_size": 512,
    "max_position_embeddings": 4096,
    "eos_token_id": 1,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "hidden_size": 128,
}


def save_model(folder: Path, **settings: int) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**MODEL, **settings}))
    return folder


def python(folder: Path) -> str:
    """An interpreter whose `vllm` is the stand-in. It becomes our own, so that its process is the server's."""
    path = folder / "python"
    path.write_text(f'#!/bin/sh\nPYTHONPATH="{_PACKAGES}" exec "{sys.executable}" "$@"\n')
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def engine(folder: Path, *flags: str, pause_s: float = 0.1, **settings: Any) -> ServedEngine:
    folder.mkdir(exist_ok=True)
    given = {"device": "cpu", "slots": 8, "max_context": 4096, **settings}
    model = str(save_model(folder / "model"))
    log = str(folder / "server.log")
    config = ServedConfig(model=model, python=python(folder), log=log, flags=flags, **given)
    return ServedEngine("vllm", config, pause_s=pause_s)
