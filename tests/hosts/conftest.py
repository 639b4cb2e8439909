"""Environments that several files of tests play: a taskset of verifiers, and a server of OpenEnv."""

import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent


@pytest.fixture
def sums(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A taskset of the test's own; verifiers starts its tool server as a process, which must find it too."""
    monkeypatch.syspath_prepend(str(HERE))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")]))
    return {"taskset": {"id": "polyrl_test_sums", "with_tools": False}, "agent": {"max_turns": 4}}


@pytest.fixture
def counting_server(tmp_path: Path) -> Iterator[str]:
    with (tmp_path / "server.log").open("wb") as log:
        command = [sys.executable, str(HERE / "openenv_server.py")]
        server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
    assert server.stdout is not None
    try:
        port = int(server.stdout.readline())
        url = f"http://127.0.0.1:{port}"
        for _ in range(200):
            try:
                urllib.request.urlopen(f"{url}/health", timeout=1)
                break
            except OSError:
                time.sleep(0.1)
        yield url
    finally:
        server.kill()
        server.wait()
        server.stdout.close()
