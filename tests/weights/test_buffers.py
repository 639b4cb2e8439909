"""Buffers: written through their owner's mapping alone, and gone without a trace."""

import mmap
import os
from pathlib import Path

import pytest

from polyrl.errors import UserError
from polyrl.weights.buffers import Buffer, available_bytes


def test_a_buffer_is_writable_by_its_owner_and_by_nobody_who_has_the_descriptor():
    buffer = Buffer(5000)
    buffer.view[:4] = b"abcd"
    with pytest.raises(PermissionError):
        os.pwrite(buffer.fd, b"x", 0)
    with pytest.raises(PermissionError):
        mmap.mmap(buffer.fd, 5000)
    with pytest.raises(PermissionError):
        os.ftruncate(buffer.fd, 0)
    again = os.open(f"/proc/self/fd/{buffer.fd}", os.O_RDWR)
    with pytest.raises(PermissionError):
        os.pwrite(again, b"x", 0)
    os.close(again)
    assert os.pread(buffer.fd, 4, 0) == b"abcd"
    buffer.close()


def test_a_buffer_has_no_name_in_the_file_system():
    before = sorted(os.listdir("/dev/shm"))
    buffer = Buffer(5000)
    assert sorted(os.listdir("/dev/shm")) == before
    buffer.close()


def num_mappings() -> int:
    return Path("/proc/self/maps").read_text().count("memfd:polyrl-weights")


def test_closing_gives_memory_and_descriptor_back_also_while_a_view_is_held():
    before = num_mappings()
    buffer = Buffer(5000)
    fd, held = buffer.fd, buffer.view[10:20]
    buffer.close()
    buffer.close()
    with pytest.raises(OSError):
        os.fstat(fd)
    assert bytes(held) == bytes(10)
    del buffer, held
    assert num_mappings() == before


def test_more_than_there_is_memory_for_is_refused_before_the_kernel_looks_for_it():
    with pytest.raises(UserError, match="no memory for 17592186044416 bytes of weights"):
        Buffer(1 << 44)


def test_a_buffer_with_users_outlives_its_closing():
    buffer = Buffer(0)
    buffer.use()
    buffer.close()
    assert os.fstat(buffer.fd)
    assert len(buffer.view) == 0
    buffer.leave()
    buffer.close()
    assert buffer.fd < 0


@pytest.mark.parametrize(
    ("limit", "left"), [("max", 600 << 20), (str(1000 << 20), 150 << 20), (str(10_000 << 20), 600 << 20), ("1", 0)]
)
def test_what_is_left_is_that_of_the_machine_or_of_the_group_whichever_is_less(tmp_path: Path, limit: str, left: int):
    mega = 1 << 20
    (tmp_path / "meminfo").write_text(
        "MemTotal: 9999999 kB\nMemAvailable: 409600 kB\nSwapFree: 204800 kB\nHugePages_Total: 0\n"
    )
    (tmp_path / "memory.max").write_text(f"{limit}\n")
    (tmp_path / "memory.current").write_text(f"{900 * mega}\n")
    (tmp_path / "memory.stat").write_text(f"anon {800 * mega}\ninactive_file {50 * mega}\n")
    assert available_bytes(tmp_path, tmp_path) == left
