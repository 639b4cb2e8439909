"""The contract of a run's prompts and rewards: what the fleet, the trainer and validation ask of them (tasks.py)."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from polyrl.client import EpisodeCall
from polyrl.data.tokens import TokenIds
from polyrl.rewards.pool import RewardPool
from polyrl.rewards.reward import Reward
from polyrl.wire.frames import EnvironmentReward


class Answered(NamedTuple):
    """An answer, or an episode, whose tokens are all that the policy drew."""

    tokens: list[int]
    finish: str
    calls: Sequence[EpisodeCall] = ()
    """An episode's; `own` is the reward that its environment gave it."""
    own: EnvironmentReward | None = None


class UnderWay(NamedTuple):
    running: int
    timeout_s: float
    longest: tuple[float, str]
    """The longest-running reward: its seconds, and its function."""
    failed: tuple[int, str]
    """The number of answers without a reward, and the reason of the last."""


class Tasks(Protocol):
    """The prompts and rewards of a run. Domains, and prompts within them, have numbers; validation sets, names."""

    @property
    def num_prompts(self) -> list[int]: ...

    @property
    def names(self) -> list[str]: ...

    def tokens(self, domain: int, prompt: int) -> TokenIds: ...

    def row(self, domain: int, prompt: int) -> bytes:
        """Return the row of an episode's task, as JSON; empty for a prompt, and where the environment has its own."""
        ...

    @property
    def digests(self) -> tuple[str, ...]:
        """The digest of each domain's prompts in order; empty where the recipe alone determines them."""
        ...

    async def score(self, domain: int, prompt: int, answer: Answered, limit_s: float = 0.0) -> Reward:
        """Return the reward. Raises if there is none: a missing reward is never a zero.

        `limit_s` is the CPU time that the answer's program may take; 0: no limit was learned.
        """
        ...

    @property
    def scores_groups(self) -> bool:
        """Whether any domain has a reward function of whole groups."""
        ...

    async def score_group(self, domain: int, prompt: int, answers: Sequence[Answered]) -> list[Reward | None]:
        """Return what the functions of whole groups add to each answer's reward. Raises as `score`.

        None: there is none for that answer now, through no fault of its own.
        """
        ...

    @property
    def validation_names(self) -> list[str]:
        """The names of the validation sets."""
        ...

    def validation_tokens(self, name: str) -> list[TokenIds]: ...

    async def score_validation(self, name: str, prompt: int, answer: Answered) -> float:
        """Score an attempt of a validation set. Raises as `score`."""
        ...

    async def score_validation_group(self, name: str, prompt: int, answers: Sequence[Answered]) -> list[Reward | None]:
        """Return what is added to each answer's reward. Raises as `score`."""
        ...

    def held_out(self, name: str) -> list[tuple[int, bytes]]:
        """Return the numbers and rows of a validation set's tasks, whose episodes are played."""
        ...

    async def failed(self) -> None:
        """Wait for as long as all is well. Raises UserError when nothing can be trained."""
        ...

    def rewards_under_way(self) -> UnderWay | None:
        """Return the present state of the reward functions; None if there is nothing to report."""
        ...

    def reward_metrics(self) -> dict[str, float]:
        """Return the metrics of the reward functions since the last call."""
        ...

    @property
    def pool(self) -> RewardPool | None:
        """The places where functions run; None: they run elsewhere."""
        ...

    def why_none_scored(self) -> str:
        """Return why a reward has failed for all answers so far; empty if none has."""
        ...
