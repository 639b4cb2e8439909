"""The contract of episodes that a host plays: an episode, its calls of the policy, and how it ends.

    end = await environment.play(episode)        the environment calls the policy through the episode, many times
    drawn = await episode.call(prompt, limits)   a call: tokens in, drawn tokens out

Rules kept here: the calls of an episode are answered one after the other. Sampling is the run's: a call says where to
stop, and nothing else. An episode either has a reward, or it failed for reasons that the policy cannot have caused;
there is no third way to end, and a failure is never a zero.
"""

import asyncio
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, Protocol

from msgspec import Struct

from polyrl.errors import PolyrlError
from polyrl.hosts.tools import whole_text
from polyrl.scheduling.core.bounds import MAX_REWARD
from polyrl.wire.host_frames import MAX_CALLS, MAX_PARTS, MAX_STOP_CHARACTERS, MAX_STOP_IDS, MAX_STOPS, PART_NAME

MAX_WHY = 300
"""Characters of the reason of an end that are told."""
_PART_NAME = re.compile(PART_NAME)


class NoRoom(PolyrlError):
    """The prompt fills the context, or the episode's token budget is spent. The policy may have caused it."""


class EpisodeFailed(PolyrlError):
    """An episode ended for reasons that the policy cannot have caused. It has no reward; the message is one line."""


class CallLimits(NamedTuple):
    """Where the answer to a call ends, beside the model's own end of text."""

    max_tokens: int | None = None
    """None: as many as the context and the episode's budget leave."""
    stop_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()


class DrawnAnswer(NamedTuple):
    """The answer to a call. A token that ended it is the last one, and so is one that completed a stop string."""

    tokens: list[int]
    logprobs: list[float]
    finish: Literal["stop", "length"]


class Episode(ABC):
    """One attempt at one task, as an environment sees it. `draw` is its way to the policy."""

    def __init__(
        self,
        name: str,
        *,
        index: int,
        seed: int,
        max_context: int,
        task: Mapping[str, Any] | None = None,
        attempt: int = 0,
    ) -> None:
        self.name = name
        """Unique in this host."""
        self.index = index
        """The task's number. All episodes of a group have the same task and the same seed."""
        self.seed = seed
        self.task = task
        """A row of the recipe's data, if the recipe has data."""
        self.attempt = attempt
        """How often this episode was begun before."""
        self.max_context = max_context
        """Tokens of a prompt and its answer together."""
        self._one_by_one = asyncio.Lock()

    async def call(self, prompt: Sequence[int], limits: CallLimits) -> DrawnAnswer:
        """Return the answer, however long it takes. Raises NoRoom, and EpisodeFailed when there can be no answer."""
        if not prompt:
            raise EpisodeFailed("a call without a prompt; expected at least one token")
        _check_limits(limits)
        async with self._one_by_one:
            if len(prompt) >= self.max_context:
                raise NoRoom(f"a prompt of {len(prompt)} tokens; the context is {self.max_context} tokens long")
            room = self.max_context - len(prompt)
            most = room if limits.max_tokens is None else min(limits.max_tokens, room)
            return await self.draw(prompt, limits._replace(max_tokens=most))

    @abstractmethod
    async def draw(self, prompt: Sequence[int], limits: CallLimits) -> DrawnAnswer:
        """Answer one call. The prompt fits into the context, and so does `max_tokens`, which is a number."""


class EpisodeEnd(Struct, frozen=True, kw_only=True):
    """An episode that has its reward."""

    reward: float
    correct: bool = False
    """Whether the task was solved, for pass@k."""
    parts: dict[str, float] = {}
    """Named parts of the reward, or beside it."""
    why: str = ""
    """Why it ended, as the environment says: one line."""
    num_turns: int = 0
    untrained: tuple[int, ...] = ()
    """Numbers of calls that another role made of the policy: an opponent, a simulated user, a judge."""


class PlayedEnvironment(Protocol):
    """An environment that a host plays: a package's, through its adapter, or a person's own."""

    @property
    def name(self) -> str: ...

    @property
    def num_tasks(self) -> int | None:
        """Known after `start`. None: tasks are made from any number."""
        ...

    @property
    def max_at_once(self) -> int | None:
        """Known after `start`: episodes that it can play at once; None: any number. An episode that waited for a place
        within its environment would spend its first turn's time there."""
        ...

    @property
    def worn_out(self) -> str:
        """Why its process should be replaced, in a line; empty: it need not be. Asked from any thread."""
        ...

    async def start(self) -> None:
        """Get ready. Raises UserError for settings that cannot be used."""
        ...

    async def play(self, episode: Episode) -> EpisodeEnd:
        """Play one episode; many run at once. Raises EpisodeFailed; any other exception is a failure too."""
        ...

    async def close(self) -> None: ...


def _check_limits(limits: CallLimits) -> None:
    """Raise EpisodeFailed for limits that no run takes: refused by the manager, they would cost others their host."""
    if limits.max_tokens is not None and not _is_number(limits.max_tokens, 1):
        raise EpisodeFailed(f"a call for {str(limits.max_tokens)[:40]} tokens; expected a whole number from 1 on")
    if len(limits.stop_ids) > MAX_STOP_IDS or len(limits.stop) > MAX_STOPS:
        raise EpisodeFailed(f"a call with {len(limits.stop_ids)} stop tokens and {len(limits.stop)} stop strings; "
                            f"expected at most {MAX_STOP_IDS} and {MAX_STOPS}")  # fmt: skip
    for token in limits.stop_ids:
        if not _is_number(token, 0, 1 << 31):
            raise EpisodeFailed(f"the stop token {str(token)[:40]}; expected a token's number")
    for one in limits.stop:
        if not isinstance(one, str) or not 0 < len(one) <= MAX_STOP_CHARACTERS:
            raise EpisodeFailed(f"the stop string {str(one)[:40]!r}; expected 1 to {MAX_STOP_CHARACTERS} characters")
        if whole_text(one) != one:
            raise EpisodeFailed(f"the stop string {one[:40]!r}; expected no half of a character")


def _is_number(value: object, least: int, end: float = math.inf) -> bool:
    return isinstance(value, int) and least <= value < end


def finite(value: object, what: str) -> float:
    """Return a reward as a number. Raises EpisodeFailed for anything else, NaN included."""
    if isinstance(value, bool | int | float) or hasattr(value, "__float__"):
        try:
            number = float(value)  # type: ignore[arg-type]
        except (TypeError, ValueError, OverflowError):
            number = math.nan
        if math.isfinite(number) and abs(number) <= MAX_REWARD:
            return number
        expected = f"a number of at most {MAX_REWARD:g}" if math.isfinite(number) else "a finite number"
        raise EpisodeFailed(f"{what} is {str(value)[:40]}; expected {expected}")
    raise EpisodeFailed(f"{what} is {type(value).__name__}; expected a number")


def checked_parts(parts: object) -> dict[str, float]:
    """Return named parts of a reward. Raises EpisodeFailed for what cannot travel with a sample."""
    if not isinstance(parts, Mapping):
        raise EpisodeFailed(f"the parts of a reward are {type(parts).__name__}; expected a dict")
    if len(parts) > MAX_PARTS:
        raise EpisodeFailed(f"a reward of {len(parts)} parts; expected at most {MAX_PARTS}")
    for name in parts:
        if not isinstance(name, str) or _PART_NAME.match(name) is None:
            raise EpisodeFailed(f"a part of a reward is called {str(name)[:80]!r}; expected letters, digits, _ . or -")
    return {name: finite(value, f"the part {name} of the reward") for name, value in parts.items()}


def checked_untrained(numbers: Sequence[object]) -> tuple[int, ...]:
    """Return the numbers of calls that are not trained. Raises EpisodeFailed for what is no call's number."""
    found = tuple(one for one in numbers if isinstance(one, int) and 0 <= one < MAX_CALLS)
    if len(found) != len(numbers):
        raise EpisodeFailed(f"untrained calls beyond the numbers of calls; expected 0 to {MAX_CALLS - 1}")
    return found
