"""The notes of a run's payload: everything in it that is not tokens."""

import msgspec

from polyrl.wire.control import AnswerRules, HostJoinRequest, JoinRequest
from polyrl.wire.frames import PromptPayload


class Note(msgspec.Struct, frozen=True, tag=True, tag_field="note", array_like=True):
    """An entry of the payload that is not tokens."""


class SessionOpened(Note, frozen=True, tag="session"):
    key: str
    incarnation: int
    facts: JoinRequest


class HostOpened(Note, frozen=True, tag="host"):
    key: str
    incarnation: int
    facts: HostJoinRequest


class CallKept(Note, frozen=True, tag="call"):
    """A new call of an episode. Calls from this number on, and tokens beyond `num_tokens`, are gone."""

    sample: int
    number: int
    num_tokens: int
    is_cut: bool
    """Whether tokens are thrown away."""
    base: int
    kept: int
    tokens: bytes
    start: int
    max_tokens: int
    stop_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()


class EpisodeKept(Note, frozen=True, tag="episode"):
    """An episode has ended with these calls and tokens."""

    sample: int
    num_calls: int
    num_tokens: int
    is_cut: bool
    finish: str
    reward: float
    parts: dict[str, float] = {}
    untrained: tuple[int, ...] = ()


class RunOpened(Note, frozen=True, tag="run"):
    key: str
    has_reward: bool
    has_weights: bool = False
    caveat: str = ""
    trains: bool = False
    answers: AnswerRules | None = None


class VersionOffered(Note, frozen=True, tag="offered"):
    """The addresses of a version's weights, and the digest that they must have."""

    version: int
    digest: str
    addresses: tuple[str, ...]


class Granted(Note, frozen=True, tag="granted"):
    """New leases: each generates for its sample from this token on."""

    leases: list[int]
    samples: list[int]
    from_tokens: list[int]
    workers: list[str]


class PromptsSupplied(Note, frozen=True, tag="prompts"):
    prompts: tuple[PromptPayload, ...]


class RewardKept(Note, frozen=True, tag="reward"):
    sample: int
    value: float
    parts: dict[str, float] = {}


AnyNote = (
    SessionOpened
    | HostOpened
    | RunOpened
    | VersionOffered
    | Granted
    | PromptsSupplied
    | RewardKept
    | CallKept
    | EpisodeKept
)
