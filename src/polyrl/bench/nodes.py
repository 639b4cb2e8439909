"""The bench's trainer and workers, each a process that is spoken to a line at a time.

    python -m polyrl.bench.nodes serve|pull SETTINGS NUM_BYTES|NUMBER

A trainer publishes random weights, a worker pulls them. Lines are JSON. A process says {"addresses": [...]} when it is
ready, and ends when its input does.
"""

import json
import subprocess
import sys
import time
from typing import Any, Literal

import msgspec
import numpy as np

from polyrl.bench.floor import cpu_s
from polyrl.weights.manifest import Layout, Spec, lay_out
from polyrl.weights.peer import WeightPeer
from polyrl.weights.server import WeightServer
from polyrl.weights.settings import TransferError, WeightSettings

KEY = b"the key of a bench, which is no secret"
_END_S = 20.0


class Node:
    """Ends with the `with` block."""

    def __init__(
        self, role: Literal["serve", "pull"], settings: WeightSettings, number: int, prefix: list[str] | None = None
    ) -> None:
        """`number` is a trainer's version in bytes, or says which worker this is. `prefix` runs it elsewhere."""
        module = "polyrl.bench.nodes"
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

    def request(self, **wish: Any) -> dict[str, Any]:
        self.tell(**wish)
        return self.hear()


# Inside such a process


def main(argv: list[str]) -> int:
    role, settings, number = argv
    decoded = msgspec.json.decode(settings, type=WeightSettings)
    node = _Trainer(decoded, int(number)) if role == "serve" else _WeightWorker(decoded, int(number))
    _say({"addresses": node.addresses})
    try:
        for line in sys.stdin:
            _say(node.do(json.loads(line)))
    finally:
        node.close()
    return 0


def _say(what: dict[str, Any]) -> None:
    print(json.dumps(what), flush=True)


class _Trainer:
    def __init__(self, settings: WeightSettings, num_bytes: int) -> None:
        self._server = WeightServer(settings, KEY)
        self._server.start()
        self._layout = _layout_of(num_bytes)
        self._bits = np.random.default_rng(0).integers(0, 1 << 16, self._layout.num_bytes // 2, dtype=np.uint16)
        self._version = 0
        self.addresses = self._server.addresses

    def do(self, wish: dict[str, Any]) -> dict[str, Any]:
        said: dict[str, Any] = {}
        if wish["do"] == "publish":
            self._version += 1
            self._bits[:: 1 << 20] += 1
            offer = self._server.publish(self._version, self._layout, self._fill)
            said = {"version": offer.version, "digest": offer.digest, "num_bytes": offer.num_bytes}
        return {**said, "cpu_s": cpu_s(), "num_bytes_sent": self._server.num_bytes_sent}

    def _fill(self, view: memoryview) -> None:
        np.copyto(np.frombuffer(view, np.uint16), self._bits)

    def close(self) -> None:
        self._server.close()


class _WeightWorker:
    def __init__(self, settings: WeightSettings, number: int) -> None:
        self._peer = WeightPeer(settings, KEY, number=number)
        self.addresses = self._peer.addresses

    def do(self, wish: dict[str, Any]) -> dict[str, Any]:
        before, start = cpu_s(), time.perf_counter()
        error = ""
        try:
            self._peer.pull(wish["version"], wish["digest"], wish["addresses"], wish["deadline_s"]).close()
        except TransferError as failed:
            error = failed.reason
        took_s = time.perf_counter() - start
        sent = self._peer.num_bytes_sent
        return {"took_s": took_s, "cpu_s": cpu_s() - before, "num_bytes_sent": sent, "error": error}

    def close(self) -> None:
        self._peer.close()


def _layout_of(num_bytes: int) -> Layout:
    return lay_out([Spec("weights", "bfloat16", (num_bytes // 2,))])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
