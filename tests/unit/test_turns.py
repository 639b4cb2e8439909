"""Turns of environments: learned limits, hosts that hang, and time that is nobody's."""

import msgspec

from polyrl.ids import HostName, Incarnation, SampleId, Step, Version, WorkerName
from polyrl.scheduling.core import commands as c
from polyrl.scheduling.core import events as e
from polyrl.scheduling.core.parameters import DomainData, EnvironmentRules, FleetRules, RoundsConfig, SchedulerConfig
from polyrl.scheduling.invariants import check
from polyrl.scheduling.rules.play_limits import MIN_ENDED
from polyrl.scheduling.scheduler import Scheduler

RULES = EnvironmentRules(turn_timeout_s=100.0, least_turn_timeout_s=2.0, episode_timeout_s=1000.0)
W = WorkerName("w")


class Table:
    """Episodes of one group, at hosts that do what they are told and no more; a worker that answers at once."""

    def __init__(self, rules: EnvironmentRules = RULES, num_episodes: int = 2, *, can_answer: bool = True) -> None:
        config = SchedulerConfig(
            domains=(DomainData(name="d", prompts_per_step=1, num_prompts=1000, environment="tools"),),
            max_new_tokens=100_000,
            max_staleness=1000,
            fleet_rules=FleetRules(heartbeat_timeout_s=1e6, stall_timeout_s=1e6, pull_timeout_s=1e6),
            rounds=RoundsConfig(samples_per_prompt=num_episodes, min_group_samples=1),
            environments=rules,
        )
        self.scheduler, self.now, self.lives = Scheduler(config), 0.0, 0
        self.played: dict[SampleId, c.PlayEpisode] = {}
        self.stopped: dict[SampleId, c.StopEpisode] = {}
        self.forgotten: list[c.ForgetHost] = []
        self.orders: dict[SampleId, c.Generate] = {}
        self.delivered: list[c.DeliverGroup] = []
        self.tell(e.VersionPublished(Version(0)))
        if can_answer:
            self.tell(e.WorkerJoined(W, Incarnation(1), slots=64, version=Version(0)))

    def tell(self, event: e.Event, after_s: float = 0.0) -> None:
        self.now += after_s
        for command in self.scheduler.handle(event, self.now):
            match command:
                case c.PlayEpisode():
                    self.played[command.sample] = command
                case c.StopEpisode():
                    self.stopped[command.sample] = command
                case c.ForgetHost():
                    self.forgotten.append(command)
                case c.Generate():
                    self.orders[command.sample] = command
                case c.DeliverGroup():
                    self.delivered.append(command)
                case _:
                    pass
        check(self.scheduler, self.now)

    def open_round(self, step: int) -> None:
        self.played, self.stopped, self.orders = {}, {}, {}
        self.tell(e.RoundRequested(Step(step)))

    def join(self, name: str) -> None:
        self.lives += 1
        self.tell(e.HostJoined(HostName(name), Incarnation(self.lives), "tools", 64))

    def tokens(self, sample: SampleId) -> int:
        return self.scheduler.desk.samples[sample].num_tokens

    def call(self, sample: SampleId, after_s: float) -> None:
        start = self.tokens(sample)
        self.tell(e.CallMade(sample, self.played[sample].attempt, start, start, start + 10), after_s)

    def answer(self, sample: SampleId, after_s: float = 0.0) -> None:
        self.tell(e.SampleFinished(self.orders[sample].lease, self.tokens(sample) + 10), after_s)

    def turn(self, sample: SampleId, after_s: float) -> None:
        self.call(sample, after_s)
        self.answer(sample)
        self.wait(0.0)

    def wait(self, seconds: float) -> None:
        self.tell(e.TimePassed(), seconds)

    def train(self, step: int) -> None:
        for sample, played in self.played.items():
            self.tell(e.EpisodeEnded(sample, played.attempt, "scored", self.tokens(sample)))
        groups = tuple(one.group for one in self.delivered)
        self.tell(e.GroupsTaken(Step(step), groups))
        self.tell(e.StepTrained(Step(step)))

    @property
    def ended(self) -> dict[str, int]:
        return self.scheduler.ledger.episodes_ended


def practised(rules: EnvironmentRules = RULES, num_episodes: int = 2) -> Table:
    """A table at which many turns of a second have ended; a second round is open, each episode has one answer."""
    table = Table(rules, num_episodes)
    table.join("h1")
    table.open_round(0)
    for _ in range(max(MIN_ENDED, 101)):
        for sample in table.played:
            table.turn(sample, 1.0 / num_episodes)
    table.train(0)
    table.open_round(1)
    for sample in table.played:
        table.turn(sample, 0.1)
    return table


def test_a_turn_that_hangs_is_over_at_its_learned_limit_and_the_other_episodes_go_on():
    table = practised()
    slow, other = table.played
    before = dict(table.ended)
    for _ in range(8):
        table.turn(other, 1.0)
    assert slow in table.stopped, "eight seconds are more than five times one second, and less than 100"
    assert "took too long (over" in table.stopped[slow].why
    assert other not in table.stopped and not table.forgotten
    assert table.ended == {**before, "timed_out": 1}
    table.turn(other, 1.0)


def test_what_is_not_to_be_learned_hangs_until_the_set_limit():
    table = practised(msgspec.structs.replace(RULES, learn_turn_timeouts=False))
    slow, other = table.played
    for _ in range(98):
        table.turn(other, 1.0)
    assert not table.stopped
    for _ in range(3):
        table.turn(other, 1.0)
    assert list(table.stopped) == [slow]


def test_a_host_in_which_nothing_moves_is_told_to_end_and_all_its_episodes_go_on_elsewhere():
    table = practised()
    table.join("h2")
    before = dict(table.ended)
    table.wait(20.0)
    assert [(one.host, one.hangs) for one in table.forgotten] == [("h1", True)]
    assert "none of its 2 episodes has moved" in table.forgotten[0].why
    assert table.ended == before, "nothing is scored"
    assert table.scheduler.ledger.hosts_hung == 1
    assert {one.host for one in table.played.values()} == {"h2"}
    assert {one.attempt for one in table.played.values()} == {2}


def test_an_episode_that_stands_still_at_the_next_host_too_is_the_cause_and_is_scored():
    table = practised()
    table.join("h2")
    before = dict(table.ended)
    table.wait(20.0)
    for sample in table.played:
        table.tell(e.CallRepeated(sample, 2), 0.1)  # the call that has an answer
    table.wait(30.0)
    assert [one.host for one in table.forgotten] == ["h1"], "the second host is not held guilty"
    assert table.ended == {**before, "timed_out": 2}
    assert table.delivered, "a time-out has a reward, and the group is complete"


def test_a_new_host_has_the_set_limit_for_its_first_move():
    table = practised()
    table.tell(e.HostLeft(HostName("h1"), Incarnation(1), "its machine was taken"))
    table.join("h2")
    table.wait(90.0)
    assert not table.stopped and not table.forgotten, "it may be loading"


def test_a_replay_is_as_many_turns_as_it_repeats():
    table = practised(num_episodes=1)
    (sample,) = table.played
    for _ in range(10):
        table.turn(sample, 1.0)
    table.join("h2")
    table.tell(e.HostLeft(HostName("h1"), Incarnation(1), "its machine was taken"))
    num_tokens = table.tokens(sample)
    for _ in range(11):
        table.tell(e.CallRepeated(sample, 2), 3.0)
        table.wait(0.0)
    assert not table.stopped and table.tokens(sample) == num_tokens, "33 s are over one limit, and within eleven"


def test_time_that_an_episode_waits_for_a_worker_is_not_its_own():
    table = Table(msgspec.structs.replace(RULES, episode_timeout_s=30.0), num_episodes=1, can_answer=False)
    table.join("h1")
    table.open_round(0)
    (sample,) = table.played
    table.call(sample, 20.0)
    table.wait(500.0)
    assert not table.stopped, "nobody is there to answer it: that is no fault of the policy or the environment"
    table.tell(e.WorkerJoined(W, Incarnation(1), slots=1, version=Version(0)))
    table.answer(sample)
    table.wait(9.0)
    assert not table.stopped
    table.wait(2.0)
    assert table.stopped[sample].why == "it took too long"
    assert table.ended == {"timed_out": 1}


GAMES = msgspec.structs.replace(RULES, episode_timeout_s=200.0)


def many_games(rules: EnvironmentRules = GAMES) -> tuple[Table, SampleId]:
    """Episodes of four turns of a second have ended, for longer than one may take; one of the next round is played."""
    table = Table(rules, 2)
    table.join("h1")
    for step in range(MIN_ENDED):
        table.open_round(step)
        for _ in range(4):
            for sample in table.played:
                table.turn(sample, 0.5)
        table.train(step)
    table.open_round(MIN_ENDED)
    return table, next(iter(table.played))


def test_an_episode_that_goes_in_circles_is_over_at_its_learned_limit_and_scored():
    table, circling = many_games()
    before = table.ended["scored"]
    num_turns = 0
    while circling not in table.stopped and num_turns < 40:
        table.turn(circling, 1.0)
        num_turns += 1
    assert 20 <= num_turns <= 22, "five times the four seconds that others took, and far from the 200 s that are set"
    assert "it took too long (over 2" in table.stopped[circling].why
    assert (table.ended["scored"], table.ended["timed_out"]) == (before, 1)
    plays = table.scheduler.desk.state.plays[0]
    assert plays.times.num_observed == before and not plays.slowest, "what was stopped buys the next one no time"


def test_the_set_limit_of_an_episode_holds_where_nothing_is_to_be_learned():
    table, circling = many_games(msgspec.structs.replace(GAMES, learn_episode_timeouts=False))
    for _ in range(199):
        table.turn(circling, 1.0)
    assert circling not in table.stopped
    table.turn(circling, 1.0)
    assert table.stopped[circling].why == "it took too long"


def test_a_turn_that_began_within_the_episodes_limit_has_its_own_time():
    table, slow = many_games(msgspec.structs.replace(GAMES, learn_turn_timeouts=False))
    for _ in range(19):
        table.turn(slow, 1.0)
    other = next(one for one in table.played if one != slow)
    for _ in range(60):
        table.tell(e.CallRepeated(other, 1), 1.0)
    assert slow not in table.stopped, "a probe for slow turns would find none, if the episode's limit cut them short"
    table.turn(slow, 0.5)
    assert "five times what others took" in table.stopped[slow].why


def test_no_time_passes_while_the_driver_is_away():
    table = practised()
    slow, other = table.played
    table.tell(e.DriverResumed(away_s=50.0, grace_s=1.0), 50.0)
    table.turn(other, 1.0)
    assert not table.stopped and not table.forgotten
    table.turn(slow, 0.5)
    turns = table.scheduler.desk.state.turns[0]
    assert turns.slowest.get(table.scheduler.desk.groups[table.scheduler.desk.samples[slow].group].prompt, 0.0) < 3.0


def test_a_call_that_is_repeated_by_an_attempt_that_is_over_is_late_news():
    table = practised()
    sample, _ = table.played
    late = table.scheduler.ledger.late_news
    table.tell(e.CallRepeated(sample, 7))
    table.tell(e.CallRepeated(SampleId(1 << 40), 1))
    table.call(sample, 0.1)
    table.tell(e.CallRepeated(sample, 1))
    assert table.scheduler.ledger.late_news == late + 3
