"""What a program uses, as it is counted from outside."""

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

_NUM_BYTES = 48 << 20
_FILLS = f"""
import ctypes, os, sys, threading, time
def fill():
    held = bytearray({_NUM_BYTES})
    for at in range(0, len(held), 4096): held[at] = 1
    if sys.argv[1] == "ended":
        while open("/proc/self/stat").read().rpartition(")")[2].split()[0] != "Z": time.sleep(0.01)
    print("full", flush=True)
    time.sleep(60)
threading.Thread(target=fill).start()
if sys.argv[1] == "ended": ctypes.CDLL(None).syscall(60 if os.uname().machine == "x86_64" else 93, 0)
"""


_COUNTS = """
import sys
from polyrl.rewards.sandbox.inside.counting import usage_of_session
print(usage_of_session(int(sys.argv[1])).memory_bytes)
"""


@pytest.fixture(params=["there", "ended"])
def leader(request: pytest.FixtureRequest) -> Iterator[int]:
    """A process with a thread that holds memory, whose first thread is there or has ended."""
    words = [sys.executable, "-S", "-c", _FILLS, str(request.param)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, start_new_session=True) as process:
        assert process.stdout is not None and process.stdout.readline() == b"full\n"
        yield process.pid
        os.kill(process.pid, 9)


def test_memory_is_counted_whichever_thread_of_a_process_has_ended(leader: int):
    """Counted by a process of its own: what the counting process holds itself is subtracted, and this one holds much."""
    counted = subprocess.run([sys.executable, "-c", _COUNTS, str(leader)], capture_output=True, check=True)
    assert int(counted.stdout) > _NUM_BYTES // 2
