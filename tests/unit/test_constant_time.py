"""Tokens and session keys are compared in constant time: how long it takes says nothing of how much of one fits."""

from types import SimpleNamespace
from typing import Any, NoReturn, cast

from polyrl.ids import Incarnation
from polyrl.manager import opening
from polyrl.manager.frames_in import joining
from polyrl.manager.peers.sessions import TrainerSession, WorkerSession
from polyrl.wire.control import JoinRequest
from polyrl.wire.credentials import AccessTokens

FACTS = JoinRequest(name="w1", protocol=1, engine="script", slots=1)


def refuse(*_: object) -> NoReturn:
    raise AssertionError("a secret is compared, or looked up, as other text is")


WATCHED = ("__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__", "__contains__", "__hash__", "startswith", "find")


class SecretBytes(bytes):
    """What ends where the first difference is cannot be done with it. compare_digest does not ask it."""


class SecretText(str):
    __slots__ = ()

    def encode(self, encoding: str = "utf-8", errors: str = "strict") -> bytes:
        return SecretBytes(super().encode(encoding, errors))


for kind in (SecretBytes, SecretText):
    for name in WATCHED:
        setattr(kind, name, refuse)


def test_tokens_and_sessions_are_compared_in_constant_time():
    tokens = AccessTokens({"worker": SecretText("w" * 20), "admin": SecretText("a" * 20)})
    worker = WorkerSession(SecretText("w" * 20), Incarnation(1), FACTS)
    trainer = TrainerSession(SecretText("a" * 20), has_reward=False)
    lobby = cast(Any, SimpleNamespace(workers={"w1": worker}, run=SimpleNamespace(trainer=trainer)))
    for given in ("w" * 20, "a" * 20, "w" * 19, "w" * 19 + "x", "", "\udcff\u00fc"):
        assert tokens.scope_of(given) == {"w" * 20: "worker", "a" * 20: "admin"}.get(given)
        assert (joining.find_worker(lobby, given) is worker) == (given == "w" * 20)
        assert (opening.find_trainer(lobby, given) is trainer) == (given == "a" * 20)
    lobby.run.trainer = None
    assert opening.find_trainer(lobby, "a" * 20) is None
