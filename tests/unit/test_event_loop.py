"""A process that runs a loop gives back what it does not use."""

import gc
import os
import platform
import threading
from pathlib import Path

import pytest

from polyrl.run.event_loop import again_and_again, give_back


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other allocators do without")
def test_memory_that_is_free_between_what_is_used_is_given_back():
    blocks = [bytearray(b"x") * 100_000 for _ in range(1000)]
    used = blocks[::20]
    blocks.clear()
    gc.collect()
    before = resident_bytes()
    give_back()
    assert resident_bytes() < before - 40_000_000
    assert len(used) == 50


def test_it_is_done_for_as_long_as_the_loop_lasts_and_no_longer():
    thrice = threading.Semaphore(0)

    with again_and_again(thrice.release, 0.001):
        assert all(thrice.acquire(timeout=10) for _ in range(3))
    assert all(one.name != "release" for one in threading.enumerate())
