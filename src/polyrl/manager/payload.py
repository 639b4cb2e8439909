"""The payload of a run, which the scheduler never sees: prompts, tokens with their log-probabilities, rewards.

The tokens of a sample are a growing buffer of cells (wire/columns.py), and segments that say which version and worker
wrote from where. They are kept from its first lease until its step is over or its group is dropped.
"""

from collections.abc import Container, Sequence
from typing import Any

from msgspec import structs

from polyrl.ids import GroupId, SampleId, Step, group_of
from polyrl.manager.calls import CallRecord, payload_of
from polyrl.manager.frames_in.stride import Stride
from polyrl.manager.notes import VersionOffered
from polyrl.manager.peers.link import Link
from polyrl.wire import columns
from polyrl.wire.columns import CELL_BYTES
from polyrl.wire.frames import Ended, EnvironmentReward, NewTokens, PromptPayload, SamplePayload, Segment

_OFFERS_KEPT = 64
"""Versions whose digests are kept: more than any staleness that is worth training on."""


class SampleTokens:
    """The tokens of a sample so far, and what is known of them."""

    __slots__ = (
        "_cells",
        "calls",
        "engine",
        "finish",
        "newest_call",
        "own",
        "parts",
        "reward",
        "row",
        "segments",
        "sent_on",
        "stride",
        "version",
        "worker",
    )

    def __init__(self) -> None:
        self._cells = bytearray()
        self.stride: Stride | None = None
        """A stride that may hold more of its tokens, in row `row`."""
        self.row = 0
        self.segments: list[Segment] = []
        self.version = -1
        """The version of the last token under the present lease; -1 when it has none yet."""
        self.worker = self.engine = ""
        self.finish = ""
        self.reward = 0.0
        self.parts: dict[str, float] = {}
        self.own: EnvironmentReward | None = None
        """Of an episode that has ended: its environment's reward, which `reward` is until the trainer has scored it."""
        self.calls: list[CallRecord] = []
        """An episode's; empty for a single answer."""
        self.newest_call: tuple[int, int] = (0, -1)
        """The attempt that its host is at, and the newest call that was made in it, since this process started."""
        self.sent_on: Link | None = None
        """The trainer's connection on which it was sent to be scored: as long as that lasts, the trainer has it."""

    @property
    def cells(self) -> bytearray:
        """All cells that have come."""
        if self.stride is not None:
            self.stride.end()
        return self._cells

    def add_settled(self, cells: bytes | memoryview) -> None:
        """Add cells that waited in a stride."""
        self._cells += cells

    @property
    def num_tokens(self) -> int:
        return len(self._cells) // CELL_BYTES if self.stride is None else self.stride.num_tokens(self.row)

    def lease_to(self, worker: str, engine: str, from_token: int) -> None:
        """Lease the sample to a worker from this token on. Later tokens of an earlier lease are dropped."""
        del self.cells[from_token * CELL_BYTES :]
        self.segments = [one for one in self.segments if one.from_token < from_token]
        self.worker, self.engine, self.version = worker, engine, -1

    def cut(self, num_calls: int, num_tokens: int) -> None:
        """Throw an episode's calls and tokens beyond these away."""
        del self.calls[num_calls:]
        del self.cells[num_tokens * CELL_BYTES :]
        self.segments = [one for one in self.segments if one.from_token < num_tokens]
        self.version = -1

    def end_episode(self, finish: str, reward: float, parts: dict[str, float], untrained: Sequence[int] = ()) -> None:
        """Note the reward that the environment gave, and the calls that it does not pay for."""
        self.finish, self.reward, self.parts = finish, reward, parts
        for number in untrained:
            if number < len(self.calls):
                self.calls[number].is_trained = False
        self.own = EnvironmentReward(reward, parts)

    def begin_segment(self, version: int) -> None:
        """Note that the next token is by this version."""
        self.version = version
        last = self.segments[-1] if self.segments else None
        by = (version, self.worker, self.engine, "")  # a segment with a digest is of a version that was replaced
        if last is None or (last.version, last.worker, last.engine, last.digest) != by:
            self.segments.append(Segment(self.num_tokens, version, self.worker, engine=self.engine))


class Payload:
    def __init__(self) -> None:
        self.prompts: dict[GroupId, PromptPayload] = {}
        self.tokens: dict[SampleId, SampleTokens] = {}
        self.offers: dict[int, VersionOffered] = {}
        """The newest versions that came with weights."""
        self._replaced: dict[int, set[str]] = {}
        """Former digests of a version that was published again."""
        self._groups: dict[Step, set[GroupId]] = {}
        self._samples: dict[GroupId, list[SampleId]] = {}

    def offer(self, offer: VersionOffered) -> None:
        """Keep an offer. Where the version had another digest, what it generated keeps that one."""
        known = self.digest_of(offer.version)
        if known and known != offer.digest:
            self._freeze(offer.version, known)
        self.offers[offer.version] = offer
        for version in sorted(self.offers)[:-_OFFERS_KEPT]:
            del self.offers[version]
            self._replaced.pop(version, None)

    def _freeze(self, version: int, digest: str) -> None:
        self._replaced.setdefault(version, set()).add(digest)
        for tokens in self.tokens.values():
            if tokens.stride is not None:
                tokens.stride.end()
            tokens.segments = [
                structs.replace(one, digest=digest) if one.version == version and not one.digest else one
                for one in tokens.segments
            ]
            if tokens.version == version:
                tokens.version = -1  # its next token begins a segment

    def was(self, version: int, digest: str) -> bool:
        """Return whether the version had this digest before it got another."""
        return digest in self._replaced.get(version, ())

    def digest_of(self, version: int) -> str:
        """Return a version's digest; empty in a run without weights."""
        offer = self.offers.get(version)
        return "" if offer is None else offer.digest

    def expect(self, step: Step, group: GroupId) -> None:
        """Note that a group belongs to a step: its payload is dropped when the step is over."""
        self._groups.setdefault(step, set()).add(group)

    def tokens_of(self, sample: SampleId) -> SampleTokens:
        """Return a sample's tokens, made at its first lease."""
        tokens = self.tokens.get(sample)
        if tokens is None:
            tokens = self.tokens[sample] = SampleTokens()
            self._samples.setdefault(group_of(sample), []).append(sample)
        return tokens

    def drop_group(self, group: GroupId) -> None:
        self.prompts.pop(group, None)
        for sample in self._samples.pop(group, ()):
            del self.tokens[sample]

    def drop_step(self, step: Step) -> None:
        for group in self._groups.pop(step, ()):
            self.drop_group(group)

    def answer(self, sample: SampleId) -> SamplePayload:
        """Return an answer that has ended, for the trainer. The cells are not copied: they grow no more."""
        tokens = self.tokens_of(sample)
        cells: Any = tokens.cells  # written like bytes; a copy would be all answers of a round in memory twice
        segments = tokens.segments
        if self.offers:
            segments = [
                one if one.digest else structs.replace(one, digest=self.digest_of(one.version)) for one in segments
            ]
        calls = payload_of(tokens.calls) if tokens.calls else ()
        return SamplePayload(
            sample, cells, tuple(segments), tokens.finish, tokens.reward, tokens.parts, calls=calls, own=tokens.own
        )

    @property
    def num_bytes(self) -> int:
        return sum(len(tokens.cells) for tokens in self.tokens.values())


def append_cells(tokens: SampleTokens, offset: int, version: int, cells: bytes) -> int:
    """Add the new ones of a frame's cells. Returns how many tokens that was; -1 if some before them are missing."""
    buffer = tokens.cells
    skip = len(buffer) - offset * CELL_BYTES
    if skip < 0:
        return -1
    if skip >= len(cells):
        return 0
    if version != tokens.version:
        tokens.begin_segment(version)
    buffer += cells[skip:] if skip else cells
    return (len(cells) - skip) // CELL_BYTES


def without_rows(
    frame: NewTokens, column: columns.Columns, idle: Container[int], ended: tuple[Ended, ...]
) -> NewTokens:
    """Return the frame without the rows whose cells start at `idle`, and with these ends."""
    starts = (0, *column.ends)
    rows = [row for row in range(len(column.leases)) if starts[row] not in idle]
    return NewTokens(
        frame.seq,
        columns.pack_column("<u8", [column.leases[row] for row in rows]),
        columns.pack_column("<u4", [column.offsets[row] for row in rows]),
        columns.pack_column("<u4", [column.counts[row] for row in rows]),
        columns.pack_column("<i4", [column.versions[row] for row in rows]),
        b"".join(frame.cells[starts[row] : column.ends[row]] for row in rows),
        ended,
    )
