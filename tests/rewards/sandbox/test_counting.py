"""What a program uses, as it is counted from outside."""

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from polyrl.rewards.sandbox.inside.counting import pids_of_session, queued_s

_NUM_BYTES = 48 << 20
_FILLS = f"""
import ctypes, os, sys, threading, time
ctypes.CDLL(None).prctl(15, b"RssAnon: 0", 0, 0, 0)
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
    """A process with a thread that holds memory, whose first thread is there or has ended. Its name looks like a count
    of memory: it comes first in what /proc says."""
    words = [sys.executable, "-S", "-c", _FILLS, str(request.param)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, start_new_session=True) as process:
        assert process.stdout is not None and process.stdout.readline() == b"full\n"
        yield process.pid
        os.kill(process.pid, 9)


def test_memory_is_counted_whichever_thread_of_a_process_has_ended(leader: int):
    """Counted by a process of its own: what that one holds itself is subtracted, and ours holds much."""
    counted = subprocess.run([sys.executable, "-c", _COUNTS, str(leader)], capture_output=True, check=True)
    assert int(counted.stdout) > _NUM_BYTES // 2


_WAITS_FOR_A_CORE = """
import os, threading, time
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
def spin():
    while True: pass
for _ in range(2):
    if os.fork() == 0:
        threading.Thread(target=spin).start()
        time.sleep(1)
        print("done", flush=True)
        time.sleep(60)
time.sleep(60)
"""


def test_time_without_a_core_is_that_of_any_process_and_thread():
    """The first process of a pytest run waits for the program's; the first thread of a program may wait for others."""
    words = [sys.executable, "-S", "-c", _WAITS_FOR_A_CORE]
    with subprocess.Popen(words, stdout=subprocess.PIPE, start_new_session=True) as process:
        assert process.stdout is not None
        assert [process.stdout.readline() for _ in range(2)] == [b"done\n"] * 2
        queued = queued_s(pids_of_session(process.pid))
        os.killpg(process.pid, 9)
    assert queued > 0.3
