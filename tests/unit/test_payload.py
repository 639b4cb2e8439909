"""The payload: texts that grow by offset, and what the next manager has of them when one is killed."""

import random
import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polyrl.errors import JournalError
from polyrl.ids import GroupId, SampleId, Step, WorkerName, group_of, parse_sample, sample_id
from polyrl.manager import from_trainer, from_workers, joining
from polyrl.manager.journal import Granted, PromptsSupplied, RewardKept
from polyrl.manager.link import Link
from polyrl.manager.payload import Payload, PayloadReader, Text, append_cells
from polyrl.manager.service import Service
from polyrl.manager.sessions import WorkerSession
from polyrl.manager.settings import JournalSettings, ManagerSettings
from polyrl.scheduling.parameters import DomainData, FleetRules, RoundsConfig, SchedulerConfig
from polyrl.telemetry.journal import LIVE_FOLDER, PAYLOAD, segments
from polyrl.wire import columns, frames
from polyrl.wire.columns import pack_cells
from polyrl.wire.control import JoinRequest, RunRequest
from polyrl.wire.frames import PROTOCOL, Ended, EndReason, PromptText, SampleText, Sampling, Segment, Tokens

FIRST, SECOND = parse_sample("1/0"), parse_sample("1/1")


def cells(*tokens: int) -> bytes:
    return pack_cells(tokens, [-0.5] * len(tokens))


def tokens_in(text: Text) -> list[int]:
    return columns.unpack_tokens(columns.tokens_of(bytes(text.cells)))


def tokens_frame(lease: int, offset: int, tokens: list[int], version: int = 0, end: Ended | None = None) -> Tokens:
    def column(kind: str, number: int) -> bytes:
        return columns.pack_column(kind, [number] if tokens else [])

    return Tokens(
        1,
        column("<u8", lease),
        column("<u4", offset),
        column("<u4", len(tokens)),
        column("<i4", version),
        cells(*tokens),
        () if end is None else (end,),
    )


# A text


def test_cells_are_added_after_those_that_are_there():
    text = Text()
    assert append_cells(text, 0, 0, cells(1, 2)) == 2
    assert append_cells(text, 2, 0, cells(3)) == 1
    assert tokens_in(text) == [1, 2, 3]


def test_cells_that_are_there_already_are_not_added_again():
    text = Text()
    append_cells(text, 0, 0, cells(1, 2, 3))
    assert append_cells(text, 0, 0, cells(1, 2)) == 0
    assert append_cells(text, 1, 0, cells(2, 3, 4)) == 1
    assert tokens_in(text) == [1, 2, 3, 4]


def test_cells_with_a_gap_before_them_are_not_added():
    text = Text()
    append_cells(text, 0, 0, cells(1))
    assert append_cells(text, 2, 0, cells(3)) == -1
    assert tokens_in(text) == [1]


def test_segments_say_who_wrote_from_where_with_which_version():
    text = Text()
    text.lease_to("a", "vllm", 0)
    append_cells(text, 0, 0, cells(1, 2))
    append_cells(text, 2, 1, cells(3))
    text.lease_to("b", "vllm", 3)
    append_cells(text, 3, 1, cells(4))
    assert text.segments == [
        Segment(0, 0, "a", engine="vllm"),
        Segment(2, 1, "a", engine="vllm"),
        Segment(3, 1, "b", engine="vllm"),
    ]


def test_a_lease_from_an_earlier_token_forgets_what_came_after_it():
    text = Text()
    text.lease_to("a", "vllm", 0)
    append_cells(text, 0, 0, cells(1, 2))
    append_cells(text, 2, 1, cells(3, 4))
    text.lease_to("b", "vllm", 2)
    assert (tokens_in(text), text.segments) == ([1, 2], [Segment(0, 0, "a", engine="vllm")])
    text.lease_to("a", "vllm", 0)
    assert (tokens_in(text), text.segments) == ([], [])


def test_the_same_worker_with_the_same_version_goes_on_in_its_segment():
    text = Text()
    text.lease_to("a", "vllm", 0)
    append_cells(text, 0, 0, cells(1))
    text.lease_to("a", "vllm", 1)
    append_cells(text, 1, 0, cells(2))
    assert text.segments == [Segment(0, 0, "a", engine="vllm")]


def test_a_step_that_is_over_takes_its_groups_with_it_and_no_others():
    payload = Payload()
    for step, group in ((0, 1), (1, 2)):
        payload.expect(Step(step), GroupId(group))
        payload.prompts[GroupId(group)] = PromptText(group, b"1234", Sampling())
        payload.text(sample_id(GroupId(group), 0)).cells.extend(cells(1))
    payload.drop_step(Step(0))
    assert (list(payload.prompts), list(payload.texts)) == ([GroupId(2)], [sample_id(GroupId(2), 0)])
    assert payload.num_bytes == 8
    payload.drop_group(GroupId(2))
    payload.drop_step(Step(1))
    assert payload.num_bytes == 0


# Reading it again


class Reader(PayloadReader):
    """Takes frames as they are, and names workers and samples in few words."""

    def grant(self, lease: int, sample: SampleId, worker: str, from_token: int = 0) -> None:
        self.note(Granted([lease], [sample], [from_token], [worker]))

    def hear(self, lease: int, offset: int, *tokens: int, version: int = 0, end: Ended | None = None) -> None:
        self.tokens(frames.encode(tokens_frame(lease, offset, [*tokens], version, end)))

    def has(self, sample: SampleId) -> list[int]:
        return tokens_in(self.payload.text(sample))


def test_tokens_are_those_of_the_sample_whose_lease_they_came_under():
    reader = Reader()
    reader.grant(1, FIRST, "a")
    reader.grant(2, SECOND, "a")
    reader.hear(2, 0, 20, 21)
    reader.hear(1, 0, 10)
    reader.hear(1, 1, 11)
    assert (reader.has(FIRST), reader.has(SECOND)) == ([10, 11], [20, 21])


def test_late_tokens_of_a_lease_that_was_followed_by_another_are_not_taken():
    reader = Reader()
    reader.grant(1, FIRST, "a")
    reader.hear(1, 0, 10, 11)
    reader.grant(2, FIRST, "b", from_token=2)
    reader.hear(1, 2, 12, 13)
    reader.hear(2, 2, 92)
    assert reader.has(FIRST) == [10, 11, 92]
    assert reader.payload.text(FIRST).segments == [Segment(0, 0, "a"), Segment(2, 0, "b")]


def test_tokens_that_the_next_lease_was_not_given_are_cut_off():
    reader = Reader()
    reader.grant(1, FIRST, "a")
    reader.hear(1, 0, 10, 11, 12)
    reader.grant(2, FIRST, "b", from_token=1)
    assert reader.has(FIRST) == [10]
    reader.hear(2, 1, 91)
    assert reader.has(FIRST) == [10, 91]


def test_nothing_is_taken_after_the_end_of_a_lease():
    reader = Reader()
    reader.grant(1, FIRST, "a")
    reader.hear(1, 0, 10, end=Ended(1, 1, "stop"))
    reader.hear(1, 1, 11)
    assert reader.has(FIRST) == [10]
    assert reader.payload.text(FIRST).finish == "stop"


@pytest.mark.parametrize("reason", ["handed_over", "engine_failed", "refused"])
def test_an_end_of_the_lease_alone_does_not_finish_the_answer(reason):
    reader = Reader()
    reader.grant(1, FIRST, "a")
    reader.hear(1, 0, 10, end=Ended(1, 1, reason))
    assert reader.payload.text(FIRST).finish == ""


def test_a_lease_that_was_written_down_and_never_given_does_not_take_that_of_another_sample_along():
    """A manager was killed after it wrote the payload and before it wrote the events: the number is given again."""
    reader = Reader()
    reader.grant(7, FIRST, "a")
    reader.grant(7, SECOND, "a")
    reader.grant(8, FIRST, "b")
    reader.hear(7, 0, 20)
    reader.hear(8, 0, 10)
    assert (reader.has(FIRST), reader.has(SECOND)) == ([10], [20])


def test_prompts_and_rewards_are_kept_as_they_came_last():
    reader = Reader()
    prompt = PromptText(1, columns.pack_tokens([5, 6]), Sampling(temperature=0.5))
    reader.note(PromptsSupplied((PromptText(1, b"1234", Sampling()),)))
    reader.note(PromptsSupplied((prompt,)))
    reader.note(RewardKept(FIRST, 0.25))
    reader.note(RewardKept(FIRST, 0.75))
    assert reader.payload.prompts == {GroupId(1): prompt}
    assert reader.payload.text(FIRST).reward == 0.75


def test_without_a_run_nothing_is_kept():
    reader = Reader()
    reader.grant(1, FIRST, "a")
    reader.hear(1, 0, 10)
    assert reader.finish(None).num_bytes == 0


# A manager that is killed after any commit: the next one has what it had


CONFIG = SchedulerConfig(
    domains=(DomainData(name="d", prompts_per_step=2, num_prompts=50),),
    max_new_tokens=6,
    rounds=RoundsConfig(samples_per_prompt=2),
    fleet_rules=FleetRules(heartbeat_timeout_s=1000.0, max_failures=1000),
)
SMALL_FILES = ManagerSettings(journal=JournalSettings(fsync="never", segment_mb=0.002))


class Line(Link):
    """A connection that keeps what is sent."""

    def __init__(self) -> None:
        self.sent: list[bytes] = []

    def send(self, frame: frames.ToWorker | frames.ToTrainer) -> None:
        self.sent.append(frames.encode(frame))

    def close(self, reason: str, code: int = 1001) -> None:
        pass


class Worker:
    """A worker as the manager sees it: it makes what it is asked for, whenever it is told to."""

    def __init__(self, service: Service, name: str) -> None:
        self._executor = service.executor
        former = self._executor.workers.get(WorkerName(name))
        if former is not None and former.link is not None:
            from_workers.gone(self._executor, former, former.link)
        reply = joining.join(
            self._executor, JoinRequest(name=name, protocol=PROTOCOL, engine="none", slots=3, version=self.published())
        )
        session = joining.find_worker(self._executor, reply.session)
        assert session is not None
        self.session: WorkerSession = session
        self.line = Line()
        self.session.connect(self.line)
        self.version = self.published()
        self.at: dict[int, int] = {}
        """Where it stands, by lease; also of those that are over."""
        self.say(frames.Hello(self.version, b""))

    def published(self) -> int:
        assert self._executor.scheduler is not None
        return self._executor.scheduler.desk.state.published

    def say(self, frame: frames.FromWorker) -> None:
        from_workers.said(self._executor, self.session, self.line, frames.encode(frame))

    def listen(self) -> None:
        for frame in map(frames.decode_to_worker, self.line.sent):
            match frame:
                case frames.Generate():
                    self.at |= {one.lease: len(one.so_far) // 4 for one in frame.orders}
                case frames.Pull():
                    self.version = frame.version
                    self.say(frames.Installed(frame.version))
                case _:
                    pass
        self.line.sent.clear()

    def write(self, rng: random.Random) -> None:
        """A token or two of one of its leases, be it over or not, and perhaps the end."""
        if not self.at:
            return
        lease = rng.choice(sorted(self.at))
        offset = self.at[lease]
        tokens = [rng.randrange(1000) for _ in range(min(rng.randint(1, 2), CONFIG.max_new_tokens - offset))]
        self.at[lease] = total = offset + len(tokens)
        reasons: list[EndReason] = ["stop", "handed_over", "engine_failed"]
        is_full = total == CONFIG.max_new_tokens
        reason = "length" if is_full else rng.choice(reasons)
        end = Ended(lease, total, reason) if is_full or rng.random() < 0.5 else None
        self.say(tokens_frame(lease, offset, tokens, self.version, end))


class Manager:
    """A manager without sockets, its workers and its trainer, played by a seed."""

    def __init__(self, run_dir: Path, seed: int) -> None:
        self.rng = random.Random(seed)
        self.service = Service(run_dir, SMALL_FILES)
        self.executor = self.service.executor
        joining.open_run(self.executor, RunRequest(protocol=PROTOCOL, config=CONFIG, has_reward=True))
        assert self.executor.trainer is not None
        self.trainer, self.line = self.executor.trainer, Line()
        self.trainer.connect(self.line)
        self.step = 0
        self.seq = 0
        self.delivered: list[int] = []
        self.workers: dict[str, Worker] = {}
        self.state(frames.TrainerHello())
        self.state(frames.Published(self.next_seq(), 0))
        self.state(frames.RequestRound(self.next_seq(), 0))

    def next_seq(self) -> int:
        self.seq += 1
        return self.seq

    def state(self, frame: frames.FromTrainer) -> None:
        from_trainer.said(self.executor, self.trainer, self.line, frames.encode(frame))

    def play(self) -> None:
        """Somebody does something, and it is committed."""
        what = self.rng.choice(["write"] * 12 + ["join", "leave", "train"])
        if what == "join" or not self.workers:
            name = self.rng.choice("abc")
            self.workers[name] = Worker(self.service, name)
        elif what == "leave":
            name = self.rng.choice(sorted(self.workers))
            self.workers.pop(name).say(frames.Goodbye("it is enough"))
        elif what == "write":
            self.workers[self.rng.choice(sorted(self.workers))].write(self.rng)
        elif len(self.delivered) == 2:
            self.train()
        self.executor.commit()
        self.listen()
        self.executor.commit()

    def train(self) -> None:
        self.state(frames.Took(self.next_seq(), self.step, tuple(self.delivered)))
        self.state(frames.StepDone(self.next_seq(), self.step))
        self.step += 1
        self.delivered = []
        self.state(frames.Published(self.next_seq(), self.step))
        self.state(frames.RequestRound(self.next_seq(), self.step))

    def listen(self) -> None:
        for worker in self.workers.values():
            worker.listen()
        for frame in map(frames.decode_to_trainer, self.line.sent):
            match frame:
                case frames.Opened():
                    prompts = (
                        PromptText(one.group, columns.pack_tokens([one.prompt]), Sampling()) for one in frame.groups
                    )
                    self.state(frames.SupplyPrompts(self.next_seq(), tuple(prompts)))
                case frames.ScoreThese():
                    for one in frame.samples:
                        value = self.rng.random()
                        self.state(
                            frames.Scored(self.next_seq(), one.text.sample, one.attempt, "scored", value, False, 0.0)
                        )
                case frames.Delivered():
                    self.delivered.append(frame.group)
                case _:
                    pass
        self.line.sent.clear()


def kept(service: Service) -> Mapping[str, PromptText | SampleText]:
    """All that somebody may still ask for."""
    assert service.executor.scheduler is not None
    groups, payload = service.executor.scheduler.desk.groups, service.executor.payload
    texts = {f"sample {one}": payload.sample_text(one) for one in payload.texts if group_of(one) in groups}
    return {f"prompt of {group}": prompt for group, prompt in payload.prompts.items()} | texts


@given(st.integers(0, 10_000))
@settings(max_examples=15)
def test_the_next_manager_has_what_a_killed_one_had(tmp_path_factory, seed):
    folder = tmp_path_factory.mktemp("run")
    manager = Manager(folder / "run", seed)
    for number in range(200):
        manager.play()
        if number % 10 == 9:
            copy = folder / f"copy-{number}"
            shutil.copytree(folder / "run", copy)
            next_one = Service(copy, SMALL_FILES)
            assert kept(next_one) == kept(manager.service)
            next_one.close()
            shutil.rmtree(copy)
    manager.service.close()


def test_a_run_whose_answers_are_not_all_on_the_disk_does_not_go_on(tmp_path):
    """Events reached the disk before a loss of power, and the tokens that they speak of did not."""
    manager = Manager(tmp_path / "run", 3)
    assert manager.executor.scheduler is not None
    desk = manager.executor.scheduler.desk
    while not any(one.state == "scored" for one in desk.samples.values()):
        manager.play()
    manager.service.close()
    for path in segments(tmp_path / "run" / LIVE_FOLDER, PAYLOAD):
        data = path.read_bytes()
        path.write_bytes(data[: data.index(b"\n") + 1])
    with pytest.raises(JournalError, match=r"it ended at token \d+, and the payload has 0"):
        Service(tmp_path / "run", SMALL_FILES)
