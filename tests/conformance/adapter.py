"""What the suite asks of a trainer. Another trainer takes part with a class of these methods.

Nothing is needed but Python; a sequence may be a plain pair.
"""

import tomllib
from collections.abc import Mapping
from fractions import Fraction
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

FIXED_TOKENS = 100
"""The divisor of aggregation `fixed`."""


class CaseCall(NamedTuple):
    saw: list[int]
    drew: list[int]
    finish: str = "stop"
    paid: bool = True
    """False: somebody else asked the policy, such as the user whom it plays."""


class CaseSequence(NamedTuple):
    tokens: list[int]
    trained: str
    """A 1 for each token that is trained, a 0 for context."""


class CaseEpisode(NamedTuple):
    calls: list[CaseCall]
    reward: float = 0.0
    group: int = 0
    failed: bool = False
    """It ended without a reward, for a reason that the policy cannot have caused."""
    sequences: list[CaseSequence] | None = None
    advantages: Mapping[str, float] = MappingProxyType({})
    weights: Mapping[str, str] = MappingProxyType({})
    """For each aggregation, what the loss of each of its drawn tokens is multiplied with, all in all."""


class Case(NamedTuple):
    name: str
    bug: str
    wrong: str
    """What goes wrong where the case fails."""
    episodes: list[CaseEpisode]
    mean_reward: float | None = None


class ConformingTrainer(Protocol):
    """All methods take the episodes of a step, and answer for each of them in order; None for one that failed."""

    def sequences(self, episodes: list[CaseEpisode]) -> list[list[CaseSequence] | None]:
        """Return the sequences that the trainer runs its model on, in the order of their first calls."""
        ...

    def advantages(self, name: str, episodes: list[CaseEpisode]) -> list[float | None]:
        """Return the advantage that all drawn tokens of the episode have."""
        ...

    def weights(self, aggregation: str, episodes: list[CaseEpisode]) -> list[list[list[float]] | None]:
        """Return, for each sequence and each of its tokens, the derivative of the step's loss by the token's loss."""
        ...

    def mean_reward(self, episodes: list[CaseEpisode]) -> float:
        """Return the mean reward that is told of the step."""
        ...


class CaseRequest(NamedTuple):
    session: str
    """Empty: none is said."""
    saw: list[int]
    retry: int = 0
    """How many times the client has sent this request before."""
    got: list[int] | None = None
    """The tokens of the answer; None: it is refused."""


class ServedCase(NamedTuple):
    name: str
    bug: str
    wrong: str
    opens: list[str]
    """The session of each episode that begins, in order."""
    draws: list[list[int]]
    """What the policy draws, one answer after the other."""
    requests: list[CaseRequest]
    trained: dict[str, list[CaseSequence]]
    """By session, the sequences that its episode is trained on."""
    refused: tuple[int, ...] = ()
    """The indices of the episodes that may not begin."""


class ConformingServer(Protocol):
    """Answers the requests of episodes, by their sessions. Made with what its policy draws."""

    def __init__(self, draws: list[list[int]]) -> None: ...

    def open(self, session: str) -> bool:
        """Begin an episode. Return whether it may have this session."""
        ...

    def ask(self, session: str, saw: list[int], retry: int) -> list[int] | None:
        """Send a request as a client does. Return the drawn tokens; None: it was refused."""
        ...

    def close(self) -> dict[str, list[CaseCall]]:
        """End all episodes. Return the calls that each is trained on, by session."""
        ...


def read_cases() -> list[Case]:
    found = _read("cases.toml")
    return [Case(**{**case, "episodes": [_episode(each) for each in case["episodes"]]}) for case in found]


def read_served_cases() -> list[ServedCase]:
    return [ServedCase(**{**case, **_served(case)}) for case in _read("served.toml")]


def _read(file: str) -> list[dict[str, Any]]:
    return tomllib.loads((Path(__file__).parent / file).read_text(encoding="utf-8"))["case"]


def _served(said: dict[str, Any]) -> dict[str, Any]:
    trained = {session: [CaseSequence(**each) for each in its] for session, its in said["trained"].items()}
    requests = [CaseRequest(**each) for each in said["requests"]]
    return {"requests": requests, "trained": trained, "refused": tuple(said.get("refused", ()))}


def _episode(said: dict[str, Any]) -> CaseEpisode:
    sequences = said.get("sequences")
    made = None if sequences is None else [CaseSequence(**each) for each in sequences]
    return CaseEpisode(**{**said, "calls": [CaseCall(**each) for each in said["calls"]], "sequences": made})


def exact(text: str) -> float:
    return float(Fraction(text))
