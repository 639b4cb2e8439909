"""Running a command of the system, with a deadline: its output, or one line on what went wrong.

Rules kept here: the deadline holds whatever the command does, prints or leaves behind. A command that is not waited for
any more is ended with all that it started; one that has ended by itself may leave processes, as `nohup ... &` does.
"""

import asyncio
import contextlib
import os
import signal
from asyncio.subprocess import PIPE
from collections.abc import Mapping, Sequence
from typing import Any

from polyrl.engines.finishing import finish_first
from polyrl.errors import plain, shorten
from polyrl.providers.provider import ProviderError

MAX_OUTPUT_BYTES = 16 << 20
_LINGER_S = 0.5
"""How long the output is read after the end: what the command left behind may hold the pipes for ever."""


async def call(
    argv: Sequence[str], *, timeout_s: float, stdin: bytes = b"", environment: Mapping[str, str] | None = None
) -> str:
    """Return what the command printed. Raises ProviderError if it fails, is not there, or takes too long."""
    code, out, error = await call_for_code(argv, timeout_s=timeout_s, stdin=stdin, environment=environment)
    if code:
        raise ProviderError(f"{argv[0]}: exit code {code}: {last_line(error or out)}")
    return out


async def call_for_code(
    argv: Sequence[str], *, timeout_s: float, stdin: bytes = b"", environment: Mapping[str, str] | None = None
) -> tuple[int, str, str]:
    """Return exit code, output and errors. Raises ProviderError if it is not there, or prints or takes too much."""
    heard = _Heard(argv[0])
    try:
        # cancelled in its middle, the start would end that process alone, and wait for all that hold its pipes
        transport, _ = await finish_first(
            asyncio.get_running_loop().subprocess_exec(
                lambda: heard, *argv, stdin=PIPE, stdout=PIPE, stderr=PIPE,
                env={**os.environ, **(environment or {})}, start_new_session=True,
            )
        )  # fmt: skip
        far: Any = transport.get_pipe_transport(0)  # uvloop's is no asyncio.WriteTransport
        if stdin and not far.is_closing():  # a command that is over already has closed it
            far.write(stdin)
        far.close()
        async with asyncio.timeout(timeout_s):
            await heard.over
    except BaseException as error:
        heard.end()
        if isinstance(error, TimeoutError):
            raise ProviderError(f"{argv[0]}: no answer within {timeout_s:g} s") from error
        if isinstance(error, OSError):
            raise ProviderError(f"{argv[0]}: cannot be started: {error.strerror or error}") from error
        raise
    transport.close()
    code = transport.get_returncode()
    assert code is not None, "it is over when the process has ended"
    return code, heard.text(1), heard.text(2)


class _Heard(asyncio.SubprocessProtocol):
    """The output of a command. `over` is done once it has ended."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._printed = {1: bytearray(), 2: bytearray()}
        self._open = {1, 2}
        self._has_ended = False
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.SubprocessTransport | None = None
        self.over: asyncio.Future[None] = self._loop.create_future()

    def end(self) -> None:
        """End it and all that it started, if it was started."""
        if self._transport is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._transport.get_pid(), signal.SIGKILL)
            self._transport.close()

    def text(self, descriptor: int) -> str:
        return self._printed[descriptor].decode(errors="replace")

    def connection_made(self, transport: Any) -> None:  # uvloop's is no asyncio.SubprocessTransport
        self._transport = transport

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        printed = self._printed[fd]
        if len(printed) + len(data) <= MAX_OUTPUT_BYTES:
            printed += data
        elif not self.over.done():
            self.over.set_exception(ProviderError(f"{self._name}: printed more than {MAX_OUTPUT_BYTES >> 20} MiB"))

    def pipe_connection_lost(self, fd: int, exc: Exception | None) -> None:
        self._open.discard(fd)
        if self._has_ended and not self._open:
            self._end()

    def process_exited(self) -> None:
        self._has_ended = True
        if self._open:
            self._loop.call_later(_LINGER_S, self._end)
        else:
            self._end()

    def _end(self) -> None:
        if not self.over.done():
            self.over.set_result(None)


def last_line(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    return shorten(plain(lines[-1].strip())) if lines else "it said nothing"
