"""What every test of the sandbox needs: bubblewrap, and something outside that programs try to get at."""

import asyncio
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from polyrl.errors import UserError
from polyrl.rewards.sandbox.sandbox import Sandbox


def why_not() -> str:
    """Say why no sandbox can be opened here; empty if one can."""
    if shutil.which("bwrap") is None:
        return "bwrap is missing: apt-get install bubblewrap"

    async def body() -> None:
        async with Sandbox.open(size=1):
            pass

    try:
        asyncio.run(body())
    except UserError as error:
        return str(error)
    return ""


@pytest.fixture(scope="session")
def bubblewrap() -> None:
    if reason := why_not():
        pytest.skip(reason)


class Outside(NamedTuple):
    """What is outside of the sandbox, and must stay out of its reach."""

    port: int
    socket_name: str
    secret_file: Path
    pid: int

    def fill_in(self, source: str) -> str:
        values = {"HOST_PORT": self.port, "HOST_SOCKET": self.socket_name, "SECRET_FILE": str(self.secret_file)}
        for name, value in {**values, "HOST_PID": self.pid}.items():
            source = source.replace(name, repr(value))
        return source


@pytest.fixture
def outside(tmp_path: Path) -> Iterator[Outside]:
    secret = tmp_path / "secret.txt"
    secret.write_text("secret")
    os.chmod(secret, 0o644)
    name = f"polyrl-test-{os.getpid()}"
    sleeper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket(socket.AF_UNIX) as abstract:
        abstract.bind("\0" + name)
        abstract.listen()
        yield Outside(server.getsockname()[1], name, secret, sleeper.pid)
        assert sleeper.poll() is None, "a program killed a process of the host"
    sleeper.kill()
    sleeper.wait()
