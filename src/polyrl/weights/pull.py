"""One pull: ask which source has what, choose the cheapest chain from the held version, fetch, build, verify, swap.

Rules: nothing in a manifest is used before its digest has been checked. Only a source vouches for a delta's manifest,
so the result of the deltas is verified as a whole against the version's own manifest, for which the manager vouches. If
it is wrong, the full version is fetched instead. Checked manifests decide how much memory is taken, within bounds.
"""

import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import Empty, SimpleQueue
from typing import TypeVar

import numpy as np

import polyrl
from polyrl.weights import delta as codec
from polyrl.weights.chains import Chain, ChainStep, Delta, Full, cheapest
from polyrl.weights.chunks import UNFORGEABLE, bad_chunks
from polyrl.weights.fetch import IDLE_S, ChunkSource, Fetch, OnProgress
from polyrl.weights.manifest import (
    BadManifest,
    DeltaManifest,
    Layout,
    Manifest,
    WrongBytes,
    changed_tensors,
    decode_delta,
    decode_manifest,
)
from polyrl.weights.protocol import BlobEntry, Catalog, ProtocolError, SourceRefused
from polyrl.weights.receiver import SourceDialer, SourceLink
from polyrl.weights.settings import TransferError, Unreadable
from polyrl.weights.shelf import HostCopy, Shelf
from polyrl.weights.store import Blob

SCOUT_S = 1.0
"""Sources that answer this much later than the first one are left out."""
PARTS_SCOUT_S = 5.0
"""The same where a source has only a part of a version: then all others are needed."""
APPEAR_S = 20.0
"""How long a source that was asked too early has to get hold of the version."""
_ENCODE_BYTES_PER_S = 1e9
"""The least speed of a trainer's delta encoder. A pull that can use the delta waits for it accordingly."""
_REFRESH_EVERY_S = 0.05
_COPY_BYTES = 64 << 20
_MAX_THREADS = 8

AnswerT = TypeVar("AnswerT")


class Contact:
    """A source that answered. If its connection breaks between two requests, it is dialled again."""

    def __init__(self, address: str, dialer: SourceDialer) -> None:
        """Connect, and ask for the catalog. Raises OSError, ProtocolError or SourceRefused."""
        self.address, self._dialer = address, dialer
        self._link = dialer.dial(address)
        self.node = self._link.node
        self.catalog = Catalog(False, ())
        try:
            self.refresh()
        except (OSError, ProtocolError, SourceRefused):
            self.close()
            raise

    @property
    def has_parts(self) -> bool:
        """Whether it is one of a trainer's nodes that serve versions together."""
        return self.catalog.origin and any(one.kind == "full" and not one.complete for one in self.catalog.blobs)

    def refresh(self) -> None:
        """Ask for the current catalog."""
        self.catalog = self._exchange(SourceLink.catalog)

    def manifest(self, name: str) -> bytes:
        return self._exchange(lambda link: link.manifest(name))

    def close(self) -> None:
        self._link.close()

    def _exchange(self, question: Callable[[SourceLink], AnswerT]) -> AnswerT:
        try:
            return self._answer(question)
        except OSError:
            self._link.close()
            self._link = self._dialer.dial(self.address)
            if self._link.node != self.node:
                raise ConnectionError("another process answers at this address now") from None
            return self._answer(question)
        except ProtocolError:
            self._link.close()
            raise

    def _answer(self, question: Callable[[SourceLink], AnswerT]) -> AnswerT:
        try:
            return question(self._link)
        finally:
            self._link.keep(IDLE_S)


class _BadDelta(Exception):
    """The chain of deltas does not lead to the wanted version."""


class WeightPull:
    def __init__(
        self,
        shelf: Shelf,
        dialer: SourceDialer,
        number: int,
        stop: threading.Event,
        bad_sources: dict[str, str],
        needless: set[str],
        *,
        relayed: bool = False,
    ) -> None:
        """`needless` are addresses that did not answer and without which a pull ended well: it is kept up to date."""
        self._relayed, self._needless = relayed, needless
        self._shelf, self._dialer, self._number, self._stop, self._bad = shelf, dialer, number, stop, bad_sources
        self._sources: list[Contact] = []
        self._lied: list[str] = []
        """The addresses that gave wrong bytes during this pull."""
        self._silent: dict[str, str] = {}
        """By address, a line on each that did not answer."""

    def run(
        self, version: int, digest: str, addresses: Sequence[str], deadline: float, on_progress: OnProgress | None
    ) -> HostCopy:
        try:
            self._sources = self._scout(addresses, deadline)
            manifest, canonical = self._find_manifest(version, digest, deadline)
            self._check_hash(manifest)
            self._shelf.store.announce(digest, canonical)
            chain = self._find_chain(manifest, deadline)
            try:
                copy = self._follow(chain, manifest, canonical, deadline, on_progress)
            except _BadDelta as error:
                full = Chain((Full(digest, manifest.layout.num_bytes),), manifest.layout.num_bytes)
                try:
                    copy = self._follow(full, manifest, canonical, deadline, on_progress)
                except TransferError as then:
                    raise self._error(f"{error}; then {then.reason}") from error
            self._needless.update(self._silent)
            return copy
        except TransferError:
            self._needless.clear()
            raise
        except (BadManifest, ProtocolError) as error:
            raise self._error(str(error)) from error
        finally:
            for source in self._sources:
                source.close()

    def offered(self, addresses: Sequence[str], deadline: float) -> list[BlobEntry]:
        sources = self._scout(addresses, deadline)
        for source in sources:
            source.close()
        return list(dict.fromkeys(entry for source in sources for entry in source.catalog.blobs))

    def _error(self, reason: str) -> TransferError:
        return TransferError(reason, source_is_bad=bool(self._lied), bad_addresses=tuple(self._lied))

    def _accuse(self, address: str, why: str) -> None:
        self._bad[address] = why
        if address not in self._lied:
            self._lied.append(address)
        for source in self._sources:
            if source.address == address:
                source.close()
        self._sources = [source for source in self._sources if source.address != address]

    # Sources that answer.

    def _scout(self, addresses: Sequence[str], deadline: float) -> list[Contact]:
        """Ask all addresses at once. If a source has several, `number` decides which one is used."""
        answers: SimpleQueue[tuple[int, Contact | Exception]] = SimpleQueue()
        given_up = threading.Event()
        unique = list(dict.fromkeys(addresses))
        for place, address in enumerate(unique):
            args = (place, address, answers, given_up)
            threading.Thread(target=self._visit, args=args, name="weights-scout", daemon=True).start()
        found: dict[int, Contact] = {}
        failures: dict[int, Exception] = {}
        until = deadline
        while len(found) + len(failures) < len(unique) and not self._stop.is_set():
            try:
                place, answer = answers.get(timeout=max(0.0, min(0.1, until - time.monotonic())))
            except Empty:
                if time.monotonic() >= until:
                    break
                continue
            if isinstance(answer, Exception):
                failures[place] = answer
            else:
                found[place] = answer
                missing = {one for at, one in enumerate(unique) if at not in found and at not in failures}
                are_parts = any(one.has_parts for one in found.values()) and not missing <= self._needless
                patience_s = PARTS_SCOUT_S if are_parts else SCOUT_S
                until = min(until, time.monotonic() + patience_s)
        given_up.set()
        self._close_late(answers)
        for place, failure in failures.items():
            if isinstance(failure, ProtocolError):
                self._accuse(unique[place], str(failure))
        late = {one: failures.get(at, "no answer") for at, one in enumerate(unique) if at not in found}
        self._silent = {address: f"{address}: {why}" for address, why in late.items()}
        if not found:
            raise self._error("; ".join(["no source answers", *self._silent.values()]))
        return self._one_a_node([found[place] for place in sorted(found)])

    def _visit(
        self, place: int, address: str, answers: SimpleQueue[tuple[int, Contact | Exception]], late: threading.Event
    ) -> None:
        try:
            contact = Contact(address, self._dialer)
        except (OSError, ProtocolError, SourceRefused) as error:
            answers.put((place, error))
            return
        if late.is_set():
            contact.close()
        else:
            answers.put((place, contact))

    def _close_late(self, answers: SimpleQueue[tuple[int, Contact | Exception]]) -> None:
        while not answers.empty():
            _, answer = answers.get()
            if isinstance(answer, Contact):
                answer.close()

    def _one_a_node(self, found: list[Contact]) -> list[Contact]:
        by_node: dict[bytes, list[Contact]] = {}
        for one in found:
            by_node.setdefault(one.node, []).append(one)
        chosen = [same[self._number % len(same)] for same in by_node.values()]
        for one in found:
            if one not in chosen:
                one.close()
        return chosen

    def _refresh_all(self) -> None:
        """Ask all sources for their current catalogs, and leave out those that do not answer."""
        alive: list[Contact] = []
        for source in self._sources:
            try:
                source.refresh()
                alive.append(source)
            except (OSError, ProtocolError, SourceRefused):
                source.close()
        self._sources = alive
        if not alive:
            raise self._error("no source answers any more")

    # What they offer.

    def _find_manifest(self, version: int, digest: str, deadline: float) -> tuple[Manifest, bytes]:
        until = min(deadline, time.monotonic() + APPEAR_S)
        while True:
            for source in list(self._sources):
                canonical = self._manifest_from(source, digest)
                if canonical is None:
                    continue
                try:
                    manifest = decode_manifest(canonical, digest)
                except WrongBytes as error:
                    self._accuse(source.address, f"manifest of version {version}: {error}")
                    continue
                except BadManifest as error:  # the manager vouches for these bytes: this side is too old
                    raise Unreadable(
                        f"version {version} is written in a form that PolyRL {polyrl.__version__} does not know "
                        f"({error}); install the PolyRL that the trainer runs"
                    ) from error
                if manifest.version != version:
                    raise TransferError(f"{digest[:16]}... is version {manifest.version}; expected {version}")
                return manifest, canonical
            self._wait(until, f"no source holds version {version}, {digest[:16]}...")
            self._refresh_all()

    def _check_hash(self, manifest: Manifest) -> None:
        """Refuse a version from relays if they could forge it.

        The manager vouches for the manifest, the hash for chunks.
        """
        hash = manifest.chunks.hash
        if self._relayed and hash not in UNFORGEABLE and not self._dialer.settings.one_machine:
            expected = ", ".join(UNFORGEABLE)
            raise TransferError(
                f"version {manifest.version} is known by {hash}, which a worker that passes it on can forge; "
                f"expected {expected}, or the trainer as the source"
            )

    def _manifest_from(self, source: Contact, name: str) -> bytes | None:
        try:
            return source.manifest(name)
        except SourceRefused:
            return None
        except (OSError, ProtocolError):
            source.close()
            self._sources.remove(source)
            return None

    def _find_chain(self, manifest: Manifest, deadline: float) -> Chain:
        """Return the cheapest chain. Waits for versions that a source is getting and deltas that it is making."""
        held = [] if self._shelf.held is None else [self._shelf.held[1]]
        bases = [one.digest for one in held if one.layout.fingerprint == manifest.layout.fingerprint]
        worth_s = 1.0 + manifest.layout.num_bytes / _ENCODE_BYTES_PER_S
        delta_until = min(deadline, time.monotonic() + worth_s)
        until = min(deadline, time.monotonic() + APPEAR_S)
        while True:
            chain = cheapest(bases, manifest.digest, self._offers())
            wanted = [(base, manifest.digest) for base in bases]
            coming = any(pair in source.catalog.coming for pair in wanted for source in self._sources)
            if chain is not None and not (coming and time.monotonic() < delta_until):
                return chain
            self._wait(until, f"no source has a way to version {manifest.version}, {manifest.digest[:16]}...")
            self._refresh_all()

    def _offers(self) -> list[ChainStep]:
        offers: dict[ChainStep, None] = {}
        for source in self._sources:
            for entry in source.catalog.blobs:
                if entry.kind == "full":
                    offers[Full(entry.name, entry.num_bytes)] = None
                else:
                    offers[Delta(entry.name, entry.base, entry.target, entry.num_bytes)] = None
        return list(offers)

    def _wait(self, until: float, what: str) -> None:
        if time.monotonic() >= until or not self._sources:
            raise self._error("; ".join([what, *(f"{one}: {self._bad[one]}" for one in self._lied)]))
        if self._stop.wait(_REFRESH_EVERY_S):
            raise TransferError("broken off")

    # Fetching and building.

    def _follow(
        self, chain: Chain, manifest: Manifest, canonical: bytes, deadline: float, on_progress: OnProgress | None
    ) -> HostCopy:
        layout = manifest.layout
        self._shelf.trim_deltas()
        deltas = [self._fetch_delta(step, layout, deadline) for step in chain.steps if isinstance(step, Delta)]
        first = chain.steps[0]
        if isinstance(first, Full):
            wanted = (manifest, canonical) if first.target == manifest.digest else self._other_full(first, layout)
            self._fetch(self._shelf.build(*wanted), deadline, on_progress)
            if not deltas:
                return HostCopy(self._shelf.swap(manifest), manifest)
            buffer = self._shelf.take_built()
        else:
            assert self._shelf.held is not None
            buffer = self._shelf.take_buffer(layout.num_bytes)
            _copy(self._shelf.held[0].view, buffer.view)
        before = self._shelf.held
        try:
            self._apply(deltas, manifest, buffer.view)
        except _BadDelta:
            self._shelf.return_buffer(buffer)
            for _, blob in deltas:
                self._shelf.drop_delta(blob)
            raise
        blob = self._shelf.swap(manifest, buffer)
        if isinstance(first, Full) or before is None:
            return HostCopy(blob, manifest)
        changed = changed_tensors([one for one, _ in deltas], layout)
        return HostCopy(blob, manifest, base=before[1].digest, changed=changed)

    def _other_full(self, step: Full, layout: Layout) -> tuple[Manifest, bytes]:
        """Return the manifest of another full version, from which the deltas start."""
        for source in list(self._sources):
            canonical = self._manifest_from(source, step.target)
            if canonical is None:
                continue
            try:
                manifest = decode_manifest(canonical, step.target)
            except BadManifest as error:
                self._accuse(source.address, str(error))
                continue
            if manifest.layout.fingerprint == layout.fingerprint:
                return manifest, canonical
        raise _BadDelta(f"no manifest of {step.target[:16]}..., from which the deltas start")

    def _fetch_delta(self, step: Delta, layout: Layout, deadline: float) -> tuple[DeltaManifest, Blob]:
        for source in list(self._sources):
            canonical = self._manifest_from(source, step.blob)
            if canonical is None:
                continue
            try:
                delta = decode_delta(canonical, layout, step.blob)
                if (delta.base, delta.target) != (step.base, step.target):
                    raise BadManifest("a delta between other versions than the catalog says")
                if delta.chunks.num_bytes > 2 * layout.num_bytes + (1 << 20):
                    raise BadManifest(f"a delta of {delta.chunks.num_bytes} bytes for {layout.num_bytes}")
            except BadManifest as error:
                self._accuse(source.address, f"delta {step.blob[:16]}...: {error}")
                continue
            blob = self._shelf.add_delta(delta, canonical, 0)
            try:
                self._fetch(blob, deadline, None)
            except TransferError:
                self._shelf.drop_delta(blob)
                raise
            return delta, blob
        raise _BadDelta(f"no source gives delta {step.blob[:16]}... any more")

    def _fetch(self, blob: Blob, deadline: float, on_progress: OnProgress | None) -> None:
        sources: list[ChunkSource] = []
        for one in self._sources:
            complete = any(entry.name == blob.name and entry.complete for entry in one.catalog.blobs)
            sources.append(ChunkSource(one.address, one.node, origin=one.catalog.origin, complete=complete))
        if not sources:
            raise self._error("no source is left")
        fetch = Fetch(blob, self._shelf.store, sources, self._dialer, self._stop, relayed=self._relayed)
        try:
            fetch.run(deadline, on_progress)
        except TransferError as error:
            self._accuse_all(sources)
            silent = self._silent.values() if any(one.has_parts for one in self._sources) else []
            raise self._error("; ".join([error.reason, *silent])) from error
        self._accuse_all(sources)

    def _accuse_all(self, sources: list[ChunkSource]) -> None:
        for source in sources:
            if source.is_bad:
                self._accuse(source.address, source.failure)

    def _apply(self, deltas: list[tuple[DeltaManifest, Blob]], manifest: Manifest, target: memoryview) -> None:
        try:
            for delta, blob in deltas:
                codec.apply(delta, manifest.layout, blob.view, target, threads=_num_threads())
        except (codec.BadDelta, BadManifest) as error:
            raise _BadDelta(f"a delta cannot be applied: {error}") from error
        wrong = bad_chunks(target, manifest.chunks, _num_threads())
        if wrong:
            raise _BadDelta(f"deltas lead to another version: chunk {wrong[0]} and {len(wrong) - 1} more are wrong")


def _copy(source: memoryview, target: memoryview) -> None:
    old, new = np.frombuffer(source, np.uint8), np.frombuffer(target, np.uint8)

    def copy(start: int) -> None:
        np.copyto(new[start : start + _COPY_BYTES], old[start : start + _COPY_BYTES])

    with ThreadPoolExecutor(_num_threads()) as pool:
        list(pool.map(copy, range(0, len(old), _COPY_BYTES)))


def _num_threads() -> int:
    return min(_MAX_THREADS, os.cpu_count() or 1)
