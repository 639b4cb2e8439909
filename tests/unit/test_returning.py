"""Calls of an episode go back to the worker that answered the last one, also where all workers are full."""

from polyrl.ids import HostName, Incarnation, SampleId, Step, Version, WorkerName
from polyrl.scheduling.core import commands as c
from polyrl.scheduling.core import events as e
from polyrl.scheduling.core.parameters import DomainData, RoundsConfig, SchedulerConfig
from polyrl.scheduling.invariants import check
from polyrl.scheduling.scheduler import Scheduler

NUM_WORKERS, SLOTS, NUM_EPISODES = 4, 4, 24
CONFIG = SchedulerConfig(
    domains=(DomainData(name="d", prompts_per_step=NUM_EPISODES, num_prompts=100, environment="tools"),),
    max_new_tokens=1000,
    rounds=RoundsConfig(samples_per_prompt=1),
)


class Game:
    """Every episode makes its next call at once; workers answer in turn. More episodes than slots."""

    def __init__(self) -> None:
        self.scheduler = Scheduler(CONFIG)
        self.now = 0.0
        self.orders: dict[WorkerName, list[c.Generate]] = {}
        self.wrote: dict[SampleId, WorkerName] = {}
        self.num_returned = self.num_moved = self.num_played = 0
        self.attempts: dict[SampleId, int] = {}
        self.tell(e.VersionPublished(Version(0)))
        for number in range(NUM_WORKERS):
            self.join(f"w{number}")
        self.tell(e.HostJoined(HostName("h"), Incarnation(1), "tools", NUM_EPISODES))
        self.tell(e.RoundRequested(Step(0)))

    def join(self, name: str) -> None:
        self.tell(e.WorkerJoined(WorkerName(name), Incarnation(1), slots=SLOTS, version=Version(0)))

    def tell(self, event: e.Event) -> None:
        self.now += 0.001
        for command in list(self.scheduler.handle(event, self.now)):
            match command:
                case c.PlayEpisode():
                    self.attempts[command.sample] = command.attempt
                    self.tell(e.CallMade(command.sample, command.attempt, 0, 0, 10))
                case c.Generate():
                    self.orders.setdefault(command.worker, []).append(command)
                    if command.sample in self.wrote:
                        self.num_returned += self.wrote[command.sample] == command.worker
                        self.num_moved += self.wrote[command.sample] != command.worker
                case _:
                    pass
        check(self.scheduler, self.now)

    def answer(self, worker: WorkerName) -> None:
        """The worker's oldest sample is answered; its episode asks again."""
        order = self.orders[worker].pop(0)
        self.wrote[order.sample] = worker
        start = self.scheduler.desk.samples[order.sample].num_tokens + 10
        self.tell(e.SampleFinished(order.lease, start))
        self.tell(e.CallMade(order.sample, self.attempts[order.sample], start, start, start + 10))

    def play(self, num_turns: int) -> None:
        for _ in range(num_turns):
            self.num_played += 1
            workers = [one for one in self.orders if self.orders[one]]
            self.answer(workers[self.num_played % len(workers)])


def test_where_all_workers_are_full_a_call_still_goes_back_to_the_worker_of_the_last_one():
    game = Game()
    assert sum(map(len, game.orders.values())) == NUM_WORKERS * SLOTS
    game.play(600)
    assert game.num_returned > 500
    assert game.num_moved <= NUM_EPISODES


def test_episodes_of_a_worker_that_was_lost_go_on_elsewhere():
    game = Game()
    game.play(200)
    lost = WorkerName("w2")
    game.tell(e.WorkerLeft(lost, Incarnation(1), "its machine is gone"))
    del game.orders[lost]
    behind = {sample.id for sample in game.scheduler.desk.samples.values() if sample.num_tokens}
    for _ in range(100):
        game.play(1)
        behind -= {order.sample for orders in game.orders.values() for order in orders}
    assert not behind, "every episode was placed again"
