"""`polyrl manager`: the process that workers and a trainer dial."""

import argparse
import asyncio
import logging
import shlex
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from polyrl.wire.control import DEFAULT_PORT

if TYPE_CHECKING:
    from ssl import SSLContext

    from polyrl.manager.http import Front, ListenAddress
    from polyrl.manager.serving.texts import Served
    from polyrl.manager.settings import ManagerSettings

EXAMPLE = """\
example:
  polyrl manager --run-dir runs/first
  polyrl worker --join http://127.0.0.1:5000 --token-file runs/first/worker.token --engine emulated
  polyrl manager --run-dir runs/answers --serve models/SmolLM2-135M-Instruct

Killed at any moment, it goes on when it is started again with the same --run-dir: workers and trainer dial in by
themselves, and no token that was acknowledged is lost. docs/reference/manager.md lists the settings."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("settings", nargs="*", metavar="section.key=value", help="for example journal.fsync=always")
    parser.add_argument(
        "--host", default="127.0.0.1", help="the address to listen on; 0.0.0.0 is all (default: %(default)s)"
    )
    parser.add_argument("--port", type=int, default=DEFAULT_PORT, help="0 takes a free one (default: %(default)s)")
    parser.add_argument("--run-dir", default="run", metavar="DIR", help="where the run is kept (default: %(default)s)")
    parser.add_argument("--config", metavar="FILE", help="a TOML file of settings")
    parser.add_argument("--tls-cert", metavar="FILE", help="serve https and wss with this certificate (PEM)")
    parser.add_argument("--tls-key", metavar="FILE", help="its key (PEM)")
    parser.add_argument(
        "--serve",
        metavar="MODEL_DIR",
        help="open a run without a trainer, and answer OpenAI's clients with the tokenizer of this directory",
    )
    parser.add_argument(
        "--tokenizer", metavar="MODEL_DIR", help="answer OpenAI's clients in text, beside a trainer's run"
    )
    parser.add_argument("--verbose", action="store_true", help="log every join, loss and refusal")


def run(args: argparse.Namespace) -> int:
    from polyrl.config import apply_overrides, build, load_toml
    from polyrl.errors import UserError
    from polyrl.manager.settings import ManagerSettings
    from polyrl.wire.credentials import server_tls

    tree = apply_overrides({} if args.config is None else load_toml(args.config), args.settings)
    settings = build(tree, ManagerSettings, source=args.config or "", overrides=args.settings)
    if not 0 <= args.port <= 65535:
        raise UserError(f"--port: {args.port} is not a port")
    if args.serve is not None and args.tokenizer is not None:
        raise UserError("--serve has a tokenizer already; leave --tokenizer out")
    tls = server_tls(args.tls_cert, args.tls_key)
    level = logging.INFO if args.verbose else logging.WARNING
    logging.basicConfig(level=level, format="%(asctime)s %(name)s %(message)s", stream=sys.stderr)
    from polyrl.run.event_loop import run_loop

    return run_loop(_serve(args, settings, tls))


async def _serve(args: argparse.Namespace, settings: "ManagerSettings", tls: "SSLContext | None") -> int:
    from polyrl.manager.process import run_manager

    run_dir, served = Path(args.run_dir), _load(args.serve or args.tokenizer)
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)

    def on_ready(front: "Front", address: "ListenAddress", recovered: str) -> None:
        print(f"manager: {address.url}  run: {run_dir}  ({recovered})", flush=True)
        url, trust = (address.url, "") if args.tls_cert is None else _way_in(args, address)
        model = "" if args.serve is None else f" --engine builtin --model {shlex.quote(args.serve)}"
        token = run_dir / "worker.token"
        print(f"  join with: polyrl worker --join {url} --token-file {token}{model}{trust}", flush=True)
        if served is not None:
            token = run_dir / "generate.token"
            print(f"  ask at: {address.url}/v1  model: {front.model_name}  token: {token}", flush=True)

    opens_run, where = args.serve is not None, (args.host, args.port)
    whole = await run_manager(
        run_dir, settings, where, tls=tls, served=served, opens_run=opens_run, stop=stop, on_ready=on_ready
    )
    how = "; the run can go on" if whole else " before its run was read; it can go on"
    print(f"manager: stopped{how} with the same --run-dir", flush=True)
    return 0


def _way_in(args: argparse.Namespace, address: "ListenAddress") -> tuple[str, str]:
    """Return a URL that matches the certificate, and a worker's `--ca` option, empty if the system trusts it."""
    from polyrl.config.recipe import ManagerSection
    from polyrl.errors import UserError
    from polyrl.run.encryption import encryption

    for ca, trust in (("", ""), (args.tls_cert, f" --ca {args.tls_cert}")):
        try:
            found = encryption(ManagerSection(host=args.host, tls_cert=args.tls_cert, tls_key=args.tls_key, ca=ca))
        except UserError:
            continue
        assert found is not None
        return found.url(address.port), trust
    return address.url, f" --ca FILE  (FILE: the authority that signed {args.tls_cert})"


def _load(folder: str | None) -> "Served | None":
    if folder is None:
        return None
    from polyrl.manager.serving.texts import load

    return load(Path(folder))
