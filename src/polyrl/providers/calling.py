"""Running a command of the system, with a deadline: its output, or one line on what went wrong."""

import asyncio
import os
from collections.abc import Mapping, Sequence

from polyrl.errors import plain, shorten
from polyrl.providers.provider import ProviderError

MAX_OUTPUT_BYTES = 16 << 20


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
    """Return exit code, output and errors. Raises ProviderError if it is not there, or takes too long."""
    try:
        process = await asyncio.create_subprocess_exec(
            *argv, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
            env={**os.environ, **(environment or {})}, start_new_session=True,
        )  # fmt: skip
    except OSError as error:
        raise ProviderError(f"{argv[0]}: cannot be started: {error.strerror or error}") from error
    try:
        out, errors = await asyncio.wait_for(process.communicate(stdin), timeout_s)
    except TimeoutError as error:
        process.kill()
        await process.wait()
        raise ProviderError(f"{argv[0]}: no answer within {timeout_s:g} s") from error
    assert process.returncode is not None
    return process.returncode, _text(out), _text(errors)


def last_line(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    return shorten(plain(lines[-1].strip())) if lines else "it said nothing"


def _text(output: bytes) -> str:
    return output[:MAX_OUTPUT_BYTES].decode(errors="replace")
