"""The ledger: the end of every prompt, sample, token, second and dollar.

Sums that must hold at any moment (invariants.py checks them):

    tokens arrived   = tokens kept + answered + discarded by cause + of samples still open
    samples started  = trained + answered + discarded by cause + open
    prompts started  = trained + dropped by reason + deferred + open
    a worker's seconds by activity add up to its time in the fleet; dollars are seconds times its price
    the trainer's seconds are those of the run, without those in which its process was gone

*Answered* counts what a client other than the trainer asked for and got (asking.py); it is no prompt of the data.
`prompts started` counts first tries only: a deferred prompt is started once, however often it is tried. Only
tokens that reached us are counted, so tokens that a dying worker had not yet sent never are. A worker that is out of
sight and comes back is paid for the time between. A worker that never comes back, or comes back as another process, is
paid up to the last moment it was seen.
"""

from typing import Literal

from msgspec import Struct, field

from polyrl.ids import HostName, Seconds, Step, WorkerName

Activity = Literal["starting", "pulling", "generating", "idle", "draining", "training", "validating"]
DiscardCause = Literal[
    "speculation",
    "deferral",
    "preemption",
    "filtered",
    "reward_failed",
    "failed",
    "refused",
    "not_taken",
    "withdrawn",
    "environment_lost",
    "abandoned",
]
"""`environment_lost`: drawn for an episode that took another way when it was begun again. `abandoned`: drawn for a call
that its environment no longer waited for."""
EpisodeOutcome = Literal["scored", "failed", "timed_out"]

OTHERS = WorkerName("(others)")
"""The line of all workers that went long ago; no worker can have this name."""
OTHER_HOSTS = HostName("(others)")
NUM_LENGTH_BINS = 24
"""Bin b holds answers of 2^(b-1) up to 2^b - 1 tokens."""


class StepLine(Struct, frozen=True, omit_defaults=True):
    """A step, as the metrics show it."""

    step: Step
    kind: str
    opened_at: Seconds
    closed_at: Seconds
    trained_at: Seconds
    step_s: Seconds
    """From the end of the step before, or the first round's opening. Validation is no part of it, nor is an absence."""
    num_groups: int
    num_samples: int
    tokens_trained: int
    tokens_discarded: dict[str, int]
    """Since the step before was trained."""
    longest: int
    trained_mean: float
    generated_mean: float
    """Mean length of all the round's samples that ended by themselves, trained or not."""
    inclusion_by_length: tuple[tuple[int, int, int], ...]
    """(bin, samples that ended with such a length, those of them trained), of the run so far."""
    wait_train_s: Seconds
    wait_remote_s: Seconds
    train_s: Seconds
    seed_window_s: Seconds
    seed_window_why: str
    """A line on what the seeding rule learned in this step."""
    mean_workers: float
    num_moves: int
    usd: float
    """The cost of the run so far."""
    predicted_s: Seconds | None = None
    """From the round's opening to its closing, as the parallelism planner expected it; none where it does not plan."""
    expected_mean: float = 0.0
    """Mean length of answers as learned from all that were seen, those included that were stopped and would have gone
    on; 0: not told, by earlier rules."""
    prompt_factor: float = 0.0
    sample_factor: float = 0.0
    """With adaptive factors, those that were in force when the step ended; 0: not told, by earlier rules."""
    mode_left: str = ""
    """Why the mode of tail batching was left after this step, if it was."""


class WorkerLine(Struct):
    price_usd_per_hour: float
    """The price of its present life; earlier lives may have cost something else."""
    seconds: dict[str, float] = {}
    usd: float = 0.0
    num_joins: int = 0
    num_losses: int = 0
    num_stalls: int = 0
    """How often in a row, without an answer, all its samples stalled."""
    paid_until: Seconds | None = None
    """When its last life ended: a process that was started before that is paid from then on."""

    @property
    def paid_s(self) -> float:
        return sum(self.seconds.values())


class HostLine(Struct):
    """The account of a host's time."""

    price_usd_per_hour: float
    seconds: float = 0.0
    episode_seconds: float = 0.0
    """Seconds times the number of episodes that it played meanwhile."""
    usd: float = 0.0
    num_joins: int = 0
    num_losses: int = 0


class RewardWorkerLine(Struct):
    """The account of a reward worker's time."""

    price_usd_per_hour: float
    seconds: float = 0.0
    cpu_s: float = 0.0
    """The CPU time that its functions took, as it says."""
    num_jobs: int = 0
    """Answers and groups for which it sent a result."""
    usd: float = 0.0
    num_joins: int = 0
    num_losses: int = 0


class Ledger(Struct):
    prompts_started: int = 0
    prompts_trained: int = 0
    prompts_dropped: dict[str, int] = {}
    num_deferrals: int = 0
    samples_started: int = 0
    samples_trained: int = 0
    samples_answered: int = 0
    samples_discarded: dict[str, int] = {}
    tokens_arrived: int = 0
    tokens_kept: int = 0
    tokens_answered: int = 0
    tokens_discarded: dict[str, int] = {}
    discarded_told: dict[str, int] = {}
    """`tokens_discarded` at the last step's line."""
    tokens_reprefilled: int = 0
    moves: dict[str, int] = {}
    late_news: int = 0
    rounds: dict[str, int] = {}
    workers: dict[WorkerName, WorkerLine] = {}
    trainer_usd_per_hour: float = 0.0
    started_at: Seconds | None = None
    trainer_left_at: Seconds | None = None
    """When the trainer was last seen; None while it is there."""
    trainer_gone_s: Seconds = 0.0
    """How long there was no trainer, until another process took its place."""
    ended_by_bin: list[int] = field(default_factory=lambda: [0] * NUM_LENGTH_BINS)
    trained_by_bin: list[int] = field(default_factory=lambda: [0] * NUM_LENGTH_BINS)
    episodes_begun: int = 0
    episodes_ended: dict[str, int] = {}
    """By outcome. Episodes that were stopped, or lost with their host, are in neither."""
    hosts_hung: int = 0
    """Hosts that were given up because none of their episodes moved any more."""
    num_calls: int = 0
    hosts: dict[HostName, HostLine] = {}
    reward_workers: dict[str, RewardWorkerLine] = {}

    def discard(self, cause: DiscardCause, num_tokens: int) -> None:
        """Book a sample that ends untrained."""
        self.samples_discarded[cause] = self.samples_discarded.get(cause, 0) + 1
        self.discard_tokens(cause, num_tokens)

    def discard_tokens(self, cause: DiscardCause, num_tokens: int) -> None:
        if num_tokens:
            self.tokens_discarded[cause] = self.tokens_discarded.get(cause, 0) + num_tokens

    def drop_prompt(self, reason: str) -> None:
        self.prompts_dropped[reason] = self.prompts_dropped.get(reason, 0) + 1

    def count_move(self, cause: str) -> None:
        self.moves[cause] = self.moves.get(cause, 0) + 1

    def pay(self, worker: WorkerName, activity: Activity, seconds: Seconds) -> None:
        line = self.workers[worker]
        line.seconds[activity] = line.seconds.get(activity, 0.0) + seconds
        line.usd += seconds * line.price_usd_per_hour / 3600

    def worker_line(self, worker: WorkerName, price_usd_per_hour: float) -> WorkerLine:
        line = self.workers.get(worker)
        if line is None:
            line = self.workers[worker] = WorkerLine(price_usd_per_hour=price_usd_per_hour)
        line.price_usd_per_hour = price_usd_per_hour
        return line

    def fold(self, worker: WorkerName) -> None:
        """Add the line of a worker that left long ago to the line of all such workers."""
        line = self.workers.pop(worker)
        others = self.worker_line(OTHERS, 0.0)
        for activity, seconds in line.seconds.items():
            others.seconds[activity] = others.seconds.get(activity, 0.0) + seconds
        others.usd += line.usd
        others.num_joins += line.num_joins
        others.num_losses += line.num_losses

    def fold_host(self, host: HostName) -> None:
        """Add the line of a host that left long ago to the line of all such hosts."""
        line = self.hosts.pop(host)
        others = self.hosts.setdefault(OTHER_HOSTS, HostLine(0.0))
        others.seconds += line.seconds
        others.episode_seconds += line.episode_seconds
        others.usd += line.usd
        others.num_joins += line.num_joins
        others.num_losses += line.num_losses

    def fold_reward_worker(self, name: str) -> None:
        """Add the line of a reward worker that left long ago to the line of all such workers."""
        line = self.reward_workers.pop(name)
        others = self.reward_workers.setdefault(OTHERS, RewardWorkerLine(0.0))
        others.seconds += line.seconds
        others.cpu_s += line.cpu_s
        others.num_jobs += line.num_jobs
        others.usd += line.usd
        others.num_joins += line.num_joins
        others.num_losses += line.num_losses

    def trainer_left(self, at: Seconds) -> None:
        if self.trainer_left_at is None and self.started_at is not None:
            self.trainer_left_at = max(at, self.started_at)

    def trainer_replaced(self, now: Seconds) -> None:
        if self.trainer_left_at is not None:
            self.trainer_gone_s += now - self.trainer_left_at
            self.trainer_left_at = None

    def trainer_usd(self, now: Seconds) -> float:
        if self.started_at is None:
            return 0.0
        seen_at = now if self.trainer_left_at is None else self.trainer_left_at
        return (seen_at - self.started_at - self.trainer_gone_s) * self.trainer_usd_per_hour / 3600

    def usd(self, now: Seconds) -> float:
        """Return all dollars up to `now`, as far as activities have been settled."""
        all_lines = (self.workers.values(), self.hosts.values(), self.reward_workers.values())
        return self.trainer_usd(now) + sum(line.usd for lines in all_lines for line in lines)


def length_bin(num_tokens: int) -> int:
    num_bits = num_tokens.bit_length()
    return num_bits if num_bits < NUM_LENGTH_BINS else NUM_LENGTH_BINS - 1
