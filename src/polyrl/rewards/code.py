"""The code reward: 1 if the program in the answer passes the row's tests, otherwise 0. Programs run in a sandbox.

    [[rewards.functions]]
    function = "polyrl.rewards.code:score"
    args = { cpu_s = 4, memory_mb = 512 }

A row's column `tests` is a list, or its JSON text, of cases such as {"input": "2 3", "output": "5"},
{"function": "add", "args": [2, 3], "value": 5} and {"pytest": "from solution import add ..."}. Without that column the
row's answer is what the program has to print.

Rules kept here: where there is no bubblewrap, a recipe that names this reward is refused before its run starts.
"""

import shutil

from polyrl.rewards.reward import Reward, RewardInput
from polyrl.rewards.sandbox.sandbox import MISSING
from polyrl.rewards.sandbox.scoring import score_program

if shutil.which("bwrap") is None:
    raise ImportError(MISSING)


async def score(
    given: RewardInput,
    *,
    tests: str = "tests",
    language: str = "python",
    template: str = "",
    partial: bool = False,
    cpu_s: float = 5.0,
    memory_mb: int = 512,
    sandboxes: int = 0,
) -> Reward:
    """Run the answer's program against the row's tests; score_program describes the arguments."""
    return await score_program(
        given,
        tests=tests,
        language=language,
        template=template,
        partial=partial,
        cpu_s=cpu_s,
        memory_mb=memory_mb,
        sandboxes=sandboxes,
    )
