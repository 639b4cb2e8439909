"""A dashboard's process: of runs that a person names, or behind the manager of a live one.

serve           until it is cancelled, on a port of its own; each live run's manager is asked for its status
serve_manager   until standard input ends, on a UNIX socket; the manager tells its status there
live_link       the page that the manager of a live run serves itself
"""

import asyncio
import contextlib
import secrets
import signal
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from http.client import HTTPException
from pathlib import Path
from socket import create_connection
from urllib.parse import urlsplit
from urllib.request import urlopen

from aiohttp import web

from polyrl.dashboard.server import ROOT, DashboardServer, serving
from polyrl.dashboard.watched import WatchedRun, read_status
from polyrl.errors import UserError
from polyrl.wire.control import Status
from polyrl.wire.credentials import TOKEN_FILES, client_tls, find_token, read_token_file
from polyrl.wire.dial import Dialer, Unreachable, url_of_run

_HEALTH_S = 15.0
_TELL_EVERY_S = 2.0
_MISSED = 5
"""Answers that a manager may miss in a row."""


def live_link(path: Path, health_s: float = _HEALTH_S) -> str | None:
    """Return the page of a run whose manager answers; None if there is none. Raises UserError for one that hangs."""
    try:
        url = url_of_run(path)
        if url.startswith("http://"):
            with urlopen(f"{url}/v1/health", timeout=health_s):
                pass
        else:  # its certificate is the browser's to check
            parts = urlsplit(url)
            create_connection((parts.hostname or "", parts.port or 443), health_s).close()
        return f"{url}/dash/#token={read_token_file(path / TOKEN_FILES['view'])}"
    except TimeoutError as error:
        raise UserError(
            f"{path}: its manager did not answer within {health_s:.0f} s; try again, or, if the run is over, remove "
            f"{path / 'manager.json'}: then it is read from its files"
        ) from error
    except (OSError, ValueError, LookupError, TypeError, AttributeError, HTTPException, UserError):
        return None


async def serve(
    paths: Sequence[Path], show_link: Callable[[str], None], *, host: str, port: int, tokenizer: str | None
) -> None:
    """Serve runs until this is cancelled. `tokenizer`: a model's directory, where a run has no recipe."""
    loop = asyncio.get_running_loop()
    live = [await loop.run_in_executor(None, live_link, path) is not None for path in paths]
    runs = [WatchedRun(path, live=is_live, folder=tokenizer) for path, is_live in zip(paths, live, strict=True)]
    for one in runs:
        one.start()
    listening = [asyncio.create_task(_listen(one)) for one in runs if one.live]
    token = secrets.token_urlsafe(24)
    try:
        async with serving(DashboardServer(runs, token), lambda runner: web.TCPSite(runner, host, port)) as site:
            listens_on = site.name.rpartition(":")[2] if port else _port_of(site)
            show_link(f"http://{host}:{listens_on}{ROOT}/#token={token}")
            await asyncio.Event().wait()
    except OSError as error:
        raise UserError(f"--port: cannot listen on {host}:{port}: {error.strerror or error}") from error
    finally:
        for task in listening:
            task.cancel()


async def _listen(run: WatchedRun) -> None:
    """Tell the page of a live run what its manager says, until the manager is gone."""
    num_missed = 0
    with contextlib.suppress(
        UserError, OSError, ValueError, LookupError, TypeError
    ):  # its directory, or its token, is gone
        url = url_of_run(run.path)
        token = find_token(str(run.path / TOKEN_FILES["admin"]), "--token-file")
        async with Dialer(url, token, client_tls(url, None)) as dialer:
            while num_missed < _MISSED:
                try:
                    run.tell(await dialer.get("/v1/status", Status))
                    num_missed = 0
                except Unreachable:
                    num_missed += 1
                await asyncio.sleep(_TELL_EVERY_S)
    run.end()


def _port_of(site: object) -> int:
    return site._server.sockets[0].getsockname()[1]  # type: ignore[attr-defined]


async def serve_manager(path: Path, socket: Path) -> None:
    """Serve a live run behind its manager, which tells its state on standard input.

    The end of the input, or SIGTERM, is the end; both come when the manager is killed. The socket's folder goes too.
    """
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    watched = WatchedRun(path, live=True)
    watched.start()
    try:
        async with serving(DashboardServer([watched], None), lambda runner: web.UnixSite(runner, socket)):
            print("ready", flush=True)
            async for line in _input_lines():
                status = read_status(line)
                if status is not None:
                    watched.tell(status)
    finally:
        socket.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            socket.parent.rmdir()


async def _input_lines() -> AsyncIterator[bytes]:
    reader = asyncio.StreamReader(limit=1 << 26)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while line := await reader.readline():
        yield line
