"""A folder with a tiny model and rows to train on, and `polyrl` processes that are started in it."""

import json
import os
import time
from pathlib import Path

import pytest
from tests.builtin.tiny_models import save_tiny
from tests.warm import WarmProcess

LETTERS = [chr(0x4E00 + number) for number in range(3, 60)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny("qwen3", tmp_path_factory.mktemp("model"), tokenizer=True, vocab_size=64)


@pytest.fixture
def bare_desk(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The model and the rows, and we are in the folder. Rewards and recipes are the test's own."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").symlink_to(model)
    rows = [{"prompt": "".join(LETTERS[number : number + 4]), "number": number} for number in range(20)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return tmp_path


def polyrl(*arguments: str, together: bool = False) -> WarmProcess:
    """A process of this source tree; `together`: what it says of errors is in its output."""
    return WarmProcess(arguments, together=together)


def start(*settings: str) -> WarmProcess:
    return polyrl("train", "recipe.toml", *settings)


def join(run_dir: Path) -> WarmProcess:
    """A worker that the run has not started."""
    until = time.monotonic() + 60
    while not (run_dir / "manager.json").exists() and time.monotonic() < until:
        time.sleep(0.05)
    url = json.loads((run_dir / "manager.json").read_text())["url"]
    joining = ("--join", url, "--token-file", str(run_dir / "worker.token"), "--engine", "builtin", "--model", "model")
    return polyrl("worker", *joining, "slots=8", "kv_tokens=2048", together=True)


def processes_in(folder: Path) -> list[str]:
    return list(commands_in(folder).values())


def commands_in(folder: Path) -> dict[int, str]:
    """Command lines of whoever works in this folder, by process."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                if Path(os.readlink(entry / "cwd")) == folder:
                    found[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except OSError:
                continue
    return found
