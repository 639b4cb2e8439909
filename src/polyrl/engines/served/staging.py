"""What both kinds of server need for an install: a version brought near, handed over, and found to be there.

Nothing is copied: a version that was fetched lies in shared memory, and the server's ranks map it.
"""

import asyncio
import logging
import tempfile
from collections.abc import Awaitable
from pathlib import Path
from typing import NamedTuple

import polyrl
from polyrl.engines.engine import EngineError, Weights
from polyrl.engines.served import checking
from polyrl.engines.served.handing import Answer, Handing, Offer, handing
from polyrl.engines.served.server import ServerBroken
from polyrl.errors import UserError
from polyrl.weights import folder
from polyrl.weights.buffers import Buffer
from polyrl.weights.chunks import table_of
from polyrl.weights.manifest import Manifest

log = logging.getLogger("polyrl.engines.served")

PUT_S = 600.0
"""An install takes no longer, whatever the size of the model."""
LATE_S = 5.0
"""So long after the server's answer may its ranks' still come."""


class Staged(NamedTuple):
    manifest: Manifest
    offer: Offer
    fd: int
    view: memoryview
    buffer: Buffer | None
    """Ours, where the version came from a directory."""

    @property
    def version(self) -> int:
        return self.manifest.version


async def stage(weights: Weights, model: str) -> Staged:
    """Raises EngineError: when it is nowhere to be had, or is not of this model."""
    try:
        return await asyncio.to_thread(_stage, weights, Path(model))
    except UserError as error:  # of its directory, or for want of memory
        raise EngineError(f"version {weights.version}: {error}") from error


def _stage(weights: Weights, model: Path) -> Staged:
    copy = weights.copy
    if copy is not None:
        return Staged(copy.manifest, checking.offer_of(copy.manifest, model), copy.fd, copy.view, None)
    if weights.folder is None:
        raise EngineError(f"nobody says where version {weights.version} can be had")
    source = Path(weights.folder)
    found = folder.scan(source)
    layout = folder.layout_in(source, found)
    buffer = Buffer(layout.num_bytes)
    folder.copy_into(layout, found, source, buffer.view)
    manifest = Manifest(weights.version, layout, table_of(buffer.view), "")
    offer = checking.offer_of(manifest, model)._replace(any_dtype=True)
    return Staged(manifest, offer, buffer.fd, buffer.view, buffer)


async def hand_over(staged: Staged, socket_name: str, ask: Awaitable[object], *, late_s: float = LATE_S) -> None:
    """Offer a version to a server's ranks while `ask` has the server fetch it; returns once it is seen to be there.

    Raises EngineError when the old weights still run, ServerBroken when nobody knows which do.
    """
    async with handing(socket_name, staged.offer, staged.fd) as offered:
        try:
            async with asyncio.timeout(PUT_S):
                answers = await _answers(offered, asyncio.ensure_future(ask), late_s)
        except TimeoutError as error:
            why = f"version {staged.version} was not taken within {PUT_S:g} s"
            raise (ServerBroken if offered.has_gone else EngineError)(why) from error
    try:
        num_compared = checking.compare(answers, staged.manifest.layout, staged.view)
    except EngineError as error:
        raise ServerBroken(f"version {staged.version}: {error}") from error
    if not num_compared:
        log.warning("version %d was installed; the server holds nothing that could be compared", staged.version)


async def _answers(offered: Handing, asking: "asyncio.Future[object]", late_s: float) -> list[Answer]:
    """The ranks answer while the server carries the request out: once it has answered, they have."""
    answering = asyncio.ensure_future(offered.answers())
    try:
        await asyncio.wait((asking, answering), return_when=asyncio.FIRST_COMPLETED)
        if not answering.done():
            await asyncio.wait((answering,), timeout=late_s)
        if not answering.done() and not offered.has_gone:
            raise EngineError(_why(asking.exception()) or "the server did not call what it was started with for this")
        if not answering.done():
            raise ServerBroken(_why(asking.exception()) or "ranks of the server did not answer")
        answers = answering.result()
        try:
            await asking
        except EngineError as error:
            raise ServerBroken(str(error)) from error
        return answers
    finally:
        for task in (asking, answering):
            task.cancel()
        await asyncio.gather(asking, answering, return_exceptions=True)


def _why(error: BaseException | None) -> str:
    return "" if error is None else str(error)


async def labelled(ask: Awaitable[object]) -> None:
    """Have the server say which version it runs. New weights under the old label are not what anybody expects."""
    try:
        await ask
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
