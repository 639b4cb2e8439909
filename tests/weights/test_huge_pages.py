"""A mapping on huge pages: where it lies, how long it lasts, and what the kernel makes of it."""

import os
from pathlib import Path

import numpy as np
import pytest

from polyrl.weights.huge_pages import HUGE_BYTES, map_file

SHARED = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")


@pytest.fixture
def fd():
    fd = os.memfd_create("polyrl-test-huge")
    yield fd
    os.close(fd)


def mapped() -> list[str]:
    """What the kernel says of each mapping of such a file."""
    return [one for one in Path("/proc/self/smaps").read_text().split("VmFlags") if "memfd:polyrl-test-huge" in one]


def test_the_file_is_filled_with_pages_also_where_no_huge_page_fits(fd: int):
    num_bytes = 2 * HUGE_BYTES + 5000
    view = map_file(fd, num_bytes)
    assert os.fstat(fd).st_blocks * 512 >= num_bytes
    assert view.nbytes == num_bytes
    assert not np.frombuffer(view, np.uint8).any()
    assert np.frombuffer(view, np.uint8).ctypes.data % HUGE_BYTES == 0
    view[-3:] = b"end"
    assert os.pread(fd, 9, num_bytes - 3) == b"end"


def test_the_mapping_ends_with_the_last_view(fd: int):
    view = map_file(fd, HUGE_BYTES)
    part = np.frombuffer(view[10:20], np.uint8)
    del view
    assert len(mapped()) == 1
    part[0] = 7
    del part
    assert mapped() == []
    assert os.pread(fd, 1, 10) == b"\x07"


def test_a_file_that_cannot_be_written_to_is_an_error(fd: int):
    read_only = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY)
    with pytest.raises(OSError):
        map_file(read_only, 5000)
    os.close(read_only)
    assert mapped() == []


@pytest.mark.skipif(
    not SHARED.exists() or "[deny]" in SHARED.read_text(), reason="no huge pages for shared memory here"
)
@pytest.mark.skipif(tuple(map(int, os.uname().release.split(".")[:2])) < (6, 1), reason="the kernel cannot collapse")
def test_whole_huge_pages_are_huge(fd: int):
    view = map_file(fd, 4 * HUGE_BYTES + 5000)
    (found,) = [line for line in mapped()[0].splitlines() if line.startswith("ShmemPmdMapped")]
    assert int(found.split()[1]) << 10 >= HUGE_BYTES  # at least one: memory may be in pieces
    del view
