"""A stand-in of an OpenAI-compatible service, on loopback, that fails in every way that a test asks for."""

import contextlib
import json
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple

USAGE = {"prompt_tokens": 100, "completion_tokens": 20, "total_tokens": 120}


class Act(NamedTuple):
    """How a request is answered."""

    text: str = '{"why": "fine", "score": 7}'
    status: int = 200
    headers: tuple[tuple[str, str], ...] = ()
    raw: bytes | None = None
    """The whole body; None: a completion with `text`."""
    after_s: float = 0.0
    reset: bool = False
    """Break the connection instead."""
    usage: dict[str, Any] | None = USAGE


class Asked(NamedTuple):
    at: float
    path: str
    body: dict[str, Any]
    key: str
    cookie: str = ""

    @property
    def text(self) -> str:
        return self.body["messages"][-1]["content"] if "messages" in self.body else self.body["prompt"]


class StandIn:
    """Answers as `act` says, which is called with the number of the request, from 0, and the request."""

    def __init__(self, act: Callable[[int, Asked], Act]) -> None:
        self.act = act
        self.asked: list[Asked] = []
        self.models: tuple[int, Any] = (200, {"data": [{"id": "the-judge"}]})
        self.num_at_once = self.most_at_once = 0
        self.lock = threading.Lock()
        self.addresses: set[tuple[str, int]] = set()
        """Of the clients' connections."""
        self.url = ""


@contextmanager
def stand_in(act: Callable[[int, Asked], Act] | list[Act] | None = None) -> Iterator[StandIn]:
    """With a list: its acts in order, and the last one for ever."""
    acts = [Act()] if act is None else act
    service = StandIn((lambda number, _: acts[min(number, len(acts) - 1)]) if isinstance(acts, list) else acts)
    server = _Server(("127.0.0.1", 0), _handler(service))
    service.url = f"http://127.0.0.1:{server.server_address[1]}/v1"
    thread = threading.Thread(target=lambda: server.serve_forever(poll_interval=0.02), daemon=True)
    thread.start()
    try:
        yield service
    finally:
        server.shutdown()
        server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 256


def _handler(service: StandIn) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            status, body = service.models
            self._send(status, json.dumps(body).encode(), ())

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            key, cookie = self.headers.get("Authorization", ""), self.headers.get("Cookie", "")
            asked = Asked(time.monotonic(), self.path, body, key, cookie)
            with service.lock:
                number = len(service.asked)
                service.asked.append(asked)
                service.addresses.add(self.client_address)
                service.num_at_once += 1
                service.most_at_once = max(service.most_at_once, service.num_at_once)
            try:
                self._act(service.act(number, asked))
            finally:
                with service.lock:
                    service.num_at_once -= 1

        def _act(self, act: Act) -> None:
            time.sleep(act.after_s)
            if act.reset:
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                self.close_connection = True
                self.connection.close()
                return
            self._send(act.status, _completion(act) if act.raw is None else act.raw, act.headers)

        def _send(self, status: int, raw: bytes, headers: tuple[tuple[str, str], ...]) -> None:
            with contextlib.suppress(OSError):
                self.send_response(status)
                for name, value in (("Content-Length", str(len(raw))), *headers):
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(raw)

        def finish(self) -> None:
            with contextlib.suppress(OSError, ValueError):
                super().finish()

        def log_message(self, format: str, *args: Any) -> None: ...

    return Handler


def _completion(act: Act) -> bytes:
    if act.status != 200:
        return json.dumps({"error": {"message": act.text}}).encode()
    choice = {"index": 0, "message": {"role": "assistant", "content": act.text}, "finish_reason": "stop"}
    found: dict[str, Any] = {"object": "chat.completion", "model": "the-judge", "choices": [choice]}
    return json.dumps(found if act.usage is None else {**found, "usage": act.usage}).encode()
