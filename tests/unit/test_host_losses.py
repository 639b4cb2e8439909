"""Hosts that are lost again and again: held against an episode only if it gets nowhere in between."""

from polyrl.ids import HostName, Incarnation, Step, Version, WorkerName
from polyrl.scheduling.core import commands as c
from polyrl.scheduling.core import events as e
from polyrl.scheduling.core.parameters import DomainData, RoundsConfig, SchedulerConfig
from polyrl.scheduling.invariants import check
from polyrl.scheduling.parts.episodes import MAX_HOST_LOSSES
from polyrl.scheduling.scheduler import Scheduler

CONFIG = SchedulerConfig(
    domains=(DomainData(name="d", prompts_per_step=1, num_prompts=100, environment="tools"),),
    max_new_tokens=10_000,
    rounds=RoundsConfig(samples_per_prompt=1),
)
HOST = HostName("h")


class Episode:
    """One episode, whose host dies and comes back."""

    def __init__(self) -> None:
        self.scheduler, self.now, self.num_lives, self.num_tokens = Scheduler(CONFIG), 0.0, 0, 0
        self.begun: c.PlayEpisode | None = None
        self.order: c.Generate | None = None
        self.tell(e.VersionPublished(Version(0)))
        self.tell(e.WorkerJoined(WorkerName("w"), Incarnation(1), slots=4, version=Version(0)))
        self.come()
        self.tell(e.RoundRequested(Step(0)))

    def tell(self, event: e.Event) -> None:
        self.now += 1.0
        for command in list(self.scheduler.handle(event, self.now)):
            if isinstance(command, c.PlayEpisode):
                self.begun = command
            elif isinstance(command, c.Generate):
                self.order = command
        check(self.scheduler, self.now)

    def come(self) -> None:
        self.num_lives += 1
        self.tell(e.HostJoined(HOST, Incarnation(self.num_lives), "tools", 4))

    def die(self) -> None:
        self.tell(e.HostLeft(HOST, Incarnation(self.num_lives), "its machine was taken"))
        self.come()

    def make_call(self) -> None:
        assert self.begun is not None
        start = self.num_tokens
        self.tell(e.CallMade(self.begun.sample, self.begun.attempt, start, start, start + 10))

    def answer(self) -> None:
        assert self.order is not None
        self.num_tokens += 10
        self.tell(e.SampleFinished(self.order.lease, self.num_tokens))

    @property
    def num_given_up(self) -> int:
        return self.scheduler.ledger.samples_discarded.get("failed", 0)


def test_an_episode_that_gets_on_outlives_any_number_of_hosts():
    episode = Episode()
    for _ in range(5 * MAX_HOST_LOSSES):
        episode.make_call()
        episode.answer()
        episode.die()
    assert (episode.num_given_up, episode.num_tokens) == (0, 50 * MAX_HOST_LOSSES)


def test_an_episode_whose_hosts_are_lost_in_the_same_call_leaves_its_group():
    episode = Episode()
    episode.make_call()
    episode.answer()
    for _ in range(MAX_HOST_LOSSES - 1):
        episode.die()
        assert episode.num_given_up == 0
        episode.make_call()
    episode.die()
    assert episode.num_given_up == 1
