"""The schema of a scenario file: one typed tree, its defaults, and what is refused.

A scenario is a TOML file; docs/reference/scenarios.md explains every key. The sections `rounds`, `seeding`, `rewards`,
`routing`, `fleet_rules`, `weight_delivery`, `scaling` and `environments` are the scheduler's own configuration, the
very same structs that a live run reads. The others describe the world that the simulator plays: machines, network,
workload, hosts of environments, supply, faults.
"""

from itertools import pairwise
from typing import Annotated, Literal

from msgspec import Meta, Struct, field

from polyrl.config.supply_trace import SupplyEvent
from polyrl.engines.lockstep import EngineTimes
from polyrl.scheduling.core.bounds import AtLeastOne, Count, NotNegative, Positive, Region, Share
from polyrl.scheduling.core.parameters import (
    EnvironmentRules,
    FleetRules,
    HandBackConfig,
    ParallelismConfig,
    RewardConfig,
    RoundsConfig,
    RoutingConfig,
    ScalingConfig,
    SeedingConfig,
    WeightDeliveryConfig,
)
from polyrl.scheduling.rules.parallelism import DecodeSpeed, capacity_tokens

_KV_TOKENS = 2_000_000


class RunSection(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    steps: AtLeastOne = 20
    warmup_steps: Count = 0
    """Steps left out of the figures, for what is still being learned (the seeding window) to settle."""
    mode: Literal["synchronous", "streaming"] = "streaming"
    """`synchronous` generates all, then scores all, then trains; `streaming` does each as soon as it can."""
    max_staleness: Count = 0
    max_new_tokens: AtLeastOne = 8192
    num_epochs: AtLeastOne | None = None
    """Passes over the data, after which the run ends. None: as many as the steps need."""
    max_time_s: Positive = 1e7
    """Virtual seconds after which the run is called stuck, with an error."""


class TrainerSection(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    num_devices: AtLeastOne = 8
    local_workers: Count = 4
    """Engines on the trainer's own devices; 0 for a trainer that never generates."""
    price_usd_per_hour: NotNegative = 83.79
    s_per_token: Positive = 4e-5
    """Seconds of forward and backward per trained token, on `timed_devices` devices."""
    timed_devices: AtLeastOne | None = None
    """Devices that `s_per_token` was timed on; none: `num_devices`."""
    scaling: Share = 1.0
    """On n times as many devices a token is trained n to this power as fast: 1 is a free exchange, 0 gains nothing."""
    reward_slots_per_device: Positive | None = None
    """Scoring runs beside each device, `rewards.slots` in all; none: `rewards.slots` as it is said there."""
    micro_batch_samples: AtLeastOne = 16
    micro_batch_fixed_s: NotNegative = 0.2
    optimizer_s: NotNegative = 3.0
    filter_equal: bool = False
    """Reject groups whose samples are all right or all wrong (they teach nothing); a fresh prompt takes their place."""
    switch_s: NotNegative = 2.0
    """Seconds that a device needs to go from generating to training or back."""


class EngineSection(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An engine, of the width that the trainer's own have first (num_devices / local_workers), and a remote one."""

    step_fixed_s: Positive = 0.012
    """Seconds of one decode step with no sample in it; the rest is added."""
    step_sample_s: NotNegative = 0.0
    """More seconds a step, per running sample."""
    step_context_s: NotNegative = 0.0
    """More seconds a step, per token of context in the cache."""
    prefill_tokens_per_s: Positive = 40_000.0
    tp_exponent: Share = 0.2
    """An engine twice as wide as the first ones is 2 to this power as fast: 1 is a free exchange, 0 gains nothing."""
    kv_tokens: AtLeastOne | None = None
    """Tokens that fit into the cache of one engine; above it the engine preempts the newest sample. None: by
    `parallelism.model` and the engine's width, or 2,000,000 where no model is described."""
    slots: AtLeastOne = 256
    flush_s: Positive = 1.0
    """Seconds between two reports of a worker's progress. Tokens not yet reported die with a worker."""

    def times(self, kv_tokens: int) -> EngineTimes:
        """Return the constants of an engine whose cache holds so many tokens."""
        return EngineTimes(
            step_fixed_s=self.step_fixed_s,
            step_sample_s=self.step_sample_s,
            step_context_s=self.step_context_s,
            prefill_tokens_per_s=self.prefill_tokens_per_s,
            kv_tokens=kv_tokens,
            slots=self.slots,
        )


class SimFleetSection(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    workers: Count = 0
    """Remote workers that are there from the start. Supply adds to them and takes away."""
    devices_per_worker: AtLeastOne = 2
    spot: bool = True
    price_usd_per_hour: NotNegative = 5.32
    start_s: NotNegative = 60.0
    """From the machine's start (paid) to its joining."""
    heartbeat_s: Positive = 1.0
    speed: Positive = 1.0
    """Speed of a remote engine, against a local one."""
    join_at_s: list[NotNegative] = []
    """Moments at which one more worker joins (the ramp)."""
    held_by_advice: bool = False
    """Hold only as many workers as the scheduler's scaling rule says are useful; release the rest."""
    hold_at_most: Count | None = None
    """Hold no more workers than this of those that the market grants; a lost one is replaced. None: all of them."""
    regions: tuple[Region, ...] = ()
    """Remote workers are in these regions, in turn; none: near the trainer."""

    @property
    def is_held(self) -> bool:
        """Workers are asked for, not taken as they are granted."""
        return self.held_by_advice or self.hold_at_most is not None


class NetworkSection(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    weights_gb: Positive = 16.4
    delta_gb: Positive | None = None
    """Size of a delta to the previous version; none: every pull is full."""
    trainer_egress_gbps: Positive = 200.0
    worker_ingress_gbps: Positive = 50.0
    worker_egress_gbps: Positive = 50.0
    region_gbps: Positive | None = None
    """The bandwidth into and out of each region of `fleet.regions`, each way; none: as much as its workers can."""
    publish_s: NotNegative = 1.0
    """Seconds from the optimizer step's end to a version that can be pulled."""
    install_s: NotNegative = 1.0
    latency_s: NotNegative = 0.001


class RewardSection(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Scoring in a domain. Quantiles are of the natural duration; a time limit cuts it."""

    duration_quantiles: list[tuple[Share, NotNegative]] = field(default_factory=lambda: [(0.0, 0.01), (1.0, 0.01)])
    endless_share: Share = 0.0
    """Share of samples that would never end: they hit whatever limit there is, and are wrong."""
    correct_share: Share = 0.5
    failure_share: Share = 0.0
    """Share of scoring attempts that fail for reasons outside the sample."""


class SimEnvironmentSection(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An environment that plays a domain's samples. The domain's lengths are then of all calls of an episode together,
    and its reward is what the environment does after the last answer."""

    call_quantiles: list[tuple[Share, Positive]]
    """[probability, calls of an episode], both rising."""
    tool_quantiles: list[tuple[Share, NotNegative]] = field(default_factory=lambda: [(0.0, 1.0), (1.0, 1.0)])
    """[probability, seconds] from an answer to the next call, both rising."""
    tool_correlation: Share = 0.0
    """How much alike a task's tools are: the share of their time's normal score that is the task's (Gaussian copula).
    0: each tool's time is its own."""
    tool_tokens: Count = 200
    """Tokens that the result of a tool adds to the prompt of the next call. They are given, not drawn."""
    begin_s: NotNegative = 1.0
    """From the beginning of an episode to its first call."""
    failure_share: Share = 0.0
    """Share of attempts that fail for reasons that the policy cannot have caused."""
    replay_share: Share = 1.0
    """Share of tool results that are the same in another attempt; the first that differs ends the replay."""

    @property
    def most_given_tokens(self) -> int:
        """The tokens that all results of the longest episode add."""
        return round(self.call_quantiles[-1][1]) * self.tool_tokens


class SimHostsSection(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The processes that play the episodes of domains with an environment."""

    processes: Annotated[int, Meta(ge=1, le=100_000)] = 4
    """Of each environment, from the start on."""
    slots: AtLeastOne = 32
    """Episodes that a process plays at once."""
    price_usd_per_hour: NotNegative = 0.0
    """Of a process."""
    mean_life_s: Positive | None = None
    """Mean seconds from a process' start to its death; none: it does not die."""
    mean_time_to_hang_s: Positive | None = None
    """Mean seconds from a process' start to when none of its episodes moves any more; none: it does not hang."""
    restart_s: Positive = 20.0
    """A process that died is back after this, under its name."""


class SimDomainSection(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: str
    prompts_per_step: AtLeastOne
    num_prompts: AtLeastOne = 100_000
    prompt_tokens: AtLeastOne = 512
    length_quantiles: list[tuple[Share, Positive]]
    """[probability, tokens], both rising. Between them the logarithm of the length is linear in the normal score."""
    cap_share: Share = 0.0
    """Share of answers that run into max_new_tokens whatever it is."""
    tail: Literal["stretched", "log-normal", "clipped"] = "stretched"
    """Answers between the last quantile and `cap_share`: `stretched` rise to max_new_tokens, whatever it is;
    `log-normal` go on as the last two quantiles do; `clipped` are as long as the last quantile."""
    correlation: Share = 0.2
    """Within-prompt correlation of lengths (Gaussian copula)."""
    reward: RewardSection = RewardSection()
    environment: SimEnvironmentSection | None = None
    """The environment that plays its samples as episodes of several calls; none: a sample is one answer."""

    def __post_init__(self) -> None:
        check_quantiles("length_quantiles", self.length_quantiles)
        check_quantiles("reward.duration_quantiles", self.reward.duration_quantiles)
        if self.environment is not None:
            check_quantiles("environment.call_quantiles", self.environment.call_quantiles)
            check_quantiles("environment.tool_quantiles", self.environment.tool_quantiles)


class WorkloadSection(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    trace: str | None = None
    """A JSONL file of recorded lengths, in place of the quantiles. Its path starts from the file that says so."""
    growth_per_step: Annotated[float, Meta(gt=-1, le=1)] = 0.0
    """Answers grow by this share every step (models learn to think longer)."""


class SupplySection(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Spot supply: a schedule of granted workers, a trace file of the same, or a random market."""

    events: list[SupplyEvent] = []
    trace: str | None = None
    """A CSV file `at_s,workers` or `at_s,workers,usd_per_hour`, in order; its path is from the file that says so."""
    notice_s: NotNegative = 30.0
    """Warning before a machine is taken; 0 is death without notice."""
    market_mean_s: Positive | None = None
    """Mean seconds between random changes of the supply; none: no random market."""
    market_min: Count = 0
    market_max: Count = 6

    def __post_init__(self) -> None:
        times = [event.at_s for event in self.events]
        for index, (earlier, later) in enumerate(pairwise(times)):
            if later < earlier:
                raise ValueError(
                    f"events.{index + 1}.at_s: {later} comes before {earlier}; events must be in order of time"
                )
        if self.market_max < self.market_min:
            raise ValueError(f"market_max: {self.market_max} is below market_min = {self.market_min}")


class FaultsSection(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Faults. Rates are per worker and hour of virtual time."""

    kill_at_s: list[NotNegative] = []
    """Moments, counted from the start of step `kill_step`, at which `kill_workers` workers die or are taken."""
    kill_step: Count = 2
    kill_workers: Count = 0
    kill_notice_s: NotNegative = 0.0
    kill_back_after_s: Positive | None = None
    deaths_per_hour: NotNegative = 0.0
    restart_s: Positive = 20.0
    """A worker that died by `deaths_per_hour` comes back after this, under its old name."""
    slow_share: Share = 0.0
    """Share of remote workers that run at `slow_speed`."""
    slow_speed: Positive = 0.5
    partitions_per_hour: NotNegative = 0.0
    partition_s: Positive = 10.0
    """A partitioned worker goes on generating; its news arrives late, all at once."""
    late_s: NotNegative = 0.0
    """News of workers is late by up to this."""
    repeat_share: Share = 0.0
    """Share of news that arrives twice."""
    pull_failure_share: Share = 0.0


class Scenario(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: str
    about: str
    source: str = ""
    """The source of its figures."""
    run: RunSection = RunSection()
    trainer: TrainerSection = TrainerSection()
    engine: EngineSection = EngineSection()
    fleet: SimFleetSection = SimFleetSection()
    network: NetworkSection = NetworkSection()
    workload: WorkloadSection = WorkloadSection()
    domains: Annotated[list[SimDomainSection], Meta(min_length=1)]
    hosts: SimHostsSection = SimHostsSection()
    supply: SupplySection = SupplySection()
    faults: FaultsSection = FaultsSection()
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
        names = [domain.name for domain in self.domains]
        for index, name in enumerate(names):
            if name in names[:index]:
                raise ValueError(f"domains.{index}.name: {name!r} is there twice")
        self._check_who_generates()
        self._check_waits()
        self._check_engines()

    @property
    def has_environments(self) -> bool:
        return any(domain.environment is not None for domain in self.domains)

    @property
    def first_width(self) -> int:
        """Devices of each of the trainer's own engines at the start."""
        return max(1, self.trainer.num_devices // max(1, self.trainer.local_workers))

    @property
    def training_speed(self) -> float:
        """Speed at which all devices train a token, against those that it was timed on."""
        trainer = self.trainer
        timed = trainer.num_devices if trainer.timed_devices is None else trainer.timed_devices
        return (trainer.num_devices / timed) ** trainer.scaling

    @property
    def reward_slots(self) -> int:
        per_device = self.trainer.reward_slots_per_device
        return self.rewards.slots if per_device is None else max(1, round(per_device * self.trainer.num_devices))

    def kv_tokens(self, width: int) -> int:
        """Return the tokens that fit into the cache of an engine on so many devices, by the planner's own formula."""
        planned = self.parallelism
        if self.engine.kv_tokens is not None:
            return max(1, int(self.engine.kv_tokens * width / self.first_width))
        if planned.model is None:
            return _KV_TOKENS
        return capacity_tokens(planned.model, width, int(planned.memory_gb * 1e9), planned.memory_fraction)

    def decode_speed(self) -> DecodeSpeed:
        """Return `[engine]` as the parallelism planner counts: of an engine on one device."""
        engine = self.engine
        slower = self.first_width**engine.tp_exponent
        return DecodeSpeed(
            fixed_s=engine.step_fixed_s * slower,
            per_sample_s=engine.step_sample_s * slower,
            per_context_token_s=engine.step_context_s * slower,
            tp_exponent=engine.tp_exponent,
        )

    def _check_engines(self) -> None:
        if self.parallelism.speed is not None:
            raise ValueError("parallelism.speed: a scenario's engines are described in [engine]; expected none here")
        if self.engine.kv_tokens is not None and self.parallelism.model is not None:
            raise ValueError("engine.kv_tokens: parallelism.model says what fits; expected one of the two")
        given = [0 if one.environment is None else one.environment.most_given_tokens for one in self.domains]
        prompts = [one.prompt_tokens + tokens for one, tokens in zip(self.domains, given, strict=True)]
        longest = max(prompts) + self.run.max_new_tokens
        for width in (self.first_width, self.fleet.devices_per_worker):
            if self.kv_tokens(width) < longest:
                raise ValueError(f"engine.kv_tokens: expected room for one prompt and its longest answer, {longest}")

    def _check_who_generates(self) -> None:
        num_local = self.trainer.local_workers
        if self.trainer.num_devices < num_local:
            most = self.trainer.num_devices
            raise ValueError(f"trainer.local_workers: expected at most one a device, {most} (trainer.num_devices)")
        if num_local == 0 and self.run.mode == "synchronous":
            raise ValueError("trainer.local_workers: expected at least 1, since a synchronous run generates there")
        supply = self.supply
        granted = supply.events or supply.trace is not None or supply.market_mean_s is not None
        if num_local == 0 and self.fleet.workers == 0 and not self.fleet.join_at_s and not granted:
            raise ValueError("fleet.workers: expected at least 1, since trainer.local_workers = 0")

    def _check_waits(self) -> None:
        """Refuse a time limit that is shorter than what it limits: the run could only fail."""
        begins = [one.environment.begin_s for one in self.domains if one.environment is not None]
        if begins and min(self.environments.turn_timeout_s, self.environments.episode_timeout_s) <= max(begins):
            raise ValueError(
                f"environments.turn_timeout_s: expected more than {max(begins):g} (environment.begin_s), and so of "
                "episode_timeout_s, or no episode is ever begun in time"
            )
        rules = self.fleet_rules
        for limit, key, takes, what in (
            (rules.heartbeat_timeout_s, "heartbeat_timeout_s", self.fleet.heartbeat_s, "fleet.heartbeat_s"),
            (rules.switch_timeout_s, "switch_timeout_s", self.trainer.switch_s, "trainer.switch_s"),
            (rules.stall_timeout_s / 2, "stall_timeout_s", self.engine.flush_s, "half of it against engine.flush_s"),
            (rules.hand_over_timeout_s, "hand_over_timeout_s", self.network.latency_s, "network.latency_s"),
        ):
            if limit <= takes:
                raise ValueError(
                    f"fleet_rules.{key}: expected more than {takes:g} ({what}), or nothing ever arrives in time"
                )


def check_quantiles(key: str, quantiles: list[tuple[float, float]]) -> None:
    """Refuse a quantile list that does not rise; `key` names it in the message."""
    if len(quantiles) < 2:
        raise ValueError(f"{key}: expected at least two [probability, value] pairs, got {len(quantiles)}")
    for index, (earlier, later) in enumerate(pairwise(quantiles)):
        if later[0] <= earlier[0] or later[1] < earlier[1]:
            raise ValueError(f"{key}.{index + 1}: {list(later)} does not rise above {list(earlier)}")
