"""The life of a sample, end to end, in small scripts: lost, drained, restarted, raced, scored, refilled, stalled."""

import pytest
from msgspec import structs
from tests.unit.driver import Driver, leased, only, small_config

from polyrl.errors import LawViolation
from polyrl.ids import GroupId, Incarnation, LeaseId, SampleId, Step, Version, WorkerName, show_sample
from polyrl.scheduling.core import commands as c
from polyrl.scheduling.core import events as e
from polyrl.scheduling.core.parameters import FleetRules, RewardConfig, RoundsConfig
from polyrl.scheduling.parts.scoring import case_of
from polyrl.scheduling.scheduler import Scheduler


def test_a_sample_is_generated_scored_delivered_taken_and_trained():
    run = Driver(small_config(prompts=1, samples=2))
    run.begin()
    assert leased(run.join("a")) == {"1/0": ("a", 0), "1/1": ("a", 0)}
    run.finish("1/0", at=30)
    said = run.finish("1/1", at=50)
    assert [one.sample % 1024 for one in only(said, c.Score)] == [1]
    assert not only(run.reward("1/0"), c.DeliverGroup)
    said = run.reward("1/1")
    assert [(one.group, len(one.samples)) for one in only(said, c.DeliverGroup)] == [(1, 2)]
    assert [(one.step, one.num_groups) for one in only(said, c.CloseRound)] == [(0, 1)]
    run.take(0, 1)
    (report,) = only(run.trained(0), c.ReportStep)
    assert (report.line.tokens_trained, report.line.num_samples, report.line.longest) == (80, 2, 50)
    assert (run.ledger.samples_trained, run.ledger.prompts_trained, run.ledger.tokens_kept) == (2, 1, 80)


def test_a_lost_worker_hands_its_samples_on_where_they_stopped():
    run = Driver(small_config(prompts=1, samples=2))
    run.begin()
    run.join("a")
    run.bring("a", s1_0=120, s1_1=40)
    run.join("b")
    assert leased(run.leave("a")) == {"1/0": ("b", 120), "1/1": ("b", 40)}
    assert run.ledger.moves == {"lost": 2}
    assert run.ledger.tokens_reprefilled == 160


def test_a_worker_that_is_not_heard_of_is_missed_after_three_seconds():
    run = Driver(small_config(prompts=1, samples=1))
    run.begin()
    run.join("a")
    run.join("b")
    run.bring("a", s1_0=7)
    run.silence("a")
    assert not run.wait(2.5)
    said = run.wait(1.0)
    assert [one.worker for one in only(said, c.ForgetWorker)] == ["a"]
    assert leased(said) == {"1/0": ("b", 7)}


def test_without_migration_a_moved_sample_starts_again_and_its_tokens_are_ledgered():
    run = Driver(small_config(prompts=1, samples=1, migrate=False))
    run.begin()
    run.join("a")
    run.bring("a", s1_0=300)
    run.join("b")
    assert leased(run.leave("a")) == {"1/0": ("b", 0)}
    assert run.ledger.tokens_discarded == {"preemption": 300}


def test_a_drained_worker_hands_over_at_its_current_token_and_is_released():
    run = Driver(small_config(prompts=1, samples=1))
    run.begin()
    run.join("a")
    run.bring("a", s1_0=100)
    run.join("b")
    said = run.drain("a")
    assert [one.lease for one in only(said, c.HandOver)] == [run.leases["1/0"]]
    assert not only(said, c.ReleaseWorker)
    said = run.end("1/0", at=131)
    assert leased(said) == {"1/0": ("b", 131)}
    assert [one.worker for one in only(said, c.ReleaseWorker)] == ["a"]
    run.leave("a")
    assert run.ledger.workers[WorkerName("a")].num_losses == 0


def test_a_drained_worker_that_dies_first_is_not_released_but_replaced():
    run = Driver(small_config(prompts=1, samples=1))
    run.begin()
    run.join("a")
    run.bring("a", s1_0=100)
    run.drain("a")
    said = run.join("a")
    assert not only(said, c.ReleaseWorker)
    assert not only(said, c.ForgetWorker), "a command goes by name: it would hit the new process"
    assert leased(said) == {"1/0": ("a", 100)}
    assert run.ledger.workers[WorkerName("a")].num_losses == 1


def test_a_hand_over_that_is_not_answered_ends_after_ten_seconds():
    run = Driver(small_config(prompts=1, samples=1))
    run.begin()
    run.join("a")
    run.bring("a", s1_0=100)
    run.join("b")
    run.drain("a")
    assert not leased(run.wait(9.0))
    assert leased(run.wait(2.0)) == {"1/0": ("b", 100)}
    assert run.ledger.moves == {"hand_over_timeout": 1}


def test_a_worker_that_restarts_before_it_is_missed_loses_its_samples_and_starts_anew():
    run = Driver(small_config(prompts=1, samples=1))
    run.begin()
    run.join("a")
    run.bring("a", s1_0=55)
    old = run.leases["1/0"]
    assert leased(run.join("a")) == {"1/0": ("a", 55)}
    assert run.leases["1/0"] != old
    assert (run.ledger.workers[WorkerName("a")].num_joins, run.ledger.workers[WorkerName("a")].num_losses) == (2, 1)


def test_late_news_of_a_dead_lease_or_an_earlier_life_changes_nothing_but_its_count():
    run = Driver(small_config(prompts=1, samples=1))
    run.begin()
    run.join("a")
    run.bring("a", s1_0=55)
    old = run.leases["1/0"]
    run.join("a")
    for event in (
        e.SampleFinished(old, 90),
        e.LeaseEnded(old, 90, "handed_over"),
        e.TokensArrived(WorkerName("a"), Incarnation(1), (run.leases["1/0"],), (99,)),
        e.WorkerLeft(WorkerName("a"), Incarnation(1), "late"),
        e.WorkerJoined(WorkerName("a"), Incarnation(1), 8),
        e.WorkerJoined(WorkerName("a"), Incarnation(2), 8),
        e.VersionPublished(Version(0)),
        e.RoundRequested(Step(0)),
        e.StepTrained(Step(7)),
    ):
        before = run.ledger.late_news
        assert run.tell(event) == []
        assert run.ledger.late_news == before + 1
    assert run.sample("1/0").num_tokens == 55


def test_nobody_moves_somebody_elses_sample_on():
    run = Driver(small_config(prompts=1, samples=1))
    run.begin()
    run.join("a")
    run.join("b")
    run.tell(e.TokensArrived(WorkerName("b"), Incarnation(1), (run.leases["1/0"],), (500,)))
    assert run.sample("1/0").num_tokens == 0


@pytest.mark.parametrize("nonsense", [-5, 0, 19])
def test_progress_backwards_is_not_believed(nonsense):
    run = Driver(small_config(prompts=1, samples=1))
    run.begin()
    run.join("a")
    run.bring("a", s1_0=20)
    run.bring("a", s1_0=nonsense)
    assert run.sample("1/0").num_tokens == 20


def test_progress_beyond_the_cap_counts_up_to_the_cap():
    run = Driver(small_config(prompts=1, samples=1))
    run.begin()
    run.join("a")
    run.bring("a", s1_0=10**9)
    assert run.sample("1/0").num_tokens == 1000


def test_the_race_is_decided_by_the_order_of_answers_not_of_rewards():
    """Two places, three prompts: the third to have its answers is deferred, although its rewards would come first."""
    rounds = RoundsConfig(tail_batching="race", samples_per_prompt=2, prompt_factor=1.5, sample_factor=1.5)
    run = Driver(small_config(prompts=2, rounds=rounds))
    run.begin()
    run.join("a", slots=16)
    said = run.finish("1/2", "1/0")
    assert [one.lease for one in only(said, c.Abort)] == [run.leases["1/1"]]
    run.finish("3/0")
    run.reward("3/0")
    assert not only(run.said, c.DropGroup)
    said = run.finish("2/0", "2/1")
    assert [one.group for one in only(said, c.DropGroup)] == [3]
    assert [(one.prompt, one.times_deferred) for one in run.scheduler.desk.state.tail.deferred[0]] != []
    said = run.reward("2/0", "2/1", "1/0", "1/2")
    assert [one.group for one in only(said, c.DeliverGroup)] == [2, 1]
    assert only(said, c.CloseRound)
    assert run.ledger.samples_discarded == {"speculation": 2, "deferral": 3}


def test_a_failed_reward_is_not_a_zero_but_tried_again_and_then_dropped():
    run = Driver(small_config(prompts=1, samples=3, rewards=RewardConfig(max_attempts=2)))
    run.begin()
    run.join("a")
    run.finish("1/0", "1/1", "1/2")
    said = run.reward("1/0", outcome="infrastructure_failed")
    assert [(one.sample % 1024, one.attempt) for one in only(said, c.Score)] == [(0, 2)]
    run.reward("1/1", "1/2")
    said = run.reward("1/0", outcome="infrastructure_failed")
    (delivery,) = only(said, c.DeliverGroup)
    assert [sample % 1024 for sample in delivery.samples] == [1, 2]
    assert run.ledger.samples_discarded == {"reward_failed": 1}


def test_an_answer_that_can_have_no_reward_is_dropped_at_the_first_attempt():
    run = Driver(small_config(prompts=1, samples=3, rewards=RewardConfig(max_attempts=3)))
    run.begin()
    run.join("a")
    run.finish("1/0", "1/1", "1/2")
    run.reward("1/1", "1/2")
    said = run.reward("1/0", outcome="no_reward")
    assert only(said, c.Score) == [] and run.ledger.samples_discarded == {"reward_failed": 1}
    (delivery,) = only(said, c.DeliverGroup)
    assert [sample % 1024 for sample in delivery.samples] == [1, 2]


def test_the_answer_to_an_earlier_attempt_does_not_count():
    run = Driver(small_config(prompts=1, samples=1, rewards=RewardConfig(max_attempts=3)))
    run.begin()
    run.join("a")
    run.finish("1/0")
    run.reward("1/0", outcome="infrastructure_failed")
    assert run.tell(e.RewardFinished(run.sample("1/0").id, 1, "scored")) == []
    assert only(run.reward("1/0"), c.DeliverGroup)


def test_a_reward_that_nobody_answers_is_asked_for_again():
    run = Driver(small_config(prompts=1, samples=1))
    run.begin()
    run.join("a")
    run.finish("1/0")
    said = run.wait(200.0)
    assert [one.attempt for one in only(said, c.CancelScore)] == [1]
    assert [one.attempt for one in only(said, c.Score)] == [2]


def test_siblings_whose_rewards_nobody_answers_fall_together():
    run = Driver(small_config(prompts=1, samples=2, rewards=RewardConfig(max_attempts=1)))
    run.begin()
    run.join("a")
    run.finish("1/0", "1/1")
    said = run.wait(200.0)
    assert [one.group for one in only(said, c.DropGroup)] == [1]
    assert run.ledger.prompts_dropped == {"reward_failed": 1}
    assert run.ledger.samples_discarded == {"reward_failed": 2}


@pytest.mark.parametrize("outcome", ["timed_out", "crashed", "refused"])
def test_an_answer_that_breaks_its_own_reward_is_scored_like_any_other(outcome):
    run = Driver(small_config(prompts=1, samples=1))
    run.begin()
    run.join("a")
    run.finish("1/0")
    assert only(run.reward("1/0", outcome=outcome), c.DeliverGroup)


@pytest.mark.parametrize("cpu_s", [-1.0, float("nan"), float("inf")])
def test_a_reward_counts_although_its_clock_lies_or_nobody_looked_at_it(cpu_s):
    run = Driver(small_config(prompts=1, samples=1))
    run.begin()
    run.join("a")
    run.finish("1/0")
    said = run.tell(e.RewardFinished(run.sample("1/0").id, 1, "scored", correct=True, cpu_s=cpu_s))
    assert only(said, c.DeliverGroup)
    assert run.scheduler.desk.budgets.anchors == run.scheduler.desk.budgets.expected == {}


def test_rewards_beyond_the_pool_wait_for_a_place():
    run = Driver(small_config(prompts=1, samples=3, rewards=RewardConfig(slots=1)))
    run.begin()
    run.join("a")
    assert len(only(run.finish("1/0", "1/1", "1/2"), c.Score)) == 1
    assert len(only(run.reward("1/0"), c.Score)) == 1
    assert len(only(run.reward("1/1"), c.Score)) == 1
    assert only(run.reward("1/2"), c.DeliverGroup)


def test_of_rewards_that_wait_the_one_with_the_lowest_expected_cost_goes_first():
    run = Driver(small_config(prompts=4, samples=1, rewards=RewardConfig(slots=1)))
    run.begin()
    run.join("a")
    desk = run.scheduler.desk
    for group, seconds in ((1, 5.0), (2, 9.0), (3, 0.5), (4, 2.0)):
        desk.budgets.observe(case_of(desk, desk.groups[GroupId(group)]), seconds, correct=True)
    said = run.finish("1/0", "2/0", "3/0", "4/0")
    order = [one.sample for one in only(said, c.Score)]
    for _ in range(3):
        last = next(name for name in ("1/0", "2/0", "3/0", "4/0") if run.sample(name).id == order[-1])
        order += [one.sample for one in only(run.reward(last), c.Score)]
    first, *rest = order
    cheapest = [run.sample(name).id for name in ("3/0", "4/0", "1/0", "2/0")]
    assert len(order) == 4 and rest == [one for one in cheapest if one != first]


def test_rewards_wait_for_the_whole_round_when_they_are_not_scored_as_finished():
    run = Driver(small_config(prompts=1, samples=2, rewards=RewardConfig(as_finished=False)))
    run.begin()
    run.join("a")
    assert not only(run.finish("1/0"), c.Score)
    assert len(only(run.finish("1/1"), c.Score)) == 2


def test_a_rejected_group_is_replaced_by_a_fresh_prompt():
    run = Driver(small_config(prompts=2, samples=1))
    run.begin()
    run.join("a")
    run.complete(1, 2, samples=1)
    said = run.tell(e.GroupRejected(GroupId(1), "all rewards are equal"))
    (added,) = only(said, c.AddGroup)
    assert (added.group.group, added.group.num_samples) == (3, 1)
    assert leased(said) == {"3/0": ("a", 0)}
    said = run.complete(3, samples=1)
    assert [one.num_groups for one in only(said, c.CloseRound)] == [2]
    assert run.ledger.prompts_dropped == {"filtered": 1}


def test_samples_without_a_reward_of_their_group_leave_it_and_are_in_the_ledger():
    run = Driver(small_config(prompts=1, samples=3))
    run.begin()
    run.join("a")
    run.complete(1, samples=3)
    gone = (run.sample("1/0").id, run.sample("1/2").id)
    assert run.tell(e.GroupUnscored(GroupId(1), gone, "the judge is away")) == []
    assert run.ledger.samples_discarded == {"reward_failed": 2}
    for samples in (gone, (SampleId(run.sample("1/1").id + 5),), ()):  # said again; of no sample of the group; of none
        run.tell(e.GroupUnscored(GroupId(1), samples, "the judge is away"))
    run.tell(e.GroupUnscored(GroupId(7), gone, "of a group that is none"))
    assert run.ledger.late_news == 4 and run.ledger.samples_discarded == {"reward_failed": 2}
    run.take(0, 1)
    run.tell(e.StepRestarted(Step(0)))
    run.take(0, 1)
    (reported,) = only(run.trained(0), c.ReportStep)
    assert (reported.line.num_samples, run.ledger.samples_trained) == (1, 1)


def test_a_group_without_any_reward_of_its_group_is_replaced_and_is_no_filtered_one():
    run = Driver(small_config(prompts=2, samples=2))
    run.begin()
    run.join("a")
    run.complete(1, 2, samples=2)
    lost = (run.sample("1/0").id, run.sample("1/1").id)
    said = run.tell(e.GroupUnscored(GroupId(1), lost, "the judge raised"))
    (dropped,), (added,) = only(said, c.DropGroup), only(said, c.AddGroup)
    assert (dropped.group, dropped.why, added.group.group) == (1, "the judge raised", 3)
    assert [one.num_groups for one in only(run.complete(3, samples=2), c.CloseRound)] == [2]
    assert run.ledger.prompts_dropped == {"reward_failed": 1}
    assert run.ledger.samples_discarded == {"reward_failed": 2}


def test_without_refill_the_step_goes_on_with_one_group_less():
    run = Driver(small_config(prompts=2, rounds=RoundsConfig(samples_per_prompt=1, refill=False)))
    run.begin()
    run.join("a")
    run.complete(1, samples=1)
    assert not only(run.tell(e.GroupRejected(GroupId(1), "all rewards are equal")), c.AddGroup)
    said = run.complete(2, samples=1)
    assert [one.num_groups for one in only(said, c.CloseRound)] == [1]


def test_a_refill_brings_the_trainers_devices_back_when_nobody_else_is_there():
    run = Driver(small_config(prompts=1, samples=1))
    run.begin()
    run.join("t", local=True)
    run.complete(1, samples=1)
    run.turn("t", "training")
    said = run.tell(e.GroupRejected(GroupId(1), "all rewards are equal"))
    assert [one.worker for one in only(said, c.StartGenerating)] == ["t"]
    assert leased(run.turn("t", "generating")) == {"2/0": ("t", 0)}


def test_repeated_news_of_a_micro_batch_does_not_keep_the_trainers_devices():
    run = Driver(small_config(prompts=2, samples=1))
    run.begin()
    run.join("t", local=True, slots=1)
    run.join("a", slots=1)
    run.complete(1, samples=1)
    run.wait(70.0)
    run.turn("t", "training")
    run.take(0, 1)
    run.tell(e.MicroBatchTrained(Step(0)))
    run.take(0, 1)
    assert run.duty("t") == "training"
    assert [one.worker for one in only(run.leave("a"), c.StartGenerating)] == ["t"]


def test_with_staleness_one_the_next_round_starts_when_this_one_has_no_sample_left_to_place():
    run = Driver(small_config(prompts=1, samples=2, max_staleness=1))
    run.begin(steps=3)
    assert [one.step for one in only(run.said, c.OpenRound)] == [0]
    said = run.join("a", slots=3)
    assert [one.step for one in only(said, c.OpenRound)] == [1]
    assert leased(said) == {"1/0": ("a", 0), "1/1": ("a", 0), "2/0": ("a", 0)}
    said = run.complete(1)
    assert not only(said, c.OpenRound), "version 1 is not published: round 2 would be two versions old"
    run.take(0, 1)
    assert [one.step for one in only(run.trained(0), c.OpenRound)] == [2]


def test_strictly_on_policy_a_worker_waits_for_the_new_version():
    run = Driver(small_config(prompts=1, samples=1))
    run.begin()
    run.join("a")
    run.complete(1, samples=1)
    run.take(0, 1)
    said = run.trained(0)
    assert only(said, c.OpenRound)
    assert not leased(said)
    assert [(one.version, one.held) for one in only(said, c.PullWeights)] == [(1, 0)]
    assert leased(run.install("a", 1)) == {"2/0": ("a", 0)}
    assert run.sample("2/0").version == 1


def test_a_round_requested_ahead_of_its_version_waits():
    run = Driver(small_config(prompts=1, samples=1))
    run.begin(steps=2)
    run.join("a")
    run.complete(1, samples=1)
    run.take(0, 1)
    assert [one.step for one in only(run.said, c.OpenRound)] == [0]
    assert [one.step for one in only(run.trained(0), c.OpenRound)] == [1]


def test_a_stalled_sample_among_healthy_ones_is_taken_back():
    run = Driver(small_config(prompts=1, samples=2))
    run.begin()
    run.join("a", slots=2)
    stuck = run.leases["1/1"]
    for tokens in range(1, 20):
        run.wait(10.0)
        run.bring("a", s1_0=tokens)
        assert tokens > 11 or not only(run.said, c.Abort), "110 s are not too long"
    assert [one.lease for one in only(run.said, c.Abort)] == [stuck]
    assert run.leases["1/1"] > stuck
    assert run.ledger.moves == {"stalled": 1}
    assert run.state("a") == "active"


def test_a_worker_that_has_samples_and_brings_no_token_is_given_up():
    run = Driver(small_config(prompts=1, samples=2))
    run.begin()
    run.join("a")
    assert not run.wait(110.0)
    said = run.wait(140.0)
    assert [one.worker for one in only(said, c.ForgetWorker)] == ["a"]
    assert run.ledger.moves == {"lost": 2}


def test_a_round_of_another_step_is_not_taken():
    run = Driver(small_config(prompts=1, samples=1))
    run.begin()
    run.join("a")
    run.complete(1, samples=1)
    run.take(1, 1)
    assert run.ledger.late_news == 1
    run.tell(e.StepTrained(Step(0)))
    assert run.ledger.prompts_dropped == {"not_taken": 1}
    assert run.ledger.samples_discarded == {"not_taken": 1}


def test_groups_are_held_back_until_the_round_is_complete_without_streaming():
    run = Driver(small_config(prompts=2, samples=1, streaming=False))
    run.begin()
    run.join("a")
    assert not only(run.complete(1, samples=1), c.DeliverGroup)
    said = run.complete(2, samples=1)
    assert [one.group for one in only(said, c.DeliverGroup)] == [1, 2]
    assert only(said, c.CloseRound)


def test_data_that_ends_is_said_once_for_every_round_asked_for():
    run = Driver(small_config(prompts=1, samples=1, num_prompts=1, num_epochs=1))
    run.begin()
    run.join("a")
    run.complete(1, samples=1)
    run.take(0, 1)
    assert [one.step for one in only(run.trained(0), c.EndData)] == [1]


def test_a_worker_that_claims_a_version_nobody_published_gets_the_one_there_is():
    run = Driver(small_config(prompts=1, samples=1))
    run.begin()
    said = run.join("a", ready=False, version=Version(9))
    assert [(one.version, one.held) for one in only(said, c.PullWeights)] == [(0, None)]


def test_time_does_not_go_back():
    scheduler = Scheduler(small_config())
    scheduler.handle(e.TimePassed(), 5.0)
    with pytest.raises(LawViolation, match="time went back"):
        scheduler.handle(e.TimePassed(), 4.9)


def test_a_lease_that_was_never_given_is_late_news():
    run = Driver()
    run.begin()
    assert run.tell(e.SampleFinished(LeaseId(77), 5)) == []
    assert run.ledger.late_news == 1


def test_a_trainer_that_begins_a_step_anew_gets_again_what_it_took():
    run = Driver(small_config(prompts=2, samples=2))
    run.begin()
    run.join("a")
    run.complete(1, 2)
    run.take(0, 1)
    said = run.tell(e.StepRestarted(Step(0)))
    assert [(one.group, len(one.samples)) for one in only(said, c.DeliverGroup)] == [(1, 2)]
    assert [one.num_groups for one in only(said, c.CloseRound)] == [2]
    assert not only(run.tell(e.StepRestarted(Step(0))), c.DeliverGroup), "it had taken nothing since"
    run.take(0, 1, 2)
    (report,) = only(run.trained(0), c.ReportStep)
    assert report.line.num_groups == 2
    assert run.ledger.prompts_trained == 2


def test_a_step_that_is_not_open_cannot_begin_anew():
    run = Driver(small_config(prompts=1, samples=2))
    run.begin()
    assert not run.tell(e.StepRestarted(Step(5)))
    assert run.ledger.late_news == 1


def test_tokens_that_were_not_told_before_an_abort_are_discarded_for_its_cause():
    run = Driver(small_config(prompts=1, samples=2))
    run.begin()
    run.join("a")
    run.bring("a", s1_0=10)
    run.tell(e.TokensDiscarded("speculation", 5))
    run.tell(e.TokensDiscarded("speculation", -7))
    assert run.ledger.tokens_discarded == {"speculation": 5}
    assert run.ledger.tokens_arrived == 15


def test_a_run_goes_on_with_other_rules_and_only_with_rules():
    run = Driver(small_config(prompts=1, samples=4, rewards=RewardConfig(slots=4)))
    before = run.scheduler.desk.config
    other = structs.replace(
        before,
        seed=9,
        max_new_tokens=7,
        rounds=RoundsConfig(samples_per_prompt=1),
        rewards=RewardConfig(slots=1, t_max_s=99.0, as_finished=False),
        fleet_rules=FleetRules(heartbeat_timeout_s=60.0),
    )
    run.tell(e.RulesChanged(other))
    now = run.scheduler.desk.config
    assert (now.seed, now.max_new_tokens, now.rounds) == (before.seed, before.max_new_tokens, before.rounds)
    assert (now.rewards.slots, now.rewards.t_max_s, now.rewards.as_finished) == (1, 99.0, True)
    assert now.fleet_rules.heartbeat_timeout_s == 60.0
    assert Scheduler.load(run.scheduler.save()).desk.config == now


def test_who_is_scored_when_there_are_fewer_places_waits_again():
    run = Driver(small_config(prompts=1, samples=4, rewards=RewardConfig(slots=4)))
    run.begin()
    run.join("a")
    names = [f"1/{index}" for index in range(4)]
    run.finish(*names)
    running = run.scheduler.desk.scoring.running
    assert len(running) == 4
    said = run.tell(e.RulesChanged(structs.replace(run.scheduler.desk.config, rewards=RewardConfig(slots=1))))
    assert len(only(said, c.CancelScore)) == 3 and len(running) == 1
    delivered: list[c.Command] = []
    while running:
        delivered += run.reward(show_sample(next(iter(running))))
    assert len(only(delivered, c.DeliverGroup)) == 1
