"""The code reward WITHOUT A SANDBOX: programs that a model wrote run with the rights of the run's user.

    function = "polyrl.rewards.unsafe_no_sandbox:UnsafeCode"

It takes the arguments of the reward `code`, and warns on every start. Limits of CPU time, memory, output and processes
hold for programs that do not try to get around them; nothing else does.
"""

from typing import ClassVar

from polyrl.rewards.sandbox.scoring import ProgramReward


class UnsafeCode(ProgramReward):
    is_unsafe: ClassVar[bool] = True
