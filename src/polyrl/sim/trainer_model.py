"""The trainer, as the simulator plays it: it takes complete groups in micro-batches, steps, publishes, asks for more.

Rules it keeps: it trains step by step, and a step ends only when its round is closed and every delivered group is
trained. It trains on the devices that local workers have given it, in proportion to how many those are; a trainer
without local workers has all its devices all the time. On more devices than it was timed on, tokens are trained faster
by `scaling`; what a step costs beside its tokens (`optimizer_s`) stays.
Several events of one moment come out in the order in which a real one would send them.

It leaves out what training does to the policy: lengths are the workload's.
"""

from collections.abc import Callable

from polyrl.ids import GroupId, Seconds, Step, Version, WorkerName
from polyrl.scheduling.core import events as e
from polyrl.sim.scenario import Scenario

Later = Callable[[Seconds, Callable[[], None]], None]
Tell = Callable[[e.Event], None]


class TrainerModel:
    def __init__(self, scenario: Scenario, later: Later, tell: Tell) -> None:
        self._trainer = scenario.trainer
        self._s_per_token = scenario.trainer.s_per_token / scenario.training_speed
        self._publish_s = scenario.network.publish_s
        self._max_staleness = scenario.run.max_staleness
        self._num_steps = scenario.run.steps
        self._later = later
        self._tell = tell
        self._training: dict[WorkerName, None] = {}
        self._delivered: dict[Step, list[tuple[GroupId, int, int]]] = {}
        self._closed: dict[Step, int] = {}
        self._num_taken: dict[Step, int] = {}
        self._busy = False
        self._ended_at: Step | None = None
        self.step = Step(0)
        self.tokens_trained = 0
        """With the prompts: what forward and backward went over."""
        self.done = False
        self.num_local = scenario.trainer.local_workers
        """Engines on its devices now."""

    def start(self) -> None:
        self._tell(e.VersionPublished(Version(0)))
        for step in range(min(self._max_staleness + 1, self._num_steps)):
            self._tell(e.RoundRequested(Step(step)))

    def deliver(self, step: Step, group: GroupId, num_samples: int, num_tokens: int) -> None:
        self._delivered.setdefault(step, []).append((group, num_samples, num_tokens))
        self._soon()

    def close(self, step: Step, num_groups: int) -> None:
        self._closed[step] = num_groups
        self._soon()

    def reopen(self, step: Step) -> None:
        """Reopen a round whose group was rejected: the number of its groups will be announced again."""
        self._closed.pop(step, None)

    def end_data(self, step: Step) -> None:
        self._ended_at = step
        self.done = self.done or self.step >= step

    def give_devices(self, worker: WorkerName) -> None:
        self._training[worker] = None
        self._soon()

    def take_devices(self, worker: WorkerName) -> None:
        self._training.pop(worker, None)

    def _soon(self) -> None:
        self._later(0.0, self._go_on)

    def _share_of_devices(self) -> float:
        if self.num_local == 0:
            return 1.0
        return min(1.0, len(self._training) / self.num_local)

    def _go_on(self) -> None:
        """Start a micro-batch if there is one, or end the step if that was all."""
        share = self._share_of_devices()
        if self._busy or self.done or share == 0.0:
            return
        waiting = self._delivered.get(self.step, [])
        closed = self._closed.get(self.step)
        if closed is not None and self._num_taken.get(self.step, 0) >= closed and not waiting:
            self._busy = True
            self._later(self._trainer.optimizer_s, self._end_step)
            return
        batch, num_tokens = self._next_batch(waiting, whole=closed is not None)
        if not batch:
            return
        self._delivered[self.step] = waiting[len(batch) :]
        self._num_taken[self.step] = self._num_taken.get(self.step, 0) + len(batch)
        self._busy = True
        self.tokens_trained += num_tokens
        self._tell(e.GroupsTaken(self.step, tuple(batch)))
        duration = self._trainer.micro_batch_fixed_s + num_tokens * self._s_per_token / share
        self._later(duration, self._end_batch)

    def _next_batch(self, waiting: list[tuple[GroupId, int, int]], *, whole: bool) -> tuple[list[GroupId], int]:
        """Enough groups for a micro-batch; fewer only when no more will come."""
        batch: list[GroupId] = []
        num_samples = num_tokens = 0
        for group, samples, tokens in waiting:
            batch.append(group)
            num_samples += samples
            num_tokens += tokens
            if num_samples >= self._trainer.micro_batch_samples:
                return batch, num_tokens
        return (batch, num_tokens) if whole else ([], 0)

    def _end_batch(self) -> None:
        self._busy = False
        self._tell(e.MicroBatchTrained(self.step))
        self._soon()

    def _end_step(self) -> None:
        step = self.step
        self._delivered.pop(step, None)
        self._closed.pop(step, None)
        self._num_taken.pop(step, None)
        self.step = Step(step + 1)
        self.done = self.step >= self._num_steps or self.step == self._ended_at
        self._busy = False
        self._tell(e.StepTrained(step))
        if not self.done:
            self._later(self._publish_s, self._publish)

    def _publish(self) -> None:
        self._tell(e.VersionPublished(Version(self.step)))
        wanted = Step(self.step + self._max_staleness)
        if wanted < self._num_steps:
            self._tell(e.RoundRequested(wanted))
        self._soon()
