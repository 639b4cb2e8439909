"""`polyrl weights ACTION PLACE...`: look at weight versions, check them, compare them, move them.

`serve` and `pull` need the run's worker token; with it, a trainer that runs can be pulled from too. `pull` without
`--digest` takes the newest version that the source offers, and trusts the source on that; with it, only the version of
that digest is accepted.
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

from polyrl.cli.parser import Actions, CliAction, add_action
from polyrl.errors import UserError

if TYPE_CHECKING:
    from polyrl.weights.fetch import OnProgress
    from polyrl.weights.settings import Tls, WeightSettings

ACTIONS: Actions = {
    "inspect": CliAction("DIR", "what a version, or a model directory, consists of"),
    "verify": CliAction("DIR", "compare every byte with the manifest"),
    "diff": CliAction("DIR DIR", "which tensors changed, and what their delta would cost"),
    "serve": CliAction("DIR", "let others pull the version in a directory"),
    "pull": CliAction("HOST:PORT...", "get a version, verified, from any of these"),
}

EXAMPLE = """\
  polyrl weights diff models/arithmetic models/trained
  polyrl weights serve models/trained --port 7000 --token-file worker.token
  polyrl weights pull HOST:7000 --token-file worker.token --out models/pulled
  polyrl weights verify models/pulled"""

EXIT_NOT_PULLED = 1
NUM_SHOWN = 10


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_action(parser, ACTIONS)
    parser.add_argument("places", nargs="*", metavar="PLACE", help="a directory, or what the action says")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--threads", type=int, default=1, metavar="N", help="for hashing and deltas (default: 1)")
    parser.add_argument("--digest", metavar="HEX", help="verify, serve, pull: take no version but this one")
    parser.add_argument("--all", action="store_true", help="inspect, diff: every tensor instead of the first ten")
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
    if args.action == "pull":
        return _pull(args)
    wanted = 2 if args.action == "diff" else 1
    if len(args.places) != wanted:
        expected = "one directory" if wanted == 1 else "two directories"
        raise UserError(f"weights {args.action}: {len(args.places)} arguments; expected {expected}")
    if args.threads < 1:
        raise UserError(f"--threads: {args.threads}; expected at least 1")
    do = {"inspect": _inspect, "verify": _verify, "diff": _diff, "serve": _serve}[args.action]
    return do(args, *map(Path, args.places))


# Versions in directories


def _inspect(args: argparse.Namespace, directory: Path) -> int:
    from polyrl.weights import looking

    facts = looking.inspect(directory)
    if args.json:
        print(json.dumps(facts, indent=2))
        return 0
    tensors = facts.pop("tensors")
    if facts["version"] is None:
        print(f"{directory}: a model directory without a manifest: nothing to verify it against")
    for name, value in facts.items():
        if value is not None:
            print(f"{name:<14}{_words(value)}")
    shapes = ("x".join(map(str, one["shape"])) or "number" for one in tensors)
    _list(args, [f"{one['dtype']:<14} {shape:<16} {one['name']}" for one, shape in zip(tensors, shapes, strict=True)])
    return 0


def _verify(args: argparse.Namespace, directory: Path) -> int:
    from polyrl.weights import looking

    facts = looking.verify(directory, args.digest, threads=args.threads)
    said = f"ok: version {facts['version']}, {facts['num_chunks']} chunks, {facts['num_bytes']:,} bytes"
    print(json.dumps(facts, indent=2) if args.json else f"{said}\n{facts['digest']}")
    return 0


def _diff(args: argparse.Namespace, old: Path, new: Path) -> int:
    """Compare two versions. Return exit code 0 if they are equal, 1 if they differ, like diff(1)."""
    from polyrl.weights import looking

    facts, changed, layouts = looking.compare(old, new, threads=args.threads)
    if facts is None:
        if args.json:
            print(json.dumps({"layouts_differ": layouts}, indent=2))
            return 1
        print(f"versions of different layouts: {len(layouts)} tensors differ; there is no delta between them")
        _list(args, [f"{name}: {a or 'not there'} -> {b or 'not there'}" for name, (a, b) in layouts.items()])
        return 1
    if args.json:
        print(json.dumps({**facts, "changed": {name: number for name, (number, _) in changed.items()}}, indent=2))
        return 1 if changed else 0
    num_tensors, num_elements = facts["num_tensors"], facts["num_elements"]
    if not changed:
        print(f"the same: {num_tensors} tensors, {num_elements:,} elements")
        return 0
    print(f"{len(changed)} of {num_tensors} tensors changed, {_share(facts['num_changed'], num_elements)}")
    print(f"a delta of {facts['delta_bytes']:,} bytes, {facts['ratio']} times smaller than the version")
    ranked = sorted(changed.items(), key=lambda one: -one[1][0] / one[1][1])
    _list(args, [f"{_share(*counts):<40} {name}" for name, counts in ranked])
    return 1


def _share(part: int, whole: int) -> str:
    return f"{part:,} of {whole:,} elements ({part / whole:.2%})"


def _words(value: Any) -> str:
    match value:
        case dict():
            return ", ".join(f"{name}: {_words(one)}" for name, one in value.items()) or "none"
        case int():
            return f"{value:,}"
        case _:
            return str(value) or "none"


def _list(args: argparse.Namespace, lines: list[str]) -> None:
    shown = lines if args.all else lines[:NUM_SHOWN]
    for line in shown:
        print(f"  {line}")
    if len(lines) > len(shown):
        print(f"  ... and {len(lines) - len(shown)} more (--all)")


# Versions on their way


def _serve(args: argparse.Namespace, directory: Path) -> int:
    from polyrl.weights import folder
    from polyrl.weights.server import WeightServer

    found = folder.scan(directory)
    manifest = folder.read_manifest(directory, args.digest)
    layout = folder.layout_in(directory, found) if manifest is None else manifest.layout
    changes = {} if manifest is None else {"chunk_bytes": manifest.chunks.chunk_bytes, "hash": manifest.chunks.hash}
    server = WeightServer(_settings(args, num_deltas=0, **changes), _key(args), _tls(args))
    server.start()
    try:
        offer = server.publish(
            0 if manifest is None else manifest.version,
            layout,
            lambda view: folder.copy_into(layout, found, directory, view),
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
    from polyrl.weights import folder
    from polyrl.weights.peer import WeightPeer
    from polyrl.weights.settings import TransferError

    _check_pull(args)
    peer = WeightPeer(_settings(args), _key(args), _tls(args))
    try:
        entry = peer.newest(args.places, args.deadline, args.digest)
        start = time.monotonic()
        with peer.pull(entry.version, entry.name, args.places, args.deadline, _progress(args)) as copy:
            took_s = time.monotonic() - start
            if args.out is not None:
                folder.write(Path(args.out), copy.manifest, copy.view)
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


def _check_pull(args: argparse.Namespace) -> None:
    from polyrl.weights.protocol import ProtocolError
    from polyrl.weights.receiver import parse_address

    if not args.places:
        raise UserError("weights pull: no address; expected HOST:PORT, as `polyrl weights serve` says it")
    try:
        for place in args.places:
            parse_address(place)
    except ProtocolError as error:
        raise UserError(f"weights pull: {error}") from error
    if args.out is not None and Path(args.out).exists():
        raise UserError(f"{args.out}: is there already; a version is written into a new directory")
    if args.digest is not None and not re.fullmatch("[0-9a-f]{64}", args.digest):
        raise UserError(f"--digest: {args.digest!r} is no digest; expected 64 hexadecimal digits")
    if not 0 < args.deadline < math.inf:
        raise UserError(f"--deadline: {args.deadline:g}; expected seconds above 0")


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
    """Return a progress line that overwrites itself; None without a terminal."""
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
