"""The worker's side of an install: a version is brought near, found to fit the model, handed over, and verified.

`inside` is the server's side, and says how the two speak. Nothing is copied: a version that was fetched lies in shared
memory, and the server's ranks map it. The listening socket has a random name, no file, and takes in only processes of
our own user. No rank writes before all ranks are ready; a rank that vanishes after that leaves unknown weights
(ServerBroken).

Checked before: every tensor of the model's directory is in the version, in its shape, and the other way round.
Checked after: the first bytes of embeddings, head and norms, read back from every rank, are the version's, as that
rank's slice. Matrices are left out: servers repack them for their kernels, and the same loop of the same loader put
them in.
"""

import asyncio
import hashlib
import json
import logging
import math
import os
import secrets
import socket
import tempfile
from collections.abc import AsyncIterator, Awaitable, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import polyrl
from polyrl.engines.engine import EngineError, NotOfThisModel, Weights
from polyrl.engines.served.between import HEAD_BYTES, LENGTH, peer_uid
from polyrl.engines.served.server import ServerBroken, facts_of
from polyrl.errors import UserError
from polyrl.weights import folder
from polyrl.weights.buffers import Buffer
from polyrl.weights.chunks import View, table_of
from polyrl.weights.manifest import Layout, Manifest, Spec, is_table

log = logging.getLogger("polyrl.engines.served")

PUT_S = 600.0
"""The time limit of an install, for models of any size."""
LATE_S = 5.0
"""The longest time that ranks may answer after their server has."""
_MOST_BYTES = 64 << 20
_MOST_RANKS = 4096
_MOST_PROBES = 8
_VOCABULARY_MULTIPLE = 64
"""Engines of the field pad a vocabulary to a multiple of this before they split it."""


class HandedVersion(NamedTuple):
    """A version as every rank is told of it: (name, dtype, shape, start) of each tensor in a file."""

    tensors: list[tuple[str, str, tuple[int, ...], int]]
    num_bytes: int
    probes: list[str]
    """Parameters that are wanted back."""
    any_dtype: bool = False
    """The server may take them in its own dtype, as it does when it starts from a directory."""


class ParameterProbe(NamedTuple):
    """A parameter as a rank holds it, and the digest of its first bytes."""

    dtype: str
    shape: tuple[int, ...]
    digest: str


class RankInstalled(NamedTuple):
    """A rank's report of an install."""

    slice: int
    num_slices: int
    heads: dict[str, ParameterProbe]


def new_name() -> str:
    return f"polyrl-install-{secrets.token_hex(16)}"


class Handing:
    """A version on offer to all ranks of a server. `answers` waits for them."""

    def __init__(self, listener: socket.socket, offer: HandedVersion, fd: int) -> None:
        self._listener, self._fd = listener, fd
        self._offer = json.dumps(offer._asdict()).encode()
        self._go = asyncio.Event()
        self._num_ready = 0
        self._ranks: dict[int, asyncio.Task[RankInstalled]] = {}

    @property
    def has_gone(self) -> bool:
        """Whether ranks were told to write."""
        return self._go.is_set()

    async def answers(self) -> list[RankInstalled]:
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

    async def _serve(self, connection: socket.socket, rank: dict[str, Any], num_ranks: int) -> RankInstalled:
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
            heads = {
                name: ParameterProbe(dtype, tuple(shape), digest)
                for name, (dtype, shape, digest) in said["heads"].items()
            }
            return RankInstalled(rank["slice"], rank["num_slices"], heads)


@asynccontextmanager
async def handing(name: str, offer: HandedVersion, fd: int) -> AsyncIterator[Handing]:
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


def offer_of(manifest: Manifest, model: Path) -> HandedVersion:
    """Return what ranks are told of a version. Raises NotOfThisModel if it is not of the model in this directory."""
    if manifest.adapter is not None:
        raise NotOfThisModel(
            f"version {manifest.version} is an adapter, which a server cannot merge; "
            'expected whole weights: lora.publish = "merged"'
        )
    layout = manifest.layout
    tensors = []
    for name in _names(manifest, model):
        entry = layout.by_name[name]
        tensors.append((name, entry.dtype, entry.shape, entry.start))
    return HandedVersion(tensors, layout.num_bytes, probes_of(layout))


def check_served(model: str, served: str) -> None:
    """Raises EngineError when a server that runs already, from the directory `served`, has another model than ours."""
    ours, theirs = Path(model).resolve(), Path(served)
    if not theirs.is_absolute() or not (theirs / "config.json").is_file():
        log.warning("the server's model is %r, which is no directory here: it is taken for that in %s", served, model)
        return
    if theirs.resolve() == ours:
        return
    why = _difference(ours, theirs)
    if why:
        raise EngineError(f"the server runs the model in {served}, which is not that of --model {model}: {why}")
    log.warning("the server runs the model in %s: it is taken for that in %s", served, model)


def _difference(ours: Path, theirs: Path) -> str:
    mine, its = facts_of(str(ours)), facts_of(str(theirs))
    if mine.vocab != its.vocab:
        return f"a vocabulary of {its.vocab} ids; expected {mine.vocab}"
    if mine.kv_numbers != its.kv_numbers:
        return "it has other layers"
    if not (any(ours.glob("*.safetensors")) and any(theirs.glob("*.safetensors"))):
        return ""
    try:
        wanted, found = folder.scan(ours).specs, folder.scan(theirs).specs
    except UserError as error:
        raise EngineError(str(error)) from error
    for name in [*wanted, *found]:
        if name not in found:
            return f"it has no {name}"
        if name not in wanted:
            return f"it has {name}"
        if found[name].shape != wanted[name].shape:
            return f"{name} has shape {list(found[name].shape)}; expected {list(wanted[name].shape)}"
    return ""


def _names(manifest: Manifest, model: Path) -> list[str]:
    """Return the names of the tensors that the server is given: those of its directory."""
    layout = manifest.layout
    wanted: dict[str, Spec] = {}
    if any(model.glob("*.safetensors")):
        wanted = {name: one for name, one in folder.scan(model).specs.items() if not name.endswith("inv_freq")}
    if not wanted:
        return [one.name for one in layout.tensors]
    where = f"version {manifest.version} is not of the model in {model}"
    for name, spec in wanted.items():
        ours = layout.by_name.get(name)
        if ours is None:
            raise NotOfThisModel(f"{where}: it has no {name}")
        if ours.shape != spec.shape:
            raise NotOfThisModel(f"{where}: {name} has shape {list(ours.shape)}; expected {list(spec.shape)}")
    given = {layout.by_name[name].name for name in wanted}
    for one in layout.tensors:
        if one.name not in given:
            raise NotOfThisModel(f"{where}, which has no {one.name}")
    return list(wanted)


def probes_of(layout: Layout) -> list[str]:
    """Parameters that every server holds under these names: tables, and vectors from all over the model."""
    tables = [name for name in layout.by_name if is_table(name)]
    vectors = [name for name, one in layout.by_name.items() if len(one.shape) == 1 and name.endswith("norm.weight")]
    step = max(1, len(vectors) // (_MOST_PROBES - 2))
    return [*tables[:2], *vectors[::step]][:_MOST_PROBES]


class Shard(NamedTuple):
    """A rank's slice of a parameter: a run of the version's bytes, and zeros up to its size."""

    dtype: str
    shape: tuple[int, ...]
    num_bytes: int
    start: int
    """In the version; so is `end`."""
    end: int


def shard_of(layout: Layout, name: str, rank: int, num_ranks: int, multiple: int = _VOCABULARY_MULTIPLE) -> Shard:
    """Return a tensor-parallel rank's slice of a parameter that every server has under this name. Raises EngineError.

    A norm is whole at every rank. A table's rows are split after it was padded with zeros to a multiple, and then so
    that it divides.
    """
    tensor = layout.by_name.get(name)
    if tensor is None or not 0 <= rank < num_ranks <= _MOST_RANKS:
        raise EngineError(f"{name!r} of slice {rank} of {num_ranks} was read back; expected what was asked for")
    if not is_table(name):
        return Shard(tensor.dtype, tensor.shape, tensor.num_bytes, tensor.start, tensor.end)
    num_rows = tensor.shape[0] if tensor.shape else 1
    unit = math.lcm(multiple, num_ranks)
    rows = -(-num_rows // unit) * unit // num_ranks
    row_bytes = math.prod(tensor.shape[1:]) * tensor.item_bytes
    first, end = (tensor.start + min(one * rows, num_rows) * row_bytes for one in (rank, rank + 1))
    return Shard(tensor.dtype, (rows, *tensor.shape[1:]), rows * row_bytes, first, end)


def compare(answers: Iterable[RankInstalled], layout: Layout, view: View) -> int:
    """Return how many parameters could be compared, over all ranks. Raises EngineError for one that is wrong."""
    num_compared = 0
    for answer in answers:
        for name, head in answer.heads.items():
            shard = shard_of(layout, name, answer.slice, answer.num_slices)
            if (shard.dtype, shard.shape) != (head.dtype, head.shape):
                continue  # padded or split in a way of the server's own
            if hashlib.blake2b(_head(shard, memoryview(view)), digest_size=16).hexdigest() != head.digest:
                raise EngineError(f"{name} of slice {answer.slice} is not what was handed over")
            num_compared += 1
    return num_compared


def _head(shard: Shard, version: memoryview) -> bytes:
    """Return the first bytes of a rank's slice."""
    num_bytes = min(HEAD_BYTES, shard.num_bytes)
    return bytes(version[shard.start : min(shard.end, shard.start + num_bytes)]).ljust(num_bytes, b"\0")


class StagedVersion(NamedTuple):
    manifest: Manifest
    offer: HandedVersion
    fd: int
    view: memoryview
    buffer: Buffer | None
    """Ours, where the version came from a directory."""

    @property
    def version(self) -> int:
        return self.manifest.version


async def stage(weights: Weights, model: str) -> StagedVersion:
    """Raises EngineError: when it is nowhere to be had, or is not of this model."""
    try:
        return await asyncio.to_thread(_stage, weights, Path(model))
    except UserError as error:  # of its directory, or for want of memory
        raise EngineError(f"version {weights.version}: {error}") from error


def _stage(weights: Weights, model: Path) -> StagedVersion:
    copy = weights.copy
    if copy is not None:
        return StagedVersion(copy.manifest, offer_of(copy.manifest, model), copy.fd, copy.view, None)
    if weights.folder is None:
        raise EngineError(f"version {weights.version} has no known source")
    source = Path(weights.folder)
    found = folder.scan(source)
    layout = folder.layout_in(source, found)
    buffer = Buffer(layout.num_bytes)
    folder.copy_into(layout, found, source, buffer.view)
    manifest = Manifest(weights.version, layout, table_of(buffer.view), "")
    offer = offer_of(manifest, model)._replace(any_dtype=True)
    return StagedVersion(manifest, offer, buffer.fd, buffer.view, buffer)


async def hand_over(
    staged: StagedVersion, socket_name: str, request: Awaitable[object], *, late_s: float = LATE_S
) -> None:
    """Offer a version to a server's ranks while `request` has the server fetch it; returns once it is seen to be there.

    Raises EngineError when the old weights still run, ServerBroken when it is unknown which do.
    """
    async with handing(socket_name, staged.offer, staged.fd) as offered:
        try:
            async with asyncio.timeout(PUT_S):
                answers = await _answers(offered, asyncio.ensure_future(request), late_s)
        except TimeoutError as error:
            why = f"version {staged.version} was not taken within {PUT_S:g} s"
            raise (ServerBroken if offered.has_gone else EngineError)(why) from error
    try:
        num_compared = compare(answers, staged.manifest.layout, staged.view)
    except EngineError as error:
        raise ServerBroken(f"version {staged.version}: {error}") from error
    if not num_compared:
        log.warning("version %d was installed; the server holds nothing that could be compared", staged.version)


async def _answers(offered: Handing, requested: "asyncio.Future[object]", late_s: float) -> list[RankInstalled]:
    """Collect the ranks' answers. They come while the server carries the request out: once it has answered, they
    have."""
    answering = asyncio.ensure_future(offered.answers())
    try:
        await asyncio.wait((requested, answering), return_when=asyncio.FIRST_COMPLETED)
        if not answering.done():
            await asyncio.wait((answering,), timeout=late_s)
        if not answering.done() and not offered.has_gone:
            raise EngineError(
                _why(requested.exception()) or "the server did not call what it was started with for this"
            )
        if not answering.done():
            raise ServerBroken(_why(requested.exception()) or "ranks of the server did not answer")
        answers = answering.result()
        try:
            await requested
        except EngineError as error:
            raise ServerBroken(str(error)) from error
        return answers
    finally:
        for task in (requested, answering):
            task.cancel()
        await asyncio.gather(requested, answering, return_exceptions=True)


def _why(error: BaseException | None) -> str:
    return "" if error is None else str(error)


async def labelled(request: Awaitable[object]) -> None:
    """Have the server say which version it runs. New weights under the old label would mislead its readers."""
    try:
        await request
    except EngineError as error:
        raise ServerBroken(f"the weights are in place, but not their label: {error}") from error


class OurModules:
    """A directory for a server's PYTHONPATH, with our package in it and nothing else of our environment."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="polyrl-modules-")
        (Path(self._folder.name) / "polyrl").symlink_to(Path(polyrl.__file__).parent)

    @property
    def path(self) -> str:
        return self._folder.name
