"""An account is made of the journal alone, and adds up whatever happened to the fleet."""

from itertools import pairwise

import msgspec
import pytest
from tests.properties.hostile import play
from tests.properties.hosts import EpisodeWorld

from polyrl.errors import JournalError
from polyrl.journal.files import EVENTS, FILE_NAME, LIVE_FOLDER, PAYLOAD
from polyrl.journal.records import encode_header, encode_record
from polyrl.scheduling.scheduler import Scheduler
from polyrl.telemetry.account import read_account
from polyrl.telemetry.reconcile import broken_sums


def write_journal(path, world, *, log=None, saved=b""):
    path.parent.mkdir(parents=True, exist_ok=True)
    log = world.log if log is None else log
    path.write_bytes(encode_header(world.config, {}, saved) + b"".join(encode_record(*entry) for entry in log))
    return path


def write_segments(folder, world, *cuts):
    """A live run's journal: each file starts from the state that the one before ended with."""
    scheduler = Scheduler(world.config)
    saved, starts = b"", [0, *cuts, len(world.log)]
    for number, (start, end) in enumerate(pairwise(starts), start=1):
        part = world.log[start:end]
        write_journal(folder / LIVE_FOLDER / f"{EVENTS}-{number:06}.bin", world, log=part, saved=saved)
        for now, event, _ in part:
            scheduler.handle(event, now)
        saved = scheduler.save()


@pytest.fixture(scope="module")
def world():
    return play(4, num_events=120)


@pytest.mark.parametrize("seed", range(12))
def test_whatever_happened_every_sum_holds_and_every_loss_is_seen(seed, tmp_path):
    world = play(seed, num_events=150)
    account = read_account(write_journal(tmp_path / FILE_NAME, world), verify=True)
    assert account.broken_laws == []
    assert broken_sums(account) == []
    assert account.num_records == len(world.log)
    assert account.num_checks > 10
    lost = [life for life in account.lives if life.ending == "lost"]
    assert len(account.lives) == sum(line.num_joins for line in account.ledger.workers.values())
    assert len(lost) == sum(line.num_losses for line in account.ledger.workers.values())
    assert all(life.why for life in account.lives if life.ended_at is not None)
    for spans in account.timeline.rows.values():
        assert all(one.end_s <= then.start_s + 1e-9 for one, then in pairwise(spans)), "a second of a name counts twice"


@pytest.mark.parametrize("seed", range(6))
def test_hosts_are_paid_for_the_time_that_they_were_seen(seed, tmp_path):
    world = EpisodeWorld(seed)
    world.play(150)
    account = read_account(write_journal(tmp_path / FILE_NAME, world), verify=True)
    assert account.broken_laws == []
    assert broken_sums(account) == []
    assert sum(seconds for seconds, _ in account.hosts.values()) > 0.0
    name = next(name for name, line in account.ledger.hosts.items() if line.seconds > 0.0)
    account.ledger.hosts[name].seconds += 3.0
    assert [line.partition(" are ")[0] for line in broken_sums(account)] == [f"seconds of host {name}"]


def test_several_journals_know_since_when_a_host_is_there(tmp_path):
    world = EpisodeWorld(2)
    world.play(150)
    write_segments(tmp_path, world, 60, 120)
    assert broken_sums(read_account(tmp_path, verify=True)) == []
    (tmp_path / LIVE_FOLDER / f"{EVENTS}-000001.bin").unlink()
    assert broken_sums(read_account(tmp_path, verify=True)) == []


def test_the_timeline_says_the_same_as_the_ledger(world, tmp_path):
    account = read_account(write_journal(tmp_path / FILE_NAME, world))
    for name, line in account.ledger.workers.items():
        seen: dict[str, float] = {}
        for span in account.timeline.rows[name]:
            seen[span.activity] = seen.get(span.activity, 0.0) + span.end_s - span.start_s
        told = {activity: seconds for activity, seconds in line.seconds.items() if seconds > 0}
        # A machine that starts while another of its name still runs is paid, and has no place in their row.
        assert seen.pop("starting", 0.0) <= told.pop("starting", 0.0) + 1e-6, name
        assert seen == pytest.approx(told), name


def test_several_journals_are_one_run(world, tmp_path):
    whole = read_account(write_journal(tmp_path / FILE_NAME, world))
    write_segments(tmp_path / "live", world, 40, 41, 90)
    parts = read_account(tmp_path / "live", verify=True)
    assert parts.num_records == whole.num_records
    assert msgspec.msgpack.encode(parts.ledger) == msgspec.msgpack.encode(whole.ledger)
    assert parts.timeline.rows == whole.timeline.rows
    assert parts.is_whole
    assert broken_sums(parts) == []


def test_a_journal_that_starts_in_mid_run_adds_up_from_there(world, tmp_path):
    write_segments(tmp_path, world, 60)
    account = read_account(tmp_path / LIVE_FOLDER / f"{EVENTS}-000002.bin", verify=True)
    assert not account.is_whole
    assert account.num_records == len(world.log) - 60
    assert (account.broken_laws, broken_sums(account)) == ([], [])


@pytest.mark.parametrize("num_missing", [1, 7, 40, 400])
def test_a_journal_that_was_cut_short_is_told_up_to_its_last_whole_record(world, tmp_path, num_missing):
    path = write_journal(tmp_path / FILE_NAME, world)
    path.write_bytes(path.read_bytes()[:-num_missing])
    account = read_account(tmp_path, verify=True)
    assert "cut short" in account.cut_short
    assert 0 < account.num_records < len(world.log)
    assert (account.broken_laws, broken_sums(account)) == ([], [])


@pytest.mark.parametrize("left", [b"", b"polyrl-jour", b"polyrl-journal 1\n\x01\x02"])
def test_a_file_that_a_killed_manager_had_hardly_begun_hides_nothing(world, tmp_path, left):
    write_segments(tmp_path, world)
    (tmp_path / LIVE_FOLDER / f"{EVENTS}-000002.bin").write_bytes(left)
    assert read_account(tmp_path).num_records == len(world.log)


def test_a_file_that_is_cut_and_followed_by_another_is_damage(world, tmp_path):
    write_segments(tmp_path, world, 60)
    first = tmp_path / LIVE_FOLDER / f"{EVENTS}-000001.bin"
    first.write_bytes(first.read_bytes()[:-3])
    with pytest.raises(JournalError, match="cut short"):
        read_account(tmp_path)


def test_a_run_without_a_single_event_is_an_account_of_nothing(world, tmp_path):
    account = read_account(write_journal(tmp_path / FILE_NAME, world, log=[]), verify=True)
    assert (account.num_records, account.lines, account.lives) == (0, [], [])
    assert (account.now, account.open.samples) == (0.0, 0)
    assert broken_sums(account) == []


def test_a_directory_without_a_run_says_what_was_expected(tmp_path):
    with pytest.raises(
        JournalError, match=r"there is no run; expected journal\.bin of a simulation, or journal/events"
    ):
        read_account(tmp_path)
    (tmp_path / LIVE_FOLDER).mkdir()
    (tmp_path / LIVE_FOLDER / f"{PAYLOAD}-000001.bin").write_bytes(b"polyrl-payload 1\n")
    with pytest.raises(JournalError, match="no trainer has opened a run"):
        read_account(tmp_path)


def test_commands_that_are_not_those_of_the_journal_end_the_account(world, tmp_path):
    number, (now, event, commands) = next((n, entry) for n, entry in enumerate(world.log, start=1) if entry[2])
    log = [*world.log[: number - 1], (now, event, commands[:-1]), *world.log[number:]]
    account = read_account(write_journal(tmp_path / FILE_NAME, world, log=log))
    assert account.num_records == number
    assert f"record {number}: this version of PolyRL decides otherwise" in account.difference
    assert account.broken_laws == []


def test_a_law_that_does_not_hold_is_found_and_named(world, tmp_path):
    scheduler = Scheduler(world.config)
    for now, event, _ in world.log[:60]:
        scheduler.handle(event, now)
    scheduler.ledger.tokens_arrived += 5
    path = write_journal(tmp_path / FILE_NAME, world, log=world.log[60:], saved=scheduler.save())
    (said,) = read_account(path, verify=True).broken_laws
    assert "tokens arrived" in said


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda ledger: setattr(ledger, "samples_trained", ledger.samples_trained + 1), "samples trained"),
        (lambda ledger: setattr(ledger, "prompts_trained", ledger.prompts_trained - 1), "prompts trained"),
        (lambda ledger: next(iter(ledger.workers.values())).seconds.update(idle=10**6), "seconds of worker"),
        (lambda ledger: setattr(next(iter(ledger.workers.values())), "usd", 99.0), "dollars of worker"),
        (lambda ledger: setattr(ledger, "trainer_usd_per_hour", 7.0), "dollars of the trainer"),
        (lambda ledger: setattr(ledger, "tokens_kept", ledger.tokens_kept + 1), "tokens kept"),
    ],
)
def test_a_number_that_does_not_reconcile_is_named(world, tmp_path, spoil, said):
    account = read_account(write_journal(tmp_path / FILE_NAME, world))
    spoil(account.ledger)
    assert any(line.startswith(said) for line in broken_sums(account))
