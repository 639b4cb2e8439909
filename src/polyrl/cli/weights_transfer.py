"""`polyrl weights serve DIR`, `polyrl weights pull ADDRESS...`: a version from one machine to another, verified.

Both need the run's worker token; with it, a trainer that runs can be pulled from too. `pull` without `--digest` takes
the newest version that is offered, and believes the source which one that is; with it, nothing else is accepted.
"""

import argparse
import json
import math
import re
import signal
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from polyrl.errors import UserError

if TYPE_CHECKING:
    from polyrl.weights.fetch import OnProgress
    from polyrl.weights.protocol import BlobEntry
    from polyrl.weights.settings import Tls, WeightSettings

EXIT_NOT_PULLED = 1


def add_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("serve, pull")
    group.add_argument("--token-file", metavar="FILE", help="the run's worker.token; default: POLYRL_TOKEN")
    group.add_argument(
        "--interface", action="append", default=[], metavar="CIDR", help="listen inside this network; default: all"
    )
    group.add_argument("--port", type=int, default=0, help="serve: listen on this port; default: any")
    group.add_argument("--egress-mb-s", type=float, default=0.0, metavar="N", help="send at most so much; default: all")
    group.add_argument("--streams", type=int, default=4, metavar="N", help="pull: connections (default: %(default)s)")
    group.add_argument("--out", metavar="DIR", help="pull: write the version into this new directory")
    group.add_argument("--deadline", type=float, default=3600.0, metavar="S", help="pull: give up after so long")
    group.add_argument("--relay", action="store_true", help="pull: then serve it to others until interrupted")
    group.add_argument("--tls-cert", metavar="FILE", help="serve with TLS: the certificate (PEM)")
    group.add_argument("--tls-key", metavar="FILE", help="and its key")
    group.add_argument(
        "--ca", metavar="FILE", help="pull with TLS: certificates that sources are checked against (PEM)"
    )


def run(args: argparse.Namespace) -> int:
    return _serve(args) if args.action == "serve" else _pull(args)


def _serve(args: argparse.Namespace) -> int:
    from polyrl.weights import folder as folders
    from polyrl.weights.server import WeightServer

    if len(args.places) != 1:
        raise UserError(f"weights serve: {len(args.places)} arguments; expected one directory")
    directory = Path(args.places[0])
    found = folders.scan(directory)
    manifest = folders.read_manifest(directory, args.digest)
    layout = folders.layout_in(directory, found) if manifest is None else manifest.layout
    changes = {} if manifest is None else {"chunk_bytes": manifest.chunks.chunk_bytes, "hash": manifest.chunks.hash}
    server = WeightServer(_settings(args, num_deltas=0, **changes), _key(args), _tls(args))
    server.start()
    try:
        offer = server.publish(
            0 if manifest is None else manifest.version,
            layout,
            lambda view: folders.copy_into(layout, found, directory, view),
            lossy="" if manifest is None else manifest.lossy,
            parent=None if manifest is None else manifest.parent,
            adapter=None if manifest is None else manifest.adapter,
        )
        if manifest is not None and offer.digest != manifest.digest:
            raise UserError(f"{directory}: its bytes are not those of its manifest; `polyrl weights verify` says which")
        _say(args, offer._asdict(), f"version {offer.version}, {offer.digest}\nat {' '.join(offer.addresses)}")
        _until_interrupted()
    finally:
        server.close()
    return 0


def _pull(args: argparse.Namespace) -> int:
    from polyrl.weights import folder as folders
    from polyrl.weights.peer import WeightPeer
    from polyrl.weights.settings import TransferError

    if not args.places:
        raise UserError("weights pull: no address; expected HOST:PORT, as `polyrl weights serve` says it")
    _check_addresses(args.places)
    if args.out is not None and Path(args.out).exists():
        raise UserError(f"{args.out}: is there already; a version is written into a new directory")
    if args.digest is not None and not re.fullmatch("[0-9a-f]{64}", args.digest):
        raise UserError(f"--digest: {args.digest!r} is no digest; expected 64 hexadecimal digits")
    if not 0 < args.deadline < math.inf:
        raise UserError(f"--deadline: {args.deadline:g}; expected seconds above 0")
    peer = WeightPeer(_settings(args), _key(args), _tls(args))
    try:
        entry = _choose(peer.offered(args.places, args.deadline), args.digest)
        start = time.monotonic()
        with peer.pull(entry.version, entry.name, args.places, args.deadline, _progress(args)) as copy:
            took_s = time.monotonic() - start
            if args.out is not None:
                folders.write(Path(args.out), copy.manifest, copy.view)
        said = {"version": entry.version, "digest": entry.name, "num_bytes": entry.num_bytes, "s": round(took_s, 3)}
        line = f"version {entry.version}, {entry.name}\n{entry.num_bytes:,} bytes, verified, in {took_s:.2f} s"
        _say(args, {**said, "addresses": peer.addresses}, line)
        if args.relay:
            _until_interrupted()
    except TransferError as error:
        print(f"polyrl: not pulled: {error.reason}", file=sys.stderr)
        return EXIT_NOT_PULLED
    finally:
        peer.close()
    return 0


def _check_addresses(places: list[str]) -> None:
    from polyrl.weights.protocol import ProtocolError
    from polyrl.weights.receiver import parse_address

    for place in places:
        try:
            parse_address(place)
        except ProtocolError as error:
            raise UserError(f"weights pull: {error}") from error


def _choose(entries: "list[BlobEntry]", digest: str | None) -> "BlobEntry":
    from polyrl.weights.settings import TransferError

    full = [entry for entry in entries if entry.kind == "full" and digest in (None, entry.name)]
    if not full:
        raise TransferError(f"no source offers {'a version' if digest is None else digest}")
    return max(full, key=lambda entry: (entry.version, entry.complete, entry.name))


def _settings(args: argparse.Namespace, **changes: Any) -> "WeightSettings":
    import msgspec

    from polyrl.config.explain import explain
    from polyrl.weights.interfaces import listening_addresses
    from polyrl.weights.settings import WeightSettings

    listening_addresses(args.interface, key="--interface")
    given = {"interfaces": args.interface, "port": args.port, "streams": args.streams, "egress_mb_s": args.egress_mb_s}
    try:
        return msgspec.convert({**given, **changes}, WeightSettings)
    except msgspec.ValidationError as error:
        key, _, what = explain(error, given, WeightSettings).partition(": ")
        raise UserError(f"--{key.replace('_', '-')}: {what}") from error


def _key(args: argparse.Namespace) -> bytes:
    from polyrl.wire.credentials import find_token, weights_key_of

    return weights_key_of(find_token(args.token_file))


def _tls(args: argparse.Namespace) -> "Tls | None":
    from polyrl.weights.settings import Tls
    from polyrl.wire.credentials import client_tls, server_tls

    server = server_tls(args.tls_cert, args.tls_key)
    if server is None and args.ca is None:
        return None
    client = client_tls("https://", args.ca)
    assert client is not None
    return Tls(server, client)


def _progress(args: argparse.Namespace) -> "OnProgress | None":
    """A line that is written over, on a terminal."""
    if args.json or not sys.stderr.isatty():
        return None

    def show(done: int, num_bytes: int) -> None:
        print(f"\r{done / 1e9:.2f} of {num_bytes / 1e9:.2f} GB", end="\n" if done == num_bytes else "", file=sys.stderr)

    return show


def _say(args: argparse.Namespace, what: dict[str, Any], lines: str) -> None:
    print(json.dumps(what) if args.json else lines, flush=True)


def _until_interrupted() -> None:
    over = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: over.set())
    over.wait()
