"""The output of a training run: how to join it, a line per step, a terminal display, and metrics for trackers.

Without a display, a long wait is reported too: that no worker has joined, or that a reward takes long. Zero workers are
a normal state, so this is no warning. It is reported once when the wait has lasted a while, and once more when it is
over. run/diagnosis.py finds the cause. The manager is told the state of reward functions, for other commands.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Protocol

import msgspec
import numpy as np
from rich.text import Text

from polyrl.client import Fleet
from polyrl.config.recipe import Recipe
from polyrl.errors import UserError
from polyrl.ids import Seconds
from polyrl.run import hosts, keeping, reward_workers, workers
from polyrl.run.checkpoints import ResumePoint
from polyrl.run.diagnosis import diagnose
from polyrl.run.display import Display
from polyrl.run.draft_counts import DraftCounts
from polyrl.run.findings import Finding
from polyrl.run.kept_samples import Texts, text_decoder
from polyrl.run.plugins import own_trackers
from polyrl.run.processes import ManagerAddress
from polyrl.run.settings import caveat_of
from polyrl.run.task_contract import Tasks, UnderWay
from polyrl.run.tracked_samples import show_pictures, show_samples
from polyrl.scheduling.core.ledger import StepLine
from polyrl.telemetry import breaks, validated
from polyrl.telemetry.looks import show_seconds
from polyrl.telemetry.metrics import Metrics, MetricValue, factors_changed, from_step_line, with_aliases
from polyrl.telemetry.trackers import open_trackers
from polyrl.trainer import mismatch
from polyrl.trainer.reports import StepReport
from polyrl.wire.dial import Dialer, is_loopback

_LOOK_EVERY_S = 1.0
_PATIENCE_S = 15.0
_MAX_PARTS = 128
"""Names of parts of rewards that become metrics. A host may give each episode others."""


class Watch(Protocol):
    """A program that follows the run."""

    def begun(self, url: str, join_command: str, first_step: int) -> None: ...

    def step(self, number: int, metrics: Metrics) -> None: ...


class Reporter:
    """Keeps the contract of the loop's `Events`."""

    def __init__(
        self,
        recipe: Recipe,
        run_dir: Path,
        address: ManagerAddress,
        display: Display,
        first_step: int = 0,
        watch: Watch | None = None,
    ) -> None:
        track = recipe.track
        self._watch = watch
        self._recipe, self._run_dir, self._address, self.display = recipe, run_dir, address, display
        self._validated = validated.read(run_dir, first_step)  # before the lines from there on are cut off
        """The validation metrics of the present version: reported with the step that starts from it."""
        self._version = first_step
        self._trackers = open_trackers(
            run_dir,
            first_step=first_step,
            tensorboard=track.tensorboard,
            wandb=track.wandb,
            project=track.project,
            recipe=msgspec.to_builtins(recipe),
            own=own_trackers(track, run_dir, first_step),
        )
        self._breaks = {first_step: breaks.read(run_dir, first_step)} if first_step else {}
        self._text_of: Texts | None = None
        self._fleet: Fleet | None = None
        self._tasks: Tasks | None = None
        self._drafts = DraftCounts()
        self._parts: dict[str, None] = {}
        """The names of parts that became metrics."""
        self._far: dict[str, float] = {}
        """Kinds of engines that were too far from the trainer in the last step."""

    def begin(self, fleet: Fleet) -> None:
        self._fleet = fleet
        say = self.display.say
        url = self._address.url
        status = workers.status_command(self._recipe, self._run_dir, url)
        say(f"run: {self._run_dir}   manager: {url}   status: {status}")
        say(f"metrics: {self._trackers.where}")
        command = workers.join_command(self._recipe, self._run_dir, url)
        say(Text.assemble("a worker joins with:  ", (command, "bold green")))
        for host_command in hosts.join_commands(self._recipe, self._run_dir, url):
            say(Text.assemble("a host joins with:  ", (host_command, "bold green")))
        if not self._recipe.rewards.processes:
            reward_command = reward_workers.join_command(self._recipe, self._run_dir, url)
            say(Text.assemble("a reward worker joins with:  ", (reward_command, "bold green")))
        if self._watch is not None:
            self._watch.begun(url, command, self._version)
        if self._address.tls is None and not is_loopback(url):
            say(Text("tokens and weights cross the network in clear: use a private network, or a tunnel", "yellow"))
        if caveat := caveat_of(self._recipe):
            say(Text(caveat, style="yellow"))
        for step, changed in self._breaks.items():
            if changed:
                line = f"from step {step} on, the curve has a break: {', '.join(map(str, changed))}"
                say(Text(line, style="yellow"))

    async def step_begins(self, step: int) -> None:
        self.display.step_begins(step)

    async def groups_trained(self, step: int, num: int) -> None:
        self.display.groups_trained(num)

    async def step_ended(self, report: StepReport) -> None:
        metrics = with_aliases(self._metrics(report))
        if self._version == report.step:  # another one's is still to be told
            metrics |= self._validated
            self._validated = {}
        elif report.step < self._version:  # a step of the past: a process before this one validated what it began with
            metrics |= validated.read(self._run_dir, report.step)
        await self._show_samples(report.step)
        self._trackers.log(report.step, metrics)
        self.display.step_ended(report.step, metrics)
        if self._watch is not None:
            self._watch.step(report.step, metrics)
        if not report.stats.added.num_groups and report.num_filtered:
            why = f"all rewards were equal in each of the {report.num_filtered} groups that came"
            self.display.say(Text(f"step {report.step} trained nothing: {why}", style="yellow"))
        if report.line is not None and report.line.mode_left:
            self.display.say(Text(f"step {report.step}: {report.line.mode_left}", style="yellow"))
        if report.line is not None and (changed := factors_changed(report.line, self._line_before(report.step))):
            self.display.say(f"step {report.step}: {changed}")
        self._warn_of_mismatch(report)

    async def _show_samples(self, step: int) -> None:
        every = self._recipe.track.samples_every_steps
        if self._trackers.shows_samples and every and step % every == 0:
            self._text_of = self._text_of or text_decoder(self._run_dir, self._recipe.model.path)
            await asyncio.to_thread(show_samples, self._trackers, self._run_dir, step, self._text_of)

    def _warn_of_mismatch(self, report: StepReport) -> None:
        """Warn once for each kind of engine, and again if its mismatch was lower in between."""
        bound = self._recipe.train.mismatch_warning
        far = dict(mismatch.too_far(report.stats.metrics, bound))
        for engine in [one for one in far if one not in self._far]:
            line = f"step {report.step}: log-probabilities of {engine} workers are {far[engine]:.3g} nats from the "
            line += f"trainer's for the same weights, above train.mismatch_warning={bound:g}: docs/guides/engines.md"
            self.display.say(Text(line, style="yellow"))
        self._far = far

    async def saves(self) -> None:
        self.display.doing("writes the last checkpoint")

    def knows(self, version: int) -> bool:
        """Return whether a version was validated, by this process or an earlier one."""
        return bool(self._validated) and self._version == version

    async def validates(self) -> None:
        self.display.doing("validates")

    async def validated(self, version: int, rates: dict[str, float]) -> None:
        validated.note(self._run_dir, version, rates)
        self._validated, self._version = dict(rates), version
        shown = {name.removeprefix("validation/"): rate for name, rate in rates.items()}
        of_all = {name: rate for name, rate in shown.items() if name == "reward/mean" or name.startswith("pass@")}
        several = len(shown) > 2 * len(of_all)  # a single set has the same figures as all
        parts = [f"{name} {rate:.3f}" for name, rate in {**of_all, **(shown if several else {})}.items()]
        self.display.say("  ".join([f"version {version} validates:", *parts]))

    def _known_parts(self, parts: Mapping[str, float]) -> dict[str, float]:
        for name in parts:
            if len(self._parts) < _MAX_PARTS:
                self._parts[name] = None
        return {name: mean for name, mean in parts.items() if name in self._parts}

    def _metrics(self, report: StepReport) -> dict[str, MetricValue]:
        rewards = np.array(report.rewards or [0.0])
        lengths = np.array(report.lengths or [0])
        seconds = report.seconds
        metrics: dict[str, MetricValue] = {
            **self._of_the_scheduler(report),
            **report.stats.metrics,
            "reward/mean": float(rewards.mean()) if report.rewards else None,
            "reward/std": float(rewards.std()) if report.rewards else None,
            "reward/max": float(rewards.max()) if report.rewards else None,
            "reward/min": float(rewards.min()) if report.rewards else None,
            **{f"reward/{name}/mean": mean for name, mean in self._known_parts(report.parts).items()},
            "sample/sequences": report.num_sequences,
            "token/response_length/mean": float(lengths.mean()) if report.lengths else None,
            "token/response_length/max": int(lengths.max()) if report.lengths else None,
            "token/response_length/min": int(lengths.min()) if report.lengths else None,
            "token/response_length/p95": float(np.percentile(lengths, 95)) if report.lengths else None,
            "token/prompt_length/mean": float(np.mean(report.prompt_lengths)) if report.prompt_lengths else None,
            "time/step_total": seconds["total"],
            "time/step_train": seconds["train"],
            "time/step_save": seconds.get("save"),
            "time/step_publish": seconds.get("publish"),
            "idle/trainer_share": seconds["idle"] / seconds["total"],
            "rounds/filtered_groups": report.num_filtered,
            **ages(report),
        }
        num_tokens = report.stats.added.num_tokens
        metrics["perf/throughput_all_gpus"] = num_tokens / seconds["total"]
        num_workers = 0.0 if report.line is None else report.line.mean_workers
        metrics["perf/throughput"] = num_tokens / seconds["total"] / (self._recipe.train.ranks + num_workers)
        if self._fleet is not None and self._fleet.advice is not None:
            metrics["fleet/useful"] = self._fleet.advice.num_workers
        if self._tasks is not None:
            metrics |= self._tasks.reward_metrics()
        metrics |= self._drafts.take()
        if caveat_of(self._recipe):
            metrics["rollout/imposed_lengths"] = 1
        if changed := self._breaks.get(report.step):
            metrics["run/breaks"] = len(changed)
            metrics["run/changed"] = ", ".join(map(str, changed))
        return metrics

    def _of_the_scheduler(self, report: StepReport) -> dict[str, MetricValue]:
        if report.line is None:
            return {}
        return from_step_line(report.line, self._line_before(report.step), step_s=report.seconds["total"])

    def _line_before(self, step: int) -> StepLine | None:
        """Return the line of the step before. A run that is resumed has it from the manager: the step was trained by
        another process."""
        lines = [] if self._fleet is None else self._fleet.lines
        return next((one for one in reversed(lines) if one.step == step - 1), None)

    def news(
        self, fleet: Fleet, keeper: keeping.FleetKeeper, playing: dict[str, hosts.HostProcess], tasks: Tasks
    ) -> list[Coroutine[Any, Any, None]]:
        """Return the coroutines that report everything beside the steps, until they are cancelled."""
        say, recipe, self._tasks = self.display.say, self._recipe, tasks
        news: list[Coroutine[Any, Any, None]] = [
            keeping.keep(keeper, fleet, say),
            workers.tell_who_is_turned_away(fleet, keeper, say),
            tell_of_rewards(fleet, tasks),
            self._drafts.follow(fleet),
            hosts.keep(recipe, fleet, playing, say),
            hosts.tell_of_failures(fleet, self._run_dir, say),
        ]
        if not self.display.progress.is_live:
            news.append(tell_of_waits(fleet, workers.doctor_command(recipe, self._run_dir, self._address.url), say))
        return news

    def close(self, *, in_haste: bool = False) -> None:
        """End what it has begun; `in_haste`: a person waits for the run to stop."""
        if self._validated:  # no step starts from the last version
            self._trackers.log(self._version, self._validated)
        if self._trackers.shows_samples and not in_haste:
            show_pictures(self._trackers, self._run_dir)
        self._trackers.close(in_haste=in_haste)


def ages(report: StepReport) -> dict[str, MetricValue]:
    """Return how many versions the step's tokens are behind the version that the step began with."""
    by_age, total = report.tokens_by_age, sum(report.tokens_by_age.values())
    if not total:
        return {}
    return {
        "staleness/mean": sum(age * num for age, num in by_age.items()) / total,
        "staleness/max": max(by_age),
        "staleness/mixed_samples": report.num_mixed / len(report.lengths),
        **{f"staleness/tokens/{age}": num / total for age, num in by_age.items()},
    }


class Waiting:
    """The present wait of the run, if any."""

    def __init__(self, doctor: str) -> None:
        """`doctor` is the command that says what to do."""
        self._doctor = doctor
        self._since: Seconds | None = None
        self._is_told = False

    def look(self, finding: Finding, now: Seconds, *, is_moving: bool = True) -> str | None:
        """Return the line to print, if any, for this wait. `is_moving`: tokens are generated or trained."""
        if is_moving and not finding.needs_help and not finding.stalls:
            return self._end(now)
        if self._since is None:
            self._since = now
        if self._is_told or now - self._since < _PATIENCE_S:
            return None
        self._is_told = True
        says = "says what to do" if finding.needs_help else "says more"
        return f"waits: {finding.what}; `{self._doctor}` {says}"

    def _end(self, now: Seconds) -> str | None:
        since, is_told = self._since, self._is_told
        self._since, self._is_told = None, False
        return f"goes on, after {show_seconds(now - since)}" if is_told and since is not None else None


async def tell_of_rewards(fleet: Fleet, tasks: Tasks) -> None:
    """Tell the manager what reward functions do, until it is cancelled: while some run, and when one has failed."""
    said: UnderWay | None = None
    with contextlib.suppress(UserError):
        while True:
            await asyncio.sleep(_LOOK_EVERY_S)
            now = tasks.rewards_under_way()
            if now is None and said is not None and said.running:
                now = said._replace(running=0, longest=(0.0, ""))
            if now is not None and (now.running or said is None or now._replace(longest=said.longest) != said):
                await fleet.tell_rewards(*now)
                said = now


async def tell_of_waits(fleet: Fleet, doctor: str, say: Callable[[str], None]) -> None:
    """Report long waits until cancelled, or until the manager is given up, which the run reports itself."""
    waiting = Waiting(doctor)
    with contextlib.suppress(UserError):
        earlier = await fleet.status()
        while True:
            await asyncio.sleep(_LOOK_EVERY_S)
            status = await fleet.status()
            found = diagnose(earlier, status)
            line = waiting.look(found.findings[0], time.monotonic(), is_moving=found.is_moving)
            if line is not None:
                say(line)
            earlier = status


@asynccontextmanager
async def reporting(
    recipe: Recipe,
    run_dir: Path,
    address: ManagerAddress,
    dialer: Dialer,
    point: ResumePoint | None,
    watch: Watch | None,
) -> AsyncIterator[Reporter]:
    """Open a reporter with its display, for as long as the run lasts."""
    if point is not None and point.breaks:
        breaks.note(run_dir, point.breaks)
    title = ", ".join(one for one in (recipe.name, caveat_of(recipe)) if one)
    display = Display(title, recipe.train.steps, dialer)
    reporter = Reporter(recipe, run_dir, address, display, 0 if point is None else point.next_step, watch)
    try:
        async with display:
            yield reporter
    finally:
        task = asyncio.current_task()
        reporter.close(in_haste=task is not None and task.cancelling() > 0)
