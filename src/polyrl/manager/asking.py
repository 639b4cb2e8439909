"""Requests of OpenAI's clients, beside the trainer: each becomes a group that no step trains on
(scheduling/parts/asking.py).

    ask -> the scheduler has a group of it -> tokens come, and are in the journal -> `look` wakes the reader
                                           -> closed: all is answered, it was withdrawn, or it failed

Rules kept here: questions reach the scheduler as events. So they are in the journal, they move when a worker dies, and
replay and stories know them. The number of open questions is bounded by refusing, never by making them wait.

A question does not outlive the manager: the client's connection dies with it (recovery.py).
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from polyrl.errors import Refused
from polyrl.ids import GroupId, SampleId, sample_id
from polyrl.manager.lobby import Lobby
from polyrl.manager.payload import SampleTokens
from polyrl.manager.run import Run
from polyrl.manager.settings import MISSED_BEATS, ManagerSettings
from polyrl.scheduling.core import events as e
from polyrl.scheduling.core.commands import CloseAsked
from polyrl.scheduling.core.parameters import DomainData, FleetRules, SchedulerConfig
from polyrl.wire import columns
from polyrl.wire.frames import PromptPayload, Sampling


class AskedGroup(NamedTuple):
    """A question as it was asked."""

    prompt: list[int]
    num_samples: int
    max_tokens: int
    seed: int
    sampling: Sampling


class Question:
    """A question while it is answered. Its tokens are the payload's own, and stay here until the client has read
    them."""

    def __init__(
        self, group: GroupId, tokens: Sequence[SampleTokens], max_tokens: int, seed: int, wake: Callable[[], None]
    ) -> None:
        self.group = group
        self.tokens = tokens
        self.max_tokens = max_tokens
        self.seed = seed
        self.is_refused, self.detail = False, ""
        """An engine's last failure at it: whether the engine cannot do it at all, and its message."""
        self.closed: CloseAsked | None = None
        self._wake = wake
        self._num_seen = 0

    @property
    def num_samples(self) -> int:
        return len(self.tokens)

    def look(self) -> None:
        """Wake the reader if there is more to read."""
        num = sum(len(one.cells) + len(one.finish) for one in self.tokens)
        if num != self._num_seen:
            self._num_seen = num
            self._wake()

    def close(self, command: CloseAsked) -> None:
        self.closed = command
        self._wake()


def run_to_ask(lobby: Lobby) -> Run:
    """Return the run that answers. Raises Refused where none is open."""
    if lobby.run is None:
        raise Refused("no_run", "no run is open: start the manager with --serve, or wait for the trainer")
    return lobby.run


def ask(lobby: Lobby, wanted: list[AskedGroup], wake: Callable[[], None]) -> list[Question]:
    """Ask for all groups. Raises Refused, and asks for none, if one cannot be had."""
    run = run_to_ask(lobby)
    asked = sum(one.num_samples for one in run.questions.values())
    more, most = sum(one.num_samples for one in wanted), lobby.settings.serve.max_samples
    if asked + more > most:
        raise Refused("asked", f"{asked} answers are being written, and {more} more would be above {most}")
    questions: list[Question] = []
    for one in wanted:
        group = GroupId(run.desk.state.next_group)
        tokens = [run.payload.tokens_of(sample_id(group, index)) for index in range(one.num_samples)]
        run.payload.prompts[group] = PromptPayload(group, columns.pack_tokens(one.prompt), one.sampling)
        question = Question(group, tokens, min(run.desk.max_new_tokens, one.max_tokens), one.seed, wake)
        run.questions[group] = question
        questions.append(question)
        run.tell(e.GroupAsked(one.num_samples))
    return questions


def stop(lobby: Lobby, sample: SampleId, tokens: SampleTokens) -> None:
    """End an answer that its client has enough of."""
    lobby.tell(e.SampleStopped(sample, tokens.num_tokens))


def withdraw(lobby: Lobby, group: GroupId, reason: str) -> None:
    if lobby.run is not None and group in lobby.run.questions:
        lobby.run.tell(e.GroupWithdrawn(group, reason))


def config_of(settings: ManagerSettings) -> SchedulerConfig:
    """Return the configuration of a run without a trainer. It has no data and no rounds."""
    domain = DomainData(name="asked", prompts_per_step=1, num_prompts=1)
    patience_s = max(FleetRules().heartbeat_timeout_s, MISSED_BEATS * settings.stream.heartbeat_interval_s)
    return SchedulerConfig(
        domains=(domain,),
        max_new_tokens=settings.serve.max_new_tokens,
        fleet_rules=FleetRules(heartbeat_timeout_s=patience_s),
    )
