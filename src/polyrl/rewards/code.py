"""The code reward: 1 if the program in the answer passes the row's tests, otherwise 0. Programs run in a sandbox.

    [[rewards.functions]]
    function = "code"
    args = { cpu_s = 4, memory_mb = 512 }

A row's column `tests` is a list, or its JSON text, of cases such as {"input": "2 3", "output": "5"},
{"function": "add", "args": [2, 3], "value": 5} and {"pytest": "from solution import add ..."}. Without that column the
row's answer is what the program has to print.

Rules kept here: where there is no bubblewrap, a recipe that names this reward is refused before its run starts.
Left out: finding the program, and scoring it (sandbox/scoring.py).
"""

import shutil

from polyrl.rewards.sandbox.sandbox import MISSING
from polyrl.rewards.sandbox.scoring import ProgramReward

if shutil.which("bwrap") is None:
    raise ImportError(MISSING)


class CodeReward(ProgramReward):
    """In a sandbox; ProgramReward has the arguments."""
