"""`polyrl dash`: a run in the browser."""

import argparse
import asyncio
import contextlib
import json
import secrets
import signal
import sys
import webbrowser
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING

from polyrl.errors import UserError

if TYPE_CHECKING:
    from polyrl.dashboard.watched import WatchedRun

EXAMPLE = """\
examples:
  polyrl dash runs/first                  of a live run: the page on its manager's port
  polyrl dash runs/first runs/second      both, and their curves in one picture
  polyrl simulate spot-trace --out out/spot && polyrl dash out/spot

RUN is the directory of a run, live, ended or killed, or of a simulation, or a journal. The printed link has a token
that may look and change nothing. Ctrl+C ends it; a run does not notice."""

_HEALTH_S = 15.0
_TELL_EVERY_S = 2.0
_MISSED = 5
"""Answers that a manager may miss in a row."""
_MAX_RUNS = 16


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EXAMPLE
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("runs", metavar="RUN", nargs="+", help="the directory of a run, or a journal")
    parser.add_argument("--host", default="127.0.0.1", help="the address to listen on (default: 127.0.0.1)")
    parser.add_argument("--port", type=int, default=0, metavar="N", help="the port to listen on; 0: any that is free")
    parser.add_argument("--no-browser", action="store_true", help="print the link, and open no browser")
    parser.add_argument("--tokenizer", metavar="DIR", help="a model's directory, where a run has no recipe")
    parser.add_argument("--socket", metavar="FILE", help=argparse.SUPPRESS)  # for the manager, which starts it


def run(args: argparse.Namespace) -> int:
    from polyrl.run.event_loop import run_loop

    paths = [Path(one) for one in args.runs]
    for path in paths:
        if not path.exists():
            raise UserError(f"{path}: there is no such file or directory; expected that of a run")
    if len(paths) > _MAX_RUNS:
        raise UserError(f"RUN: got {len(paths)}, expected at most {_MAX_RUNS}")
    if not 0 <= args.port < 1 << 16:
        raise UserError(f"--port: got {args.port}, expected one from 0 to 65535")
    if args.socket is not None:
        with contextlib.suppress(asyncio.CancelledError):
            run_loop(_serve_manager(paths[0], Path(args.socket)))
        return 0
    link = live_link(paths[0]) if len(paths) == 1 else None
    if link is not None:
        _open(link, args)
        return 0
    with contextlib.suppress(asyncio.CancelledError):
        run_loop(_serve(paths, args))
    return 0


def _open(link: str, args: argparse.Namespace) -> None:
    print(link, flush=True)
    if not args.no_browser:
        webbrowser.open(link)


def live_link(path: Path, health_s: float = _HEALTH_S) -> str | None:
    """Return the page of a run whose manager answers; None if there is none. Raises UserError for one that hangs."""
    from http.client import HTTPException
    from socket import create_connection
    from urllib.parse import urlsplit
    from urllib.request import urlopen

    from polyrl.wire.credentials import TOKEN_FILES, read_token_file

    try:
        url = json.loads((path / "manager.json").read_text(encoding="utf-8"))["url"].replace(
            "//0.0.0.0:", "//127.0.0.1:"
        )
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


async def _serve(paths: list[Path], args: argparse.Namespace) -> None:
    from aiohttp import web

    from polyrl.dashboard.server import ROOT, DashboardServer, serving
    from polyrl.dashboard.watched import WatchedRun

    loop = asyncio.get_running_loop()
    live = [await loop.run_in_executor(None, live_link, path) is not None for path in paths]
    runs = [WatchedRun(path, live=is_live, folder=args.tokenizer) for path, is_live in zip(paths, live, strict=True)]
    for one in runs:
        one.start()
    listening = [asyncio.create_task(_listen(one)) for one in runs if one.live]
    token = secrets.token_urlsafe(24)
    try:
        async with serving(
            DashboardServer(runs, token), lambda runner: web.TCPSite(runner, args.host, args.port)
        ) as site:
            port = site.name.rpartition(":")[2] if args.port else _port_of(site)
            _open(f"http://{args.host}:{port}{ROOT}/#token={token}", args)
            await asyncio.Event().wait()
    except OSError as error:
        raise UserError(f"--port: cannot listen on {args.host}:{args.port}: {error.strerror or error}") from error
    finally:
        for task in listening:
            task.cancel()


async def _listen(run: "WatchedRun") -> None:
    """Tell the page of a live run what its manager says, until the manager is gone."""
    from polyrl.cli import dialing
    from polyrl.wire.control import Status
    from polyrl.wire.dial import Unreachable

    num_missed = 0
    found = argparse.Namespace(manager=None, run_dir=str(run.path), token_file=None, ca=None)
    with contextlib.suppress(UserError):  # its directory, or its token, is gone
        async with dialing.dialer(found) as dialer:
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


async def _serve_manager(path: Path, socket: Path) -> None:
    """Serve a live run behind its manager, which tells its state on standard input.

    The end of the input, or SIGTERM, is the end; both come when the manager is killed. The socket's folder goes too.
    """
    from aiohttp import web

    from polyrl.dashboard.server import DashboardServer, serving
    from polyrl.dashboard.watched import WatchedRun

    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    watched = WatchedRun(path, live=True)
    watched.start()
    try:
        async with serving(DashboardServer([watched], None), lambda runner: web.UnixSite(runner, socket)):
            print("ready", flush=True)
            async for line in _input_lines():
                _hear(watched, line)
    finally:
        socket.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            socket.parent.rmdir()


def _hear(watched: "WatchedRun", line: bytes) -> None:
    from polyrl.dashboard.watched import read_status

    status = read_status(line)
    if status is not None:
        watched.tell(status)


async def _input_lines() -> AsyncIterator[bytes]:
    reader = asyncio.StreamReader(limit=1 << 26)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while line := await reader.readline():
        yield line
