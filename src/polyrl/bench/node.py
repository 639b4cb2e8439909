"""A process of the bench: a trainer that publishes random weights, or a worker that pulls them. A line in, a line out.

    python -m polyrl.bench.node serve|pull SETTINGS NUM_BYTES|NUMBER

Lines are JSON. It says {"addresses": [...]} when it is ready, and ends when its input does.
"""

import json
import sys
import time
from typing import Any

import msgspec
import numpy as np

from polyrl.bench.floor import cpu_s
from polyrl.weights.manifest import Layout, Spec, lay_out
from polyrl.weights.peer import WeightPeer
from polyrl.weights.server import WeightServer
from polyrl.weights.settings import TransferError, WeightSettings

KEY = b"the key of a bench, which is no secret"


def main(argv: list[str]) -> int:
    role, settings, number = argv
    decoded = msgspec.json.decode(settings, type=WeightSettings)
    node = Trainer(decoded, int(number)) if role == "serve" else WeightWorker(decoded, int(number))
    say({"addresses": node.addresses})
    try:
        for line in sys.stdin:
            say(node.do(json.loads(line)))
    finally:
        node.close()
    return 0


def say(what: dict[str, Any]) -> None:
    print(json.dumps(what), flush=True)


class Trainer:
    def __init__(self, settings: WeightSettings, num_bytes: int) -> None:
        self._server = WeightServer(settings, KEY)
        self._server.start()
        self._layout = layout_of(num_bytes)
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


class WeightWorker:
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


def layout_of(num_bytes: int) -> Layout:
    return lay_out([Spec("weights", "bfloat16", (num_bytes // 2,))])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
