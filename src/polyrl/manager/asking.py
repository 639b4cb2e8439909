"""Asking beside the trainer: a question becomes a group that no step trains on (rules: scheduling/parts/asking.py).

Rules kept here: questions enter by the executor's one door, as all news does. So they are in the journal, they move
when a worker dies, and replay and stories know them. What is asked at once is bounded here, never by letting it wait.

A question does not outlive the manager: the client's connection dies with it (recovery.py).
"""

from collections.abc import Callable
from typing import NamedTuple

from polyrl.ids import GroupId, SampleId, sample_id
from polyrl.manager.payload import SampleTokens
from polyrl.manager.question import Question
from polyrl.manager.refusals import Refused
from polyrl.manager.run import Executor
from polyrl.manager.settings import MISSED_BEATS, ManagerSettings
from polyrl.scheduling.core import events as e
from polyrl.scheduling.core.parameters import DomainData, FleetRules, SchedulerConfig
from polyrl.wire import columns
from polyrl.wire.frames import PromptPayload, Sampling


class AskedGroup(NamedTuple):
    prompt: list[int]
    num_samples: int
    max_tokens: int
    seed: int
    sampling: Sampling


def longest_answer(executor: Executor) -> int:
    """Raises Refused where there is no run to ask in."""
    if executor.scheduler is None:
        raise Refused("no_run", "no run is open: start the manager with --serve, or wait for the trainer")
    return executor.scheduler.desk.max_new_tokens


def ask(executor: Executor, wanted: list[AskedGroup], wake: Callable[[], None]) -> list[Question]:
    """All of it, or nothing: raises Refused."""
    longest = longest_answer(executor)
    assert executor.scheduler is not None
    asked = sum(one.num_samples for one in executor.questions.values())
    more, most = sum(one.num_samples for one in wanted), executor.settings.serve.max_samples
    if asked + more > most:
        raise Refused("asked", f"{asked} answers are being written, and {more} more would be above {most}")
    questions: list[Question] = []
    for one in wanted:
        group = GroupId(executor.scheduler.desk.state.next_group)
        texts = [executor.payload.text(sample_id(group, index)) for index in range(one.num_samples)]
        executor.payload.prompts[group] = PromptPayload(group, columns.pack_tokens(one.prompt), one.sampling)
        question = Question(group, texts, max_tokens=min(longest, one.max_tokens), seed=one.seed, wake=wake)
        executor.questions[group] = question
        questions.append(question)
        executor.tell(e.GroupAsked(one.num_samples))
    return questions


def stop(executor: Executor, sample: SampleId, text: SampleTokens) -> None:
    """Whoever asked has enough of this answer."""
    executor.tell(e.SampleStopped(sample, text.num_tokens))


def withdraw(executor: Executor, group: GroupId, reason: str) -> None:
    if group in executor.questions:
        executor.tell(e.GroupWithdrawn(group, reason))


def config_of(settings: ManagerSettings) -> SchedulerConfig:
    """Of a run without a trainer. It has no data: there are no rounds, and nobody requests any."""
    domain = DomainData(name="asked", prompts_per_step=1, num_prompts=1)
    patience_s = max(FleetRules().heartbeat_timeout_s, MISSED_BEATS * settings.stream.heartbeat_interval_s)
    return SchedulerConfig(
        domains=(domain,),
        max_new_tokens=settings.serve.max_new_tokens,
        fleet_rules=FleetRules(heartbeat_timeout_s=patience_s),
    )
