"""The parallelism planner: how many devices share one copy of the policy while a round is generated.

A wide copy (tensor parallel, TP) reads its weights faster and leaves more memory for the KV cache; narrow copies waste
less on exchanging activations. Rounds of short answers wait for weights, rounds of long answers for the KV cache, so
each round kind has its own plan.

Rules kept here:
- TP is a power of two that divides the devices, and a copy's weights fit it. All devices are used.
- Of the plans whose peak KV fits, the one with the least predicted round time. When none fits, the widest, and `why`
  says so. A plan that fits is kept until another is more than 5% faster and saves more than changing there and
  back costs.
- `PreemptionWatch` corrects the model by what happened: a preemption share more than 5 points above the last round's
  doubles TP; four rounds without any halve it.

The prediction is a lock-step fluid: at token t a copy runs its share of the samples that live that long; what exceeds
its KV cache waits its turn. It ranks plans; it does not forecast seconds.

Left out: prefill, queueing inside an engine, and whether to plan at all (`enabled` is read by the caller).
"""

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Annotated, Literal

import msgspec

from polyrl.ids import Seconds
from polyrl.scheduling.bounds import AtLeastOne, Bytes, NotNegative, Positive, Share

RoundKind = Literal["short", "long"]
Survival = Callable[[float], float]
"""The share of answers longer than so many tokens (lengths.LengthModel.survival)."""

_MAX_RISE = 0.05
_NUM_CALM_ROUNDS = 4
_GRID_PER_DOUBLING = 16


class ModelShape(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    num_layers: AtLeastOne
    num_kv_heads: AtLeastOne
    head_dim: AtLeastOne
    dtype_bytes: AtLeastOne
    weight_bytes: Annotated[int, msgspec.Meta(ge=1, le=1 << 50)]
    activation_bytes: Bytes


class Devices(msgspec.Struct, frozen=True):
    num_devices: int
    memory_bytes: int
    """Of one device."""
    fraction: float
    """The share of it that an engine may use."""


class RoundShape(msgspec.Struct, frozen=True):
    num_samples: int
    prompt_tokens: float
    cap: int


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
    enabled: bool = False
    min_gain: Share = 0.05
    """A plan that fits is changed only for one predicted to save more than this share of the round's time."""
    reshape_s: NotNegative = 15.0
    """What changing costs, there and back: a change must save more seconds of the round than this."""
    model: ModelShape | None = None
    """What is run; without it nothing is planned."""
    speed: DecodeSpeed | None = None
    """How fast one device runs it; without it nothing is planned."""
    memory_gb: Positive = 80.0
    """Of one device."""
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
    """What engines did in the rounds of one kind: the share of samples put back into the queue for want of KV cache."""

    last_share: float = 0.0
    num_calm: int = 0

    def after_round(self, tp: int, preempted_share: float, *, allowed: list[int]) -> TpAdvice:
        """The TP for the next round, after one at `tp`. `allowed` comes from `tensor_parallel_sizes`."""
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
    tp_by_kind: dict[str, int] = msgspec.field(default_factory=dict)
    min_tp_by_kind: dict[str, int] = msgspec.field(default_factory=dict)
    """What preemptions have shown to be too narrow is not planned again."""
    watches: dict[str, PreemptionWatch] = msgspec.field(default_factory=dict)
    num_preemptions: int = 0
    """Of the local engines, when the last step was trained."""


def kv_bytes_per_token(shape: ModelShape) -> int:
    return 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim * shape.dtype_bytes


def capacity_tokens(shape: ModelShape, tp: int, memory_bytes: int, fraction: float) -> int:
    """Tokens of KV cache that a copy on `tp` devices holds. Beyond one device a KV head, heads are stored again."""
    free = tp * memory_bytes * fraction - shape.weight_bytes - shape.activation_bytes
    num_copies = max(1.0, tp / shape.num_kv_heads)
    return max(0, int(free / (kv_bytes_per_token(shape) * num_copies)))


def peak_tokens(survival: Survival, num_samples: float, prompt_tokens: float, cap: int) -> float:
    """The most KV that the samples hold at once, all started together. Never too low, at most 5% too high."""
    grid = _grid(cap)
    return max(num_samples * survival(low) * (prompt_tokens + high) for low, high in pairwise(grid))


def round_time_s(
    speed: DecodeSpeed, survival: Survival, work: RoundShape, *, tp: int, replicas: int, capacity: int
) -> Seconds:
    """The predicted time of a round on `replicas` copies of `tp` devices, each with `capacity` tokens of KV cache."""
    if capacity <= 0:
        return math.inf
    share = work.num_samples / replicas
    total = 0.0
    grid = _grid(work.cap)
    for low, high in pairwise(grid):
        alive = survival(low)
        if alive <= 0.0:
            break
        any_alive = 1.0 if alive >= 1.0 else -math.expm1(work.num_samples * math.log1p(-alive))
        context = work.prompt_tokens + (low + high) / 2.0
        samples = max(1.0, share * alive)  # the slowest copy runs at least the last sample
        turns = max(1.0, samples * context / capacity)
        running = samples / turns
        total += (high - low) * any_alive * turns * speed.step_s(tp, running, running * context)
    return total


def plan(
    config: ParallelismConfig,
    state: ParallelismState,
    kind: RoundKind,
    work: RoundShape,
    *,
    shape: ModelShape,
    devices: Devices,
    speed: DecodeSpeed,
    survival: Survival,
) -> ParallelismPlan:
    """The plan for the next round of this kind, remembered for the one after."""
    round_s: dict[int, Seconds] = {}
    fits: list[int] = []
    widths = tensor_parallel_sizes(shape, devices)
    for tp in widths:
        replicas = devices.num_devices // tp
        capacity = capacity_tokens(shape, tp, devices.memory_bytes, devices.fraction)
        round_s[tp] = round_time_s(speed, survival, work, tp=tp, replicas=replicas, capacity=capacity)
        if peak_tokens(survival, work.num_samples / replicas, work.prompt_tokens, work.cap) <= capacity:
            fits.append(tp)
    tp, why = _choose(widths, fits, round_s, state.tp_by_kind.get(kind), config)
    state.tp_by_kind[kind] = tp
    return ParallelismPlan(tp, devices.num_devices // tp, round_s[tp], f"{kind} round: {why}")


def tensor_parallel_sizes(shape: ModelShape, devices: Devices) -> list[int]:
    """Every TP that can be used, narrowest first; the widest alone when the weights seem to fit none."""
    all_sizes = [2**i for i in range(devices.num_devices.bit_length()) if devices.num_devices % 2**i == 0]
    sizes = [tp for tp in all_sizes if capacity_tokens(shape, tp, devices.memory_bytes, devices.fraction) > 0]
    return sizes if sizes else all_sizes[-1:]


def _choose(
    widths: list[int], fits: list[int], round_s: dict[int, Seconds], current: int | None, config: ParallelismConfig
) -> tuple[int, str]:
    if not fits:
        return widths[-1], f"no plan holds the peak of KV; TP {widths[-1]} is the widest, samples will wait"
    best = min(fits, key=lambda tp: round_s[tp])
    times = ", ".join(f"TP {tp} {round_s[tp]:.0f} s" for tp in fits)
    if current is None or current == best:
        return best, f"TP {best} is the fastest that fits ({times})"
    if current not in fits:
        return best, f"TP {current} does not hold the peak of KV any more; TP {best} is the fastest that fits ({times})"
    gain = 1.0 - round_s[best] / round_s[current]
    if gain > config.min_gain and round_s[current] - round_s[best] > config.reshape_s:
        return best, f"TP {best} saves {gain:.0%} over TP {current} ({times})"
    return current, f"TP {current} stays: TP {best} would save {gain:.1%}, not worth a change ({times})"


def _moved(tp: int, wanted: int, allowed: list[int], why: str) -> TpAdvice:
    if wanted in allowed:
        return TpAdvice(wanted, f"{why}: TP {tp} to {wanted}")
    return TpAdvice(tp, f"{why}, but TP {tp} is the limit")


def _grid(cap: int) -> list[float]:
    """Lengths from 0 to the cap, a sixteenth of a doubling apart."""
    num = int(math.log2(max(1, cap)) * _GRID_PER_DOUBLING)
    grid = [0.0] + [2.0 ** (i / _GRID_PER_DOUBLING) for i in range(num + 1)]
    return [*grid, float(cap)] if grid[-1] < cap else grid
