"""The dashboard's timeline is that of the account, whatever happened to the fleet; of a journal that grows, too."""

import time
from itertools import pairwise
from pathlib import Path

import pytest
from tests.properties.hostile import play
from tests.telemetry.test_account import write_journal, write_segments

from polyrl.dashboard.following import TRAINER, Follower, cut, thin
from polyrl.ids import show_sample
from polyrl.journal.files import EVENTS, FILE_NAME, LIVE_FOLDER
from polyrl.journal.records import encode_header, encode_record
from polyrl.scheduling.core import commands as c
from polyrl.scheduling.core.fleet import Worker
from polyrl.scheduling.scheduler import Scheduler
from polyrl.telemetry.account import read_account
from polyrl.telemetry.lives import FleetWatcher
from polyrl.telemetry.timeline import Span

MANY = 1_000


def follow(path: Path, *, live: bool = False) -> Follower:
    follower = Follower(path, live=live)
    follower.start()
    assert follower.wait(20.0), follower.trouble
    return follower


@pytest.mark.parametrize("seed", range(8))
def test_every_worker_has_the_spans_of_the_account(seed: int, tmp_path: Path):
    path = write_journal(tmp_path / FILE_NAME, play(seed, num_events=150))
    found, account = follow(path).window(0.0, 0.0, 0, MANY), read_account(path)
    rows = {row.name: row for row in found.rows if row.kind in ("worker", "local")}
    assert rows.keys() == account.timeline.rows.keys()
    for name, spans in account.timeline.rows.items():
        wanted = [(max(0.0, one.start_s - account.started_at), one.end_s - account.started_at) for one in spans]
        given = [(start, end) for start, end, _ in rows[name].spans]
        inside = [(start, end) for start, end in wanted if end > 0.0]
        assert sum(end - start for start, end in given) == pytest.approx(sum(end - start for start, end in inside))
        lost = [life for life in account.lives if life.worker == name and life.ending == "lost"]
        assert sum(1 for _, how, _ in rows[name].ends if how == "lost") == len(lost)


def test_leases_end_as_the_journal_says_and_none_of_a_lost_worker_stays_open(tmp_path: Path):
    world = play(3, num_events=200)
    rows = follow(write_journal(tmp_path / FILE_NAME, world)).everything()
    given = [one for _, _, commands in world.log for one in commands if isinstance(one, c.Generate)]
    seen = [lease for row in rows for lease in row.leases]
    assert len(seen) == len(given) == sum(row.num_leases for row in rows)
    assert {lease.sample for lease in seen} == {show_sample(one.sample) for one in given}
    assert {lease.ending for lease in seen} >= {"finished", "lost"}
    still = {show_sample(one.id) for one in world.scheduler.desk.leases.values()}
    assert {lease.sample for lease in seen if lease.end_s is None} <= still


def test_a_run_in_several_files_is_one_timeline(tmp_path: Path):
    world = play(5, num_events=150)
    whole = follow(write_journal(tmp_path / "whole" / FILE_NAME, world)).window(0.0, 0.0, 0, MANY)
    write_segments(tmp_path / "parts", world, 40, 90)
    parts = follow(tmp_path / "parts").window(0.0, 0.0, 0, MANY)
    assert [row.name for row in parts.rows] == [row.name for row in whole.rows]
    assert parts.run_s == whole.run_s


def test_a_journal_that_grows_is_followed_into_its_next_file(tmp_path: Path):
    world = play(6, num_events=120)
    folder = tmp_path / LIVE_FOLDER
    folder.mkdir()
    first, half = folder / f"{EVENTS}-000001.bin", len(world.log) // 2
    first.write_bytes(encode_header(world.config) + b"".join(encode_record(*one) for one in world.log[:half]))
    follower = follow(tmp_path, live=True)
    before = follower.window(0.0, 0.0, 0, MANY).run_s
    with first.open("ab") as file:
        for one in world.log[half:]:
            file.write(encode_record(*one))
    until = time.monotonic() + 10.0
    wanted = follow(write_journal(tmp_path / "whole.bin", world)).window(0.0, 0.0, 0, MANY)
    while follower.window(0.0, 0.0, 0, MANY).run_s < wanted.run_s and time.monotonic() < until:
        time.sleep(0.05)
    follower.stop()
    assert follower.window(0.0, 0.0, 0, MANY) == wanted
    assert before < wanted.run_s


def test_a_record_that_is_not_decided_so_any_more_ends_the_following_with_a_line(tmp_path: Path):
    world = play(2, num_events=60)
    log = list(world.log)
    with_commands = next(number for number, entry in enumerate(log) if number > 30 and entry[2])
    log[with_commands] = (*log[with_commands][:2], [])
    follower = Follower(write_journal(tmp_path / FILE_NAME, world, log=log), live=False)
    follower.start()
    follower.wait(20.0)
    assert "decides otherwise" in follower.trouble


def test_the_trainer_has_a_row_of_its_own(tmp_path: Path):
    rows = follow(write_journal(tmp_path / FILE_NAME, play(1, num_events=200))).window(0.0, 0.0, 0, MANY).rows
    assert rows[0].name == TRAINER and rows[0].kind == TRAINER
    assert {what for _, _, what in rows[0].spans} <= {"training", "validating", "idle"}


def test_spans_are_cut_at_the_window_and_thinned_where_there_are_too_many():
    spans = [Span(float(one), one + 1.0, "idle" if one % 10 else "training") for one in range(1000)]
    assert cut(spans, 2.5, 4.5) == [(2.5, 3.0, "idle"), (3.0, 4.0, "idle"), (4.0, 4.5, "idle")]
    few = thin(cut(spans, 0.0, 1000.0), 0.0, 1000.0, 50)
    assert len(few) <= 50
    assert all(one[1] <= then[0] + 1e-9 for one, then in pairwise(few))
    assert few[0][0] == 0.0 and few[-1][1] == pytest.approx(1000.0)


def test_a_live_run_is_followed_from_the_moment_its_trainer_opens_it(tmp_path: Path):
    folder, world = tmp_path / LIVE_FOLDER, play(6, num_events=60)
    folder.mkdir()
    first = folder / f"{EVENTS}-000001.bin"
    first.touch()
    follower = Follower(tmp_path, live=True)
    follower.start()
    assert follower.wait(20.0) and not follower.trouble, "the manager is there, and no trainer yet"
    first.write_bytes(encode_header(world.config) + b"".join(encode_record(*one) for one in world.log))
    until = time.monotonic() + 20.0
    while not follower.window(0.0, 0.0, 0, MANY).rows:
        assert not follower.trouble and time.monotonic() < until, follower.trouble
        time.sleep(0.05)
    follower.stop()


@pytest.mark.parametrize("seed", range(12))
def test_a_look_at_those_that_events_name_sees_what_a_look_at_all_sees(seed: int):
    """A thousand workers cannot all be looked at after each event; the spans are the same to the last second."""
    world, few, all_ = play(seed, num_events=200), FleetWatcher(), FleetWatcher()
    scheduler = Scheduler(world.config)
    num_looked = [0, 0]
    for now, event, _ in world.log:
        commands = scheduler.handle(event, now)
        seats = _Counted(scheduler.desk.seats)
        few.look(seats, event, commands, now, scheduler.ledger)
        num_looked[0] += seats.num_walked
        all_._has_looked = False  # then it looks at each
        all_.look(scheduler.desk.seats, event, commands, now, scheduler.ledger)
        num_looked[1] += 1
    assert few.timeline.rows == all_.timeline.rows
    assert few.lives == all_.lives
    assert num_looked[0] < num_looked[1], "some events concern few"


class _Counted(dict[int, Worker]):
    num_walked = 0

    def values(self):
        self.num_walked += 1
        return super().values()


@pytest.mark.parametrize("seed", range(6))
def test_what_was_spent_is_the_sum_of_the_ledger(seed: int, tmp_path: Path):
    path = write_journal(tmp_path / FILE_NAME, play(seed, num_events=150))
    account = read_account(path)
    assert follow(path).spent_usd() == pytest.approx(account.ledger.usd(account.now))
