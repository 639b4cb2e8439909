"""Processes on this machine, as a test finds them."""

from pathlib import Path


def children(pid: int, word: str) -> list[int]:
    """Processes that this one started, of that command."""
    found = []
    for name in (entry.name for entry in Path("/proc").iterdir() if entry.name.isdigit()):
        try:
            stat = (Path("/proc") / name / "stat").read_text()
            words = (Path("/proc") / name / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if int(stat.rpartition(")")[2].split()[1]) == pid and word.encode() in words:
            found.append(int(name))
    return found
