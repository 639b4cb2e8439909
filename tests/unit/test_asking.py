"""What is asked beside the trainer: it goes first, moves like any sample, and leaves training as it was."""

from tests.unit.driver import Driver, leased, only, small_config

from polyrl.ids import GroupId, Version, parse_sample
from polyrl.scheduling.core import commands as c
from polyrl.scheduling.core import events as e
from polyrl.scheduling.core.parameters import FleetRules
from polyrl.scheduling.scheduler import Scheduler


def alone(**others) -> Driver:
    """A run in which nobody requests a round."""
    run = Driver(small_config(**others))
    run.tell(e.VersionPublished(Version(0)))
    return run


def test_an_asked_group_is_answered_by_a_worker_and_closed():
    run = alone()
    run.join("a")
    said = run.tell(e.GroupAsked(2))
    assert [(one.group, one.num_samples) for one in only(said, c.AddAsked)] == [(1, 2)]
    assert leased(said) == {"1/0": ("a", 0), "1/1": ("a", 0)}
    assert not only(run.finish("1/0", at=30), c.CloseAsked)
    said = run.finish("1/1", at=50)
    assert [(one.group, one.answered) for one in only(said, c.CloseAsked)] == [(1, True)]
    assert not only(run.said, c.Score)
    assert (run.ledger.samples_answered, run.ledger.tokens_answered, run.ledger.tokens_arrived) == (2, 80, 80)
    assert (run.ledger.samples_started, run.ledger.prompts_started) == (2, 0)


def test_asked_samples_are_answered_in_the_order_in_which_they_were_asked():
    run = alone()
    run.join("a", slots=1)
    for _ in range(3):
        run.tell(e.GroupAsked(1))
    assert leased(run.finish("1/0", at=1)) == {"2/0": ("a", 0)}
    assert leased(run.finish("2/0", at=1)) == {"3/0": ("a", 0)}


def test_who_asks_goes_before_a_round_that_waits_and_takes_no_place_from_what_runs():
    run = Driver(small_config(prompts=2, samples=1))
    run.begin()
    assert leased(run.join("a", slots=1)) == {"1/0": ("a", 0)}
    assert not leased(run.tell(e.GroupAsked(1)))
    assert leased(run.finish("1/0", at=5)) == {"3/0": ("a", 0)}
    assert leased(run.finish("3/0", at=5)) == {"2/0": ("a", 0)}


def test_the_trainers_own_devices_answer_nobody():
    run = alone()
    run.join("local", local=True)
    assert not leased(run.tell(e.GroupAsked(1)))
    assert leased(run.join("a")) == {"1/0": ("a", 0)}


def test_an_asked_sample_moves_when_its_worker_dies_and_keeps_its_tokens_even_where_others_start_again():
    run = alone(migrate=False)
    run.join("a")
    run.tell(e.GroupAsked(1))
    run.bring("a", s1_0=120)
    run.join("b")
    assert leased(run.leave("a")) == {"1/0": ("b", 120)}
    assert run.ledger.tokens_discarded == {}


def test_a_sample_of_which_there_is_enough_is_aborted_and_counts_as_answered():
    run = alone()
    run.join("a")
    run.tell(e.GroupAsked(1))
    lease = run.leases["1/0"]
    said = run.tell(e.SampleStopped(parse_sample("1/0"), 17))
    assert [(one.lease, one.discarded_for) for one in only(said, c.Abort)] == [(lease, None)]
    assert only(said, c.CloseAsked)[0].answered
    assert run.ledger.tokens_answered == 17
    assert run.tell(e.SampleStopped(parse_sample("1/0"), 18)) == []
    assert run.ledger.late_news == 1


def test_a_withdrawn_group_frees_its_places_at_once_and_all_its_tokens_are_ledgered():
    run = alone()
    run.join("a", slots=2)
    run.tell(e.GroupAsked(3))
    run.bring("a", s1_0=10, s1_1=20)
    run.finish("1/0", at=12)
    said = run.tell(e.GroupWithdrawn(GroupId(1), "they hung up"))
    assert len(only(said, c.Abort)) == 2
    assert [(one.answered, one.why) for one in only(said, c.CloseAsked)] == [(False, "they hung up")]
    assert run.ledger.samples_discarded == {"withdrawn": 3}
    assert run.ledger.tokens_discarded == {"withdrawn": 32}
    assert run.tell(e.GroupWithdrawn(GroupId(1), "again")) == []


def test_what_an_engine_refuses_is_given_up_at_once_and_its_worker_stays():
    run = alone(fleet_rules=FleetRules(max_failures=1))
    run.join("a")
    run.tell(e.GroupAsked(2))
    said = run.tell(e.LeaseEnded(run.leases["1/1"], 0, "refused"))
    assert [one.answered for one in only(said, c.CloseAsked)] == [False]
    assert run.ledger.samples_discarded == {"failed": 2}
    assert leased(run.tell(e.GroupAsked(1))) == {"2/0": ("a", 0)}


def test_an_engine_that_fails_again_and_again_ends_the_question():
    run = alone(fleet_rules=FleetRules(max_failures=2))
    for name in ("a", "b"):
        run.join(name)
    run.tell(e.GroupAsked(1))
    assert leased(run.tell(e.LeaseEnded(run.leases["1/0"], 5, "engine_failed")))
    said = run.tell(e.LeaseEnded(run.leases["1/0"], 9, "engine_failed"))
    assert [one.answered for one in only(said, c.CloseAsked)] == [False]


def test_a_worker_that_pulls_weights_goes_on_with_what_was_asked():
    run = alone()
    run.join("a")
    run.tell(e.GroupAsked(1))
    said = run.tell(e.VersionPublished(Version(1)))
    assert run.state("a") == "pulling"
    assert not only(said, c.Abort) and not only(said, c.HandOver)
    run.bring("a", s1_0=8)
    assert only(run.finish("1/0", at=9), c.CloseAsked)[0].answered


def test_questions_teach_nothing_about_the_lengths_of_answers():
    run = alone()
    run.join("a")
    before = run.scheduler.desk.lengths
    run.tell(e.GroupAsked(2))
    run.finish("1/0", at=900)
    run.tell(e.GroupWithdrawn(GroupId(1), "enough"))
    assert run.scheduler.desk.lengths == before
    assert run.scheduler.desk.state.clock.first_remote_at is None


def test_a_saved_scheduler_goes_on_with_its_questions():
    run = alone()
    run.join("a", slots=1)
    run.tell(e.GroupAsked(2))
    run.scheduler = Scheduler.load(run.scheduler.save())
    assert leased(run.finish("1/0", at=3)) == {"1/1": ("a", 0)}
    assert only(run.finish("1/1", at=3), c.CloseAsked)[0].answered
