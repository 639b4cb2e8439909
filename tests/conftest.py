"""What holds for all tests: none asks a cloud's metadata service, torch computes in one thread, since tests run side by
side and threads that wait for each other spin, and Ctrl+C is heard, which a shell has its background jobs ignore.
And for all properties: how their examples are chosen, and that none has a deadline of its own.

Chosen the same way each time: a change is not held up by what it did not do. `make test-long` draws at random, to
find what nobody has seen yet. Hypothesis would give an example 200 ms, and call a test flaky whose example was late
once; on a busy machine any may be.
"""

import os
import signal
from collections.abc import Iterator

import pytest
from hypothesis import settings

os.environ["POLYRL_METADATA_URL"] = "http://127.0.0.1:9"  # nobody listens there; inherited by every process of a test
os.environ.setdefault("OMP_NUM_THREADS", "1")  # before anybody imports torch; inherited too

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # inherited by every process of a test
    signal.signal(signal.SIGINT, signal.default_int_handler)

settings.register_profile("same", deadline=None, derandomize=True, database=None)
settings.register_profile("random", deadline=None)
settings.load_profile("same")


@pytest.fixture
def one_core() -> Iterator[None]:
    """One core for this process: what goes by the number of cores then plays everything in it."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    yield
    os.sched_setaffinity(0, cores)
