"""A live run's files: a manager that is killed at any byte goes on, files follow each other, damage is named."""

import os
import shutil
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
from tests.full_disk import files_of_at_most, no_descriptor_left
from tests.unit.driver import Driver, small_config

from polyrl.errors import JournalError, UserError
from polyrl.ids import Step
from polyrl.journal.files import EVENTS, LIVE_FOLDER, PAYLOAD, open_journals, segments
from polyrl.journal.records import replay
from polyrl.manager.journal import Recovered, RunJournal
from polyrl.manager.notes import AnyNote, Granted, PromptsSupplied, RewardKept, RunOpened
from polyrl.manager.settings import FsyncPolicy, JournalSettings
from polyrl.scheduling.core import commands as c
from polyrl.scheduling.core import events as e
from polyrl.scheduling.scheduler import Scheduler
from polyrl.wire import columns
from polyrl.wire.frames import NewTokens, PromptPayload, Sampling, encode

ABOUT = {"driver": "a test"}
WHOLE = JournalSettings(fsync="never")
TINY = JournalSettings(fsync="never", segment_mb=0.001)
RUN = RunOpened("the key of the trainer", has_reward=True)
GRANTED = Granted([7], [1024], [0], ["a"])
REWARD = RewardKept(1024, 0.5)


def tokens(number: int) -> bytes:
    """A frame of one token."""
    lease, offset, count, version = (columns.pack_column(kind, [1]) for kind in ("<u8", "<u4", "<u4", "<i4"))
    return encode(NewTokens(number, lease, offset, count, version, columns.pack_cells([number], [-0.5])))


class LiveRun(Driver):
    """A driver that keeps a journal as the manager does: what was said is written before the next event."""

    def __init__(self, run_dir: Path, settings: JournalSettings = WHOLE) -> None:
        super().__init__(small_config())
        self.run_dir = run_dir
        self.journal = RunJournal(run_dir, settings)
        self.journal.begin()
        self.journal.add_note(RUN)
        self.journal.begin_events(self.scheduler.desk.config, ABOUT)
        self.wanted: dict[int, list[AnyNote | bytes]] = {}
        """By step, what the payload holds of it."""

    def tell(self, event: e.Event) -> list[c.Command]:
        commands = super().tell(event)
        self.journal.add_event(self.now, event, commands)
        self.commit()
        return commands

    def commit(self) -> None:
        self.journal.commit()
        if self.journal.rotation_is_due:
            self.journal.rotate(self.scheduler, ABOUT, [RUN])
        if self.journal.sync_due:
            self.journal.sync()

    def note(self, step: int, item: AnyNote | bytes) -> None:
        self.wanted.setdefault(step, []).append(item)
        if isinstance(item, bytes):
            self.journal.add_tokens(item)
        else:
            self.journal.add_note(item)
        self.commit()

    def play_step(self, step: int) -> None:
        """A round of two groups, with something of each kind in the payload."""
        self.install("a")
        groups = 2 * step + 1, 2 * step + 2
        self.note(step, PromptsSupplied(tuple(PromptPayload(one, b"1234", Sampling()) for one in groups)))
        for number in range(24):
            self.note(step, tokens(100 * step + number))
        self.wait(2.0)
        self.note(step, RewardKept(1024 * groups[0], step / 2))
        self.complete(*groups)
        self.take(step, *groups)

    def until_events_are_in_a_new_file(self) -> None:
        num_files = len(files(self.run_dir, EVENTS))
        while len(files(self.run_dir, EVENTS)) == num_files:
            self.now += 1.0
            self.tell(e.TimePassed())


def started(run_dir: Path, settings: JournalSettings = WHOLE) -> LiveRun:
    run = LiveRun(run_dir, settings)
    run.begin()
    run.join("a")
    return run


def recovered(run_dir: Path, settings: JournalSettings = WHOLE) -> tuple[Recovered, list[AnyNote | bytes]]:
    found = RunJournal(run_dir, settings).recover()
    assert found is not None
    return found, read(found)


def read(found: Recovered) -> list[AnyNote | bytes]:
    """Its payload, with tokens as they came."""
    items: list[AnyNote | bytes] = []
    for one in found.payload:
        items += map(encode, one) if isinstance(one, list) else [one]
    return items


def files(run_dir: Path, stem: str) -> list[Path]:
    return segments(run_dir / LIVE_FOLDER, stem)


def state_of(scheduler: Scheduler | None) -> bytes:
    assert scheduler is not None
    return scheduler.save()


# Going on


def test_a_folder_without_a_run_is_a_new_one(tmp_path):
    assert RunJournal(tmp_path, WHOLE).recover() is None


def test_what_was_committed_is_there_although_nothing_was_closed(tmp_path):
    run = started(tmp_path)
    run.play_step(0)
    found, payload = recovered(tmp_path)
    assert state_of(found.scheduler) == run.scheduler.save()
    assert found.now == run.now
    assert payload == [RUN, *run.wanted[0]]
    assert 0 <= found.away_s < 10


def test_what_was_not_committed_is_not_there(tmp_path):
    run = started(tmp_path)
    before = run.scheduler.save()
    run.journal.add_event(run.now, e.TimePassed(), [])
    run.journal.add_note(REWARD)
    found, payload = recovered(tmp_path)
    assert (state_of(found.scheduler), payload) == (before, [RUN])


def test_a_run_that_was_never_opened_has_payload_and_no_scheduler(tmp_path):
    journal = RunJournal(tmp_path, WHOLE)
    journal.begin()
    journal.add_note(GRANTED)
    journal.commit()
    found, payload = recovered(tmp_path)
    assert (found.scheduler, found.now, found.num_records, payload) == (None, 0.0, 0, [GRANTED])


def test_a_run_goes_on_in_the_same_files(tmp_path):
    run = started(tmp_path)
    again = RunJournal(tmp_path, WHOLE)
    found = again.recover()
    assert found is not None
    assert read(found) == [RUN]
    again.go_on(())
    commands = run.scheduler.handle(e.TimePassed(), run.now + 1)
    again.add_event(run.now + 1, e.TimePassed(), commands)
    again.add_note(REWARD)
    again.close()
    found, payload = recovered(tmp_path)
    assert (state_of(found.scheduler), payload) == (run.scheduler.save(), [RUN, REWARD])
    assert [len(files(tmp_path, stem)) for stem in (EVENTS, PAYLOAD)] == [1, 1]
    assert replay(open_journals(tmp_path)).first_difference is None


def test_how_long_nobody_wrote_is_known(tmp_path):
    started(tmp_path)
    for path in (*files(tmp_path, EVENTS), *files(tmp_path, PAYLOAD)):
        os.utime(path, (time.time() - 60, time.time() - 60))
    found, _ = recovered(tmp_path)
    assert 59 < found.away_s < 70


# Killed in the middle of a write


def cuts(run_dir: Path, whole: Path, lengths: Iterable[int]) -> Iterator[Path]:
    """Copies of a run, one for each length that a file may have had when its writer was killed."""
    for length in lengths:
        copy = run_dir.parent / "cut"
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(run_dir, copy)
        os.truncate(copy / LIVE_FOLDER / whole.name, length)
        yield copy


def of_a_beginning(path: Path) -> list[int]:
    """Lengths to cut a long beginning at: every byte of its first line and its frame, some of the rest."""
    size = path.stat().st_size
    return [*range(60), *range(60, size - 20, 1 + size // 40), *range(size - 20, size)]


def goes_on(run_dir: Path, settings: JournalSettings = WHOLE) -> None:
    """A manager that goes on from here can write, and the one after it reads it."""
    journal = RunJournal(run_dir, settings)
    found = journal.recover()
    assert found is not None
    before = read(found)
    journal.go_on(())
    if found.scheduler is None:
        scheduler = Scheduler(small_config())
        journal.begin_events(scheduler.desk.config, ABOUT)
    else:
        scheduler = found.scheduler
    now = found.now + 1.0
    journal.add_event(now, e.TimePassed(), scheduler.handle(e.TimePassed(), now))
    journal.add_note(REWARD)
    journal.close()
    again, payload = recovered(run_dir, settings)
    assert (state_of(again.scheduler), payload) == (scheduler.save(), [*before, REWARD])
    assert replay(open_journals(run_dir)).first_difference is None


def test_a_record_that_was_cut_at_any_byte_is_cut_off_and_the_run_goes_on(tmp_path):
    run = started(tmp_path / "run")
    (path,) = files(run.run_dir, EVENTS)
    before, length = run.scheduler.save(), path.stat().st_size
    run.now += 1.0
    run.tell(e.RoundRequested(Step(0)))
    for copy in cuts(run.run_dir, path, range(length, path.stat().st_size)):
        found, payload = recovered(copy)
        assert (state_of(found.scheduler), payload) == (before, [RUN])
        assert (copy / LIVE_FOLDER / path.name).stat().st_size == length
        goes_on(copy)


@pytest.mark.parametrize("item", [GRANTED, REWARD, tokens(3)], ids=lambda item: type(item).__name__)
def test_payload_that_was_cut_at_any_byte_is_cut_off_and_the_run_goes_on(tmp_path, item):
    run = started(tmp_path / "run")
    (path,) = files(run.run_dir, PAYLOAD)
    length = path.stat().st_size
    run.note(0, item)
    for copy in cuts(run.run_dir, path, range(length, path.stat().st_size)):
        found, payload = recovered(copy)
        assert (state_of(found.scheduler), payload) == (run.scheduler.save(), [RUN])
        assert (copy / LIVE_FOLDER / path.name).stat().st_size == length
        goes_on(copy)


def test_a_first_file_of_events_that_was_cut_in_its_beginning_is_no_run_yet(tmp_path):
    journal = RunJournal(tmp_path / "run", WHOLE)
    journal.begin()
    journal.begin_events(small_config(), ABOUT)
    (path,) = files(tmp_path / "run", EVENTS)
    for copy in cuts(tmp_path / "run", path, of_a_beginning(path)):
        found, payload = recovered(copy)
        assert (found.scheduler, payload, files(copy, EVENTS)) == (None, [], [])
    for copy in cuts(tmp_path / "run", path, [0, 10, path.stat().st_size - 1]):
        goes_on(copy)


def test_a_first_file_of_payload_that_was_cut_at_any_byte_of_its_beginning_is_begun_again(tmp_path):
    RunJournal(tmp_path / "run", WHOLE).begin()
    (path,) = files(tmp_path / "run", PAYLOAD)
    for copy in cuts(tmp_path / "run", path, range(path.stat().st_size)):
        goes_on(copy)


def test_a_file_of_events_that_was_cut_in_its_beginning_leaves_the_one_before(tmp_path):
    run = started(tmp_path / "run", TINY)
    run.until_events_are_in_a_new_file()
    path = files(run.run_dir, EVENTS)[-1]
    for copy in cuts(run.run_dir, path, of_a_beginning(path)):
        found, _ = recovered(copy, TINY)
        assert (state_of(found.scheduler), found.now) == (run.scheduler.save(), run.now)
        assert not (copy / LIVE_FOLDER / path.name).exists()


def test_a_file_of_payload_that_was_cut_at_any_byte_of_its_beginning_is_begun_again(tmp_path):
    run = started(tmp_path / "run", TINY)
    while len(files(run.run_dir, PAYLOAD)) < 2:
        run.note(0, tokens(1))
    path = files(run.run_dir, PAYLOAD)[-1]
    for copy in cuts(run.run_dir, path, range(path.stat().st_size)):
        goes_on(copy, WHOLE)


# Files that follow each other


def test_events_are_replayed_across_files_and_recovered_from_the_last(tmp_path):
    run = started(tmp_path, TINY)
    for step in range(3):
        run.play_step(step)
        run.trained(step)
    assert len(files(tmp_path, EVENTS)) > 3
    report = replay(open_journals(tmp_path))
    assert report.first_difference is None
    found, _ = recovered(tmp_path, TINY)
    assert state_of(found.scheduler) == run.scheduler.save()
    assert found.num_records < report.num_records


def test_a_state_that_is_larger_than_a_file_should_be_does_not_make_a_file_an_event(tmp_path):
    run = started(tmp_path, TINY)
    assert len(run.scheduler.save()) > TINY.segment_mb * 2**20
    num_files, num_said = len(files(tmp_path, EVENTS)), 0
    while len(files(tmp_path, EVENTS)) < num_files + 2:
        run.now += 1.0
        run.tell(e.TimePassed())
        num_said += 1
    assert num_said > 10


def test_nor_does_it_when_the_run_goes_on(tmp_path):
    run = started(tmp_path, TINY)
    run.until_events_are_in_a_new_file()
    num_files = len(files(tmp_path, EVENTS))
    for _ in range(3):
        run.journal.abandon()
        run.journal = RunJournal(tmp_path, TINY)
        found = run.journal.recover()
        assert found is not None and state_of(found.scheduler) == run.scheduler.save()
        list(found.payload)
        run.journal.go_on(())
        run.now += 1.0
        run.tell(e.TimePassed())
        assert len(files(tmp_path, EVENTS)) == num_files


def test_the_last_steps_line_is_known_although_its_record_is_in_a_former_file(tmp_path):
    run = started(tmp_path, TINY)
    run.play_step(0)
    run.trained(0)
    run.until_events_are_in_a_new_file()
    found, _ = recovered(tmp_path, TINY)
    assert found.num_records == 0 and found.scheduler is not None
    (reported,) = (one.line for one in run.said if isinstance(one, c.ReportStep))
    assert found.scheduler.desk.state.last_line == reported


def test_a_manager_that_is_killed_right_after_a_new_file_of_events_began_knows_the_time(tmp_path):
    run = started(tmp_path, TINY)
    run.until_events_are_in_a_new_file()
    found, _ = recovered(tmp_path, TINY)
    assert found.num_records == 0
    assert found.now == run.now
    goes_on(tmp_path, TINY)


def test_payload_is_deleted_when_its_steps_are_over_and_never_before(tmp_path):
    run = started(tmp_path, TINY)
    names: set[str] = set()
    for step in range(4):
        run.play_step(step)
        _, payload = recovered(tmp_path, TINY)
        for item in run.wanted[step]:
            assert item in payload
        names |= {path.name for path in files(tmp_path, PAYLOAD)}
        run.trained(step)
        run.wait(1.0)
        _, payload = recovered(tmp_path, TINY)
        assert RUN in payload
        assert len(files(tmp_path, PAYLOAD)) == 1
    assert len(names) > 4


def test_payload_is_deleted_only_when_the_disk_knows_that_its_steps_are_over(tmp_path):
    run = started(tmp_path, JournalSettings(fsync="interval", fsync_interval_s=3600.0, segment_mb=0.001))
    run.play_step(0)
    before = files(tmp_path, PAYLOAD)[:-1]
    assert before
    run.trained(0)
    assert set(before) <= set(files(tmp_path, PAYLOAD))
    run.journal.sync()
    assert not set(before) & set(files(tmp_path, PAYLOAD))


def test_files_that_are_full_while_a_sync_runs_wait_for_the_next(tmp_path):
    run = started(tmp_path, JournalSettings(fsync="interval", fsync_interval_s=3600.0, segment_mb=0.001))
    run.until_events_are_in_a_new_file()
    sync = run.journal.take_sync()
    run.until_events_are_in_a_new_file()
    sync()
    assert len(run.journal._full) == 1, "it is not on the disk yet, and open"
    run.journal.sync()
    assert run.journal._full == []


def test_payload_of_a_step_that_is_open_outlives_the_steps_that_were_open_with_it(tmp_path):
    run = LiveRun(tmp_path, TINY)
    run.scheduler = Scheduler(small_config(max_staleness=1))
    run.begin(steps=2)
    run.join("a")
    assert sorted(run.scheduler.desk.rounds) == [0, 1]
    run.note(1, tokens(1))
    run.play_step(0)
    run.tell(e.StepTrained(Step(0)))
    run.wait(1.0)
    assert sorted(run.scheduler.desk.rounds) == [1]
    _, payload = recovered(tmp_path, TINY)
    assert tokens(1) in payload


def test_a_manager_that_goes_on_keeps_old_payload_until_its_steps_are_over(tmp_path):
    run = started(tmp_path, TINY)
    run.play_step(0)
    run.journal = RunJournal(tmp_path, TINY)
    found = run.journal.recover()
    assert found is not None
    payload = read(found)
    run.journal.go_on(tuple(run.scheduler.desk.rounds))
    run.wait(1.0)
    assert recovered(tmp_path, TINY)[1][: len(payload)] == payload
    run.trained(0)
    run.wait(1.0)
    assert len(files(tmp_path, PAYLOAD)) == 1


# Damage


def damage(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def read_all(run_dir: Path) -> None:
    found = RunJournal(run_dir, WHOLE).recover()
    assert found is not None
    list(found.payload)


@pytest.mark.parametrize("stem", [EVENTS, PAYLOAD])
def test_a_byte_that_changed_in_the_middle_is_an_error_with_file_and_byte_and_nothing_is_cut_off(tmp_path, stem):
    run = started(tmp_path)
    run.play_step(0)
    (path,) = files(tmp_path, stem)
    length = path.stat().st_size
    at = length * 9 // 10  # behind the header, which holds all settings
    damage(path, at)
    with pytest.raises(JournalError, match=rf"{path.name}: record \d+ at byte \d+: .*checksum") as caught:
        read_all(tmp_path)
    assert "\n" not in str(caught.value)
    offset = int(str(caught.value).partition(" at byte ")[2].partition(":")[0])
    assert offset <= at
    assert path.stat().st_size == length


def test_payload_that_was_cut_in_a_file_that_another_one_follows_is_damage(tmp_path):
    run = started(tmp_path, TINY)
    while len(files(tmp_path, PAYLOAD)) < 2:
        run.note(0, tokens(1))
    path = files(tmp_path, PAYLOAD)[0]
    os.truncate(path, path.stat().st_size - 1)
    with pytest.raises(JournalError, match=rf"{path.name}: record \d+ at byte \d+: cut short"):
        read_all(tmp_path)


@pytest.mark.parametrize(("stem", "why"), [(EVENTS, "not a journal"), (PAYLOAD, "not a run's payload")])
def test_a_file_of_something_else_is_named(tmp_path, stem, why):
    started(tmp_path)
    (path,) = files(tmp_path, stem)
    path.write_bytes(b"something else")
    with pytest.raises(JournalError, match=rf"{path.name}: {why}"):
        read_all(tmp_path)


def test_events_without_payload_are_an_error(tmp_path):
    started(tmp_path)
    files(tmp_path, PAYLOAD)[0].unlink()
    with pytest.raises(JournalError, match="events without payload"):
        read_all(tmp_path)


def test_a_folder_that_cannot_be_written_is_the_persons_error(tmp_path):
    (tmp_path / LIVE_FOLDER / "payload-000001.bin").mkdir(parents=True)
    with pytest.raises(UserError, match=r"payload-000001\.bin: cannot be written: Is a directory"):
        RunJournal(tmp_path, WHOLE).begin()


def test_only_their_owner_reads_the_files(tmp_path):
    started(tmp_path)
    for path in (*files(tmp_path, EVENTS), *files(tmp_path, PAYLOAD)):
        assert path.stat().st_mode & 0o777 == 0o600


# To the disk: a pipe takes what is written and refuses to be synced, so it tells when that is asked of it


@pytest.fixture
def pipe(tmp_path):
    folder = tmp_path / LIVE_FOLDER
    folder.mkdir()
    path = folder / "payload-000001.bin"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    yield reader
    os.close(reader)


def journal_into(pipe: int, run_dir: Path, fsync: FsyncPolicy, interval_s: float = 1.0) -> RunJournal:
    journal = RunJournal(run_dir, JournalSettings(fsync=fsync, fsync_interval_s=interval_s))
    journal.begin()
    os.read(pipe, 1 << 16)
    return journal


@pytest.mark.parametrize("policy", ["never", "interval"])
def test_a_commit_gives_everything_to_the_operating_system_and_waits_for_no_disk(pipe, tmp_path, policy):
    journal = journal_into(pipe, tmp_path, policy)
    journal.add_note(REWARD)
    journal.commit()
    assert len(os.read(pipe, 1 << 16)) > 12


def test_a_commit_under_always_waits_for_the_disk(pipe, tmp_path):
    journal = journal_into(pipe, tmp_path, "always")
    journal.add_note(REWARD)
    with pytest.raises(UserError, match="cannot be written: Invalid argument"):
        journal.commit()


def test_a_commit_of_nothing_waits_for_no_disk(pipe, tmp_path):
    journal = journal_into(pipe, tmp_path, "always")
    journal.commit()
    journal.rotate(None, ABOUT, [])
    assert not journal.rotation_is_due


def test_a_sync_is_due_when_the_interval_is_over_and_not_under_never(tmp_path):
    def is_due(fsync: FsyncPolicy, interval_s: float) -> bool:
        return RunJournal(tmp_path, JournalSettings(fsync=fsync, fsync_interval_s=interval_s)).sync_due

    assert is_due("interval", 1e-9)
    assert not is_due("interval", 3600.0)
    assert not is_due("never", 1e-9)


@pytest.mark.parametrize(("policy", "syncs"), [("never", False), ("interval", True)])
def test_a_journal_that_is_closed_is_on_the_disk_unless_the_policy_is_never(pipe, tmp_path, policy, syncs):
    journal = journal_into(pipe, tmp_path, policy)
    if not syncs:
        journal.close()
        return
    with pytest.raises(UserError, match="cannot be written: Invalid argument"):
        journal.close()


def test_a_disk_that_takes_no_more_is_a_line_and_what_was_committed_is_whole(tmp_path):
    run = started(tmp_path)
    (payload,) = files(tmp_path, PAYLOAD)
    before = payload.read_bytes()
    run.journal.add_note(PromptsSupplied((PromptPayload(1, b"1234" * 64, Sampling()),)))
    said = r"payload-000001\.bin: cannot be written: File too large; what was ack"
    with files_of_at_most(len(before) + 10), pytest.raises(UserError, match=said):
        run.journal.commit()
    assert payload.read_bytes() == before


# Descriptors


def test_a_file_that_cannot_be_followed_by_the_next_is_one_line_and_is_closed_once(tmp_path):
    run = started(tmp_path, TINY)
    (tmp_path / LIVE_FOLDER / f"{PAYLOAD}-{2:06}.bin").mkdir()
    with pytest.raises(UserError, match="cannot be written: Is a directory"):
        run.play_step(0)
    run.journal.abandon()


def test_files_follow_each_other_while_no_descriptor_is_left(tmp_path):
    run = started(tmp_path, TINY)
    with no_descriptor_left():
        run.play_step(0)
        run.until_events_are_in_a_new_file()
    assert len(files(tmp_path, PAYLOAD)) > 1
    run.journal.close()
