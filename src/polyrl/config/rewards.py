"""The reward settings of a recipe: which functions score an answer, with which weights, and where they run."""

import re
from typing import Annotated, Any

from msgspec import Meta, Struct, structs

from polyrl.scheduling.core.bounds import MAX_REWARD, AtLeastOne, Positive

_SLOTS_PER_PROCESS = 8
"""Rewards in progress per process of the pool: enough that no process waits for the next one to arrive."""
_SLOTS_ELSEWHERE = 64
"""Rewards in progress where all of them run on reward workers, whose places are not known beforehand."""
OWN_SANDBOX = ("code", "polyrl.rewards.code:CodeReward")
"""The function of ours that runs programs in a sandbox, by both of its names."""
STAYS = ("judge", "polyrl.rewards.judge:Judge")
"""The function of ours that no reward worker gets, by both of its names: keys and budget are the run's own."""
JUDGED_BY_MODEL = (*STAYS, "reward_model", "polyrl.rewards.reward_model:RewardModel")
"""Functions of ours that ask a model about one answer."""
ENVIRONMENT = "environment"
"""The name of an environment's own reward, among the functions that score its episodes."""
COMPARING = ("arithmetic", "math")
"""Functions of ours that compare with the row's answer: every row must have one."""
REWARD_NAMES = "arithmetic, math, code, judge, reward_model or module:function"
RewardNumber = Annotated[float, Meta(ge=-MAX_REWARD, le=MAX_REWARD)]
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


def wall_limit_s(cpu_s: float) -> float:
    """Return the wall time behind a limit of CPU time, for code that waits instead of computing."""
    return 2.0 * cpu_s + 2.0


class WeightedReward(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A reward function and its weight in the sum."""

    function: str
    """arithmetic, math, code, judge, reward_model, or a function of your own: `module:function`; environment: the
    reward that an episode's environment gives."""
    name: str = ""
    """The name in metrics and samples; empty: the function's own name."""
    weight: RewardNumber = 1.0
    """The factor of its score in the sum of all scores. 0: the score is reported, and does not count."""
    args: dict[str, Any] = {}
    """Keyword arguments of the function, after the answer; of a class, when its object is made."""
    cache: bool = True
    """Score the same answer to the same prompt once. Off is for functions that draw lots."""
    timeout_score: RewardNumber | None = None
    """The score of an answer whose program loops, or at which the function runs into its time limit. None: a program
    that loops has the function's score, 0 for code; at its own limit a function has no reward, unless the answer used
    up the CPU time of `rewards.adaptive`, which is worth 0."""
    whole_group: bool = False
    """Call the function once with all answers to a prompt, a `RewardGroup`, for a list of rewards."""

    def __post_init__(self) -> None:
        if self.name and not _NAME.fullmatch(self.name):
            raise ValueError(f"name: got {self.name!r}, expected up to 64 letters, digits, _ . or -")
        if self.whole_group and (":" not in self.function or self.function in (*OWN_SANDBOX, *JUDGED_BY_MODEL)):
            raise ValueError(f"whole_group: {self.function} scores one answer, expected a function of your own")
        if self.function == ENVIRONMENT and self.args:
            raise ValueError("args: environment takes none; data.environment_args are the environment's")

    @property
    def title(self) -> str:
        return self.name or self.function.rpartition(":")[2]


class RewardsSection(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The reward functions, and the processes that run them; docs/concepts/rewards.md."""

    functions: tuple[WeightedReward, ...] = ()
    """Each function scores every answer of the domains that name it, or that name no reward of their own."""
    processes: Annotated[int, Meta(ge=0, le=256)] = 2
    """The number of processes in the pool that functions run in. 0: functions run on reward workers alone."""
    timeout_s: Positive = 30.0
    """A reward that takes longer has failed, and its sample is dropped."""
    adaptive: bool = False
    """Learn the CPU time that each row's answers need, from correct ones, and end others soon after it."""
    t_min_s: Positive = 2.0
    """With `adaptive`: the least CPU time that an answer has."""
    t_max_s: Positive = 30.0
    """With `adaptive`: the most CPU time that an answer has, and all that it has before a correct one is known."""
    start_timeout_s: Positive = 60.0
    """The time for a process to start and to make its functions ready, a reward model included."""
    slots: AtLeastOne | None = None
    """The most rewards in progress at once; none: 8 per process, or 64 without any. More is for async functions that
    wait, and for many reward workers."""
    row_failures: AtLeastOne = 8
    """A row at which rewards have failed this often, while they scored others, is quarantined."""
    memory_gb: Positive | None = 8.0
    """The memory limit of a process; none: no limit."""
    environment: tuple[str, ...] = ()
    """Environment variables that functions get although they look like secrets: a judge's API key, for example."""
    sandbox: bool = False
    """Run the processes in a sandbox: no network, few files to read, none to write. It needs bubblewrap."""
    max_usd: Positive | None = None
    """The dollars that judges may spend in the run; then it ends. None: any."""
    max_tokens: AtLeastOne | None = None
    """The tokens that judges may read and write in the run; then it ends. None: any."""

    def __post_init__(self) -> None:
        names = [one.title for one in self.functions]
        for index, name in enumerate(names):
            if name in names[:index]:
                raise ValueError(f"functions.{index}.name: {name!r} is there twice")
        if self.t_max_s < self.t_min_s:
            raise ValueError(f"t_max_s: {self.t_max_s:g} is below t_min_s = {self.t_min_s:g}")

    @property
    def wall_s(self) -> float:
        """The wall time of a function."""
        return max(self.timeout_s, wall_limit_s(self.t_max_s)) if self.adaptive else self.timeout_s

    @property
    def memory_bytes(self) -> int:
        """0: no limit."""
        return 0 if self.memory_gb is None else int(self.memory_gb * (1 << 30))

    @property
    def max_under_way(self) -> int:
        if self.slots is not None:
            return self.slots
        return _SLOTS_PER_PROCESS * self.processes if self.processes else _SLOTS_ELSEWHERE

    def check_place(self, functions: tuple[WeightedReward, ...]) -> None:
        """Raise ValueError for functions that cannot run where these settings want them."""
        for name in (one.function for one in functions):
            if self.sandbox and name in OWN_SANDBOX:
                raise ValueError(f"rewards.sandbox: {name} has a sandbox of its own, which none can be around")
            if self.sandbox and name in JUDGED_BY_MODEL:
                raise ValueError(f"rewards.sandbox: {name} needs the network, or a model's files; leave it out")
            if not self.processes and name in STAYS:
                raise ValueError(
                    f"rewards.processes: got 0, expected at least 1, for {name}, which no reward worker gets"
                )

    def chosen(self, reward: str | tuple[str, ...] | None, own: str | None) -> tuple[WeightedReward, ...]:
        """Return the functions that score a domain's answers: `reward` is its setting, `own` its source's default.

        Raises ValueError for a domain without any.
        """
        if reward is None:
            of_answers = tuple(one for one in self.functions if one.function != ENVIRONMENT)
            if of_answers:
                return of_answers
            if own is None:
                raise ValueError(f"missing, expected {REWARD_NAMES}, or [[rewards.functions]]")
            reward = own
        found = self._named(reward)
        if any(one.function == ENVIRONMENT for one in found):
            raise ValueError("environment is the reward of data.environment, which is missing")
        return found

    def of_episodes(self, reward: str | tuple[str, ...] | None, *, has_rows: bool) -> tuple[WeightedReward, ...]:
        """Return the functions that score an environment's episodes, its own reward among them; none: that alone.

        `reward` is the domain's setting. The environment's own reward counts unless the setting leaves it out; it is
        reported either way. Raises ValueError.
        """
        own = next((one for one in self.functions if one.function == ENVIRONMENT), WeightedReward(function=ENVIRONMENT))
        if reward is None:
            found = (own, *(one for one in self.functions if one.function != ENVIRONMENT))
        else:
            found = self._named(reward)
            if own not in found:
                found = (structs.replace(own, weight=0.0), *found)
        compared = [one.function for one in found if one.function in (*COMPARING, *OWN_SANDBOX)]
        if compared and not has_rows:
            raise ValueError(
                f"{compared[0]} needs rows, and the environment brings its own tasks; expected data.source, or a list "
                'of other rewards, such as ["environment"]'
            )
        return () if found == (WeightedReward(function=ENVIRONMENT),) else found

    def _named(self, reward: str | tuple[str, ...]) -> tuple[WeightedReward, ...]:
        known = {ENVIRONMENT if one.function == ENVIRONMENT else one.title: one for one in self.functions}
        names = (reward,) if isinstance(reward, str) else reward
        found = tuple(known.get(name) or WeightedReward(function=name) for name in names)
        titles = [one.title for one in found]
        for title in titles:
            if titles.count(title) > 1:
                raise ValueError(f"{title!r} is there twice; [[rewards.functions]] gives functions names")
        return found
