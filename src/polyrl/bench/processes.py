"""The bench's trainer and workers as processes, spoken to a line at a time."""

import json
import subprocess
import sys
from typing import Any, Literal

import msgspec

from polyrl.weights.settings import WeightSettings

_END_S = 20.0


class Node:
    """Ends with the `with` block."""

    def __init__(
        self, role: Literal["serve", "pull"], settings: WeightSettings, number: int, prefix: list[str] | None = None
    ) -> None:
        """`number` is a trainer's version in bytes, or says which worker this is. `prefix` runs it elsewhere."""
        module = "polyrl.bench.node"
        argv = [sys.executable, "-m", module, role, msgspec.json.encode(settings).decode(), str(number)]
        self.process = subprocess.Popen(
            [*(prefix or []), *argv], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.addresses: list[str] = []

    def __enter__(self) -> "Node":
        self.addresses = self.hear()["addresses"]
        return self

    def __exit__(self, *_: object) -> None:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.close()
        try:
            self.process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process.stdout.close()

    def tell(self, **wish: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(wish) + "\n")
        self.process.stdin.flush()

    def hear(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"a process of the bench ended with {self.process.wait(_END_S)}")
        return json.loads(line)

    def ask(self, **wish: Any) -> dict[str, Any]:
        self.tell(**wish)
        return self.hear()
