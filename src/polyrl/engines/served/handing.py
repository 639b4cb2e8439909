"""The worker's side of an install: a version in this process's memory is handed to the ranks of a server.

`taking` is the server's side, and says how the two speak. The listening socket has a random name, no file, and takes
nobody in who runs under another user. Rules kept here: no rank writes before all ranks are ready; whoever vanishes
after that leaves weights behind that nobody knows (ServerBroken).
"""

import asyncio
import json
import os
import secrets
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

from polyrl.engines.engine import EngineError, NotOfThisModel
from polyrl.engines.served.between import LENGTH, peer_uid
from polyrl.engines.served.server import ServerBroken

_MOST_BYTES = 64 << 20
_MOST_RANKS = 4096


class Offer(NamedTuple):
    """What every rank is told: (name, dtype, shape, start, start of its scales) of each tensor in a file."""

    tensors: list[tuple[str, str, tuple[int, ...], int, int | None]]
    num_bytes: int
    probes: list[str]
    """Parameters that are wanted back."""
    any_dtype: bool = False
    """The server may take them in its own dtype, as it does when it starts from a directory."""


class Head(NamedTuple):
    """A parameter as a rank holds it, and the digest of its first bytes."""

    dtype: str
    shape: tuple[int, ...]
    digest: str


class Answer(NamedTuple):
    """What one rank has installed."""

    slice: int
    num_slices: int
    heads: dict[str, Head]


def new_name() -> str:
    return f"polyrl-install-{secrets.token_hex(16)}"


class Handing:
    """One version, offered to all ranks of one server. `answers` waits for them."""

    def __init__(self, listener: socket.socket, offer: Offer, fd: int) -> None:
        self._listener, self._fd = listener, fd
        self._offer = json.dumps(offer._asdict()).encode()
        self._go = asyncio.Event()
        self._num_ready = 0
        self._ranks: dict[int, asyncio.Task[Answer]] = {}

    @property
    def has_gone(self) -> bool:
        """Whether ranks were told to write."""
        return self._go.is_set()

    async def answers(self) -> list[Answer]:
        """Raises EngineError while nothing was written, and ServerBroken afterwards."""
        num_ranks = 1
        try:
            while len(self._ranks) < num_ranks:
                connection = await self._accept()
                rank = await _hear(connection)
                num_ranks = rank["num_ranks"]
                if not 0 <= rank["rank"] < num_ranks <= _MOST_RANKS or rank["rank"] in self._ranks:
                    raise EngineError(f"rank {rank['rank']} of {num_ranks} came; expected each once")
                self._ranks[rank["rank"]] = asyncio.create_task(self._serve(connection, rank, num_ranks))
            return list(await asyncio.gather(*self._ranks.values()))
        except (OSError, ValueError, KeyError, TypeError) as error:
            self._fail(f"a rank of the server does not answer: {type(error).__name__}: {error}", error)
        except EngineError as error:
            self._fail(str(error), error)
        finally:
            for task in self._ranks.values():
                task.cancel()
            await asyncio.gather(*self._ranks.values(), return_exceptions=True)
        raise AssertionError

    def _fail(self, why: str, error: Exception) -> None:
        kind = NotOfThisModel if isinstance(error, NotOfThisModel) else EngineError
        raise (ServerBroken if self.has_gone else kind)(why) from error

    async def _accept(self) -> socket.socket:
        loop = asyncio.get_running_loop()
        while True:
            connection, _ = await loop.sock_accept(self._listener)
            connection.setblocking(False)
            if peer_uid(connection) == os.getuid():
                return connection
            connection.close()

    async def _serve(self, connection: socket.socket, rank: dict[str, Any], num_ranks: int) -> Answer:
        with connection:
            # The first bytes on a new connection: they fit into its buffer.
            socket.send_fds(connection, [LENGTH.pack(len(self._offer))], [self._fd])
            await asyncio.get_running_loop().sock_sendall(connection, self._offer)
            _no_problem(await _hear(connection), NotOfThisModel)
            self._num_ready += 1
            if self._num_ready == num_ranks:
                self._go.set()
            await self._go.wait()
            await _tell(connection, {"go": True})
            said = await _hear(connection)
            _no_problem(said, EngineError)
            heads = {name: Head(dtype, tuple(shape), digest) for name, (dtype, shape, digest) in said["heads"].items()}
            return Answer(rank["slice"], rank["num_slices"], heads)


@asynccontextmanager
async def handing(name: str, offer: Offer, fd: int) -> AsyncIterator[Handing]:
    """Listen under this name while the context lasts."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        try:
            listener.bind("\0" + name)
        except OSError as error:
            raise EngineError(f"the socket {name} cannot be used: {error.strerror}") from error
        listener.listen(64)
        listener.setblocking(False)
        yield Handing(listener, offer, fd)


def _no_problem(said: dict[str, Any], error: type[EngineError]) -> None:
    if said["problem"]:
        raise error(str(said["problem"])[:500])


async def _tell(connection: socket.socket, what: dict[str, Any]) -> None:
    raw = json.dumps(what).encode()
    await asyncio.get_running_loop().sock_sendall(connection, LENGTH.pack(len(raw)) + raw)


async def _hear(connection: socket.socket) -> dict[str, Any]:
    (num_bytes,) = LENGTH.unpack(await _exactly(connection, LENGTH.size))
    if num_bytes > _MOST_BYTES:
        raise ConnectionError(f"an answer of {num_bytes} bytes")
    said = json.loads(await _exactly(connection, num_bytes))
    if not isinstance(said, dict):
        raise ConnectionError("an answer that is no object")
    return said


async def _exactly(connection: socket.socket, num_bytes: int) -> bytes:
    loop, raw = asyncio.get_running_loop(), bytearray()
    while len(raw) < num_bytes:
        more = await loop.sock_recv(connection, num_bytes - len(raw))
        if not more:
            raise ConnectionError("it hung up")
        raw += more
    return bytes(raw)
