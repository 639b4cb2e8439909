"""The trainer's side of a fleet: rounds and their groups, prompts, rewards, versions. client/__init__.py has an
example.

A group is handed out once; a group that was handed out and not taken when this process died comes again to the next
one. A group with a token of a version that we did not publish, or one that is no token of the model (checking.py), is
not handed out: it is rejected, its writer is named, and another takes its place. So is a group without a reward, where
groups are scored as a whole (group_rewards.py).
"""

import asyncio
import contextlib
import logging
import math
import ssl
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import numpy as np
from msgspec.structs import replace

from polyrl.client.checking import Fault, find_call_fault, find_fault, find_stranger
from polyrl.client.group_rewards import GroupRewards, wait_s
from polyrl.client.line import Line
from polyrl.errors import NoReward, PolyrlError, UserError, plain
from polyrl.ids import show_sample
from polyrl.scheduling.core.ledger import StepLine
from polyrl.scheduling.core.parameters import SchedulerConfig
from polyrl.wire import columns, frames
from polyrl.wire.columns import PIECE_BYTES
from polyrl.wire.control import AnswerRules, RunReply, RunRequest, Status
from polyrl.wire.dial import Dialer
from polyrl.wire.frames import EnvironmentReward, Origin, Sampling, Segment

log = logging.getLogger("polyrl.client")

_WARNINGS = 5
"""Samples without a reward that are named one by one."""
_PROMPTS_WITHIN_S = 0.2
"""Prompts that took longer are sent before the next one is asked for."""
_LINES_KEPT = 64
_VERSIONS_KEPT = 64
"""Versions whose digests are remembered, beyond those that `max_staleness` allows. The manager keeps as many."""


class Prompt(NamedTuple):
    tokens: list[int]
    """Empty in a domain of episodes: environments make their prompts."""
    sampling: Sampling = Sampling()
    task: bytes = b""
    """In a domain of episodes: a row of the data, as JSON; empty where the environment brings its own tasks."""


class EpisodeCall(NamedTuple):
    """One request of an episode's environment to the policy."""

    prompt: "np.ndarray[Any, Any]"
    """(tokens,) int32: all tokens that the policy saw."""
    start: int
    """The drawn tokens are `sample.tokens[start:end]`."""
    end: int
    finish: str
    """stop, or length."""
    is_trained: bool = True
    """Whether it is the policy's that the environment paid. Others are context where a later call saw them."""


class Sample(NamedTuple):
    """An answer, with what is known of every token; or an episode, whose answers to all calls follow one another."""

    id: int
    tokens: "np.ndarray[Any, Any]"
    """Drawn tokens alone."""
    logprobs: "np.ndarray[Any, Any]"
    segments: tuple[Segment, ...]
    """Which version and worker wrote from which token on."""
    finish: str
    """stop, or length."""
    reward: float
    origin: Origin
    """Which prompt of the data it answers."""
    parts: Mapping[str, float] = {}
    """The parts of the reward, by name."""
    calls: tuple[EpisodeCall, ...] = ()
    """The calls of an episode, in order. Empty: the sample is one answer to its group's prompt."""
    limit_s: float = 0.0
    """For its reward, where limits are learned: the CPU time that a program in the answer may take. Otherwise 0."""
    own: EnvironmentReward | None = None
    """The reward that an episode's environment gave it; None for a single answer."""

    @property
    def name(self) -> str:
        return show_sample(self.id)  # type: ignore[arg-type]


class Group(NamedTuple):
    step: int
    id: int
    samples: tuple[Sample, ...]
    origin: Origin


UNKNOWN_CPU_S = -1.0


class RewardResult(NamedTuple):
    """The reward of an answer with its details, for a reward function to which a number is not enough."""

    value: float
    correct: bool = False
    cpu_s: float = 0.0
    """The CPU time that the answer took; below zero: unknown."""
    parts: Mapping[str, float] = {}
    """The parts of the reward, by name: they stay with the sample."""
    outcome: frames.RewardOutcome = "scored"
    """`timed_out` or `crashed`: the answer is the cause, and the value counts."""


class RoundOver(PolyrlError):
    """There is no prompt left for that step."""


PromptOf = Callable[[int, int, int], Prompt]
"""(domain, prompt, epoch) -> what it says. Which prompts a round starts is the scheduler's decision.

Called in a thread, one prompt after the other, so it may be slow. Workers wait for it: one whose samples have all
waited for `fleet_rules.stall_timeout_s` and half as long again is given up.
"""
RewardOf = Callable[[Sample], Awaitable[float | RewardResult]]
"""A reward function. A call that raises, or returns no finite number, has failed: it is tried again, then the sample is
dropped. A call that takes too long, or raises NoReward, is not tried again.

A failure never counts as a zero. A wrong answer, for example one that crashed its test, is no failure: return a reward
for it.
"""

GroupRewardOf = Callable[[Group], Awaitable[Sequence[RewardResult | None]]]
"""A reward function of a whole group, called when all of its samples have their own rewards. Of its results, one for
each sample, `value` is added to the sample's reward and `parts` to its parts. None: there is no reward now, as if it
had raised: it is tried again, then these samples leave the group. A group that has too few left, or for which NoReward
is raised, is rejected.
"""


@asynccontextmanager
async def connect(
    url: str,
    token: str,
    config: SchedulerConfig,
    *,
    prompts: PromptOf,
    reward: RewardOf | None = None,
    group_reward: GroupRewardOf | None = None,
    has_weights: bool = False,
    caveat: str = "",
    trains: bool = False,
    answers: AnswerRules | None = None,
    tls: ssl.SSLContext | None = None,
    give_up_after_s: float = 600.0,
) -> AsyncIterator["Fleet"]:
    """Open the run at this manager, or go on with it. Without `reward`, every answer counts as scored with 0.

    `group_reward` scores groups when they are delivered, beside others that still come; it adds to `reward`.
    `has_weights`: every version is published with where its weights are, and no worker writes without them. `caveat` is
    repeated by every output on the run: status, ledger, stories, pictures. `trains`: emulated workers are refused.
    `answers`: the tokens and ends that the model can have; workers that send others are refused, as are their groups.
    """
    async with Dialer(url, token, tls) as dialer:
        fleet = Fleet(
            dialer,
            config,
            prompts,
            reward,
            give_up_after_s,
            group_reward=group_reward,
            has_weights=has_weights,
            caveat=caveat,
            trains=trains,
            answers=answers,
        )
        await fleet._open()
        try:
            yield fleet
        finally:
            await fleet._close()


class Fleet:
    """Made by `connect`."""

    def __init__(
        self,
        dialer: Dialer,
        config: SchedulerConfig,
        prompts: PromptOf,
        reward: RewardOf | None,
        give_up_after_s: float,
        *,
        group_reward: GroupRewardOf | None = None,
        has_weights: bool = False,
        caveat: str = "",
        trains: bool = False,
        answers: AnswerRules | None = None,
    ) -> None:
        self._dialer = dialer
        self._has_weights, self._caveat, self._trains, self._answers = has_weights, caveat, trains, answers
        self.digests: dict[int, tuple[str, ...]] = {}
        """Digests of the newest versions that were published with weights. Each has several, the newest last, where a
        restart made the version again and it came out otherwise. A trainer that resumes adds those of its past."""
        self._config = config
        self._prompt_of = prompts
        self._reward_of, self._group_reward_of = reward, group_reward
        self._group_rewards = GroupRewards(config.rewards, config.rounds.min_group_samples)
        self.opened: RunReply | None = None
        """The manager's reply when the run was opened."""
        self.lines: deque[StepLine] = deque(maxlen=_LINES_KEPT)
        """The scheduler's account of each of the last steps, the newest last."""
        self.advice: frames.FleetAdvised | None = None
        """How many workers are worth holding, why, and which of them to let go."""
        self._width: frames.WidthPlanned | None = None
        self._rounds: dict[int, _Round] = {}
        self._last_requested = -1
        self._has_published = False
        self._first_open_step = 0
        """Earlier steps are done here. Frames about them are outdated: they were sent before the manager knew."""
        self._wanted: dict[int, frames.PlannedGroup] = {}
        """Groups whose prompts are still to be supplied, by group."""
        self._in_parts: dict[int, tuple[Sample, ...]] = {}
        """The beginnings of groups whose rest has not come yet. After a break they come from their beginning."""
        self._kept: dict[int, dict[int, frames.SamplePayload]] = {}
        """By step and sample, the answers that this connection brought to be scored: they are not sent twice."""
        self._line = Line(dialer, give_up_after_s, self._hear, self._forget_connection)
        self._scoring: dict[tuple[int, int], asyncio.Task[None]] = {}
        self._life: asyncio.Task[None] | None = None
        self._changed = asyncio.Condition()
        self._num_unscored = 0

    # What a trainer does

    async def publish(
        self, version: int, digest: str = "", addresses: Sequence[str] = (), *, replaces: Sequence[str] = ()
    ) -> None:
        """Offer a version to the fleet. Step t trains on what version t wrote, and makes version t + 1.

        `replaces`: what processes before this one published as this version. Their tokens are still trained on.
        """
        former = tuple(one for one in replaces if one != digest)[-frames.MAX_REPLACED :]
        if digest:
            self.digests[version] = (*former, digest)
            self._forget_versions(version - self._config.max_staleness - _VERSIONS_KEPT)
        await self._state(lambda seq: frames.Published(seq, version, digest, tuple(addresses), former))
        self._has_published = True
        async with self._changed:
            self._changed.notify_all()

    def _forget_versions(self, last: int) -> None:
        for version in [one for one in self.digests if one <= last]:
            del self.digests[version]

    async def until_published(self) -> None:
        """Wait until a version that was published here is on file at the manager."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._has_published or self._has_failed)
        await self.settled()

    async def request(self, step: int) -> None:
        """Ask for a step's round ahead of `round`: it opens as soon as `max_staleness` and the data allow."""
        if step > self._last_requested:
            self._last_requested = step
            await self._state(lambda seq: frames.RequestRound(seq, step))

    async def round(self, step: int) -> AsyncIterator[Group]:
        """Request the step's round, and hand out its groups as they are complete. Raises RoundOver without prompts."""
        round_ = self._rounds.setdefault(step, _Round())
        await self.request(step)
        while True:
            async with self._changed:
                await self._changed.wait_for(
                    lambda: round_.ready or round_.is_over or round_.broke_by is not None or self._has_failed
                )
                self._raise_failure()
                if round_.broke_by is not None:
                    raise round_.broke_by
                if round_.data_ended:
                    raise RoundOver(f"step {step}: every prompt of the last epoch is trained or dropped")
                if not round_.ready:
                    return
                group = round_.ready.popleft()
            if not await self._refuse(group):
                yield group

    async def take(self, *groups: Group, worker: str = "") -> None:
        """Acknowledge groups that are trained with their step. A micro-batch of them begins, on the devices of
        this local worker; empty: on all that the trainer has."""
        for step in dict.fromkeys(group.step for group in groups):
            ids = tuple(group.id for group in groups if group.step == step)
            await self._state(lambda seq, step=step, ids=ids: frames.Took(seq, step, ids, worker))

    async def reject(self, group: Group, reason: str, *, workers: Sequence[str] = ()) -> None:
        """Reject a group: it is not trained, a fresh prompt takes its place, and the round goes on.

        `workers`: those whose tokens it is rejected for. The prompt itself is written again then, and a worker that is
        named again and again is given up.
        """
        self._rounds[group.step].rejected.add(group.id)
        named = tuple(workers)[: frames.MAX_REPLACED]
        await self._state(lambda seq: frames.Rejected(seq, group.id, reason, named))

    async def micro_batch_done(self, step: int, *, worker: str = "") -> None:
        """Say that the micro-batch on this local worker's devices is trained."""
        await self._state(lambda seq: frames.MicroBatchDone(seq, step, worker))

    async def restart_step(self, step: int) -> None:
        """Begin an open step anew: what a process before this one took, and lost, is handed out again."""
        await self._state(lambda seq: frames.RestartStep(seq, step))
        await self.settled()  # all of it has come before that is acknowledged

    async def step_done(self, step: int, *, left_out: Sequence[str] = ()) -> None:
        """Say that the step is trained. Groups of its round that were not taken are discarded.

        `left_out`: workers of which samples were left out, since they had made them up. None of them is believed.
        """
        ended = self._rounds.pop(step, _Round())
        for task in ended.group_scoring.values():
            task.cancel()
        self._first_open_step = max(self._first_open_step, step + 1)
        for one in [kept for kept in self._kept if kept <= step]:
            del self._kept[one]
        named = tuple(left_out)[: frames.MAX_REPLACED]
        await self._state(lambda seq: frames.StepDone(seq, step, named))

    @asynccontextmanager
    async def validation(self) -> AsyncIterator[None]:
        """Mark the time within the block as validation: it belongs to no step, and is no waiting time.

        A trainer that is broken off meanwhile does not say so: the manager sees another process go on.
        """
        await self._state(lambda seq: frames.Validating(seq, begins=True))
        yield
        await self._state(lambda seq: frames.Validating(seq, begins=False))

    async def tell_rewards(
        self, running: int, timeout_s: float, longest: tuple[float, str], failed: tuple[int, str]
    ) -> None:
        """Tell the state of the reward functions: how many run, which has run longest, and how many have failed."""
        longest_s, function = longest
        num_failed, why = failed
        await self._state(
            lambda seq: frames.RewardsTold(
                seq, running, timeout_s, longest_s, plain(function)[:200], num_failed, plain(why)[:1000]
            )
        )

    async def tell_offer(self, num_workers: int, usd_per_hour: float, workers: Sequence[str] = ()) -> None:
        """Tell how many workers could be had in all, what another one costs an hour, and these from now on."""
        await self._state(lambda seq: frames.Offered(seq, num_workers, usd_per_hour, tuple(workers)))

    async def status(self) -> Status:
        return await self._line.again(lambda: self._dialer.get("/v1/status", Status))

    async def line(self, step: int) -> StepLine:
        """Return the scheduler's own account of a step, when it is there."""
        async with self._changed:
            await self._changed.wait_for(lambda: any(one.step == step for one in self.lines) or self._has_failed)
            self._raise_failure()
            return next(one for one in self.lines if one.step == step)

    async def settled(self) -> None:
        """Wait until the manager has all statements made so far on file; other tasks may make new ones meanwhile."""
        last = self._line.last_said
        async with self._changed:
            await self._changed.wait_for(lambda: self._line.is_on_file(last) or self._has_failed)
            self._raise_failure()

    async def _state(self, make: Callable[[int], frames.Statement]) -> None:
        self._raise_failure()
        await self._line.state(make)

    # From its beginning to its end

    async def _open(self) -> None:
        request = RunRequest(
            protocol=frames.PROTOCOL,
            config=self._config,
            has_reward=self._reward_of is not None,
            has_weights=self._has_weights,
            caveat=self._caveat,
            trains=self._trains,
            answers=self._answers,
        )
        opened: RunReply = await self._line.again(lambda: self._dialer.post("/v1/run", request, RunReply))
        self.opened = opened
        self._life = asyncio.create_task(self._live(opened.session))

    async def _close(self) -> None:
        try:
            if not self._has_failed:  # what failed was told to whoever asked
                with contextlib.suppress(TimeoutError, PolyrlError):
                    async with asyncio.timeout(5.0):
                        await self.settled()
        finally:
            group_scoring = [task for one in self._rounds.values() for task in one.group_scoring.values()]
            tasks = [*self._scoring.values(), *group_scoring, *([] if self._life is None else [self._life])]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._line.close()

    async def _live(self, session: str) -> None:
        tasks = [asyncio.create_task(one) for one in (self._line.keep(session), self._supply_prompts())]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            async with self._changed:
                self._changed.notify_all()

    async def until_planned(self, width: int) -> frames.WidthPlanned:
        """Wait until the engines that the run started are to have another tensor parallelism than this."""
        async with self._changed:
            while self._width is None or self._width.tensor_parallel == width:
                await self._changed.wait()
            return self._width

    # Hearing

    async def _hear(self, frame: frames.ToTrainer) -> None:  # noqa: C901 (a case for each kind)
        match frame:
            case frames.Ack():
                pass  # of the line's; who waits until all is on file looks again
            case frames.Opened():
                self._wanted |= {plan.group: plan for plan in frame.groups}
            case frames.ScoreThese():
                for one in frame.samples:
                    if one.step >= self._first_open_step:
                        self._kept.setdefault(one.step, {})[one.answer.sample] = one.answer
                    self._score(one)
            case frames.CancelScoring():
                task = self._scoring.pop((frame.sample, frame.attempt), None)
                if task is not None:
                    task.cancel()
            case frames.Delivered():
                self._delivered(frame)
            case frames.Dropped():
                self._wanted.pop(frame.group, None)
            case frames.Closed():
                if frame.step >= self._first_open_step:
                    self._rounds.setdefault(frame.step, _Round()).closed = frame
            case frames.DataEnded():
                self._rounds.setdefault(frame.step, _Round()).data_ended = True
            case frames.StepReported():
                if all(one.step != frame.line.step for one in self.lines):  # the last one is told at every connection
                    self.lines.append(frame.line)
            case frames.FleetAdvised():
                self.advice = frame
            case frames.WidthPlanned():
                self._width = frame
            case frames.Release():
                raise UserError(f"the manager refused us: {frame.why}")
        async with self._changed:
            self._changed.notify_all()

    async def _supply_prompts(self) -> None:
        """Ask for prompts in a thread, and send those that are there: others may take their time."""
        while True:
            async with self._changed:
                await self._changed.wait_for(lambda: self._wanted)
            plans = list(self._wanted.values())
            prompts = await asyncio.to_thread(_first_prompts, self._prompt_of, plans)
            for plan in plans[: len(prompts)]:
                self._wanted.pop(plan.group, None)
            await self._state(lambda seq, prompts=prompts: frames.SupplyPrompts(seq, prompts))

    def _delivered(self, frame: frames.Delivered) -> None:
        if frame.step < self._first_open_step:
            return
        round_ = self._rounds.setdefault(frame.step, _Round())
        if frame.group in round_.seen:
            return
        samples = self._in_parts.pop(frame.group, ()) + tuple(self._samples(frame))
        if frame.more:
            self._in_parts[frame.group] = samples
            return
        round_.seen.add(frame.group)
        group = Group(frame.step, frame.group, samples, frame.origin)
        if self._group_reward_of is None:
            round_.ready.append(group)
            return
        task = asyncio.create_task(self._score_group(group, round_, self._group_reward_of))
        round_.group_scoring[group.id] = task
        task.add_done_callback(lambda _: round_.group_scoring.pop(group.id, None))

    def _samples(self, frame: frames.Delivered) -> Iterator[Sample]:
        """Yield the answers of a frame. Raises ConnectionError for one that is not here: after a break all come in
        full."""
        kept = self._kept.get(frame.step, {})
        for one in frame.samples:
            scored = kept.pop(one.sample, None)
            if one.is_kept and scored is None:
                raise ConnectionError(f"sample {one.sample} was not sent to be scored on this connection")
            full = one if scored is None or not one.is_kept else replace(scored, reward=one.reward, parts=one.parts)
            yield _sample(full, frame.origin)

    def _forget_connection(self) -> None:
        """Forget a connection that is over. On the next one groups come from their beginning, and answers in full."""
        self._in_parts.clear()
        self._kept.clear()

    def _fault(self, sample: Sample) -> Fault | None:
        """Return why a sample cannot be trained on, and who wrote it."""
        vocab = columns.ANY_ID if self._answers is None else self._answers.vocab
        fault = find_fault(sample.tokens, sample.logprobs, sample.segments, vocab)
        if fault is None and sample.calls:
            fault = find_call_fault(sample.calls, len(sample.tokens), vocab)
        if fault is None and self._has_weights:
            fault = find_stranger(sample.segments, self.digests)
        return fault

    async def _refuse(self, group: Group) -> bool:
        """Reject a group that cannot be trained on. Return whether it was one."""
        fault = next(filter(None, map(self._fault, group.samples)), None)
        if fault is None:
            return False
        log.warning("group %d is rejected: %s", group.id, fault)
        await self.reject(group, str(fault), workers=[fault.worker] if fault.is_lie else [])
        return True

    async def _score_group(self, group: Group, round_: "_Round", reward_of: GroupRewardOf) -> None:
        """Hand a group out when its samples have their rewards as a group; reject it if there are none."""
        try:
            with contextlib.suppress(PolyrlError):  # of a fleet that has failed, which is told to all who wait for it
                if await self._refuse(group):  # no tokenizer knows ids that are none
                    return
                try:
                    added = await self._group_rewards.rewards_of(reward_of, group, len(group.samples))
                except NoReward as error:
                    self._tell_of_none(f"group {group.id}, which is rejected", str(error))
                    round_.rejected.add(group.id)
                    await self._lose(group, group.samples, f"no reward: {error}")
                    return
                lost = [sample for sample, one in zip(group.samples, added, strict=True) if one is None]
                for sample in lost:
                    self._tell_of_none(f"sample {sample.name}", "infrastructure_failed, in a whole group")
                if lost:
                    await self._lose(group, lost, "no reward: infrastructure_failed, in a whole group")
                round_.ready.append(_add_rewards(group, added))
        except Exception as error:  # noqa: BLE001  a bug of ours: who waits for the group must hear of it
            round_.broke_by = error
        finally:
            round_.group_scoring.pop(group.id, None)
            async with self._changed:
                self._changed.notify_all()

    async def _lose(self, group: Group, lost: Sequence[Sample], reason: str) -> None:
        """Say that samples leave their group; all of them: that the group is not trained, and a fresh prompt is."""
        samples = tuple(sample.id for sample in lost)
        await self._state(lambda seq: frames.Unscored(seq, group.id, samples, reason))

    def _score(self, one: frames.ScoreThis) -> None:
        key = (one.answer.sample, one.attempt)
        if key not in self._scoring and self._reward_of is not None:
            task = self._scoring[key] = asyncio.create_task(self._run_reward(one, self._reward_of))
            task.add_done_callback(lambda _: self._scoring.pop(key, None))

    async def _run_reward(self, one: frames.ScoreThis, reward_of: RewardOf) -> None:
        rules = self._config.rewards
        sample = _sample(one.answer, one.origin, one.timeout_s if rules.adaptive else 0.0)
        outcome: frames.RewardOutcome = "scored"
        result = RewardResult(0.0)
        limit = asyncio.timeout(max(one.timeout_s, rules.wall_s))
        try:
            async with limit:
                given = 0.0 if self._fault(sample) else await reward_of(sample)  # no tokenizer knows ids that are none
            result = given if isinstance(given, RewardResult) else RewardResult(float(given))
            if not math.isfinite(result.value):
                raise ValueError(f"a reward of {result.value}")
            outcome = result.outcome
        except (PolyrlError, TimeoutError) as error:
            self._tell_of_none(f"sample {sample.name}", str(error) or f"none in {one.timeout_s:g} s")
            is_final = isinstance(error, NoReward) or limit.expired()
            outcome = "no_reward" if is_final else "infrastructure_failed"
        except Exception:
            log.exception("the reward of sample %s failed", sample.name)
            outcome = "infrastructure_failed"
        if outcome in ("infrastructure_failed", "no_reward"):
            result = RewardResult(0.0)
        if outcome == "infrastructure_failed" and one.attempt < rules.max_attempts:
            await asyncio.sleep(wait_s(one.attempt))
        await self._state(
            lambda seq: frames.Scored(
                seq,
                one.answer.sample,
                one.attempt,
                outcome,
                result.value,
                result.correct,
                result.cpu_s,
                dict(result.parts),
            )
        )

    def _tell_of_none(self, whose: str, why: str) -> None:
        self._num_unscored += 1
        level = logging.WARNING if self._num_unscored <= _WARNINGS else logging.INFO
        log.log(level, "no reward for %s: %s", whose, why)
        if self._num_unscored == _WARNINGS:
            log.warning("further ones without a reward are counted in the ledger, and not named here")

    @property
    def _has_failed(self) -> bool:
        return self._life is not None and self._life.done()

    def _raise_failure(self) -> None:
        if self._life is not None and self._life.done() and not self._life.cancelled():
            error = self._life.exception()
            if error is not None:
                raise error


class _Round:
    def __init__(self) -> None:
        self.ready: deque[Group] = deque()
        self.seen: set[int] = set()
        """Groups that came to us: each is handed out once."""
        self.rejected: set[int] = set()
        self.group_scoring: dict[int, asyncio.Task[None]] = {}
        """Groups whose rewards as a group are not there yet."""
        self.broke_by: Exception | None = None
        self.closed: frames.Closed | None = None
        self.data_ended = False

    @property
    def is_over(self) -> bool:
        if self.data_ended or self.closed is None:
            return self.data_ended
        voided = not self.rejected.isdisjoint((*self.closed.delivered, *self.closed.taken))
        return not voided and not self.group_scoring and self.seen.issuperset(self.closed.delivered)


def _first_prompts(prompt_of: PromptOf, plans: list[frames.PlannedGroup]) -> tuple[frames.PromptPayload, ...]:
    """Return the first of these prompts, at least one: as many as fit into a frame, or are there in a moment."""
    prompts: list[frames.PromptPayload] = []
    num_bytes, until = 0, time.monotonic() + _PROMPTS_WITHIN_S
    for plan in plans:
        prompt = prompt_of(plan.domain, plan.prompt, plan.epoch)
        packed = columns.pack_tokens(prompt.tokens)
        prompts.append(frames.PromptPayload(plan.group, packed, prompt.sampling, prompt.task))
        num_bytes += len(packed) + len(prompt.task)
        if num_bytes >= PIECE_BYTES or time.monotonic() > until:
            break
    return tuple(prompts)


def _add_rewards(group: Group, added: Sequence[RewardResult | None]) -> Group:
    """Return the group with its final rewards, without the samples that have none."""
    pairs = zip(group.samples, added, strict=True)
    samples = [
        sample._replace(reward=sample.reward + one.value, parts={**sample.parts, **one.parts})
        for sample, one in pairs
        if one is not None
    ]
    return group._replace(samples=tuple(samples))


def _sample(text: frames.SamplePayload, origin: Origin, limit_s: float = 0.0) -> Sample:
    cells = columns.view_cells(text.cells)
    tokens, logprobs = cells["token"].copy(), cells["logprob"].copy()
    calls = _calls(text.calls, tokens) if text.calls else ()
    said = text.segments, text.finish, text.reward
    return Sample(text.sample, tokens, logprobs, *said, origin, text.parts, calls, limit_s, text.own)


def _calls(calls: Sequence[frames.CallPayload], drawn: "np.ndarray[Any, Any]") -> tuple[EpisodeCall, ...]:
    """Give every call its whole prompt: it travels as what it adds to an earlier one."""
    made: list[EpisodeCall] = []
    for one in calls:
        new = columns.view_tokens(one.tokens)
        base = made[one.base] if one.base >= 0 else None
        seen = new[:0] if base is None else np.concatenate([base.prompt, drawn[base.start : base.end]])
        made.append(
            EpisodeCall(np.concatenate([seen[: one.kept], new]), one.start, one.end, one.finish, one.is_trained)
        )
    return tuple(made)
