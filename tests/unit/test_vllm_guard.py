"""In front of a vLLM server: nobody passes without the key, on whatever route."""

import asyncio

import pytest

from polyrl.engines.served.between import KEY_VARIABLE
from polyrl.engines.served.inside import Guard


@pytest.fixture
def ask(monkeypatch):
    monkeypatch.setenv(KEY_VARIABLE, "secret")

    def ask(kind, headers):
        passed, sent = [], []

        async def app(scope, receive, send):
            passed.append(scope)

        async def receive():
            return None

        async def send(message):
            sent.append(message)

        asyncio.run(Guard(app)({"type": kind, "path": "/collective_rpc", "headers": headers}, receive, send))
        return bool(passed), sent

    return ask


def test_who_has_the_key_passes(ask):
    assert ask("http", [(b"accept", b"*/*"), (b"Authorization", b"Bearer secret")]) == (True, [])
    assert ask("lifespan", []) == (True, [])


@pytest.mark.parametrize(
    "value", [None, b"", b"Bearer ", b"Bearer secret2", b"secret", b"Basic secret", "Bearer \u00e9".encode()]
)
def test_who_has_not_is_answered_401(ask, value):
    passed, sent = ask("http", [] if value is None else [(b"authorization", value)])
    assert not passed
    assert [message.get("status") for message in sent] == [401, None]
    assert ask("websocket", []) == (False, [{"type": "websocket.close", "code": 1008}])


def test_without_a_key_there_is_no_server(monkeypatch):
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    with pytest.raises(KeyError):
        Guard(lambda *_: None)  # type: ignore[arg-type]
