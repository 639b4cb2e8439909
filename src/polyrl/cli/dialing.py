"""The options of all commands that dial a manager, and the dialer made from them."""

import argparse
import asyncio
import os
import re
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from polyrl.errors import UserError
from polyrl.wire.control import DEFAULT_PORT

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from polyrl.wire.dial import Dialer

StructT = TypeVar("StructT")
AnswerT = TypeVar("AnswerT")
_STANDS_STILL_S = 60.0
"""A manager that makes no progress in reading its run for this long is given up."""
_LOOK_AGAIN_S = 0.5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--manager", metavar="URL", help=f"default: that of --run-dir, or http://127.0.0.1:{DEFAULT_PORT}"
    )
    parser.add_argument("--run-dir", metavar="DIR", help="find address and admin token in the directory of the run")
    add_credentials(parser)


def add_credentials(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--token-file", metavar="FILE", help="a file with the token; default: POLYRL_TOKEN")
    parser.add_argument("--ca", metavar="FILE", help="certificates that https is checked against (PEM)")


def default_name(kind: str) -> str:
    """Return a name that a peer of this machine has alone: its host and process."""
    host = re.sub(r"[^A-Za-z0-9._-]", "-", socket.gethostname()).strip("-._")[:48]
    return f"{host or kind}-{os.getpid()}"


def dialer(args: argparse.Namespace) -> "Dialer":
    from polyrl.wire.credentials import TOKEN_FILES

    url, token_file = args.manager, args.token_file
    if args.run_dir is not None:
        url = url if url is not None else _url_of(Path(args.run_dir))
        token_file = token_file if token_file is not None else str(Path(args.run_dir) / TOKEN_FILES["admin"])
    if url is None:  # of this machine, as the directory of the run is
        url, options = f"http://127.0.0.1:{DEFAULT_PORT}", "--run-dir, the directory of the run, or --token-file"
        return dialer_to(url, token_file, args.ca, options)
    return dialer_to(url, token_file, args.ca)


def dialer_to(url: str, token_file: str | None, ca: str | None, options: str = "--token-file") -> "Dialer":
    """Return a dialer. `options` names the options for a token, for the error message if none was given."""
    from polyrl.wire.credentials import TOKEN_VARIABLE, client_tls, find_token
    from polyrl.wire.dial import Dialer

    token = find_token(token_file, options)
    token_from = TOKEN_VARIABLE if token_file is None else token_file
    return Dialer(url, token, client_tls(url, ca), token_from=token_from)


async def answer(dialer: "Dialer", path: str, kind: type[StructT]) -> StructT:
    """Return the manager's answer. While the manager still reads its run, wait and show its progress."""
    from polyrl.wire.dial import Patience, Starting

    patience, shown = Patience(_STANDS_STILL_S), ""
    while True:
        try:
            return await dialer.get(path, kind)
        except Starting as starting:
            if patience.is_over(starting):
                raise
            if str(starting) != shown:
                shown = str(starting)
                print(shown, file=sys.stderr, flush=True)
            await asyncio.sleep(_LOOK_AGAIN_S)


def run_with(args: argparse.Namespace, request: "Callable[[Dialer], Awaitable[AnswerT]]") -> AnswerT:
    """Dial the manager and ask it something. Raises UserError when it cannot be reached."""
    from polyrl.run.event_loop import run_loop
    from polyrl.wire.dial import Unreachable

    async def dial() -> AnswerT:
        async with dialer(args) as dialled:
            return await request(dialled)

    try:
        return run_loop(dial())
    except Unreachable as error:
        raise UserError(str(error)) from error


def _url_of(run_dir: Path) -> str:
    from polyrl.wire.dial import url_of_run

    try:
        return url_of_run(run_dir)
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise UserError(f"{run_dir}: no manager runs there; give --manager URL") from error


def check_peer(args: argparse.Namespace, name: str) -> None:
    """Raise UserError for a name, a price or a deadline that no worker or host can have."""
    from polyrl.wire.control import WORKER_NAME

    if not re.fullmatch(WORKER_NAME, name):
        raise UserError(f"--name: {name!r} is not a name; expected up to 64 letters, digits, dots, dashes, underscores")
    if not 0 <= args.price <= 1e6:
        raise UserError(f"--price: {args.price:g} is not a price; expected US dollars per hour, 0 or more")
    if not args.drain_deadline > 0:
        raise UserError(f"--drain-deadline: {args.drain_deadline:g}; expected seconds above 0")
