"""The training loop: publish the weights, open the round, train on groups as they complete, update, report; repeat.

    for each step:  round -> (filter) -> micro-batches while the round still generates -> update -> publish

On-policy, the weights stay fixed from a round's first token until its last group is trained. In mode `async` the next
`max_staleness` rounds, or fewer after an alarm (lag.py), are requested ahead: the fleet generates them meanwhile, with
the newest weights it has.

Rules kept here: a group is taken (acknowledged) before it is trained. Once taken, it is trained in this step unless the
process dies. A group without a learning signal is rejected, and the scheduler starts another prompt in its place.
Weights change and get their new version number while the devices are held for training.

Left out: starting processes (run/training), computing rewards, and showing the numbers (telemetry).
"""

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from polyrl.client import Fleet, Group, RoundOver
from polyrl.config.recipe import Recipe, TrainSection
from polyrl.errors import UserError
from polyrl.scheduling.core.ledger import StepLine
from polyrl.trainer.batch import TrainGroup as TrainedGroup
from polyrl.trainer.batch import TrainSample, first_sequences, is_zero_variance, shaped_reward
from polyrl.trainer.lag import Lag
from polyrl.trainer.replicas import Replicas
from polyrl.trainer.reports import RejectedGroups, StepReport, make_report
from polyrl.trainer.sequences import train_samples
from polyrl.trainer.step_stats import StepStats
from polyrl.weights.server import Offer

log = logging.getLogger("polyrl.trainer")

ZERO_VARIANCE = "all rewards are equal"
_CPU_MICRO_BATCH_SAMPLES = 16
_LINE_TIMEOUT_S = 600.0
"""As long as the client waits for a manager that is gone: it may be restarting."""
_PAST_LINE_TIMEOUT_S = 10.0
"""Short: the manager sends the lines of past steps with every connection, or not at all."""

Prompts = Callable[[int, int], "np.ndarray[tuple[int], np.dtype[np.int32]]"]
"""Returns the tokens of a prompt, given its domain and its number."""


class Arrived(NamedTuple):
    """A group of the round that is worth training on."""

    group: Group
    samples: list[TrainSample]
    """Its training sequences."""
    num_tokens: int
    """The tokens that it brings to a micro-batch."""


class NothingCameError(UserError):
    """Raised when a round gives a step nothing at all: no group was generated and scored, or all were rejected."""


class Publisher(Protocol):
    """Offers the model's current weights to the workers, and tells the local engine that they changed."""

    async def publish(self, version: int) -> Offer: ...


class Safety(Protocol):
    """Saves the state that only the trainer has, so that a run survives its trainer (state/saving.py)."""

    async def offered(self, version: int, digest: str) -> bool: ...

    async def rejected(self, step: int, group: int, rewards: list[float]) -> None: ...

    async def rejected_before(self, step: int) -> RejectedGroups: ...

    async def trained(
        self,
        step: int,
        batches: Sequence[Sequence[TrainedGroup]],
        report: bytes = b"",
        rejected: Sequence[TrainedGroup] = (),
    ) -> None: ...

    async def data_ended(self, step: int) -> None: ...

    async def finish(self) -> None: ...


class LoopListener(Protocol):
    """Hears about the progress of the loop."""

    async def step_begins(self, step: int) -> None: ...

    async def groups_trained(self, step: int, num: int) -> None:
        """So many more are; below zero where groups are rejected after that."""

    async def step_ended(self, report: StepReport) -> None: ...

    async def saves(self) -> None: ...


class Loop:
    def __init__(
        self,
        recipe: Recipe,
        fleet: Fleet,
        replicas: Replicas,
        publisher: Publisher,
        prompts: Prompts,
        events: LoopListener,
        validate: Callable[[int], Awaitable[None]] | None = None,
        safety: Safety | None = None,
    ) -> None:
        """`safety` saves a step before others hear that it is done; without it, a trainer that dies loses the run.
        `validate` is also called for the version that a run resumes from, and does nothing if that one is validated."""
        self._recipe, self._fleet, self._replicas = recipe, fleet, replicas
        self._publisher, self._prompts, self._events = publisher, prompts, events
        self._validate, self._safety = validate, safety
        self._lag = Lag(recipe.train, recipe.max_staleness)
        self._too_far: dict[str, int] = {}
        """The last step that left out samples of a worker (guard.py), by the worker's name."""
        self._rejected: list[list[TrainSample]] = []
        """Groups of the open step that this process rejected for equal rewards."""
        self._taken: list[Arrived] = []
        """Groups of the open step that are trained with it."""
        self._suspected: Counter[str] = Counter()
        """How many groups of the open step were rejected because a worker in `_too_far` wrote them, by worker."""

    async def run(self, first_step: int = 0, last: StepReport | None = None, *, is_told: bool = False) -> str:
        """Train until the run ends. Return the reason, in one line.

        `last` is the report of the step before `first_step`, which an earlier process saved. `is_told`: and reported.
        """
        why = await self._run(first_step, last, is_told=is_told)
        if self._safety is not None:
            await self._events.saves()
            await self._safety.finish()
        return why

    async def _run(self, first_step: int, last: StepReport | None, *, is_told: bool) -> str:
        recipe = self._recipe
        await self._settle_the_past(first_step)
        if last is not None and not is_told:
            await self._events.step_ended(last._replace(line=await self._line_of_the_past(last.step)))
        await self._publish(first_step)
        await self._validate_if_due(first_step)  # an earlier process may have died before it validated this version
        if last is not None and (why := why_enough(recipe.train, last)):
            return why
        for step in range(first_step, recipe.train.steps):
            try:
                report = await self._step(step)
            except RoundOver:
                if self._safety is not None:
                    await self._safety.data_ended(step)
                return f"the data has ended, after {step} steps"
            await self._events.step_ended(report)
            await self._validate_if_due(step + 1)
            if why := why_enough(recipe.train, report):
                return why
        return f"all {recipe.train.steps} steps are trained"

    async def _validate_if_due(self, version: int) -> None:
        if self._validate is not None and self._recipe.validation.is_due(version):
            await self._validate(version)

    async def _settle_the_past(self, first_step: int) -> None:
        """Settle the steps that an earlier process left open: report those it saved as done, restart the others."""
        assert self._fleet.opened is not None
        for step in self._fleet.opened.open_steps:
            if step < first_step:
                await self._fleet.step_done(step)
            else:
                await self._fleet.restart_step(step)

    async def _line_of_the_past(self, step: int) -> StepLine | None:
        """Return the manager's line of an earlier step. None if its journal has begun a new file since."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_PAST_LINE_TIMEOUT_S):
                return await self._fleet.line(step)
        return None

    async def _step(self, step: int) -> StepReport:
        began = time.monotonic()
        await self._events.step_begins(step)
        self._rejected, self._taken, self._suspected = [], [], Counter()
        filtered = {} if self._safety is None else await self._safety.rejected_before(step)
        report = await self._try(step, filtered, may_be_void=True)
        while report is None:
            report = await self._try(step, filtered, may_be_void=await self._have_written_again(step))
        line = await self._line(step)
        return report._replace(line=line, seconds=report.seconds | {"total": time.monotonic() - began})

    async def _try(self, step: int, filtered: RejectedGroups, *, may_be_void: bool) -> StepReport | None:
        """Train a round and publish what it gave. None: most of it cannot have come from the run's weights, and no step
        is spent on the rest."""
        began = time.monotonic()
        replicas = self._replicas
        duty_before, trained_before = replicas.training_duty_s, replicas.trained_s
        await replicas.begin(step)
        batches = await self._train_round(step, filtered)
        if not batches and not filtered:
            raise NothingCameError(self._why_nothing(step))
        generated = time.monotonic()
        idle_s = replicas.training_duty_s - duty_before - (replicas.trained_s - trained_before)
        async with replicas.own.devices.held():
            stats = await replicas.finish(may_be_void=may_be_void)
            self._note_too_far(stats)
            if stats.is_void:
                await replicas.release()
                return None
            stats = stats._replace(metrics={**stats.metrics, **self._lag.after(step, stats.metrics)})
            seconds = {
                "total": time.monotonic() - began,
                "generate": generated - began,
                "train": replicas.trained_s - trained_before,
                "idle": max(0.0, idle_s),  # work may end after the duty has changed
            }
            report = make_report(stats, batches, filtered, self._rejected, seconds)
            save_s = await self._make_safe(report, batches)
            await self._fleet.step_done(step, left_out=[name for name, _ in stats.too_far])
            publish_s = await self._publish(step + 1)
        return report._replace(seconds=seconds | {"save": save_s, "publish": publish_s})

    async def _have_written_again(self, step: int) -> bool:
        """Reject what the workers wrote that were found out, and begin the step again with the rest. Return whether
        there was such a group."""
        taken, self._taken = self._taken, []
        for one in taken:
            if suspects := self._suspects(one.group):
                await self._reject_for(one.group, suspects)
            else:
                self._taken.append(one)
        num = len(taken) - len(self._taken)
        await self._events.groups_trained(step, -num)
        log.warning("step %d is begun again: %d of its %d groups are rejected", step, num, len(taken))
        return num > 0

    async def _make_safe(self, report: StepReport, batches: list[list[list[TrainSample]]]) -> float:
        """Save the step. Return how many seconds that took."""
        began = time.monotonic()
        if self._safety is not None:
            await self._fleet.settled()  # the manager must have the groups on file as taken before this process does
            await self._safety.trained(report.step, batches, report.encode(), self._rejected)
        return time.monotonic() - began

    async def _line(self, step: int) -> StepLine:
        try:
            async with asyncio.timeout(_LINE_TIMEOUT_S):
                return await self._fleet.line(step)
        except TimeoutError as error:
            raise UserError(
                f"step {step} is trained, and the manager gave no account of it for {_LINE_TIMEOUT_S:.0f} s"
            ) from error

    async def _train_round(self, step: int, filtered: RejectedGroups) -> list[list[list[TrainSample]]]:
        """Train on the round's groups as they arrive, at whichever replica is free. Return them by micro-batch. Groups
        rejected for equal rewards go to `filtered`, which has those that an earlier process rejected."""
        waiting: list[Arrived] = []
        batches: list[list[list[TrainSample]]] = []
        groups = self._teaching(step, filtered)
        if self._recipe.train.mode == "synchronous":
            groups = _in_order(groups)
        try:
            async for group in self._replicas.beside(groups):
                waiting.append(group)
                if self._is_enough(waiting):
                    batches.append(await self._start_micro_batch(step, waiting, len(batches)))
                    waiting = []
            if waiting:
                batches.append(await self._start_micro_batch(step, waiting, len(batches)))
            await self._replicas.done()
        except BaseException:
            await self._replicas.give_up()
            raise
        return batches

    async def _teaching(self, step: int, filtered: RejectedGroups) -> AsyncIterator[Arrived]:
        """Yield the groups of the round that are worth training on. Others are rejected, and the scheduler replaces
        them: groups with equal rewards, which go to `filtered`, and groups that suspects wrote. Groups that were taken
        before the step began again come first."""
        for one in list(self._taken):
            yield one
        async for group in self._fleet.round(step):
            if suspects := self._suspects(group):
                await self._reject_for(group, suspects)
                continue
            samples = self._train_samples(group)
            if self._teaches_nothing(samples):
                rewards = filtered[group.id] = [one.reward for one in group.samples]
                self._rejected.append(samples)
                if self._safety is not None:  # first, since a rejected group is not delivered again
                    await self._safety.rejected(step, group.id, rewards)
                await self._fleet.reject(group, ZERO_VARIANCE)
            else:
                yield Arrived(group, samples, sum(map(_size, samples)))

    async def _reject_for(self, group: Group, suspects: list[str]) -> None:
        why = f"log-probabilities of {', '.join(suspects)} are too far from the trainer's"
        self._suspected.update(suspects)
        await self._fleet.reject(group, why, workers=suspects)

    def _suspects(self, group: Group) -> list[str]:
        """Return the group's workers that were too far off recently. The manager gives up one named three times."""
        if not self._too_far:
            return []
        until = group.step - 1 - self._recipe.max_staleness
        writers = {segment.worker for sample in group.samples for segment in sample.segments}
        return sorted(name for name in writers & self._too_far.keys() if self._too_far[name] >= until)

    def _why_nothing(self, step: int) -> str:
        if not self._suspected:
            return (
                f"step {step}: nothing of its round could be generated and scored; the manager's log says why, "
                "and `polyrl ledger` counts it. The run can go on when that is mended"
            )
        whose = ", ".join(f"worker {name or 'unknown'} ({num} groups)" for name, num in sorted(self._suspected.items()))
        return (
            f"step {step}: all groups of its round were rejected, since log-probabilities of their writers were too far"
            f" from the trainer's, in it or before (algorithm.max_mismatch={self._recipe.algorithm.max_mismatch:g}): "
            f"{whose}. The run can go on when these workers have the weights of this run, or are stopped"
        )

    def _note_too_far(self, stats: StepStats) -> None:
        for name, nats in stats.too_far:
            self._too_far[name] = stats.step
            log.warning(
                "step %d: samples of worker %s are not trained on: log-probabilities %.1f nats a token from ours, "
                "above algorithm.max_mismatch=%g",
                stats.step,
                name or "unknown",
                nats,
                self._recipe.algorithm.max_mismatch,
            )

    def _teaches_nothing(self, samples: list[TrainSample]) -> bool:
        """Return whether a group has nothing to train on, or is to be filtered for equal rewards."""
        algorithm, cap = self._recipe.algorithm, self._recipe.rollout.max_new_tokens
        if not samples or algorithm.zero_variance != "filter":
            return not samples
        return is_zero_variance(
            [shaped_reward(one.reward, num, algorithm, cap) for one, num in first_sequences([samples])]
        )

    def _is_enough(self, waiting: Sequence[Arrived]) -> bool:
        num_samples = sum(len(one.group.samples) for one in waiting)
        num_tokens = sum(one.num_tokens for one in waiting)
        return is_micro_batch(num_samples, num_tokens, self._recipe.train, self._replicas.device_type)

    async def _start_micro_batch(self, step: int, arrived: Sequence[Arrived], number: int) -> list[list[TrainSample]]:
        """Start training on groups as soon as a replica is free; it goes on beside the round. `number` is that of the
        micro-batch: a synchronous step divides them the same way every time."""
        batch = [one.samples for one in arrived]
        its_replica = number if self._recipe.train.mode == "synchronous" else None
        replica = await self._replicas.free(its_replica)  # a group taken earlier would count as being trained
        taken = {one.group.id for one in self._taken}
        new = [one for one in arrived if one.group.id not in taken]
        self._taken += new
        await self._fleet.take(*(one.group for one in new), worker=replica.worker)

        async def train() -> None:
            await self._replicas.add(replica, batch)
            await self._fleet.micro_batch_done(step, worker=replica.worker)
            await self._events.groups_trained(step, len(new))

        self._replicas.start(replica, train())
        return batch

    def _train_samples(self, group: Group) -> list[TrainSample]:
        return train_samples(group, lambda: self._prompts(group.origin.domain, group.origin.prompt))

    async def _publish(self, version: int) -> float:
        """Publish a version. Return how many seconds that took."""
        began = time.monotonic()
        offer = await self._publisher.publish(version)
        await self._replicas.name_version(version)
        if self._safety is not None and await self._safety.offered(offer.version, offer.digest):
            log.warning(
                "version %d is not what it was, bit for bit, after the steps were trained again on this device", version
            )
        former = self._fleet.digests.get(version, ())
        await self._fleet.publish(offer.version, offer.digest, offer.addresses, replaces=former)
        if self._recipe.max_staleness:
            for step in range(version, min(version + self._lag.now + 1, self._recipe.train.steps)):
                await self._fleet.request(step)
            await self._fleet.settled()  # the local engine must not wake with a version that is unknown there
        await self._replicas.release()
        return time.monotonic() - began


def why_enough(train: TrainSection, report: StepReport) -> str | None:
    """Return why the run ends here: the step's mean reward reached `train.stop_at_reward`. None if it goes on."""
    enough = train.stop_at_reward
    if enough is None or not report.rewards or float(np.mean(report.rewards)) < enough:
        return None
    return f"step {report.step}: the mean reward has reached {enough:g}"


def is_micro_batch(num_samples: int, num_tokens: int, train: TrainSection, device_type: str) -> bool:
    """Return whether this much is worth a call of the device. For a GPU, part of a pack takes as long as a full one."""
    if num_tokens >= train.micro_batch_tokens * (train.ranks // train.replicas):
        return True
    least = train.min_micro_batch_samples
    if least is None:
        return device_type == "cpu" and num_samples >= _CPU_MICRO_BATCH_SAMPLES
    return num_samples >= least


def _size(sample: TrainSample) -> int:
    """Return the tokens that a sequence brings to a micro-batch. The prompt of an answer is not counted; that of an
    episode's sequence may be a long conversation."""
    return len(sample.answer) if sample.episode is None and sample.drawn is None else sample.num_tokens


async def _in_order(groups: AsyncIterator[Arrived]) -> AsyncIterator[Arrived]:
    """Yield all groups in the order of their ids, so that floating-point sums do not depend on the order of arrival."""
    for one in sorted([one async for one in groups], key=lambda one: one.group.id):
        yield one
