"""What the trainer's own devices do: seed, hand over, train, and come back when nobody else is there."""

from typing import Literal

from tests.unit.driver import Driver, leased, only, small_config

from polyrl.ids import GroupId, Step, Version, WorkerName
from polyrl.scheduling.core import commands as c
from polyrl.scheduling.core import events as e
from polyrl.scheduling.core.fleet import Speed
from polyrl.scheduling.core.parameters import HandBackConfig, SeedingConfig


def seeding(mode: Literal["fixed", "whole_round"] = "fixed", fixed_s=20.0, *, prompts=2, samples=1, **others) -> Driver:
    config = SeedingConfig(mode=mode, fixed_s=fixed_s)
    return Driver(small_config(prompts=prompts, samples=samples, seeding=config, **others))


def test_the_trainers_devices_generate_first_and_hand_over_when_the_window_ends():
    run = seeding(fixed_s=20.0)
    run.begin()
    assert leased(run.join("t", local=True, slots=2)) == {"1/0": ("t", 0), "2/0": ("t", 0)}
    run.join("a")
    run.bring("t", s1_0=5)
    assert not only(run.wait(19.0), c.HandOver)
    assert len(only(run.wait(2.0), c.HandOver)) == 2
    assert leased(run.end("1/0", at=30)) == {"1/0": ("a", 30)}
    assert run.duty("t") == "stopping"
    said = run.end("2/0", at=8)
    assert leased(said) == {"2/0": ("a", 8)}
    assert [one.worker for one in only(said, c.StartTraining)] == ["t"]
    run.turn("t", "training")
    assert run.duty("t") == "training"


def test_with_zero_workers_the_trainers_devices_generate_the_whole_round():
    run = seeding(fixed_s=5.0)
    run.begin()
    run.join("t", local=True)
    for tokens in range(10, 100, 10):
        run.wait(50.0)
        run.bring("t", s1_0=tokens, s2_0=tokens)
    assert not only(run.said, c.HandOver)
    said = run.complete(1, 2, samples=1)
    assert only(said, c.CloseRound)
    assert [one.worker for one in only(said, c.StartTraining)] == ["t"]


def test_a_window_that_ends_while_the_fleet_still_pulls_is_kept_open():
    run = seeding(fixed_s=5.0)
    run.begin()
    run.join("t", local=True)
    run.join("a", ready=False)
    assert not only(run.wait(30.0), c.HandOver)
    run.install("a")
    assert only(run.wait(3.0), c.HandOver)


def test_a_worker_that_joins_in_an_unbounded_window_gives_it_an_end():
    run = seeding(fixed_s=20.0)
    run.begin()
    run.join("t", local=True)
    run.wait(60.0)
    run.join("a")
    assert only(run.wait(0.1), c.HandOver)


def test_seeding_for_the_whole_round_never_hands_over():
    run = seeding("whole_round")
    run.begin()
    run.join("t", local=True)
    run.join("a")
    run.wait(100.0)
    assert not only(run.said, c.HandOver)


def test_the_devices_come_back_when_the_fleet_goes_to_zero():
    run = seeding(fixed_s=1.0)
    run.begin()
    run.join("t", local=True)
    run.join("a")
    run.wait(2.0)
    run.end("1/0", at=4)
    run.end("2/0", at=6)
    run.turn("t", "training")
    said = run.leave("a")
    assert [one.worker for one in only(said, c.StartGenerating)] == ["t"]
    assert leased(run.turn("t", "generating")) == {"2/0": ("t", 6), "1/0": ("t", 4)}


def test_the_devices_come_back_when_all_others_are_about_to_leave_and_samples_wait():
    run = seeding(fixed_s=1.0, hand_back=HandBackConfig(come_back_after_s=1e6))
    run.begin()
    run.join("t", local=True)
    run.join("a", slots=1)
    run.wait(2.0)
    run.end("1/0", at=4)
    run.end("2/0", at=6)
    run.turn("t", "training")
    assert not only(run.drain("a", notice_s=30.0), c.StartGenerating)
    assert [one.worker for one in only(run.wait(25.0), c.StartGenerating)] == ["t"]  # and it has 3 s left


def test_the_devices_finish_a_micro_batch_before_they_come_back():
    run = seeding(fixed_s=1.0, prompts=3)
    run.begin()
    run.join("t", local=True)
    run.join("a", slots=8)
    run.finish("1/0")
    run.reward("1/0")
    run.wait(2.0)
    for sample in ("2/0", "3/0"):
        if run.workers[sample] == "t":
            run.end(sample, at=4)
    run.turn("t", "training")
    run.take(0, 1)
    assert not only(run.leave("a"), c.StartGenerating)
    assert not only(run.wait(0.5), c.StartGenerating)
    (back,) = only(run.tell(e.MicroBatchTrained(Step(0))), c.StartGenerating)
    assert back.why == "samples wait and no other worker is there"


def test_all_devices_with_nothing_to_train_for_a_while_generate_again():
    run = seeding(fixed_s=1.0, prompts=2, balance=True, hand_back=HandBackConfig(come_back_after_s=10.0))
    run.tell(e.VersionPublished(Version(0)))
    run.join("t", local=True)
    run.request(0)
    run.join("a", slots=1)
    run.wait(2.0)
    run.end("1/0", at=4)
    run.end("2/0", at=4)
    run.turn("t", "training")
    assert not only(run.wait(9.0), c.StartGenerating)
    (back,) = only(run.wait(5.0), c.StartGenerating)
    assert "nothing was there to train" in back.why


def test_after_the_step_the_devices_generate_again():
    run = seeding(fixed_s=20.0, prompts=1)
    run.begin()
    run.join("t", local=True)
    run.complete(1, samples=1)
    run.turn("t", "training")
    run.take(0, 1)
    said = run.trained(0)
    assert [one.why for one in only(said, c.StartGenerating)] == ["the step is trained"]


def test_devices_that_do_not_turn_round_in_five_minutes_are_given_up():
    run = seeding(prompts=1)
    run.begin()
    run.join("t", local=True)
    run.complete(1, samples=1)
    assert run.duty("t") == "to_training"
    assert [one.worker for one in only(run.wait(301.0), c.ForgetWorker)] == ["t"]


def test_a_repeated_change_of_duty_is_late_news():
    run = seeding(prompts=1)
    run.begin()
    run.join("t", local=True)
    run.turn("t", "training")
    assert (run.duty("t"), run.ledger.late_news) == ("generating", 1)


def hand_back(*, balance: bool = False, known: bool = True, **others) -> Driver:
    config = HandBackConfig(enabled=True, first_share=0.2, last_share=0.5, check_every_share=0.05, **others)
    whole = SeedingConfig(mode="whole_round")
    run = Driver(small_config(prompts=8, samples=1, hand_back=config, seeding=whole, balance=balance))
    run.begin()
    run.join("t", local=True, slots=4)
    run.join("u", local=True, slots=4)
    if known:
        for worker in run.scheduler.desk.state.fleet.local():
            worker.speed.observe(1, 0.01)
            worker.speed.observe(4, 0.01)
    return run


def test_no_device_is_handed_back_before_it_is_known_how_fast_the_others_are():
    run = hand_back(known=False)
    assert not only(run.finish("1/0", "2/0", "5/0", "3/0"), c.HandOver)


def test_a_device_is_handed_back_when_the_other_holds_what_still_runs():
    run = hand_back()
    run.finish("1/0", "2/0", "5/0")
    assert not only(run.said, c.HandOver), "five samples are too many for four slots"
    stopped = only(run.finish("3/0"), c.HandOver)
    assert [(one.worker, one.why) for one in stopped] == [("t", "1 of 2 local workers hold what still runs")]
    said = run.end("4/0", at=9)
    assert leased(said) == {"4/0": ("u", 9)}
    assert [one.worker for one in only(said, c.StartTraining)] == ["t"]


def test_of_replicas_that_turn_to_generating_together_the_first_leaves_the_others_their_share():
    run = Driver(small_config(prompts=8, samples=1, seeding=SeedingConfig(mode="whole_round"), balance=False))
    run.begin()
    for name in ("t", "u", "v"):
        run.join(name, local=True, ready=False)
    assert len(leased(run.turn("u", "generating"))) == 3
    assert len(leased(run.turn("t", "generating"))) == 3
    assert len(leased(run.turn("v", "generating"))) == 2


def test_what_waits_for_a_replica_that_does_not_turn_goes_to_the_others_as_their_samples_end():
    run = Driver(small_config(prompts=8, samples=1, seeding=SeedingConfig(mode="whole_round"), balance=False))
    run.begin()
    run.join("t", local=True, ready=False)
    run.join("u", local=True, ready=False)
    first = leased(run.turn("t", "generating"))
    assert len(first) == 4
    assert len(leased(run.finish(*list(first)[:2]))) == 1, "t holds 2 of 6 and may have 3"
    assert len(leased(run.leave("u"))) == 3


def test_a_device_is_not_handed_back_when_its_samples_do_not_fit_into_the_other_cache():
    config = HandBackConfig(enabled=True)
    run = Driver(small_config(prompts=8, samples=1, hand_back=config, seeding=SeedingConfig(mode="whole_round")))
    run.begin()
    run.join("t", local=True, slots=8, kv_tokens=2000)
    run.join("u", local=True, slots=8, kv_tokens=2000)
    run.finish("1/0", "2/0", "3/0", "4/0")
    assert not only(run.said, c.HandOver)


def test_nothing_is_handed_back_unless_asked_for():
    run = Driver(small_config(prompts=8, samples=1, seeding=SeedingConfig(mode="whole_round")))
    run.begin()
    run.join("t", local=True)
    run.join("u", local=True)
    run.finish("1/0", "2/0", "3/0", "4/0")
    assert not only(run.said, c.HandOver)


def test_the_time_of_a_local_worker_that_died_generating_ends_with_it():
    run = seeding("whole_round", prompts=1)
    run.begin()
    run.join("t", local=True)
    run.wait(10.0)
    run.leave("t")
    run.join("a")
    run.wait(50.0)
    run.complete(1, samples=1)
    run.take(0, 1)
    (report,) = only(run.trained(0), c.ReportStep)
    assert report.line.seed_window_s == 10.0


def test_with_overlap_and_zero_workers_training_comes_first_and_later_samples_go_on_where_they_stopped():
    run = seeding("whole_round", max_staleness=1)
    run.begin(steps=2)
    assert leased(run.join("t", local=True)) == {f"{group}/0": ("t", 0) for group in (1, 2, 3, 4)}
    run.bring("t", s3_0=7, s4_0=9)
    said = run.complete(1, 2, samples=1)
    assert {one.lease for one in only(said, c.HandOver)} == {run.leases["3/0"], run.leases["4/0"]}
    run.end("3/0", at=7)
    assert [one.worker for one in only(run.end("4/0", at=9), c.StartTraining)] == ["t"]
    run.turn("t", "training")
    run.take(0, 1, 2)
    run.tell(e.MicroBatchTrained(Step(0)))
    assert run.duty("t") == "training"
    assert only(run.trained(0), c.StartGenerating)
    assert leased(run.turn("t", "generating")) == {"4/0": ("t", 9), "3/0": ("t", 7)}
    assert run.ledger.tokens_discarded == {}


def test_with_overlap_the_devices_seed_the_round_that_opens_with_the_new_version():
    run = seeding(fixed_s=20.0, max_staleness=1)
    run.begin(steps=2)
    run.join("a")
    run.join("t", local=True)
    run.complete(1, 2, samples=1)
    run.turn("t", "training")
    run.take(0, 1, 2)
    run.tell(e.MicroBatchTrained(Step(0)))
    said = run.tell(e.StepTrained(Step(0)))
    assert [one.why for one in only(said, c.StartGenerating)] == [
        "the step is trained, and a round opens with its version"
    ]
    run.turn("t", "generating")
    run.tell(e.VersionPublished(Version(1)))
    assert leased(run.request(2)) == {"5/0": ("t", 0), "6/0": ("t", 0)}


def test_with_overlap_the_devices_train_at_once_if_the_next_round_is_complete():
    run = seeding(fixed_s=20.0, max_staleness=1)
    run.begin(steps=2)
    run.join("a")
    run.join("t", local=True)
    run.complete(1, 2, 3, 4, samples=1)
    run.turn("t", "training")
    run.take(0, 1, 2)
    run.tell(e.MicroBatchTrained(Step(0)))
    run.trained(0)
    assert run.duty("t") == "training"


def test_a_replica_that_has_nothing_to_train_generates_again_while_samples_wait():
    run = hand_back(come_back_after_s=10.0)
    run.finish("1/0", "2/0", "5/0", "3/0")
    run.end("4/0", at=9)
    run.turn("t", "training")
    assert not only(run.wait(11.0), c.StartGenerating), "the other one holds all that runs"
    (back,) = only(run.leave("u"), c.StartGenerating)
    assert back.worker == "t"


def test_a_replica_that_has_nothing_to_train_generates_again_if_that_makes_the_others_samples_faster():
    run = hand_back(come_back_after_s=10.0, balance=True)
    run.finish("1/0", "2/0", "5/0", "3/0")
    run.end("4/0", at=9)
    run.turn("t", "training")
    fleet = run.scheduler.desk.state.fleet
    other = fleet.seats[fleet.by_name[WorkerName("u")]]
    other.speed = Speed([0.01, 0.01, 0.04], [1.0, 2.0, 4.0])
    assert not only(run.wait(8.0), c.StartGenerating), "it may still get something to train"
    (back,) = only(run.wait(4.0), c.StartGenerating)
    assert back.worker == "t" and "nothing was there to train" in back.why


def test_replicas_take_micro_batches_at_different_times_and_a_busy_one_finishes_its_own_first():
    run = hand_back()
    run.finish("1/0", "2/0", "5/0", "3/0")
    run.end("4/0", at=9)
    run.turn("t", "training")
    run.reward("1/0", "2/0")
    run.tell(e.GroupsTaken(Step(0), (GroupId(1),), WorkerName("t")))
    assert not only(run.leave("u"), c.StartGenerating)
    assert only(run.tell(e.MicroBatchTrained(Step(0), WorkerName("t"))), c.StartGenerating)


def test_a_replica_without_work_comes_back_for_waiting_samples_while_another_trains():
    run = Driver(small_config(prompts=4, samples=1, seeding=SeedingConfig(mode="whole_round")))
    run.begin()
    run.join("t", local=True, slots=1)
    run.join("u", local=True, slots=1)
    run.join("a", slots=2)
    run.finish("1/0", "2/0", "3/0")
    run.reward("1/0", "2/0", "3/0")
    for _ in range(3):
        run.wait(3.0)
    idle = [one.worker for one in only(run.said, c.StartTraining)]
    assert len(idle) == 2
    for name in idle:
        run.turn(name, "training")
    run.tell(e.GroupsTaken(Step(0), (GroupId(1),), WorkerName(idle[0])))
    (back,) = only(run.leave("a"), c.StartGenerating)
    assert back.worker == idle[1], "the other one has a micro-batch to finish"


def test_the_time_of_training_is_that_in_which_any_replica_trains():
    run = hand_back()
    run.complete(*range(1, 9), samples=1)
    for name in ("t", "u"):
        run.turn(name, "training")
    run.tell(e.GroupsTaken(Step(0), (GroupId(1), GroupId(2)), WorkerName("t")))
    run.wait(2.0)
    run.tell(e.GroupsTaken(Step(0), tuple(map(GroupId, range(3, 9))), WorkerName("u")))
    run.wait(2.0)
    run.tell(e.MicroBatchTrained(Step(0), WorkerName("t")))
    run.wait(3.0)
    run.tell(e.MicroBatchTrained(Step(0), WorkerName("u")))
    (report,) = only(run.trained(0), c.ReportStep)
    assert report.line.train_s == 7.0
    assert report.line.wait_train_s == 0.0
