"""Groups that the trainer rejects for what a worker wrote: their prompts are written again, by workers it believes."""

from msgspec.structs import replace
from tests.unit.driver import Driver, leased, only, small_config

from polyrl.ids import GroupId, HostName, Incarnation, Step, WorkerName, sample_id
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


def test_disbelieved_groups_use_up_no_refills_where_others_are_believed():
    """Several names use up the refills of a round in a moment; then nothing of it was left, and the run ended."""
    run = begun(*(f"m{number}" for number in range(8)), num_prompts=4, num_epochs=1)
    groups = [1, 2]
    for number in range(3):
        run.complete(*groups, samples=1)
        for group in groups:
            disbelieve(run, group, f"m{number}")
        groups = [groups[-1] + 1, groups[-1] + 2]
    said = run.complete(*groups, samples=1)
    assert [one.num_groups for one in only(said, c.CloseRound)] == [2]
    assert run.ledger.prompts_dropped == {}


def test_a_round_that_nobody_believed_writes_ends_after_a_bounded_number_of_groups():
    """Where no worker is believed yet, whoever joins anew under other names gets all of it again."""
    run = begun("m0", prompts=4)
    for number in range(1000):
        groups = list(run.scheduler.desk.rounds[Step(0)].groups)
        if not groups:
            break
        run.join(f"m{number + 1}")
        run.complete(*groups, samples=1)
        for group in groups:
            disbelieve(run, group, run.workers[f"{group}/0"])
    assert [one.num_groups for one in run.said if isinstance(one, c.CloseRound)][-1] == 0
    num_prompts = run.ledger.prompts_dropped["filtered"]
    assert num_prompts == run.ledger.prompts_started > 4, "and those that it was refilled with"
    assert run.ledger.samples_started == (1 + run.scheduler.desk.config.fleet_rules.max_failures) * num_prompts


def with_a_believed_worker() -> Driver:
    """Return a run in which answers of the worker `old` were trained."""
    run = begun("old")
    run.complete(1, 2, samples=1)
    run.take(0, 1, 2)
    run.trained(0)
    run.install("old")
    return run


def test_what_is_written_again_waits_for_workers_of_which_answers_were_trained():
    run = with_a_believed_worker()
    run.join("new", slots=64)
    run.complete(3, 4, samples=1)
    for group, again in ((3, 5), (4, 6)):
        assert leased(disbelieve(run, group, "new")) == {f"{again}/0": ("old", 0)}
    assert not only(run.leave("new"), c.Generate)


def test_a_worker_of_which_a_step_left_samples_out_is_not_believed_for_having_been_in_it():
    """Fewer forged samples than honest ones, under many names, made each of these a worker that is believed."""
    run = begun()
    run.join("old", slots=1)
    run.join("liar")
    run.complete(1, 2, samples=1)
    assert {run.workers["1/0"], run.workers["2/0"]} == {"old", "liar"}
    run.take(0, 1, 2)
    run.tell(e.StepTrained(Step(0), (WorkerName("liar"),)))
    seats = run.scheduler.desk.seats.values()
    assert {one.name: one.is_believed for one in seats} == {"old": True, "liar": False}


def test_it_does_not_wait_for_believed_workers_that_are_gone():
    run = with_a_believed_worker()
    run.join("new")
    run.complete(3, 4, samples=1)
    run.leave("old")
    assert leased(disbelieve(run, 3, "old")) == {"5/0": ("new", 0)}


def test_each_call_of_an_episode_that_is_played_again_waits_for_workers_of_which_answers_were_trained():
    """New names are the least loaded, and got every call of it."""
    config = small_config(samples=1)
    domain = replace(config.domains[0], environment="tools")
    run = Driver(replace(config, domains=(domain,)))
    run.begin()
    run.tell(e.HostJoined(HostName("h"), Incarnation(1), "tools", 4))
    run.join("old", slots=2)

    def call(group: int, start: int) -> list[c.Generate]:
        sample = sample_id(GroupId(group), 0)
        return only(run.tell(e.CallMade(sample, 1, start, start, start + 10)), c.Generate)

    def end(group: int, num_tokens: int) -> None:
        run.tell(e.EpisodeEnded(sample_id(GroupId(group), 0), 1, "scored", num_tokens))

    for group in (1, 2):
        call(group, 0)
        run.finish(f"{group}/0")
        end(group, 10)
    run.take(0, 1, 2)
    run.trained(0)
    run.install("old")
    run.join("new", slots=64)
    assert [one.worker for group in (3, 4) for one in call(group, 0)] == ["old", "new"]
    run.finish("4/0")
    end(4, 10)
    disbelieve(run, 4, "new")
    for start in (0, 10, 20):
        assert [one.worker for one in call(5, start)] == ["old"]
        run.finish("5/0", at=start + 10)


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
