"""Folders that are there whole, on the disk, or not at all."""

import os
from pathlib import Path

import pytest

from polyrl.disk import whole_folder


def test_a_folder_gets_its_name_when_all_that_is_in_it_is_synced_and_then_the_name_is(tmp_path: Path, monkeypatch):
    out = tmp_path / "out"
    synced: list[tuple[str, bool]] = []
    fsync = os.fsync

    def watched(descriptor: int) -> None:
        synced.append((Path(os.readlink(f"/proc/self/fd/{descriptor}")).name, out.exists()))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", watched)
    with whole_folder(out) as fresh:
        (fresh / "first").write_bytes(b"1")
        (fresh / "inner").mkdir()
        (fresh / "inner" / "second").write_bytes(b"2")
    names = ["first", "inner", "second", fresh.name]
    assert sorted(synced[:-1]) == sorted((name, False) for name in names)
    assert synced[-1] == (tmp_path.name, True)
    assert (out / "inner" / "second").read_bytes() == b"2"


def test_a_folder_that_fails_is_removed(tmp_path: Path):
    with pytest.raises(OSError, match="full"), whole_folder(tmp_path / "out") as fresh:
        (fresh / "first").write_bytes(b"1")
        raise OSError("the disk is full")
    assert not list(tmp_path.iterdir())
