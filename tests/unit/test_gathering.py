"""News that changes nothing is held back, and told before something depends on it: nobody can tell the difference."""

import os
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs
from tests.unit.played import CONFIG, SMALL_FILES, Line, Manager, Worker, tokens_frame

from polyrl.ids import LeaseId, WorkerName
from polyrl.journal.files import open_journals
from polyrl.journal.records import replay
from polyrl.manager.frames_in import from_workers
from polyrl.manager.lobby import Lobby
from polyrl.manager.run import gather
from polyrl.manager.service import Service
from polyrl.scheduling.core import events as e
from polyrl.scheduling.core.parameters import FleetRules, HandBackConfig, RoutingConfig
from polyrl.scheduling.parts import credit
from polyrl.scheduling.parts.hearing import concerned, runs_of
from polyrl.wire import columns, frames

REPORT = frames.Report(1, 0, 0.5, 0, 1.0)
TIMEOUT_S = 3.0
RULES = FleetRules(heartbeat_timeout_s=TIMEOUT_S, max_failures=1000)
BEATING = structs.replace(CONFIG, fleet_rules=RULES, routing=RoutingConfig(balance=False), max_new_tokens=1000)


def records_of(run_dir: Path) -> list[e.Event]:
    return [record.event for _, records in open_journals(run_dir) for record in records]


def pass_time(manager: Manager, seconds: float) -> None:
    """In small steps, as the service's timer would: nothing is told before it is due."""
    for _ in range(round(seconds / 0.05)):
        manager.wait(0.05)
        manager.commit()


def test_reports_that_change_nothing_are_one_small_record_a_deadline(tmp_path):
    manager = Manager(tmp_path, 0, BEATING)
    workers = [Worker(manager.service, name) for name in "abcdef"]
    manager.commit()
    before = len(records_of(tmp_path))
    for _ in range(30):
        for worker in workers:
            worker.say(REPORT)
        pass_time(manager, 1.0)
    told = records_of(tmp_path)[before:]
    manager.service.close()
    assert {type(one) for one in told} == {e.FleetReported}
    assert len(told) <= 30 / (TIMEOUT_S / 2) + 1
    assert all(one.seats == (1,) * 6 and one.progress == one.engines == () for one in told)  # type: ignore[union-attr]


@pytest.mark.parametrize("last_heard_s", [0.2, 1.0, 2.9, 4.0])
def test_a_worker_is_given_up_as_long_after_it_was_last_heard_as_ever(tmp_path, last_heard_s: float):
    manager = Manager(tmp_path, 0, BEATING)
    worker = Worker(manager.service, "a")
    manager.commit()
    began = manager.lobby.now()
    if last_heard_s > TIMEOUT_S:
        worker.say(REPORT)
        pass_time(manager, 2.0)
        worker.say(REPORT)
    manager.wait(began + last_heard_s - manager.lobby.now())
    worker.say(REPORT)
    heard_at = manager.lobby.now()
    while "a" in manager.lobby.workers:
        pass_time(manager, 0.05)
        assert manager.lobby.now() < heard_at + 2 * TIMEOUT_S
    assert manager.lobby.now() - heard_at == pytest.approx(TIMEOUT_S, abs=0.2)
    manager.service.close()


def test_what_a_lost_worker_had_brought_and_nobody_had_told_is_in_the_ledger(tmp_path):
    """Its samples wait, and are dropped before anybody goes on with them: there is no lease to abort."""
    manager = Manager(tmp_path, 0, BEATING)
    manager.workers["a"] = worker = Worker(manager.service, "a")
    manager.commit()
    manager.commit()
    lease = min(worker.at)
    worker.say(tokens_frame(lease, 0, list(range(90))))
    worker.say(frames.Goodbye("it is enough"))
    scheduler = manager.lobby.need_run().scheduler
    assert [one.num_tokens for one in scheduler.desk.samples.values() if one.num_tokens] == [90]
    assert scheduler.ledger.tokens_arrived == manager.lobby.need_run().num_tokens == 90
    manager.service.close()


def test_so_is_what_it_had_brought_when_another_process_takes_its_name(tmp_path):
    manager = brought_and_untold(tmp_path)
    Worker(manager.service, "a")
    assert manager.lobby.need_run().scheduler.ledger.tokens_arrived == 90
    assert replay(open_journals(tmp_path)).first_difference is None
    manager.service.close()


def test_an_answer_has_nobody_told_of_but_those_that_failed_its_group(tmp_path):
    """Whoever fails a sample of every group would otherwise have the whole fleet's news told with every answer."""
    manager = brought_and_untold(tmp_path)
    manager.workers["b"] = Worker(manager.service, "b")
    manager.commit()
    desk, now = manager.lobby.need_run().desk, manager.lobby.now()
    lease, sample = next(iter(desk.leases.items()))
    assert concerned(desk, e.SampleFinished(lease, 90), now) is None
    seat = desk.state.fleet.by_name[WorkerName("b")]
    desk.groups[sample.group].failed_on.append(seat)
    assert concerned(desk, e.SampleFinished(lease, 90), now) == [seat]
    assert concerned(desk, e.GroupRejected(sample.group, "a lie", (WorkerName("b"), WorkerName("c"))), now) == [seat]
    assert concerned(desk, e.GroupRejected(sample.group, "too easy"), now) is None
    manager.service.close()


def test_an_answer_after_which_devices_may_be_given_back_has_the_trainers_own_workers_told_of(tmp_path):
    """Nothing else may tell of them in a whole round, where samples are not moved for balance."""
    manager = brought_and_untold(tmp_path)
    desk, now = manager.lobby.need_run().desk, manager.lobby.now()
    lease, _ = next(iter(desk.leases.items()))
    desk.config = structs.replace(desk.config, hand_back=HandBackConfig(enabled=True))
    (round_,) = desk.rounds.values()
    desk.state.fleet.local_seats.append(7)
    round_.num_waiting = 0
    round_.next_hand_back_share = 2.0 / round_.num_planned
    assert concerned(desk, e.SampleFinished(lease, 90), now) is None
    round_.next_hand_back_share = 1.0 / round_.num_planned
    assert concerned(desk, e.SampleFinished(lease, 90), now) == [7]
    manager.service.close()


def test_a_worker_that_has_all_that_it_is_trusted_with_earns_more_within_a_few_heartbeats(tmp_path):
    """Long before its first answer ends, and although nothing depends on its news."""
    domains = (structs.replace(CONFIG.domains[0], prompts_per_step=30),)
    manager = Manager(tmp_path, 0, structs.replace(BEATING, domains=domains))
    manager.workers["a"] = worker = Worker(manager.service, "a", slots=100)
    for num_known in (credit.START, 2 * credit.START, 4 * credit.START):
        manager.commit()
        manager.commit()
        assert len(worker.at) == num_known
        pass_time(manager, 2.1)
        for lease, at in list(worker.at.items()):
            worker.say(tokens_frame(lease, at, [1, 2, 3]))
            worker.at[lease] = at + 3
        worker.say(REPORT)
    manager.service.close()


def test_a_report_is_told_once_however_often_its_worker_is_told_of(tmp_path):
    """Two in a row of samples that wait mean a full engine; one may mean that it computes prompts."""
    manager = brought_and_untold(tmp_path)
    worker, lobby = manager.workers["a"], manager.lobby
    desk = lobby.need_run().desk
    (seat,) = desk.seats
    worker.say(frames.Report(1, 3, 0.5, 0, 1.0))
    told = [gather(desk, [worker.session], lobby.need_run().payload.tokens, lobby.now(), [seat]) for _ in range(3)]
    assert [len(one.engines) for one in told if one is not None] == [1, 0, 0]
    worker.say(frames.Report(1, 3, 0.5, 0, 1.0))
    again = gather(desk, [worker.session], lobby.need_run().payload.tokens, lobby.now(), [seat])
    assert again is not None
    assert again.engines == ((0, 3, 0),)
    manager.service.close()


def brought_and_untold(run_dir: Path) -> Manager:
    manager = Manager(run_dir, 0, BEATING)
    manager.workers["a"] = worker = Worker(manager.service, "a", slots=100)
    manager.commit()
    manager.commit()
    worker.say(tokens_frame(min(worker.at), 0, list(range(90))))
    manager.commit()
    assert untold(manager) == 90
    return manager


def check_that_it_is_nobodys_time(lobby: Lobby, absence_s: float) -> None:
    desk = lobby.need_run().desk
    assert lobby.now() - desk.state.clock.step_began_at < 5.0
    assert sum(desk.ledger.workers[WorkerName("a")].seconds.values()) < 5.0
    assert [one.unheard for one in desk.seats.values()] == [True]
    assert lobby.now() > absence_s


def test_an_absence_is_nobodys_time_though_tokens_had_come_that_nobody_had_told(tmp_path):
    manager = brought_and_untold(tmp_path)
    manager.service.close()
    then = time.time() - 1000.0
    for path in (tmp_path / "journal").iterdir():
        os.utime(path, (then, then))
    again = Service(tmp_path, SMALL_FILES)
    check_that_it_is_nobodys_time(again.lobby, 1000.0)
    again.close()


def test_nor_is_the_time_that_the_whole_process_stood_still(tmp_path):
    manager = brought_and_untold(tmp_path)
    manager.workers["a"].say(REPORT)
    manager.lobby.set_clock(manager.lobby.now() + 1000.0)
    manager.lobby.need_run().stood_still(1000.0)
    manager.lobby.need_run().tell_news(manager.workers["a"].session)
    check_that_it_is_nobodys_time(manager.lobby, 1000.0)
    manager.workers["a"].say(REPORT)
    assert not any(one.unheard for one in manager.lobby.need_run().desk.seats.values())
    manager.service.close()


def test_a_worker_may_come_back_after_a_restart_with_more_leases_that_are_over_than_it_has_now(tmp_path):
    manager = brought_and_untold(tmp_path)
    manager.service.close()
    again = Service(tmp_path, SMALL_FILES)
    (session,) = again.lobby.workers.values()
    line = Line()
    session.connect(line)
    held = columns.pack_column("<u8", list(range(1, session.facts.slots + 1)))
    from_workers.said(again.lobby, session, line, frames.encode(frames.Hello(0, held)))
    assert again.lobby.refused == {}
    assert session.greeted
    again.close()


def untold(manager: Manager) -> int:
    """Tokens of running samples that the scheduler has not heard of. Of those that wait it has heard all."""
    desk, texts = manager.lobby.need_run().desk, manager.lobby.need_run().payload.tokens
    behind = {one.id: texts[one.id].num_tokens - one.num_tokens for one in desk.samples.values() if one.id in texts}
    assert not any(num for sample, num in behind.items() if desk.samples[sample].state == "waiting")
    return sum(num for sample, num in behind.items() if desk.samples[sample].state in ("leased", "stopping"))


@given(st.integers(0, 10_000))
@settings(max_examples=25)
def test_every_token_is_accounted_for_and_the_journal_replays_to_the_same_commands(tmp_path_factory, seed: int):
    run_dir = tmp_path_factory.mktemp("run") / "run"
    config = structs.replace(CONFIG, fleet_rules=FleetRules(heartbeat_timeout_s=3.0, stall_timeout_s=5.0))
    manager = Manager(run_dir, seed, config)
    for _ in range(150):
        manager.play_all()
        arrived = manager.lobby.need_run().scheduler.ledger.tokens_arrived
        assert arrived + untold(manager) == manager.lobby.need_run().num_tokens
    manager.service.close()
    assert replay(open_journals(run_dir)).first_difference is None


def test_leases_that_gained_the_same_are_one_run():
    gains = [(LeaseId(10), 2), (LeaseId(11), 2), (LeaseId(40), 2), (LeaseId(41), 5), (LeaseId(90), 0)]
    assert runs_of(gains) == (10, 31, 2, 1, 5, 49, 0)
