"""Go on by itself after a rank was lost: the process replaces itself by one that resumes the run.

Everything else about the run has ended in good order by then: the manager's journal is closed, and the steps so far are
on disk. Workers, hosts and reward workers were told nothing: they dial until the manager is there again, at the same
port, and keep what they have.

Rules kept here: a run that loses ranks again and again before it trains a step ends (train.restarts). Ranks of torchrun
are started again by torchrun.
"""

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from polyrl.errors import RankLost
from polyrl.run import ranks
from polyrl.trainer.state import checkpoint, redo

_RESTARTS = "POLYRL_RESTARTS"
"""COUNT:STEP, the restarts in a row without a new step, and the step that the run was at."""


def go_on(lost: RankLost, run_dir: Path, overrides: Sequence[str], most: int, *, quiet: bool) -> None:
    """Replace this process, or return if the run has to end. `overrides` are those that its recipe may not have yet."""
    if ranks.rank_info(os.environ) is not None:  # torchrun's
        return
    step = _next_step(run_dir)
    count = _restarts(os.environ, step) + 1
    if count > most:
        return
    print(f"polyrl: {lost.why}; going on from step {step} ({count} of {most} tries)", file=sys.stderr, flush=True)
    os.environ[_RESTARTS] = f"{count}:{step}"
    arguments = sys.argv[1:]
    if checkpoint.found(run_dir):
        arguments = ["train", "--resume", str(run_dir), *overrides, *(["--quiet"] if quiet else [])]
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-m", "polyrl", *arguments])


def _restarts(environment: Mapping[str, str], step: int) -> int:
    count, _, before = environment.get(_RESTARTS, "0:-1").partition(":")
    return int(count) if int(before) == step else 0


def _next_step(run_dir: Path) -> int:
    done = [checkpoint.step_of(one) for one in checkpoint.found(run_dir)]
    logged = [checkpoint.step_of(one) + 1 for one in redo.found(run_dir)]
    return max([0, *done, *logged])


def is_restarted(environment: Mapping[str, str]) -> bool:
    """Return whether torchrun has started this process again after a rank was lost."""
    return int(environment.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0
