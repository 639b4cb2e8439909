"""Whose fault a failed lease is: the worker's, the group's or the sample's."""

from tests.unit.driver import Driver, leased, only, small_config

from polyrl.ids import WorkerName
from polyrl.scheduling.core import commands as c
from polyrl.scheduling.core.parameters import FleetRules, RoundsConfig
from polyrl.scheduling.parts import failures, leases
from polyrl.scheduling.scheduler import Scheduler


def fleet(*names: str, prompts: int = 4, samples: int = 2, slots: int = 64, **others) -> Driver:
    run = Driver(small_config(prompts=prompts, samples=samples, **others))
    run.begin(steps=0)
    for name in names:
        run.join(name, slots=slots)
    run.request(0)
    return run


def is_there(run: Driver, name: str) -> bool:
    return WorkerName(name) in run.scheduler.desk.state.fleet.by_name


def refuse(run: Driver, *names: str) -> None:
    """Whatever these workers have, they refuse by turns, until they are given nothing more."""
    while mine := [held for name in names if (held := _held(run, name))]:
        for held in mine:
            run.end(held[0], at=0, reason="refused")


def _held(run: Driver, name: str) -> list[str]:
    return [one for one, worker in run.workers.items() if worker == name and _runs(run, one)]


def _runs(run: Driver, sample: str) -> bool:
    return run.leases[sample] in run.scheduler.desk.leases


def test_a_sample_that_failed_goes_to_another_worker_and_not_back_to_the_empty_one():
    run = fleet("a", "b", prompts=2)
    said = run.end("1/0", at=7, reason="engine_failed")
    assert leased(said) == {"1/0": ("b", 7)}
    said = run.end("1/0", at=9, reason="engine_failed")
    assert list(leased(said)) == ["1/0"], "both failed it: anybody may have it"


def test_a_sample_that_failed_waits_for_one_that_did_not_fail_it_and_is_full():
    run = fleet("bad", prompts=2, samples=1)
    run.join("good", slots=1)
    run.request(1)
    assert leased(run.end("1/0", at=3, reason="engine_failed")) == {"1/0": ("good", 3)}
    assert leased(run.end("2/0", at=4, reason="engine_failed")) == {}
    run.wait(10.0)
    assert run.sample("2/0").state == "waiting"
    loaded = Scheduler.load(run.scheduler.save())
    assert loaded.desk.failed_wait
    assert leased(run.finish("1/0", at=9)) == {"2/0": ("good", 4)}


def test_who_failed_it_gets_it_again_once_nobody_else_can_write():
    run = fleet("bad", prompts=2, samples=1)
    run.join("good", slots=1)
    run.end("1/0", at=3, reason="engine_failed")
    run.end("2/0", at=4, reason="engine_failed")
    said = run.leave("good")
    assert leased(said) == {"1/0": ("bad", 3), "2/0": ("bad", 4)}


def test_a_worker_that_refuses_everything_costs_no_sample_and_is_given_up_for_good_when_others_answer():
    run = fleet("good", "bad", prompts=4)
    refuse(run, "bad")
    assert is_there(run, "bad"), "it may be the prompts that are to blame"
    groups = sorted({one.split("/")[0] for one in run.workers})
    assert len(groups) == 4 and set(run.workers.values()) == {"good"}
    said = run.finish(*(f"{group}/{index}" for group in groups for index in range(2)))
    (forgotten,) = only(said, c.ForgetWorker)
    assert (forgotten.worker, forgotten.rejoin) == ("bad", False)
    assert "3 groups in a row" in forgotten.why
    assert run.ledger.samples_discarded == {} and run.ledger.prompts_dropped == {}


def test_several_workers_that_refuse_everything_do_not_cover_for_each_other():
    run = fleet("good", "bad", "worse", prompts=12)
    refuse(run, "bad", "worse")
    open_groups = [str(one) for one in run.scheduler.desk.groups]
    run.finish(*(f"{group}/{index}" for group in open_groups for index in range(2)))
    assert not is_there(run, "bad") and not is_there(run, "worse") and is_there(run, "good")
    assert run.ledger.prompts_dropped.get("refused", 0) <= 1


def test_an_answer_clears_a_worker_of_what_it_failed_before():
    run = fleet("a", "b", prompts=6, samples=1, slots=3)
    mine = [one for one, worker in run.workers.items() if worker == "a"]
    for sample in mine[:2]:
        run.end(sample, at=0, reason="engine_failed")
    run.finish(mine[2])
    for sample in run.workers:
        run.finish(sample)
    assert is_there(run, "a")


def test_a_group_that_two_workers_refuse_is_dropped_as_a_whole_and_nobody_is_blamed():
    run = fleet("a", "b", prompts=1, samples=8)
    said: list[c.Command] = []
    while running := [one for one in run.workers if one.startswith("1/") and _runs(run, one)]:
        said += run.end(running[0], at=0, reason="refused")
    assert [one.why for one in only(said, c.DropGroup)] == ["a second worker refused it"]
    assert run.ledger.prompts_dropped == {"refused": 1} and run.ledger.samples_discarded == {"refused": 8}
    assert is_there(run, "a") and is_there(run, "b")
    run.complete(2, samples=8)
    assert is_there(run, "a") and is_there(run, "b")


def test_a_group_that_the_only_worker_refuses_is_dropped_at_once():
    run = fleet("a", rounds=RoundsConfig(samples_per_prompt=2, refill=False))
    said = run.end("1/0", at=0, reason="refused")
    assert [one.why for one in only(said, c.DropGroup)] == ["the only worker that is there refused it"]
    assert is_there(run, "a")


def test_a_sample_that_fails_three_times_is_dropped_and_the_only_worker_stays():
    run = fleet("a", prompts=1, samples=4)
    for _ in range(3):
        run.end("1/0", at=0, reason="engine_failed")
    assert run.ledger.samples_discarded == {"failed": 1}
    assert is_there(run, "a"), "nobody has shown that it can be done"


def test_when_everybody_fails_everything_nobody_is_given_up_and_the_round_ends_empty():
    """As with weights that give no numbers."""
    run = fleet("a", "b", prompts=2, samples=2, fleet_rules=FleetRules(max_failures=2))
    for _ in range(1000):
        running = [one for one in run.leases if _runs(run, one)]
        if not running:
            break
        run.end(running[0], at=0, reason="engine_failed")
    assert [one.num_groups for one in only(run.said, c.CloseRound)] == [0]
    assert is_there(run, "a") and is_there(run, "b")
    assert run.ledger.prompts_dropped == {"failed": 4}, "two, and two in their place"


def test_who_refuses_one_sample_after_the_other_costs_their_writer_nothing():
    """Otherwise it could have anybody given up that brings no answer for a while, for the price of its own place."""
    run = fleet("writer", prompts=4, samples=1)
    written = ("1/0", "2/0", "3/0")
    run.bring("writer", s1_0=100, s2_0=100, s3_0=100)
    run.join("refuses", slots=64)
    run.join("good", slots=64)
    desk = run.scheduler.desk
    for name in written:
        run.sample(name).target = desk.state.fleet.by_name[WorkerName("refuses")]
        leases.hand_over(desk, run.sample(name), "another has room", run.now)
        run.end(name, at=100)
    assert [run.workers[name] for name in written] == ["refuses"] * 3
    for name in written:
        run.end(name, at=100, reason="refused")
    run.finish(*written)
    assert is_there(run, "writer")
    assert not is_there(run, "refuses")


# Workers that have answered nothing

NEW = ("new", "newer", "newest")


def test_a_group_that_new_names_refuse_waits_for_the_worker_that_has_answered():
    run = fleet("good", prompts=3, samples=2, slots=1)
    run.finish("1/0")
    for name in NEW:
        run.join(name, slots=64)
    refuse(run, *NEW)
    assert run.ledger.prompts_dropped == {} and run.ledger.samples_discarded == {}
    while mine := _held(run, "good"):
        run.finish(*mine)
    assert run.ledger.prompts_dropped == {} and len(only(run.said, c.Score)) == 6


def test_a_group_that_new_names_refuse_waits_for_the_worker_that_still_pulls():
    run = Driver(small_config(prompts=2, samples=2))
    run.begin(steps=0)
    run.join("good", ready=False)
    for name in NEW:
        run.join(name, slots=64)
    run.request(0)
    refuse(run, *NEW)
    assert run.ledger.prompts_dropped == {}
    assert len(leased(run.install("good"))) == 4


def test_the_trainers_devices_come_back_for_samples_that_every_other_worker_has_failed():
    run = Driver(small_config(prompts=2, samples=2))
    run.begin(steps=0)
    run.join("local", local=True)
    for name in NEW:
        run.join(name, slots=64)
    run.request(0)
    run.wait(60.0)
    for sample in _held(run, "local"):
        run.end(sample, at=0)
    run.turn("local", "training")
    refuse(run, *NEW)
    assert run.duty("local") == "to_generating" and run.ledger.prompts_dropped == {}
    run.turn("local", "generating")
    assert len(_held(run, "local")) == 4


def test_a_worker_whose_answers_are_rejected_is_believed_no_more_than_a_new_one():
    run = fleet("good", prompts=1, samples=1)
    run.finish("1/0")
    assert run.scheduler.desk.seats[1].is_proven
    failures.rejected(run.scheduler.desk, run.scheduler.desk.seats[1])
    assert not run.scheduler.desk.seats[1].is_proven


def test_a_sample_that_gets_a_token_now_and_then_goes_to_another_worker_and_not_back():
    """Its worker brings two tokens a second of another one."""
    run = fleet("slow", prompts=2, samples=1, slots=2)
    run.wait(1.0)
    for turn in range(1, 61):
        run.wait(0.1)
        run.bring("slow", s1_0=10 * turn)
    run.join("good", slots=2)
    for turn in range(61, 190):
        run.wait(1.5)
        run.bring("slow", s1_0=3 * turn + 417, s2_0=1 + turn // 60)
    assert run.workers["2/0"] == "good" and run.workers["1/0"] == "slow"


def test_what_a_new_name_takes_with_it_and_brought_nothing_of_waits_for_the_worker_that_has_answered():
    """Otherwise the next new name had it, and the one after that."""
    run = fleet("good", prompts=3, samples=2, slots=1)
    run.finish("1/0")
    run.join("new", slots=64)
    begun, *idle = _held(run, "new")
    run.bring("new", **{f"s{begun.replace('/', '_')}": 3})
    run.join("newer", slots=64)
    assert leased(run.leave("new")) == {begun: ("newer", 3)}
    assert [run.sample(one).state for one in idle] == ["waiting"] * 3
    run.finish(*_held(run, "good"))
    assert _held(run, "good") == [idle[0]]


def test_what_stalls_on_a_new_name_waits_for_the_worker_that_has_answered():
    run = fleet("good", prompts=2, samples=2, slots=1, fleet_rules=FleetRules(stall_timeout_s=5.0))
    run.finish("1/0")
    run.join("new", slots=64)
    idle = _held(run, "new")
    run.bring("new", **{f"s{idle[0].replace('/', '_')}": 3})
    run.join("newer", slots=64)
    for at in range(1, 14):
        run.wait(1.0)
        run.bring("good", s1_1=at)
    assert not is_there(run, "new")
    assert [run.sample(one).state for one in idle] == ["waiting"] * 2


def test_where_nobody_has_answered_another_name_gets_what_one_takes_with_it():
    run = fleet("new", "newer", prompts=2, samples=1)
    assert list(leased(run.leave("new")).values()) == [("newer", 0)]
