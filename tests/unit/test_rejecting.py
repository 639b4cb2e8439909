"""Groups that the trainer rejects for what a worker wrote: their prompts are written again, by workers it believes."""

from tests.unit.driver import Driver, leased, only, small_config

from polyrl.ids import GroupId, WorkerName
from polyrl.scheduling.core import commands as c
from polyrl.scheduling.core import events as e
from polyrl.scheduling.core.parameters import RoundsConfig
from polyrl.scheduling.scheduler import Scheduler

WHY = "its tokens are made up"


def disbelieve(run: Driver, group: int, *names: str) -> list[c.Command]:
    return run.tell(e.GroupRejected(GroupId(group), WHY, tuple(map(WorkerName, names))))


def prompt_of(run: Driver, group: int) -> tuple[int, int, int]:
    one = run.scheduler.desk.groups[GroupId(group)]
    return one.domain, one.epoch, one.prompt


def begun(*names: str, prompts: int = 2, rounds: RoundsConfig | None = None, **others) -> Driver:
    run = Driver(small_config(prompts=prompts, samples=1, rounds=rounds, **others))
    run.begin()
    for name in names:
        run.join(name)
    return run


def test_the_prompt_of_a_disbelieved_group_is_written_again_and_none_is_lost():
    run = begun("liar")
    first = prompt_of(run, 1)
    run.complete(1, 2, samples=1)
    said = disbelieve(run, 1, "liar")
    (added,) = only(said, c.AddGroup)
    assert prompt_of(run, 3) == first == (added.group.domain, added.group.epoch, added.group.prompt)
    assert run.ledger.prompts_dropped == {} and run.ledger.prompts_started == 2
    assert run.ledger.samples_discarded == {"filtered": 1}
    assert [one.num_groups for one in only(run.complete(3, samples=1), c.CloseRound)] == [2]


def test_no_number_of_disbelieved_groups_leaves_a_step_without_groups():
    """Several names use up the refills of a round in a moment; then nothing of it was left, and the run ended."""
    run = begun(*(f"m{number}" for number in range(8)), num_prompts=4, num_epochs=1)
    groups = [1, 2]
    for number in range(8):
        run.complete(*groups, samples=1)
        for group in groups:
            disbelieve(run, group, f"m{number}")
        groups = [groups[-1] + 1, groups[-1] + 2]
    said = run.complete(*groups, samples=1)
    assert [one.num_groups for one in only(said, c.CloseRound)] == [2]
    assert run.ledger.prompts_dropped == {}


def test_what_is_written_again_waits_for_workers_of_which_answers_were_trained():
    run = begun("old")
    run.complete(1, 2, samples=1)
    run.take(0, 1, 2)
    run.trained(0)
    run.install("old")
    run.join("new", slots=64)
    run.complete(3, 4, samples=1)
    for group, again in ((3, 5), (4, 6)):
        assert leased(disbelieve(run, group, "new")) == {f"{again}/0": ("old", 0)}
    assert not only(run.leave("new"), c.Generate)


def test_it_does_not_wait_for_believed_workers_that_are_gone():
    run = begun("old")
    run.complete(1, 2, samples=1)
    run.take(0, 1, 2)
    run.trained(0)
    run.install("old")
    run.join("new")
    run.complete(3, 4, samples=1)
    run.leave("old")
    assert leased(disbelieve(run, 3, "old")) == {"5/0": ("new", 0)}


def test_a_group_of_the_trainers_own_workers_is_refilled_and_not_for_ever():
    """These are never given up, and would write the same again."""
    run = begun()
    run.join("t", local=True)
    run.complete(1, samples=1)
    first = prompt_of(run, 1)
    (added,) = only(disbelieve(run, 1, "t"), c.AddGroup)
    assert prompt_of(run, added.group.group) != first
    assert run.ledger.prompts_dropped == {"filtered": 1}


def test_without_refill_a_disbelieved_prompt_is_written_again_all_the_same():
    run = begun("liar", rounds=RoundsConfig(samples_per_prompt=1, refill=False))
    run.complete(1, samples=1)
    assert only(disbelieve(run, 1, "liar"), c.AddGroup)


def test_a_run_of_earlier_rules_drops_such_prompts_as_it_did():
    run = begun("liar")
    run.scheduler = Scheduler(run.scheduler.desk.config, rules=10)
    run.begin()
    run.join("liar")
    run.complete(1, samples=1)
    disbelieve(run, 1, "liar")
    assert run.ledger.prompts_dropped == {"filtered": 1}
