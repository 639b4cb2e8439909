"""A scenario at a scaled clock: a second stands for many, and a token for several. Pure.

Everything that takes time takes `speedup` times less of it, rules and prices included, and an answer has
`tokens_per_token` times fewer tokens, each of which takes as many times longer: seconds and dollars of a step, scaled
back, are those of the scenario. A wait for a peer that may be dead is not scaled below what a busy machine needs.
"""

from typing import NamedTuple, TypeVar

from msgspec import Struct, structs

from polyrl.engines.emulated import EmulatedConfig
from polyrl.errors import UserError
from polyrl.manager.settings import LimitSettings, ManagerSettings, StreamSettings
from polyrl.scheduling.core.ledger import StepLine
from polyrl.scheduling.core.parameters import FleetRules, SchedulerConfig
from polyrl.sim.scenario import Scenario
from polyrl.sim.simulation import scheduler_config

LEAST_HEARTBEAT_TIMEOUT_S = 2.0
"""Of real time: a process of a busy machine is silent for so long now and then."""
_LEAST_HEARTBEAT_S, _LEAST_FLUSH_S = 0.25, 0.02
_RULES_THAT_WAIT = ("rewards", "seeding", "routing", "hand_back", "weight_delivery")
Rules = TypeVar("Rules", bound=Struct)


class Scale(NamedTuple):
    speedup: float
    tokens_per_token: int

    def real_s(self, seconds: float) -> float:
        return seconds / self.speedup

    def tokens(self, tokens: int) -> int:
        return max(1, round(tokens / self.tokens_per_token))


def check_that_it_can_be_emulated(scenario: Scenario) -> None:
    """Raise UserError for what emulated engines or their processes cannot do."""
    reasons = (
        (scenario.parallelism.enabled, "parallelism.enabled: an emulated engine has no width"),
        (scenario.has_environments, "environments: its episodes need hosts"),
        (scenario.fleet.is_held, "fleet.held_by_advice: workers are not asked for here"),
        (scenario.faults.partitions_per_hour > 0, "faults.partitions_per_hour: loopback is not cut here"),
        (scenario.faults.late_s > 0 or scenario.faults.repeat_share > 0, "faults: news is not late or repeated here"),
        (scenario.trainer.filter_equal, "trainer.filter_equal: this trainer rejects no group"),
    )
    for applies, reason in reasons:
        if applies:
            raise UserError(f"{scenario.name} cannot be emulated: {reason}")


def scaled_config(scenario: Scenario, seed: int, scale: Scale) -> SchedulerConfig:
    """Return the scheduler's part of the scenario, at the scaled clock."""
    config = scheduler_config(scenario, seed)
    rules = {name: _faster(getattr(config, name), scale) for name in _RULES_THAT_WAIT}
    rules["routing"] = structs.replace(
        rules["routing"],
        move_every_tokens=scale.tokens(config.routing.move_every_tokens),
        prefill_tokens_per_s=config.routing.prefill_tokens_per_s * scale.speedup / scale.tokens_per_token,
    )
    return structs.replace(
        config,
        max_new_tokens=scale.tokens(config.max_new_tokens),
        prompt_tokens=scale.tokens(config.prompt_tokens),
        trainer_usd_per_hour=config.trainer_usd_per_hour * scale.speedup,
        fleet_rules=_patient(config.fleet_rules, scale),
        **{**rules, "rewards": structs.replace(rules["rewards"], wall_s=600.0)},
    )


def _faster(rules: Rules, scale: Scale) -> Rules:
    """Return rules whose seconds are as many real ones."""
    changes = {
        name: getattr(rules, name) / scale.speedup
        for name in rules.__struct_fields__
        if name.endswith("_s") and not name.endswith("_per_s")
    }
    return structs.replace(rules, **changes)


def _patient(rules: FleetRules, scale: Scale) -> FleetRules:
    """Scale the heartbeat's limit and the margin, which shape a run; the other time-outs only catch hanging
    processes."""
    return structs.replace(
        rules,
        heartbeat_timeout_s=max(LEAST_HEARTBEAT_TIMEOUT_S, rules.heartbeat_timeout_s / scale.speedup),
        leave_margin_s=rules.leave_margin_s / scale.speedup,
    )


def as_patient(scale: Scale) -> tuple[str, ...]:
    """Return overrides with which a simulation misses a dead worker as late as the scaled run does."""
    seconds = max(FleetRules().heartbeat_timeout_s, LEAST_HEARTBEAT_TIMEOUT_S * scale.speedup)
    return (f"fleet_rules.heartbeat_timeout_s={seconds:g}",)


def manager_settings(scenario: Scenario, scale: Scale) -> ManagerSettings:
    return ManagerSettings(
        stream=StreamSettings(
            flush_interval_s=max(_LEAST_FLUSH_S, scale.real_s(scenario.engine.flush_s)),
            heartbeat_interval_s=max(_LEAST_HEARTBEAT_S, scale.real_s(scenario.fleet.heartbeat_s)),
        ),
        limits=LimitSettings(max_price_usd_per_hour=1e6),
    )


def engine_config(scenario: Scenario, scale: Scale, *, local: bool, speed: float = 1.0) -> EmulatedConfig:
    """Return the configuration of an emulated engine that is as fast as the scenario's."""
    engine, per_token = scenario.engine, scale.tokens_per_token
    width = scenario.first_width if local else scenario.fleet.devices_per_worker
    return EmulatedConfig(
        slots=engine.slots,
        tokens_per_s=speed / ((engine.step_fixed_s + engine.step_sample_s) * per_token),
        step_per_sample_s=engine.step_sample_s * per_token / speed,
        step_per_context_token_s=engine.step_context_s * per_token**2 / speed,
        prefill_tokens_per_s=engine.prefill_tokens_per_s * speed / per_token,
        kv_tokens=scenario.kv_tokens(width) // per_token,
        version=0 if local else None,
        install_s=0.0 if local else _install_s(scenario),
        speedup=scale.speedup,
    )


def _install_s(scenario: Scenario) -> float:
    """Fetching and installing a version, for a single worker."""
    network = scenario.network
    gbps = min(network.worker_ingress_gbps, network.trainer_egress_gbps)
    return network.weights_gb * 8.0 / gbps + network.install_s


def whole(line: StepLine, scale: Scale) -> StepLine:
    """Return a step's line in the scenario's own seconds and tokens."""
    seconds = {
        name: getattr(line, name) * scale.speedup
        for name in ("opened_at", "closed_at", "trained_at", "step_s", "wait_train_s", "wait_remote_s", "train_s")
    }
    tokens = {name: getattr(line, name) * scale.tokens_per_token for name in ("tokens_trained", "longest")}
    discarded = {cause: num * scale.tokens_per_token for cause, num in line.tokens_discarded.items()}
    return structs.replace(
        line,
        **seconds,
        **tokens,
        tokens_discarded=discarded,
        seed_window_s=line.seed_window_s * scale.speedup,
        trained_mean=line.trained_mean * scale.tokens_per_token,
        generated_mean=line.generated_mean * scale.tokens_per_token,
        expected_mean=line.expected_mean * scale.tokens_per_token,
    )
