"""The payload: texts that grow by offset, and what the next manager has of them when one is killed."""

import random
import shutil
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.played import SMALL_FILES, Manager, cells, kept, tokens_frame

from polyrl.errors import JournalError
from polyrl.ids import GroupId, SampleId, Step, parse_sample, sample_id
from polyrl.journal.files import LIVE_FOLDER, PAYLOAD, segments
from polyrl.manager.notes import CallKept, EpisodeKept, Granted, PromptsSupplied, RewardKept
from polyrl.manager.payload import Payload, SampleTokens, append_cells
from polyrl.manager.payload_reader import PayloadReader
from polyrl.manager.service import Service
from polyrl.wire import columns
from polyrl.wire.frames import Ended, NewTokens, PromptPayload, Sampling, Segment

OLD_RUN = Path(__file__).parent / "recorded" / "run-before-fleet-reports"
FIRST, SECOND = parse_sample("1/0"), parse_sample("1/1")


def tokens_in(text: SampleTokens) -> list[int]:
    return columns.unpack_tokens(columns.tokens_of(bytes(text.cells)))


# A text


def test_cells_are_added_after_those_that_are_there():
    text = SampleTokens()
    assert append_cells(text, 0, 0, cells(1, 2)) == 2
    assert append_cells(text, 2, 0, cells(3)) == 1
    assert tokens_in(text) == [1, 2, 3]


def test_cells_that_are_there_already_are_not_added_again():
    text = SampleTokens()
    append_cells(text, 0, 0, cells(1, 2, 3))
    assert append_cells(text, 0, 0, cells(1, 2)) == 0
    assert append_cells(text, 1, 0, cells(2, 3, 4)) == 1
    assert tokens_in(text) == [1, 2, 3, 4]


def test_cells_with_a_gap_before_them_are_not_added():
    text = SampleTokens()
    append_cells(text, 0, 0, cells(1))
    assert append_cells(text, 2, 0, cells(3)) == -1
    assert tokens_in(text) == [1]


def test_segments_say_who_wrote_from_where_with_which_version():
    text = SampleTokens()
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
    text = SampleTokens()
    text.lease_to("a", "vllm", 0)
    append_cells(text, 0, 0, cells(1, 2))
    append_cells(text, 2, 1, cells(3, 4))
    text.lease_to("b", "vllm", 2)
    assert (tokens_in(text), text.segments) == ([1, 2], [Segment(0, 0, "a", engine="vllm")])
    text.lease_to("a", "vllm", 0)
    assert (tokens_in(text), text.segments) == ([], [])


def test_the_same_worker_with_the_same_version_goes_on_in_its_segment():
    text = SampleTokens()
    text.lease_to("a", "vllm", 0)
    append_cells(text, 0, 0, cells(1))
    text.lease_to("a", "vllm", 1)
    append_cells(text, 1, 0, cells(2))
    assert text.segments == [Segment(0, 0, "a", engine="vllm")]


def test_a_step_that_is_over_takes_its_groups_with_it_and_no_others():
    payload = Payload()
    for step, group in ((0, 1), (1, 2)):
        payload.expect(Step(step), GroupId(group))
        payload.prompts[GroupId(group)] = PromptPayload(group, b"1234", Sampling())
        payload.tokens_of(sample_id(GroupId(group), 0)).cells.extend(cells(1))
    payload.drop_step(Step(0))
    assert (list(payload.prompts), list(payload.tokens)) == ([GroupId(2)], [sample_id(GroupId(2), 0)])
    assert payload.num_bytes == 8
    payload.drop_group(GroupId(2))
    payload.drop_step(Step(1))
    assert payload.num_bytes == 0


# Reading it again


class Everything:
    def __contains__(self, _: object) -> bool:
        return True


class Reader(PayloadReader):
    """Takes frames as they are, and names workers and samples in few words."""

    def __init__(self) -> None:
        super().__init__(Everything())

    @property
    def payload(self) -> Payload:
        return self.finish(None)

    def grant(self, lease: int, sample: SampleId, worker: str, from_token: int = 0) -> None:
        self.note(Granted([lease], [sample], [from_token], [worker]))

    def hear(self, lease: int, offset: int, *tokens: int, version: int = 0, end: Ended | None = None) -> None:
        self.tokens([tokens_frame(lease, offset, [*tokens], version, end)])

    def has(self, sample: SampleId) -> list[int]:
        return tokens_in(self.payload.tokens_of(sample))


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
    assert reader.payload.tokens_of(FIRST).segments == [Segment(0, 0, "a"), Segment(2, 0, "b")]


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
    assert reader.payload.tokens_of(FIRST).finish == "stop"


@pytest.mark.parametrize("reason", ["handed_over", "engine_failed", "refused"])
def test_an_end_of_the_lease_alone_does_not_finish_the_answer(reason):
    reader = Reader()
    reader.grant(1, FIRST, "a")
    reader.hear(1, 0, 10, end=Ended(1, 1, reason))
    assert reader.payload.tokens_of(FIRST).finish == ""


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
    prompt = PromptPayload(1, columns.pack_tokens([5, 6]), Sampling(temperature=0.5))
    reader.note(PromptsSupplied((PromptPayload(1, b"1234", Sampling()),)))
    reader.note(PromptsSupplied((prompt,)))
    reader.note(RewardKept(FIRST, 0.25))
    reader.note(RewardKept(FIRST, 0.75))
    assert reader.payload.prompts == {GroupId(1): prompt}
    assert reader.payload.tokens_of(FIRST).reward == 0.75


def test_without_a_run_nothing_is_kept():
    reader = PayloadReader(())
    reader.note(Granted([1], [FIRST], [0], ["a"]))
    reader.tokens([tokens_frame(1, 0, [10])])
    assert reader.finish(None).num_bytes == 0


def test_the_next_manager_knows_which_calls_of_an_episode_are_trained():
    reader = PayloadReader({GroupId(1)})
    for number in range(3):
        reader.note(
            CallKept(FIRST, number, number, is_cut=False, base=-1, kept=0, tokens=b"", start=number, max_tokens=1)
        )
    reader.note(EpisodeKept(FIRST, 3, 3, is_cut=False, finish="stop", reward=1.0, untrained=(1, 9)))
    assert [one.is_trained for one in reader.finish(None).tokens_of(FIRST).calls] == [True, False, True]


class RowByRow:
    """What reading must come to, the plain way: one row after the other."""

    def __init__(self) -> None:
        self.texts: dict[SampleId, SampleTokens] = {}
        self._sample_of: dict[int, SampleId] = {}
        self._lease_of: dict[SampleId, int] = {}

    def grant(self, lease: int, sample: SampleId, worker: str, from_token: int) -> None:
        former = self._sample_of.get(lease)
        if former is not None:
            del self._lease_of[former]
        self._sample_of.pop(self._lease_of.get(sample, 0), None)
        self._sample_of[lease], self._lease_of[sample] = sample, lease
        self.texts.setdefault(sample, SampleTokens()).lease_to(worker, "", from_token)

    def hear(self, frame: NewTokens) -> None:
        column = columns.check(frame.leases, frame.offsets, frame.counts, frame.versions, frame.cells)
        start = 0
        for lease, offset, _, version, end in zip(*column, strict=True):
            if (sample := self._sample_of.get(lease)) is not None:
                append_cells(self.texts[sample], offset, version, frame.cells[start:end])
            start = end
        for ended in frame.ended:
            sample = self._sample_of.pop(ended.lease, None)
            if sample is not None:
                del self._lease_of[sample]
                self.texts[sample].finish = ended.reason if ended.reason == "stop" else self.texts[sample].finish


def random_frame(rng: random.Random, at: dict[int, int], *, is_wild: bool) -> NewTokens:
    """Most rows go on where their lease stopped; some say it again, leave a gap, or are of nobody's lease."""
    leases = sorted(rng.sample(sorted(at), min(len(at), rng.randint(1, 6))))
    offsets = [
        max(0, at[one] + (rng.choice([-2, -1, 0, 1]) if is_wild and rng.random() < 0.1 else 0)) for one in leases
    ]
    counts = [rng.randint(1, 3) if is_wild else 2 for _ in leases]
    for lease, offset, count in zip(leases, offsets, counts, strict=True):
        at[lease] = max(at[lease], offset + count)
    versions = [rng.randint(0, 1) if is_wild and rng.random() < 0.05 else 0 for _ in leases]
    ended = [Ended(one, at[one], rng.choice(["stop", "handed_over"])) for one in leases if rng.random() < 0.05]
    num = sum(counts)
    return NewTokens(
        1,
        columns.pack_column("<u8", leases),
        columns.pack_column("<u4", offsets),
        columns.pack_column("<u4", counts),
        columns.pack_column("<i4", versions),
        cells(*(rng.randrange(1000) for _ in range(num))),
        tuple(ended),
    )


@given(st.integers(0, 10**9), st.booleans())
@settings(max_examples=150)
def test_many_rows_at_once_come_to_what_one_after_the_other_does(seed: int, is_wild: bool):
    rng = random.Random(seed)
    bulk, plain = Reader(), RowByRow()
    at: dict[int, int] = {}
    next_lease = 1
    for _ in range(rng.randint(1, 120)):
        if not at or rng.random() < 0.2:
            next_lease += rng.choice([0, 1, 1, 1, 10**7]) if is_wild else 1
            sample, from_token = SampleId(1024 + rng.randrange(8)), rng.choice([0, 0, 3])
            at[next_lease] = from_token
            bulk.note(Granted([next_lease], [sample], [from_token], ["a"]))
            plain.grant(next_lease, sample, "a", from_token)
        batch = [random_frame(rng, at, is_wild=is_wild) for _ in range(rng.randint(1, 4))]
        bulk.tokens(batch)
        for frame in batch:
            plain.hear(frame)
        if rng.random() < 0.1:
            at.pop(rng.choice(sorted(at)))
        if rng.random() < 0.05:
            bulk.finish(None)  # as when enough is gathered
    texts = bulk.payload.tokens
    assert {sample: (bytes(one.cells), one.segments, one.finish) for sample, one in texts.items()} == {
        sample: (bytes(one.cells), one.segments, one.finish) for sample, one in plain.texts.items()
    }


# A manager that is killed after any commit: the next one has what it had


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
    desk = manager.lobby.need_run().desk
    while not any(one.state == "scored" for one in desk.samples.values()):
        manager.play()
    manager.service.close()
    for path in segments(tmp_path / "run" / LIVE_FOLDER, PAYLOAD):
        data = path.read_bytes()
        path.write_bytes(data[: data.index(b"\n") + 1])
    with pytest.raises(JournalError, match=r"it ended at token \d+, and the payload has 0"):
        Service(tmp_path / "run", SMALL_FILES)


def test_a_run_that_an_older_version_wrote_goes_on(tmp_path):
    """Its journal has a record a heartbeat. What the scheduler asks for has the same bytes as ever, or it is refused: a
    field that is added to a command, or to what one holds, is left out where it has its default."""
    shutil.copytree(OLD_RUN, tmp_path / "run" / LIVE_FOLDER)
    expected = msgspec.msgpack.decode((OLD_RUN / "kept.msgpack").read_bytes())
    later = {"sample": ({}, False, [], None), "prompt": (b"",)}  # the defaults of fields that came since
    expected = {name: [*one, *later.get(name.split()[0], ())] for name, one in expected.items()}
    service = Service(tmp_path / "run", SMALL_FILES)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(kept(service))) == expected
    service.close()
