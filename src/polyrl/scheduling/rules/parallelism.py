"""The parallelism planner: how many devices share one copy of the policy while a round is generated.

A wide copy (tensor parallel, TP) reads its weights faster and leaves more memory for the KV cache; narrow copies waste
less on exchanging activations. Rounds of short answers wait for weights, rounds of long answers for the KV cache, so
each round kind has its own plan.

Rules kept here:
- TP is a power of two that divides the devices, one server has as many (`max_tp`), and a copy's weights fit it. All
  devices are used.
- The engines' first width is home. It moves to one at which no kind of round takes longer and one of them saves more
  than `min_gain`. A kind of round runs elsewhere only where that saves more than `min_gain` of the round and more than
  `reshape_s`, what going there and coming back costs; the way back, half of it, must not cost a round of the other
  kind more than 2%. So planning never makes a round much slower than leaving the engines alone.
- A width whose peak KV does not fit, or that preemptions have shown to be too narrow (`PreemptionWatch`), is not moved
  to while another fits.

The prediction is a lock-step fluid: at token t a copy runs its share of the samples that earlier rounds of the kind
still ran at t, for as long as such rounds lasted; what exceeds its slots or its KV cache waits. Stopped samples count
with the tokens that they reached, as ended ones do: a race that closes early is over early. To it is added how long
recent rounds of the kind waited for rewards after their last sample, at any width. Where the pool of rewards, which
score beside generation, was full to the end, the round is taken to be as long at every faster width.

Left out: prefill, queueing inside an engine, and whether to plan at all (`enabled` is read by the caller).
"""

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Annotated, Literal

import msgspec

from polyrl.ids import Seconds
from polyrl.scheduling.core.bounds import AtLeastOne, Bytes, Count, NotNegative, Positive, Share
from polyrl.scheduling.core.commands import RoundKind

Survival = Callable[[float], float]
"""The share of answers longer than so many tokens (lengths.LengthModel.survival)."""

_MAX_RISE = 0.05
_NUM_CALM_ROUNDS = 4
_GRID_PER_DOUBLING = 16
_MAX_HARM = 0.02
"""The most that the way back may cost a round of the other kind, as a share of it."""


class ModelShape(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    num_layers: AtLeastOne
    num_kv_heads: AtLeastOne
    head_dim: AtLeastOne
    dtype_bytes: AtLeastOne
    weight_bytes: Annotated[int, msgspec.Meta(ge=1, le=1 << 50)]
    activation_bytes: Bytes


class LocalDevices(msgspec.Struct, frozen=True):
    num_devices: int
    memory_bytes: int
    """The memory of one device."""
    fraction: float
    """The share of it that an engine may use."""
    max_tp: int = 8


class RoundShape(msgspec.Struct, frozen=True):
    num_samples: int
    prompt_tokens: float
    cap: int
    slots: int = 1 << 30
    """Samples that one copy runs at once."""
    rewards_s: Seconds = 0.0
    """Seconds from the end of the last sample to the round's closing, at any width."""
    at_least_s: Seconds = 0.0
    """Seconds that rewards alone take, where their pool is full to the end: no width makes the round shorter."""


class RoundProgress(msgspec.Struct, frozen=True):
    """Rounds of one kind: their samples, by tokens."""

    runs: Survival
    """The share of a round's samples that run longer than so many tokens, whether they then end or are stopped."""
    rounds: Survival | None = None
    """The share of rounds of which any sample does; without it, as many as samples drawn one by one would give."""

    def lasts(self, tokens: float, num_samples: int) -> float:
        if self.rounds is not None:
            return self.rounds(tokens)
        alive = self.runs(tokens)
        return 1.0 if alive >= 1.0 else -math.expm1(num_samples * math.log1p(-alive))


class DecodeSpeed(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Seconds of one decode step at TP 1: fixed (reading weights), per running sample, per token of their contexts.

    At TP p all of it is divided by p ** tp_exponent: 1 is a free exchange of activations, 0 gains nothing.
    """

    fixed_s: Positive
    per_sample_s: NotNegative
    per_context_token_s: NotNegative
    tp_exponent: Share

    def step_s(self, tp: int, num_running: float, context_tokens: float) -> Seconds:
        work = self.fixed_s + self.per_sample_s * num_running + self.per_context_token_s * context_tokens
        return work / tp**self.tp_exponent


class ParallelismConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How wide engines are; docs/concepts/scaling.md#parallelism."""

    enabled: bool = False
    engines: Literal["local", "fleet"] = "local"
    """The engines that are planned: the trainer's own, which only a simulator can reshape; or those that a live run
    starts on devices beside the trainer's."""
    num_devices: Count = 0
    """The devices of those engines; 0: as many as the local ones have."""
    start_tp: AtLeastOne = 1
    """Their first width, for engines of the fleet."""
    min_gain: Share = 0.05
    """A plan that fits is changed only for one predicted to save more than this share of the round's time."""
    reshape_s: NotNegative = 15.0
    """The cost of a change, there and back: it must save more seconds of the round than this."""
    max_tp: AtLeastOne = 8
    """The widest engine: as many devices as one server has."""
    model: ModelShape | None = None
    """The policy's shape; without it nothing is planned."""
    speed: DecodeSpeed | None = None
    """Decode speed of one device; without it, that of the fleet's engines is measured, and `tp_exponent` assumed. For
    local engines nothing is planned without it."""
    tp_exponent: Share = 0.6
    """How a measured speed changes with the width: see DecodeSpeed."""
    memory_gb: Positive = 80.0
    """The memory of one device."""
    memory_fraction: Annotated[float, msgspec.Meta(gt=0, le=1)] = 0.85
    """The share of it that an engine may use."""


class ParallelismPlan(msgspec.Struct, frozen=True):
    tp: int
    replicas: int
    round_s: Seconds
    why: str


class TpAdvice(msgspec.Struct, frozen=True):
    tp: int
    why: str


class PreemptionWatch(msgspec.Struct):
    """Preemptions in the rounds of one kind: the share of samples requeued because the KV cache was full."""

    last_share: float = 0.0
    num_calm: int = 0

    def after_round(self, tp: int, preempted_share: float, *, allowed: list[int]) -> TpAdvice:
        """Return the TP for the next round, after one at `tp`. `allowed` comes from `tensor_parallel_sizes`."""
        rise = preempted_share - self.last_share
        self.last_share = preempted_share
        self.num_calm = self.num_calm + 1 if preempted_share <= 0.0 else 0
        if rise > _MAX_RISE:
            self.num_calm = 0
            why = f"{preempted_share:.0%} of samples were preempted, {rise * 100:.0f} points above the last round"
            return _moved(tp, tp * 2, allowed, why)
        if self.num_calm >= _NUM_CALM_ROUNDS:
            self.num_calm = 0
            return _moved(tp, tp // 2, allowed, f"{_NUM_CALM_ROUNDS} rounds without a preemption")
        return TpAdvice(tp, f"TP {tp} stays: {preempted_share:.0%} of samples were preempted")


class ParallelismState(msgspec.Struct):
    width: int = 0
    """The width that the fleet's engines were told to have last; 0: they are as they were started."""
    home_tp: int = 0
    """The width that rounds run at if nothing else is worth a change; 0 before the engines were seen."""
    times_by_kind: dict[str, dict[int, float]] = msgspec.field(default_factory=dict)
    """Predicted seconds of the last round of each kind, by the widths that come into question."""
    num_samples_by_kind: dict[str, int] = msgspec.field(default_factory=dict)
    """The number of samples in the last round of each kind."""
    rewards_s_by_kind: dict[str, Seconds] = msgspec.field(default_factory=dict)
    """Seconds that recent rounds of each kind waited for rewards after their last sample."""
    at_least_s_by_kind: dict[str, Seconds] = msgspec.field(default_factory=dict)
    """Seconds of the last round of each kind, if the pool of rewards was full to its end; else 0."""
    min_tp_by_kind: dict[str, int] = msgspec.field(default_factory=dict)
    """Widths that preemptions have shown to be too narrow are not planned again."""
    watches: dict[str, PreemptionWatch] = msgspec.field(default_factory=dict)
    num_preemptions: int = 0
    """The preemptions of the local engines, as counted when the last step was trained."""


def kv_bytes_per_token(shape: ModelShape) -> int:
    return 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim * shape.dtype_bytes


def capacity_tokens(shape: ModelShape, tp: int, memory_bytes: int, fraction: float) -> int:
    """Return the tokens of KV cache that a copy on `tp` devices holds. Beyond one device a KV head, heads are stored
    again."""
    free = tp * memory_bytes * fraction - shape.weight_bytes - shape.activation_bytes
    num_copies = max(1.0, tp / shape.num_kv_heads)
    return max(0, int(free / (kv_bytes_per_token(shape) * num_copies)))


def peak_tokens(survival: Survival, num_samples: float, prompt_tokens: float, cap: int) -> float:
    """Return the most KV that the samples hold at once, all started together. Never too low, at most 5% too high."""
    grid = _grid(cap)
    return max(num_samples * survival(low) * (prompt_tokens + high) for low, high in pairwise(grid))


def round_time_s(
    speed: DecodeSpeed, progress: RoundProgress, work: RoundShape, *, tp: int, replicas: int, capacity: int
) -> Seconds:
    """Return the predicted time of a round on `replicas` copies of `tp` devices, each with `capacity` tokens of KV
    cache."""
    if capacity <= 0:
        return math.inf
    share = work.num_samples / replicas
    total = work.rewards_s
    for low, high in pairwise(_grid(work.cap)):
        alive, lasts = progress.runs(low), progress.lasts(low, work.num_samples)
        if alive <= 0.0 or lasts <= 0.0:
            break
        context = work.prompt_tokens + (low + high) / 2.0
        samples = max(1.0, share * min(1.0, alive / lasts))  # the slowest copy runs at least the last sample
        waves = max(1.0, samples * context / capacity, samples / work.slots)
        running = samples / waves
        total += (high - low) * lasts * waves * speed.step_s(tp, running, running * context)
    return max(total, work.at_least_s)


def plan(
    config: ParallelismConfig,
    state: ParallelismState,
    kind: RoundKind,
    work: RoundShape,
    *,
    shape: ModelShape,
    devices: LocalDevices,
    speed: DecodeSpeed,
    progress: RoundProgress,
    kinds: tuple[RoundKind, ...],
) -> ParallelismPlan:
    """Return the plan for the next round of this kind."""
    widths = tensor_parallel_sizes(shape, devices)
    round_s: dict[int, Seconds] = {}
    fits: list[int] = []
    for tp in sorted({*widths, state.home_tp}):
        replicas = devices.num_devices // tp
        capacity = capacity_tokens(shape, tp, devices.memory_bytes, devices.fraction)
        round_s[tp] = round_time_s(speed, progress, work, tp=tp, replicas=replicas, capacity=capacity)
        fits_peak = peak_tokens(progress.runs, work.num_samples / replicas, work.prompt_tokens, work.cap) <= capacity
        if tp in widths and fits_peak and tp >= state.min_tp_by_kind.get(kind, 1):
            fits.append(tp)
    open_to = fits if fits else widths
    state.times_by_kind[kind] = {tp: round_s[tp] for tp in round_s if tp in open_to or tp == state.home_tp}
    _move_home(state, kinds, config)
    tp, why = _choose(state, kind, config)
    return ParallelismPlan(tp, devices.num_devices // tp, round_s[tp], f"{kind} round: {why}")


def tensor_parallel_sizes(shape: ModelShape, devices: LocalDevices) -> list[int]:
    """Return every TP that can be used, narrowest first; the widest alone when the weights seem to fit none."""
    most = min(devices.num_devices, devices.max_tp)
    all_sizes = [2**i for i in range(most.bit_length()) if devices.num_devices % 2**i == 0]
    sizes = [tp for tp in all_sizes if capacity_tokens(shape, tp, devices.memory_bytes, devices.fraction) > 0]
    return sizes if sizes else all_sizes[-1:]


def _move_home(state: ParallelismState, kinds: tuple[RoundKind, ...], config: ParallelismConfig) -> None:
    """Make home the width that suits every kind of round better, once all `kinds` that come were seen."""
    seen = [state.times_by_kind[kind] for kind in kinds if kind in state.times_by_kind]
    if len(seen) < len(kinds):
        return
    home = state.home_tp
    for tp in sorted(seen[0]):
        if not all(tp in times for times in seen):
            continue
        saved = [times[state.home_tp] - times[tp] for times in seen]
        worth = any(s > config.min_gain * times[state.home_tp] for s, times in zip(saved, seen, strict=True))
        if min(saved) >= 0.0 and worth and sum(saved) > config.reshape_s:
            home = min(home, tp, key=lambda one: sum(times[one] for times in seen))
    state.home_tp = home


def _choose(state: ParallelismState, kind: RoundKind, config: ParallelismConfig) -> tuple[int, str]:
    home, round_s = state.home_tp, state.times_by_kind[kind]
    best = min(sorted(round_s), key=lambda tp: round_s[tp])
    times = ", ".join(f"TP {tp} {round_s[tp]:.0f} s" for tp in sorted(round_s))
    saved_s = round_s[home] - round_s[best]
    if best == home or not saved_s > 0.0:
        return home, f"TP {home} is the fastest ({times})"
    gain = 1.0 if math.isinf(saved_s) else saved_s / round_s[home]
    if gain <= config.min_gain or saved_s <= config.reshape_s:
        return home, f"TP {home} stays: TP {best} would save {gain:.1%}, not worth a change ({times})"
    shortest_other_s = min((one[home] for other, one in state.times_by_kind.items() if other != kind), default=math.inf)
    if config.reshape_s / 2.0 > _MAX_HARM * shortest_other_s:
        return home, f"TP {home} stays: the way back from TP {best} would cost rounds of the other kind too much"
    return best, f"TP {best} saves {gain:.0%} over TP {home} ({times})"


def _moved(tp: int, wanted: int, allowed: list[int], why: str) -> TpAdvice:
    if wanted in allowed:
        return TpAdvice(wanted, f"{why}: TP {tp} to {wanted}")
    return TpAdvice(tp, f"{why}, but TP {tp} is the limit")


def _grid(cap: int) -> list[float]:
    """Lengths from 0 to the cap, a sixteenth of a doubling apart."""
    num = int(math.log2(max(1, cap)) * _GRID_PER_DOUBLING)
    grid = [0.0] + [2.0 ** (i / _GRID_PER_DOUBLING) for i in range(num + 1)]
    return [*grid, float(cap)] if grid[-1] < cap else grid
