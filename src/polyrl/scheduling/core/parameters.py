"""Every knob of the scheduler, typed, with its default. A live recipe and a scenario read the same structs.

Quantities that can be measured are no knobs: speeds, plateaus, length distributions, seeding windows and time limits
are learned.
"""

import math
from typing import Annotated, Literal

from msgspec import Meta, Struct, structs

from polyrl.ids import MAX_SAMPLES_PER_GROUP
from polyrl.scheduling.core.bounds import AtLeastOne, Count, Factor, NotNegative, NumTokens, Positive, Seed, Share
from polyrl.scheduling.rules.parallelism import ParallelismConfig
from polyrl.scheduling.rules.reward_budgets import RewardConfig
from polyrl.scheduling.rules.scaling import ScalingConfig
from polyrl.scheduling.rules.seeding import SeedingConfig

__all__ = [
    "DomainData",
    "EnvironmentRules",
    "FleetRules",
    "HandBackConfig",
    "ParallelismConfig",
    "RewardConfig",
    "RoundsConfig",
    "RoutingConfig",
    "ScalingConfig",
    "SchedulerConfig",
    "SeedingConfig",
    "WeightDeliveryConfig",
]

MAX_SAMPLES_PER_ROUND = 1 << 22


class RoundsConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which prompts and how many samples a round starts; docs/concepts/tail-batching.md."""

    tail_batching: Literal["off", "race", "prompts", "designated", "predicted"] = "off"
    samples_per_prompt: Annotated[int, Meta(ge=1, le=512)] = 8
    prompt_factor: Factor = 1.25
    sample_factor: Factor = 1.25
    adaptive: bool = False
    """Choose both factors anew after every long round, from the lengths seen, under the two bounds below."""
    max_waste: Share = 0.4
    """The most tokens that adaptive factors may discard, as a share of all generated."""
    max_bias: Share = 0.35
    """The most by which the mean trained answer may be shorter than the mean answer, as a share of it: for adaptive
    factors, and for the guard."""
    bias_guard: bool = False
    """Leave the mode for a milder one when a period's trained answers are shorter than `max_bias` allows: race for
    prompts, prompts and designated for off."""
    refill: bool = True
    """Start a fresh prompt for one that was dropped or filtered; otherwise the step goes on with one less."""
    max_refill_share: NotNegative = 1.0
    """At most this many refills in a round, as a share of its prompts."""
    min_group_samples: AtLeastOne = 2
    """A group that lost samples to failures is still trained with at least this many."""
    episode_length: Literal["tokens", "seconds"] = "tokens"
    """The length of an episode for `predicted` and `adaptive`: its drawn tokens, or the time from its beginning to its
    end. A race is decided by who ends first either way, and a single answer's length is its tokens."""

    def __post_init__(self) -> None:
        if self.adaptive and self.tail_batching in ("designated", "predicted"):
            raise ValueError(f"adaptive: factors are chosen for race and prompts only, not for {self.tail_batching}")
        if self.bias_guard and self.tail_batching in ("off", "predicted"):
            raise ValueError(f'bias_guard: there is no milder mode than tail_batching = "{self.tail_batching}"')
        if math.ceil(self.samples_per_prompt * self.sample_factor) > MAX_SAMPLES_PER_GROUP:
            raise ValueError(f"sample_factor: a prompt would start more than {MAX_SAMPLES_PER_GROUP} samples")
        if self.min_group_samples > max(2, self.samples_per_prompt):
            raise ValueError(f"min_group_samples: expected at most samples_per_prompt, {self.samples_per_prompt}")


class RoutingConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where samples go, and when they move; docs/concepts/routing.md."""

    prefix_imbalance: NotNegative = 0.1
    """How much more loaded, as a share of its slots, a worker may be and still get a sample for its cached prompt."""
    balance: bool = True
    balance_interval_s: Annotated[float, Meta(ge=0.01, le=1e9)] = 2.0
    move_every_tokens: AtLeastOne = 512
    """A running sample moves at most once in this many tokens."""
    move_gain_s: NotNegative = 5.0
    """A move must save at least this many seconds beyond its own cost."""
    prefill_tokens_per_s: Positive = 20_000.0
    """Assumed speed of re-prefilling a moved sample; only ever used to refuse moves that do not pay."""


class FleetRules(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How long we wait for a worker before we act; docs/concepts/fleet.md."""

    heartbeat_timeout_s: Positive = 3.0
    stall_timeout_s: Positive = 120.0
    """A sample with no new token from one look to the next, this far apart, is taken back; all of them: the worker."""
    hand_over_timeout_s: Positive = 10.0
    pull_timeout_s: Positive = 900.0
    switch_timeout_s: Positive = 300.0
    drain_timeout_s: Positive = 30.0
    leave_margin_s: NotNegative = 2.0
    """A worker that was given notice hands over this long before its machine goes."""
    max_failures: AtLeastOne = 3
    """A worker that fails this many groups in a row that others answer is given up; a sample that fails this often is
    dropped."""
    migrate: bool = True
    """Resume the samples of a lost worker where they stopped. Off: they start again, for comparison."""


class WeightDeliveryConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How workers fetch weights, and from which source; docs/concepts/weights.md#weight-delivery."""

    relay: bool = True
    trainer_uploads: AtLeastOne = 4
    peer_uploads: AtLeastOne = 2
    retry_s: Positive = 2.0
    max_retry_s: Positive = 60.0

    def __post_init__(self) -> None:
        if self.max_retry_s < self.retry_s:
            raise ValueError(f"max_retry_s: {self.max_retry_s:g} is below retry_s = {self.retry_s:g}")


class HandBackConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """When the trainer's own devices stop generating one by one; docs/concepts/devices.md."""

    enabled: bool = False
    first_share: Share = 0.2
    last_share: Share = 0.5
    check_every_share: Annotated[float, Meta(gt=0, le=1)] = 0.05
    max_slowdown: Factor = 1.1
    """How much slower the samples that go on may become."""
    come_back_after_s: Positive = 60.0
    """Devices that had nothing to train for this long generate again, if samples wait or the fleet has much to do."""

    def __post_init__(self) -> None:
        if self.last_share < self.first_share:
            raise ValueError(f"last_share: {self.last_share:g} is below first_share = {self.first_share:g}")


class DomainData(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A domain's data set and its share of every step."""

    name: Annotated[str, Meta(max_length=256)]
    prompts_per_step: AtLeastOne
    num_prompts: AtLeastOne
    environment: Annotated[str, Meta(max_length=256)] = ""
    """The environment whose episodes its samples are; hosts say which one they play. Empty: a sample is one answer."""
    scores_episodes: bool = False
    """Whether the trainer scores its episodes when they end; otherwise the environment's reward is final."""


class EnvironmentRules(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How long we wait for an environment, and how often an episode is begun; docs/concepts/episodes.md."""

    turn_timeout_s: Positive = 600.0
    """From an answer to the next call, or to the end. The most that a learned limit may become."""
    learn_turn_timeouts: bool = True
    """Learn a shorter limit from the turns that ended (rules/play_limits.py)."""
    least_turn_timeout_s: Positive = 30.0
    """The least that a learned limit may become; `turn_timeout_s`, where that is less."""
    episode_timeout_s: Positive = 3600.0
    """Of all turns of an episode together. The policy's own time, and waits for it, are not counted.
    The most that a learned limit may become."""
    learn_episode_timeouts: bool = True
    """Learn a shorter limit from the episodes that ended; no turn is begun beyond it."""
    max_calls: Count = 0
    """Calls of an episode: the next one is answered as one without room is, and the environment can end and pay.
    0: as many as its tokens allow."""
    timeout_reward: Annotated[float, Meta(ge=-1e9, le=1e9)] = 0.0
    """The reward of an episode that took too long after it was answered at least once: the policy may be the cause."""
    max_attempts: AtLeastOne = 3
    """An episode that fails this often leaves its group."""
    host_timeout_s: Positive = 10.0
    """A host that is not heard of for so long is lost, and its episodes begin again elsewhere."""
    drain_timeout_s: Positive = 600.0
    """A host that is drained may play its episodes to their end for so long."""


class SchedulerConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    domains: Annotated[tuple[DomainData, ...], Meta(min_length=1, max_length=1024)]
    seed: Seed = 0
    num_epochs: AtLeastOne | None = None
    """How often the data is gone through; none: for as long as rounds are requested."""
    max_new_tokens: NumTokens = 8192
    max_staleness: Count = 0
    streaming: bool = True
    """Hand complete groups to the trainer as they come. Off: all of a round at once."""
    trainer_usd_per_hour: NotNegative = 0.0
    prompt_tokens: NumTokens = 512
    """A typical prompt; only used to project how much cache is needed and what a move costs."""
    rounds: RoundsConfig = RoundsConfig()
    routing: RoutingConfig = RoutingConfig()
    seeding: SeedingConfig = SeedingConfig()
    hand_back: HandBackConfig = HandBackConfig()
    parallelism: ParallelismConfig = ParallelismConfig()
    rewards: RewardConfig = RewardConfig()
    fleet_rules: FleetRules = FleetRules()
    weight_delivery: WeightDeliveryConfig = WeightDeliveryConfig()
    scaling: ScalingConfig = ScalingConfig()
    environments: EnvironmentRules = EnvironmentRules()

    def __post_init__(self) -> None:
        rounds, num_prompts = self.rounds, sum(domain.prompts_per_step for domain in self.domains)
        extra = 1.0 if rounds.tail_batching == "off" else rounds.prompt_factor * rounds.sample_factor
        if num_prompts * rounds.samples_per_prompt * extra > MAX_SAMPLES_PER_ROUND:
            raise ValueError(f"domains: a round would start more than {MAX_SAMPLES_PER_ROUND} samples")

    def with_rules_of(self, other: "SchedulerConfig") -> "SchedulerConfig":
        """Return this configuration with those parts of another that may change while a run is open: timeouts, limits
        on concurrency, and the choice of workers. The composition of rounds stays."""
        rewards = structs.replace(other.rewards, as_finished=self.rewards.as_finished)
        fleet_rules = structs.replace(other.fleet_rules, migrate=self.fleet_rules.migrate)
        return structs.replace(
            self,
            routing=other.routing,
            hand_back=other.hand_back,
            rewards=rewards,
            fleet_rules=fleet_rules,
            weight_delivery=other.weight_delivery,
            scaling=other.scaling,
            environments=other.environments,
        )
