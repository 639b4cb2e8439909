"""How many cores this process really has: what it is pinned to, and what its container may use of them."""

import math
import os
from pathlib import Path

_GROUPS = Path("/sys/fs/cgroup")


def num_cores(groups: Path = _GROUPS) -> int:
    """Return the number of cores that this process may use, at least one. `groups` is the folder of control groups."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    share = _share(groups)
    return cores if share is None else max(1, min(cores, math.floor(share)))


def _share(groups: Path) -> float | None:
    """Cores that a container may use, as the second or the first version of control groups has it; none: all."""
    try:
        words = (groups / "cpu.max").read_text().split()
    except OSError:
        try:
            words = [(groups / "cpu" / f"cpu.cfs_{one}_us").read_text().strip() for one in ("quota", "period")]
        except OSError:
            return None
    try:
        quota, period = (float(word) for word in words)
    except ValueError:  # "max"
        return None
    return quota / period if quota > 0 and period > 0 else None
