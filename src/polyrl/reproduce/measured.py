"""Whole runs on this machine's GPU beside what was published: tests/gpu/check_run.py plays modes, one after another.

The script imposes RollPacker's lengths on a model with random weights, whose rewards cost nothing. So only ratios of
times are comparable, and no figure has a tolerance: the published ones are of 16 devices and of other models.
"""

import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import msgspec
from msgspec import Struct

from polyrl.errors import UserError
from polyrl.reproduce.comparing import Section, Table, relative, times
from polyrl.reproduce.published import ROLLOUT_S, SPEEDUPS

SCRIPT = Path("tests/gpu/check_run.py")
_SIZE = ("--cap", "8192", "--steps", "10")
_BEGINS = '{"mode": '
_ABOUT = (
    "Published: 7B on 16 devices with real rewards. Ours: {arch} with random weights on {device}, {prompts} prompts x "
    "8 samples a step, the published lengths imposed with a cap of {cap} tokens, rewards at no cost, a step of warm-up "
    "that is not counted. The ratios are compared, without a tolerance."
)


class ModeRun(Struct, frozen=True):
    """A mode's run, as the script tells it."""

    mode: str
    device: str
    arch: str
    prompts: int
    cap: int
    steps_s: list[float]
    kinds: list[str]
    mean_step_s: float
    generate_s: float
    train_s: float
    publish_s: float
    trained_tok_s: float
    run_s: float


class OnGpu(NamedTuple):
    modes: tuple[str, ...]
    section: Callable[[dict[str, ModeRun]], Section]


def run(modes: Sequence[str], say: Callable[[str], None], size: Sequence[str] = _SIZE) -> dict[str, ModeRun]:
    """Run the modes with the script of the checkout that the current folder is. Raises UserError if it fails."""
    if not SCRIPT.is_file():
        raise UserError(f"{SCRIPT}: is not there; run this in a checkout of PolyRL, on a machine with a GPU")
    found: dict[str, ModeRun] = {}
    command = [sys.executable, str(SCRIPT), *size, "--no-checkpoints", *modes]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith(_BEGINS):
                one = msgspec.json.decode(line, type=ModeRun)
                found[one.mode] = one
            say(line.rstrip())
    if process.returncode or found.keys() != set(modes):
        raise UserError(
            f"{SCRIPT}: ended with code {process.returncode} and {len(found)} of {len(modes)} modes; it said why"
        )
    return found


def tail_batching(runs: dict[str, ModeRun]) -> Section:
    base, ours = runs["synchronous"], runs["tail batching"]
    section = _section("Synchronous against streaming with tail batching (RollPacker)", runs)
    rollout = ROLLOUT_S["8k"]
    wanted = rollout["none"] / rollout["both"]  # type: ignore[operator]
    checks = [
        relative("step: all of RollPacker's", SPEEDUPS["8k"]["stream"], base.mean_step_s / ours.mean_step_s),
        relative("generation: both factors 1.25", wanted, base.generate_s / ours.generate_s),
    ]
    section.compare("Times as fast as synchronous", checks)
    gain = base.mean_step_s / ours.mean_step_s
    section.claim(f"a step is shorter ({times(gain)})", holds=gain > 1)
    return section


def streaming(runs: dict[str, ModeRun]) -> Section:
    base, ours = runs["synchronous"], runs["streaming"]
    section = _section("Training while the round runs (RollPacker)", runs)
    wanted, ratio = SPEEDUPS["8k"]["planner"] / SPEEDUPS["8k"]["stream"], ours.mean_step_s / base.mean_step_s
    section.compare("Mean step", [relative("on / off", wanted, ratio)])
    section.claim(f"a step is shorter ({ratio:.2f} of a synchronous one)", holds=ratio < 1)
    section.remarks.append(
        "One device cannot train while it generates: published are devices that go over to training early."
    )
    return section


def _section(title: str, runs: dict[str, ModeRun]) -> Section:
    one = next(iter(runs.values()))
    about = _ABOUT.format(arch=one.arch, device=one.device, prompts=one.prompts, cap=f"{one.cap:,}")
    header = ("mode", "steps", "mean, s", "long, s", "generation, s", "training, s", "publishing, s", "trained tok/s")
    return Section(title, about, [Table("Measured", header, [_row(one) for one in runs.values()])])


def _row(one: ModeRun) -> list[str]:
    long = [took for took, kind in zip(one.steps_s, one.kinds, strict=True) if kind == "l"]
    parts = f"{one.generate_s:.1f}", f"{one.train_s:.1f}", f"{one.publish_s:.2f}", f"{one.trained_tok_s:,.0f}"
    return [one.mode, str(len(one.steps_s)), f"{one.mean_step_s:.1f}", f"{fmean(long):.1f}" if long else "-", *parts]
