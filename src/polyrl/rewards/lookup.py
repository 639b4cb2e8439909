"""Check before the run that a recipe's reward functions exist and take their arguments.

Users' functions are checked in a separate process, since their modules are never imported into the trainer.
"""

import socket
import subprocess
import sys
from collections.abc import Mapping

from polyrl.config.plugins import is_own
from polyrl.config.rewards import WeightedReward
from polyrl.errors import ConfigError
from polyrl.rewards.line import Surroundings
from polyrl.rewards.messages import (
    MAX_REPLY_BYTES,
    Failed,
    FunctionRequest,
    RewardSetup,
    decode_reply,
    encode,
    take_messages,
)
from polyrl.rewards.reward import OURS, check_reward, find_reward
from polyrl.rewards.sandbox.sandbox import shout

_ANYWHERE = {"code": "polyrl.rewards.sandbox.scoring:ProgramReward"}
"""Functions of ours that some machines cannot import, each with a class of the same arguments that all can."""
_UNSAFE = "polyrl.rewards.unsafe_no_sandbox:UnsafeCode"


def check_functions(functions: Mapping[str, WeightedReward], surroundings: Surroundings | None = None) -> None:
    """Check the functions, given by the setting that names each. Raises ConfigError, which starts with that setting."""
    surroundings = Surroundings() if surroundings is None else surroundings
    if surroundings.walls is not None:
        surroundings.walls.check()
    theirs = {key: one for key, one in functions.items() if one.function not in OURS and ":" in one.function}
    for key, one in functions.items():
        if key not in theirs:
            check_reward(find_reward(one.function, key), one.args, key)
    if theirs:
        _check_elsewhere(theirs, surroundings)
    if any(one.function == _UNSAFE for one in functions.values()):
        shout()  # its own processes have no terminal to shout in


def check_sent(functions: Mapping[str, WeightedReward]) -> None:
    """Check the functions of a run in which reward workers alone score, as far as their machines do not matter.

    Modules of a person's own, bubblewrap and the folders of models need not be here: reward workers look for them.
    Raises ConfigError.
    """
    for key, one in functions.items():
        if is_own(one.function) or (one.function == "reward_model" and "path" in one.args):
            continue
        check_reward(find_reward(_ANYWHERE.get(one.function, one.function), key), one.args, key)


def _check_elsewhere(functions: Mapping[str, WeightedReward], surroundings: Surroundings) -> None:
    ours, theirs = socket.socketpair()
    with ours:
        with theirs, surroundings.start_words(theirs.fileno()) as words:
            process = subprocess.Popen(
                words.command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=words.descriptors,
                start_new_session=True,
                env=words.environment,
            )
        try:
            ours.settimeout(surroundings.start_s)
            ours.sendall(encode(RewardSetup(list(sys.path), surroundings.memory_bytes)))
            for key, one in functions.items():
                _check(ours, key, one)
        finally:
            process.kill()
            process.wait()


def _check(line: socket.socket, key: str, reward: WeightedReward) -> None:
    buffer, name = bytearray(), reward.function
    try:
        answers = [] if reward.whole_group else None
        line.sendall(encode(FunctionRequest(b"", key, name, reward.args, None, 0.0, answers=answers)))
        while not (replies := [decode_reply(one) for one in take_messages(buffer, MAX_REPLY_BYTES)]):
            data = line.recv(1 << 16)
            if not data:
                raise ConfigError(f'{key}: "{name}": importing it ended its process')
            buffer += data
    except TimeoutError as error:
        raise ConfigError(f'{key}: "{name}": cannot be imported within {line.gettimeout():g} s') from error
    except OSError as error:
        raise ConfigError(f'{key}: "{name}": importing it ended its process') from error
    if isinstance(replies[0], Failed):
        raise ConfigError(replies[0].reason)
