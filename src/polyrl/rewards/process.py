"""A process of the pool: reads which function to call on what, calls it, says what came of it, again and again.

    python -P -m polyrl.rewards.process FD          FD: a socket to the trainer

Rules kept here: nothing heavy is imported but what a function imports itself. Both sides speak msgspec, never pickle:
functions are named, inputs are plain data. What a function prints goes nowhere. The process ends with the trainer,
however that ends. What a function forks never speaks on our behalf.
Left out: limits. The pool ends whoever takes too long, with all that they started.
"""

import os
import socket
import struct
import sys
import time
from typing import Any

import msgspec

from polyrl.errors import one_line
from polyrl.parent import end_with_parent
from polyrl.rewards.reward import RewardFailed, RewardFunction, RewardInput, check_value, find_reward

SIZE = struct.Struct("<I")
"""Before every message: its bytes."""


class Paths(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Where modules are found, beside where they are found anyway. Said once, first."""

    folders: list[str]


class Ask(msgspec.Struct, frozen=True, tag=True, array_like=True):
    name: str
    given: RewardInput


class Began(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The function is there, and is called now: its time runs."""


class Scored(msgspec.Struct, frozen=True, tag=True, array_like=True):
    reward: float
    seconds: float


class Failed(msgspec.Struct, frozen=True, tag=True, array_like=True):
    reason: str


Question = Paths | Ask
Reply = Began | Scored | Failed

_encoder = msgspec.msgpack.Encoder(enc_hook=str)
_questions = msgspec.msgpack.Decoder(Question)
_replies = msgspec.msgpack.Decoder(Reply)


def encode(message: Question | Reply) -> bytes:
    """With its size before it. Raises TypeError, ValueError or OverflowError for what is no plain data."""
    body = _encoder.encode(message)
    return SIZE.pack(len(body)) + body


def decode_reply(body: bytes) -> Reply:
    return _replies.decode(body)


def serve(connection: socket.socket) -> None:
    """Until the other side is gone."""
    own_pid = os.getpid()
    functions: dict[str, RewardFunction] = {}
    stream = connection.makefile("rb")
    while True:
        head = stream.read(SIZE.size)
        if len(head) < SIZE.size:
            return
        question = _questions.decode(stream.read(SIZE.unpack(head)[0]))
        if isinstance(question, Paths):
            sys.path.extend(one for one in question.folders if one not in sys.path)
            continue
        reply = _answer(question, functions, connection)
        if os.getpid() != own_pid:  # a child that the function forked and let return
            os._exit(0)
        connection.sendall(encode(reply))


def _answer(ask: Ask, functions: dict[str, RewardFunction], connection: socket.socket) -> Reply:
    try:
        if ask.name not in functions:
            functions[ask.name] = find_reward(ask.name)
        connection.sendall(encode(Began()))
        began = time.perf_counter()
        reward = check_value(functions[ask.name](ask.given))
        return Scored(reward, time.perf_counter() - began)
    except RewardFailed as error:
        return Failed(str(error))
    except BaseException as error:  # noqa: BLE001  a function may raise anything, SystemExit too
        return Failed(one_line(error))


def main(arguments: list[str]) -> Any:
    end_with_parent()
    number = int(arguments[0])
    os.set_inheritable(number, False)
    with socket.socket(fileno=number) as connection:
        connection.setblocking(True)
        serve(connection)


if __name__ == "__main__":
    main(sys.argv[1:])
