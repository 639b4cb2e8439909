"""The published results that can be reproduced, by name: what each shows, and what plays it at each place, or why
nothing does."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Literal, NamedTuple

from polyrl.reproduce import elastic, losses, measured, tail, together, trained
from polyrl.reproduce.comparing import Section
from polyrl.reproduce.playing import Player

PlaceName = Literal["simulation", "emulated", "gpu"]
PLACES: tuple[PlaceName, ...] = ("simulation", "emulated", "gpu")

_NO_GPU = "no script measures it there"
_NO_WIDTH = "an emulated engine has no width"
_TOO_LONG = "its runs would take hours of real time"


class Reproduction(NamedTuple):
    about: str
    simulation: Callable[[Player], Section]
    emulated: Callable[[Player], Section] | str
    """Shorter runs; a text says why there are none."""
    gpu: measured.OnGpu | str = _NO_GPU
    """Modes to measure in a checkout on a machine with a GPU; a text says why there are none."""


REPRODUCTIONS: Mapping[str, Reproduction] = {
    "elastic-8b": Reproduction(
        "RLBoost, 8B: from no worker to four and back; tokens/s, tokens per dollar, seeding windows",
        elastic.staircase,
        partial(elastic.staircase, levels=(0, 1, 2, 4, 2, 0), level_s=1500.0, num_steps=27, baseline=elastic.TWO_STEPS),
    ),
    "elastic-14b": Reproduction(
        "RLBoost, 14B: static fleets of one and six workers, short and long answers", elastic.static_14b, _TOO_LONG
    ),
    "preemption": Reproduction(
        "RLBoost, 8B: two of four workers taken again and again; tokens lost",
        losses.preemption,
        partial(losses.preemption, num_steps=4, warmup_steps=1, every_s=300.0),
    ),
    "three-of-six": Reproduction(
        "RLBoost, 14B: three of six workers lost at 100 and 200 s; migrating against regenerating",
        losses.three_of_six,
        losses.three_of_six_emulated,
    ),
    "seeding-ablation": Reproduction(
        "RLBoost, 14B: without the trainer's own devices seeding",
        elastic.seeding_ablation,
        partial(elastic.seeding_ablation, num_steps=6, warmup_steps=3),
    ),
    "memory-ablation": Reproduction(
        "RLBoost, 14B: without memory of the seeding window",
        elastic.memory_ablation,
        partial(elastic.memory_ablation, every_s=1500.0, num_steps=18, warmup_steps=9, at_least=1),
    ),
    "spot-trace": Reproduction(
        "RLBoost, 8B and 14B: two segments of two hours of a spot market",
        elastic.spot_trace,
        partial(elastic.spot_trace, market=elastic.AN_HOUR),
    ),
    "tail-e2e": Reproduction(
        "RollPacker, 7B and 14B: its mechanisms on top of each other; step times",
        tail.end_to_end,
        tail.end_to_end_emulated,
        measured.OnGpu(("synchronous", "tail batching"), measured.tail_batching),
    ),
    "tail-sensitivity": Reproduction(
        "RollPacker: rollout time by over-provisioning factor",
        tail.sensitivity,
        partial(tail.sensitivity, caps=("8k",), num_steps={1.0: 3, 1.25: 5, 1.5: 3}, at_least=1),
    ),
    "reward-pipeline": Reproduction(
        "RollPacker: scoring beside generation",
        tail.reward_pipeline,
        partial(tail.reward_pipeline, caps=("8k",), length=("run.steps=5", "run.warmup_steps=0")),
    ),
    "adaptive-timeout": Reproduction(
        "RollPacker: learned time limits of code rewards",
        tail.adaptive_timeout,
        partial(tail.adaptive_timeout, length=("run.steps=5", "run.warmup_steps=0")),
    ),
    "stream-trainer": Reproduction(
        "RollPacker: devices that train while the round runs",
        tail.stream_trainer,
        tail.stream_trainer_emulated,
        measured.OnGpu(("synchronous", "streaming"), measured.streaming),
    ),
    "planner": Reproduction("RollPacker: the parallelism planner", tail.planner, _NO_WIDTH),
    "minimum": Reproduction(
        "RLBoost, 8B: no worker at all, and a fleet that goes away for an hour",
        losses.minimum,
        partial(losses.minimum, length=("run.steps=2", "run.warmup_steps=0"), away=losses.AWAY_FOR_A_WHILE),
    ),
    "together": Reproduction(
        "every mechanism alone, and together, on one set of machines", together.together, _TOO_LONG
    ),
    "everything": Reproduction(
        "every mechanism at once, against the published 2.03x, 2.22x and +49% tokens per dollar",
        together.everything,
        together.everything_emulated,
    ),
    "trained": Reproduction("what tail batching trains, mode by mode; adaptive factors", trained.bias, _TOO_LONG),
    "more-devices": Reproduction(
        "RollPacker's four training times as two lines, and more devices than published",
        trained.more_devices,
        _TOO_LONG,
    ),
}
