"""Put in front of a vLLM server by its flag `--middleware`: whoever has not our key is answered 401, on every route.

vLLM's own key guards some routes only; those that change weights and call methods are not among them. Runs in the
server's environment: standard library and `between` only.
"""

import hmac
import os
from collections.abc import Awaitable, Callable
from typing import Any

from polyrl.engines.served.between import KEY_VARIABLE

Receive = Callable[[], Awaitable[Any]]
Send = Callable[[dict[str, Any]], Awaitable[None]]


class Guard:
    """An ASGI middleware. Raises KeyError where there is no key: rather no server than an open one."""

    def __init__(self, app: Callable[[Any, Receive, Send], Awaitable[None]]) -> None:
        self._app = app
        self._expected = f"Bearer {os.environ[KEY_VARIABLE]}".encode()

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or hmac.compare_digest(self._given(scope), self._expected):
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            await send({"type": "http.response.start", "status": 401, "headers": [(b"content-length", b"0")]})
            await send({"type": "http.response.body", "body": b""})
        else:
            await send({"type": "websocket.close", "code": 1008})

    def _given(self, scope: Any) -> bytes:
        return next((value for name, value in scope["headers"] if name.lower() == b"authorization"), b"")
