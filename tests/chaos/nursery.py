"""Workers of a chaos test, forked from a process that has imported everything: a life costs milliseconds.

    python nursery.py PARENT

Reads lines of JSON: {"out": PATH, "number": N, "settings": {...}, "version": V, "digest": D, "addresses": [...]}; says
{"pid": P} for each. A worker writes its own addresses to OUT.addresses, pulls until it has the version, writes what it
got to OUT.result, and goes on relaying until it is killed, or until the nursery ends.
"""

import ctypes
import json
import os
import signal
import sys
import time
from pathlib import Path

import msgspec

from polyrl.weights.chunks import bad_chunks
from polyrl.weights.peer import WeightPeer
from polyrl.weights.settings import TransferError, WeightSettings

KEY = b"k" * 32
_PR_SET_PDEATHSIG = 1


def main() -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel buries them
    for line in sys.stdin:
        wish = json.loads(line)
        pid = os.fork()
        if pid == 0:
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            live(wish)
        print(json.dumps({"pid": pid}), flush=True)


def live(wish: dict) -> None:
    settings = msgspec.convert(wish["settings"], WeightSettings)
    peer = WeightPeer(settings, KEY, number=wish["number"])
    write(wish["out"] + ".addresses", peer.addresses)
    result: dict = {"failures": []}
    while peer.held is None and len(result["failures"]) < 5:
        try:
            with peer.pull(wish["version"], wish["digest"], wish["addresses"], 20) as copy:
                result["right"] = not bad_chunks(copy.view, copy.manifest.chunks)
                result["digest"] = copy.manifest.digest
        except TransferError as error:
            result["failures"].append([error.reason, error.source_is_bad])
    write(wish["out"] + ".result", result)
    while True:
        time.sleep(3600)


def write(path: str, content: object) -> None:
    Path(path + ".new").write_text(json.dumps(content), encoding="utf-8")
    os.rename(path + ".new", path)


if __name__ == "__main__":
    main()
