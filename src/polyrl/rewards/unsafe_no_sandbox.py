"""The code reward WITHOUT A SANDBOX: programs that a model wrote run with the rights of whoever started the run.

    function = "polyrl.rewards.unsafe_no_sandbox:score"

It takes the arguments of polyrl.rewards.code:score, and warns on every start. Limits of CPU time, memory, output and
processes hold for programs that do not try to get around them; nothing else does.
"""

from functools import partial

from polyrl.rewards.sandbox.scoring import score_program

score = partial(score_program, unsafe_no_sandbox=True)
