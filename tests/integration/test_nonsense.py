"""Bytes and frames that mean nothing, by the thousand: no exception of ours, no law broken, nothing lost in a restart.

Without sockets. First the decoders and the columns; then a whole lobby with its scheduler and its journal, to which
workers and trainers say random things, some of them true, and which dies and comes back at any moment.
"""

import random
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from tests.properties.hostile import random_config

from polyrl.ids import WorkerName
from polyrl.manager import opening
from polyrl.manager.frames_in import from_trainer, from_workers, joining
from polyrl.manager.lobby import Lobby
from polyrl.manager.peers.link import Link
from polyrl.manager.peers.sessions import TrainerSession, WorkerSession
from polyrl.manager.service import Service
from polyrl.manager.settings import JournalSettings, ManagerSettings
from polyrl.not_data import NOT_DATA
from polyrl.scheduling.core import events as e
from polyrl.scheduling.core.desk import Desk
from polyrl.scheduling.core.fleet import Worker
from polyrl.scheduling.core.samples import TrackedSample
from polyrl.scheduling.invariants import check
from polyrl.scheduling.rules.staleness import oldest_version
from polyrl.wire import columns, frames
from polyrl.wire.columns import BadColumns
from polyrl.wire.control import JoinRequest, RunRequest
from polyrl.wire.imposed import ImposedLengths

ALL: Any = list(HealthCheck)
QUIET = settings(suppress_health_check=ALL, print_blob=False)

ENDED = ("generated", "scoring", "scored")

# Frames, true or not


def mostly(usual: st.SearchStrategy[int], *rare: int) -> st.SearchStrategy[int]:
    return st.one_of(*[usual] * 9, st.sampled_from(rare))


small = st.integers(0, 12)
leases = mostly(st.integers(0, 30), 1 << 62, (1 << 64) - 1)
offsets = mostly(small, 0xFFFFFFFF)
versions = mostly(st.integers(0, 3), -1, 9)
names = st.sampled_from([WorkerName(f"w{number}") for number in range(3)])
reasons: st.SearchStrategy[frames.EndReason] = st.sampled_from(
    ("stop", "stop", "stop", "length", "handed_over", "engine_failed", "refused")
)
words = st.sampled_from(["", "a reason", "\u00fc" * 2000])
naturals = mostly(small, 1 << 62)
logprobs = st.one_of(*[st.just(-1.0)] * 9, st.floats(width=32))
ended = st.builds(frames.Ended, leases.filter(lambda lease: lease <= 1 << 62), naturals, reasons, words)


@st.composite
def token_frames(draw: st.DrawFn) -> frames.NewTokens:
    rows = draw(st.lists(st.tuples(leases, offsets, mostly(st.integers(1, 4), 0), versions), max_size=4))
    num = sum(row[2] for row in rows) + draw(st.sampled_from([0, 0, 0, 0, 1]))
    cells = draw(st.lists(st.tuples(mostly(st.integers(0, 99), -1), logprobs), min_size=num, max_size=num))
    return pack(rows, [one[0] for one in cells], [one[1] for one in cells], draw(st.lists(ended, max_size=3)))


def pack(
    rows: Sequence[Sequence[int]], ids: list[int], probs: list[float], ends: list[frames.Ended]
) -> frames.NewTokens:
    leases, offsets, counts, versions = (
        columns.pack_column(kind, [row[at] for row in rows]) for at, kind in enumerate(("<u8", "<u4", "<u4", "<i4"))
    )
    return frames.NewTokens(1, leases, offsets, counts, versions, columns.pack_cells(ids, probs), tuple(ends))


digests = st.sampled_from(["", *("0123456789"[version] * 64 for version in range(4)), "ab" * 32, "ab\n"])
"""A version's digest is its number, over and over."""
addresses = st.lists(st.sampled_from(["127.0.0.1:1", "", "\x00", "a" * 256, "a" * 257]), max_size=3).map(tuple)
hellos = st.builds(
    frames.Hello,
    versions,
    st.lists(leases, max_size=4).map(lambda some: columns.pack_column("<u8", some)) | st.binary(max_size=9),
    words,
    digests,
    addresses,
)
shares = st.one_of(*[st.just(0.5)] * 9, st.floats())
reports = st.builds(frames.Report, naturals, naturals, shares, naturals, shares)
worker_frames: st.SearchStrategy[Any] = st.one_of(
    token_frames(),
    hellos,
    reports,
    st.builds(frames.Installed, naturals, digests),
    st.builds(frames.InstallFailed, naturals, words),
    st.builds(frames.OnDuty, st.sampled_from(["generating", "training", "asleep"])),
    st.builds(frames.Leaving, words),
    st.builds(frames.Goodbye, words),
)
steps = mostly(st.integers(0, 5), 1 << 62)
groups = mostly(st.integers(0, 25), 1 << 62)
samples = mostly(st.integers(1, 25).map(lambda group: group * 1024), 1 << 62)
imposed = st.builds(ImposedLengths, st.floats(), st.floats(), correlation=st.floats())
sampling = st.builds(
    frames.Sampling,
    temperature=st.sampled_from([0.0, 1.0, 2.0, float("nan")]),
    imposed=st.one_of(*[st.none()] * 3, st.just(ImposedLengths()), imposed),
)
prompts = st.builds(frames.PromptPayload, groups, st.sampled_from([b"", b"abc", *[b"abcdefgh"] * 9]), sampling)
outcomes: st.SearchStrategy[frames.RewardOutcome] = st.sampled_from(
    ("scored", "timed_out", "crashed", "refused", "infrastructure_failed", "no_reward")
)
seqs = st.just(1)
trainer_frames: st.SearchStrategy[Any] = st.one_of(
    st.builds(frames.TrainerHello),
    st.builds(frames.RequestRound, seqs, steps),
    st.builds(frames.SupplyPrompts, seqs, st.lists(prompts, max_size=3).map(tuple)),
    st.builds(
        frames.Scored,
        seqs,
        samples,
        small,
        outcomes,
        st.floats(),
        st.booleans(),
        st.floats(),
        st.dictionaries(words, st.floats(), max_size=3),
    ),
    st.builds(frames.Took, seqs, steps, st.lists(groups, max_size=3).map(tuple)),
    st.builds(frames.Rejected, seqs, groups, words),
    st.builds(frames.Unscored, seqs, groups, st.lists(samples, max_size=3).map(tuple), words),
    st.builds(frames.MicroBatchDone, seqs, steps),
    st.builds(frames.StepDone, seqs, steps),
    st.builds(frames.Validating, seqs, st.booleans()),
    st.builds(frames.RewardsTold, seqs, small, st.floats(), st.floats(), words, small, words),
    st.builds(frames.Published, seqs, steps, digests, addresses),
)


@st.composite
def damaged(draw: st.DrawFn, kinds: st.SearchStrategy[Any]) -> bytes:
    """A frame with a few bytes changed, cut out or put in."""
    raw = bytearray(frames.encode(draw(kinds)))
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, len(raw)))
        stop = draw(st.integers(start, min(len(raw), start + 8)))
        raw[start:stop] = draw(st.binary(max_size=8))
    return bytes(raw)


# Bytes into the decoders


@settings(QUIET, max_examples=1500)
@given(st.binary(max_size=300) | damaged(worker_frames) | worker_frames.map(frames.encode))
def test_a_workers_bytes_are_a_frame_or_are_refused(raw: bytes):
    try:
        frame = frames.decode_from_worker(raw)
    except NOT_DATA:
        return
    if isinstance(frame, frames.NewTokens):
        check_columns(frame)


@settings(QUIET, max_examples=1000)
@given(st.binary(max_size=300) | damaged(trainer_frames) | trainer_frames.map(frames.encode))
def test_a_trainers_bytes_are_a_frame_or_are_refused(raw: bytes):
    try:
        frames.decode_from_trainer(raw)
    except NOT_DATA:
        return


@settings(QUIET, max_examples=1000)
@given(st.builds(frames.NewTokens, seqs, *[st.binary(max_size=40)] * 5))
def test_columns_of_any_bytes_fit_each_other_or_are_refused(frame: frames.NewTokens):
    check_columns(frame)


def check_columns(frame: frames.NewTokens) -> None:
    try:
        column = columns.check(frame.leases, frame.offsets, frame.counts, frame.versions, frame.cells)
        columns.check_cells(frame.cells, columns.ANY_VOCABULARY)
    except BadColumns as error:
        assert "\n" not in str(error)
        return
    assert len({len(one) for one in column}) == 1
    assert sum(column.counts) * columns.CELL_BYTES == len(frame.cells) == (column.ends[-1] if column.ends else 0)
    assert min(column.counts, default=1) >= 1
    view = columns.view_cells(frame.cells)
    assert all(token >= 0 for token in view["token"].tolist())
    assert all(columns.MIN_LOGPROB <= logprob <= columns.MAX_LOGPROB for logprob in view["logprob"].tolist())


@pytest.mark.parametrize("depth", [50, 5_000, 500_000])
def test_nesting_without_end_is_refused(depth: int):
    report = frames.encode(frames.Report(0, 0, 0.0, 0, 0.0))
    with pytest.raises(NOT_DATA):
        frames.decode_from_worker(bytes([report[0] + 1]) + report[1:] + b"\x91" * depth)


# Frames into a lobby


class Talk(RuleBasedStateMachine):
    """Two kinds of peers talk to a lobby. A third of what they say is true: otherwise nothing would ever run."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory(prefix="polyrl-nonsense-")
        journal = JournalSettings(fsync="never", segment_mb=0.005)
        self.service = Service(Path(self.folder.name), ManagerSettings(journal=journal))
        self.clock = 0.0
        self.links: dict[str, Link] = {}
        self.sessions: list[WorkerSession] = []
        self.keys: dict[WorkerName, str] = {}
        """What each name was given when it joined last, by which it joins again."""
        """All that ever were."""

    @property
    def lobby(self) -> Lobby:
        return self.service.lobby

    @property
    def desk(self) -> Desk:
        return self.lobby.need_run().desk

    @initialize(seed=st.integers(0, 10_000), has_reward=st.booleans(), has_weights=st.booleans(), early=st.booleans())
    def begin(self, seed: int, has_reward: bool, has_weights: bool, early: bool) -> None:
        self.has_weights = has_weights
        if early:
            self.join(WorkerName("w0"), 2, 0)
        self.config = random_config(random.Random(seed))
        self.open_run(has_reward=has_reward)
        self.publish(0)
        self.trainer_says(frames.RequestRound(1, 0))

    # Workers

    @rule(name=names, slots=st.integers(1, 5), version=st.none() | st.integers(0, 3))
    def join(self, name: WorkerName, slots: int, version: int | None) -> None:
        request = JoinRequest(name=name, protocol=frames.PROTOCOL, engine="script", slots=slots, version=version)
        former = self.lobby.workers.get(name)
        if former is not None and former.link is not None:
            from_workers.gone(former, former.link)
        key = self.keys[name] = joining.join(self.lobby, request, self.keys.get(name, "")).session
        session = joining.find_worker(self.lobby, key)
        assert session is not None
        self.sessions.append(session)
        self.connect(session)
        self.worker_says(session, frames.Hello(-1 if version is None else min(version, self.published), b""))

    def connect(self, session: WorkerSession) -> None:
        link = self.links[session.key] = Link(web.WebSocketResponse(), 1 << 30)
        session.connect(link)

    @property
    def published(self) -> int:
        return -1 if self.lobby.run is None else self.desk.state.published

    def worker_says(self, session: WorkerSession, frame: frames.FromWorker) -> None:
        from_workers.said(self.lobby, session, self.links[session.key], frames.encode(frame))

    @rule(data=st.data(), frame=worker_frames)
    def a_worker_says_anything(self, data: st.DataObject, frame: frames.FromWorker) -> None:
        if self.sessions:
            self.worker_says(data.draw(st.sampled_from(self.sessions)), frame)

    @rule(data=st.data(), raw=damaged(worker_frames))
    def a_worker_says_what_is_no_frame(self, data: st.DataObject, raw: bytes) -> None:
        if self.sessions:
            session = data.draw(st.sampled_from(self.sessions))
            from_workers.said(self.lobby, session, self.links[session.key], raw)

    @rule(data=st.data())
    def workers_bring_true_tokens(self, data: st.DataObject) -> None:
        for session in list(self.lobby.workers.values()):
            worker = self.lobby.need_run().seat_of(session)
            if worker is not None and worker.leases and session.greeted:
                self.worker_says(session, self.true_tokens(data, worker))

    def true_tokens(self, data: st.DataObject, worker: Worker) -> frames.NewTokens:
        rows: list[tuple[int, int, int, int]] = []
        ends: list[frames.Ended] = []
        for lease, sample in worker.leases.items():
            has = self.lobby.need_run().payload.tokens[sample].num_tokens
            count = min(data.draw(st.integers(0, 5)), self.desk.max_new_tokens - has)
            repeated = data.draw(st.integers(0, has)) if count else 0
            if count:
                rows.append((lease, has - repeated, count + repeated, worker.version))
            if data.draw(st.booleans()) and has + count:
                ends.append(frames.Ended(lease, has + count, data.draw(reasons)))
        num = sum(row[2] for row in rows)
        return pack(rows, [worker.seat] * num, [-1.0] * num, ends)

    @rule()
    def workers_install_what_they_pull(self) -> None:
        for session in list(self.lobby.workers.values()):
            worker = self.lobby.need_run().seat_of(session)
            if worker is not None and worker.pulling >= 0 and session.greeted:
                digest = self.lobby.need_run().payload.digest_of(worker.pulling)
                self.worker_says(session, frames.Installed(worker.pulling, digest))

    @rule(data=st.data())
    def a_connection_breaks(self, data: st.DataObject) -> None:
        if self.sessions:
            session = data.draw(st.sampled_from(self.sessions))
            from_workers.gone(session, self.links[session.key])
            if data.draw(st.booleans()):
                self.connect(session)

    # The trainer

    @rule(has_reward=st.booleans())
    def open_run(self, has_reward: bool) -> None:
        request = RunRequest(
            protocol=frames.PROTOCOL, config=self.config, has_reward=has_reward, has_weights=self.has_weights
        )
        opening.open_run(self.lobby, request)
        self.trainer_link = Link(web.WebSocketResponse(), 1 << 30)
        self.trainer.connect(self.trainer_link)
        self.trainer_says(frames.TrainerHello())

    @property
    def trainer(self) -> TrainerSession:
        trainer = self.lobby.need_run().trainer
        assert trainer is not None
        return trainer

    def trainer_says(self, frame: frames.FromTrainer) -> None:
        from_trainer.said(self.lobby, self.trainer, self.trainer_link, frames.encode(frame))

    def publish(self, version: int) -> None:
        """Under the digest that it has, if somebody has published it before."""
        digest = self.lobby.need_run().payload.digest_of(version) or str(version % 10) * 64
        self.trainer_says(frames.Published(1, version, digest if self.has_weights else ""))

    @rule(frame=trainer_frames)
    def the_trainer_says_anything(self, frame: frames.FromTrainer) -> None:
        self.trainer_says(frame)

    @rule(raw=damaged(trainer_frames))
    def the_trainer_says_what_is_no_frame(self, raw: bytes) -> None:
        from_trainer.said(self.lobby, self.trainer, self.trainer_link, raw)

    @rule(data=st.data())
    def the_trainer_does_its_work(self, data: st.DataObject) -> None:
        """What a trainer would say now, all of it or some."""
        if self.trainer_link.is_closing:
            self.open_run(has_reward=data.draw(st.booleans()))
        desk = self.desk
        missing = [one for one in desk.groups if one not in self.lobby.need_run().payload.prompts]
        text = tuple(frames.PromptPayload(one, b"abcd", frames.Sampling()) for one in missing)
        self.trainer_says(frames.SupplyPrompts(1, text))
        for one in list(desk.scoring.running):
            if one in desk.samples and data.draw(st.booleans()):
                attempt = desk.samples[one].attempt
                self.trainer_says(frames.Scored(1, one, attempt, data.draw(outcomes), 1.0, True, 0.1))
        for step, round_ in list(desk.rounds.items()):
            ready = tuple(one for one in round_.groups if desk.groups[one].state == "delivered")
            if ready and data.draw(st.booleans()):
                self.trainer_says(frames.Took(1, step, ready))
            if round_.closed_at is not None and data.draw(st.booleans()):
                self.trainer_says(frames.StepDone(1, step))
                self.publish(step + 1)
                self.trainer_says(frames.RequestRound(1, step + 1))

    @rule(data=st.data(), num=st.integers(1, 6))
    def all_do_what_they_should(self, data: st.DataObject, num: int) -> None:
        """Without such times no nonsense would ever meet a round in full swing."""
        self.lobby.tell(e.PlacingResumed())
        for _ in range(num):
            for name in ("w0", "w1"):
                if not any(one.name == name and one.greeted for one in self.lobby.workers.values()):
                    self.join(WorkerName(name), 3, None)
            self.workers_install_what_they_pull()
            self.workers_bring_true_tokens(data)
            self.the_trainer_does_its_work(data)

    # The rest of the world

    @rule(name=names)
    def a_person_drains(self, name: WorkerName) -> None:
        joining.drain(self.lobby, name, "a person asked")

    @rule(paused=st.booleans())
    def a_person_pauses(self, paused: bool) -> None:
        self.lobby.tell(e.PlacingPaused() if paused else e.PlacingResumed())

    @rule(seconds=st.sampled_from([0.13, 2.07, 5.11, 130.17]))
    def time_passes(self, seconds: float) -> None:
        self.clock += seconds
        self.lobby.set_clock(max(self.clock, self.lobby.now()))
        self.lobby.need_run().pass_time()

    @invariant()
    def the_clock_ticks(self) -> None:
        """By so much that what the test itself takes does not count: it must come out the same when it is repeated."""
        self.clock += 0.0537
        self.lobby.set_clock(max(self.clock, self.lobby.now()))

    @rule()
    def the_owner_commits(self) -> None:
        self.lobby.commit()

    @rule()
    def the_manager_is_killed_and_started_again(self) -> None:
        """Everything that was committed is there again; then life goes on with it."""
        self.lobby.commit()
        before = what_is_kept(self.lobby)
        self.service.close()
        self.service = Service(self.service.run_dir, self.service.settings)
        assert before == what_is_kept(self.lobby)
        for session in self.lobby.workers.values():
            self.sessions = [one for one in self.sessions if one.key != session.key] + [session]
            self.connect(session)
        self.open_run(has_reward=True)

    @invariant()
    def the_laws_hold(self) -> None:
        if self.lobby.run is None:
            return
        check(self.lobby.need_run().scheduler, self.lobby.now())
        for sample in self.desk.samples.values():
            self.check_text(sample)
        for worker in self.desk.seats.values():
            has_digest = bool(self.lobby.need_run().payload.digest_of(worker.version))
            assert worker.version == -1 or has_digest == self.has_weights

    def check_text(self, sample: TrackedSample) -> None:
        """What is kept of a sample is what the scheduler says of it, and was written by who might write it."""
        text = self.lobby.need_run().payload.tokens.get(sample.id)
        if text is None:
            assert sample.lease == 0 and sample.num_tokens == 0
            return
        assert text.num_tokens <= self.desk.max_new_tokens
        if sample.state in ENDED:
            assert text.num_tokens == sample.num_tokens > 0
            assert text.finish in ("stop", "length")
        if sample.state != "discarded":
            oldest = oldest_version(self.desk.groups[sample.group].step, self.desk.config.max_staleness)
            starts = [segment.from_token for segment in text.segments]
            assert starts == sorted(set(starts)) and starts[:1] == [0][: text.num_tokens]
            assert all(oldest <= segment.version <= self.published for segment in text.segments)

    def teardown(self) -> None:
        self.service.close()
        self.folder.cleanup()


def what_is_kept(lobby: Lobby) -> dict[str, Any]:
    """What a restart must not change: who has what, and the text of all that somebody may still ask for."""
    desk, payload = lobby.need_run().desk, lobby.need_run().payload
    texts = {one: payload.answer(one) for one in payload.tokens if one in desk.samples}
    ended = [one for one in texts if desk.samples[one].state in ENDED]
    running = [one for one in texts if desk.samples[one].state in ("waiting", "leased", "stopping")]
    return {
        "leases": {lease: sample.id for lease, sample in desk.leases.items()},
        "samples": {one: (sample.state, sample.num_tokens) for one, sample in desk.samples.items()},
        "groups": {one: group.state for one, group in desk.groups.items()},
        "prompts": dict(payload.prompts),
        "answers": {one: texts[one] for one in ended},
        "beginnings": {one: (texts[one].cells, texts[one].segments) for one in running},
    }


TestTalk = Talk.TestCase
TestTalk.settings = settings(QUIET, max_examples=150, stateful_step_count=50)
