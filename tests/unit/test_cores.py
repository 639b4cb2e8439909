"""Cores that a process really has: no more than it is pinned to, and no more than its container may use."""

import os
from pathlib import Path

import pytest

from polyrl.cores import num_cores

PINNED = len(os.sched_getaffinity(0))


def write(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    return folder


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({}, PINNED),
        ({"cpu.max": "max 100000\n"}, PINNED),
        ({"cpu.max": "100000 100000\n"}, 1),
        ({"cpu.max": "150000 100000\n"}, 1),
        ({"cpu.max": "50000 100000\n"}, 1),
        ({"cpu.max": "99900000 100000\n"}, PINNED),
        ({"cpu.max": "nonsense"}, PINNED),
        ({"cpu/cpu.cfs_quota_us": "100000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 1),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, PINNED),
    ],
)
def test_a_containers_share_bounds_the_cores(tmp_path: Path, files: dict[str, str], cores: int):
    assert num_cores(write(tmp_path, files)) == cores
