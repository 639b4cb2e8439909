"""Runs from Python: load a recipe, start it, watch its steps, stop it, resume it, export its weights.

    recipe = polyrl.load("arithmetic", {"model.path": "models/arithmetic", "train.steps": 40})
    with polyrl.start(recipe, run_dir="runs/first") as run:
        for step in run.steps():
            print(step.number, step.reward)
    polyrl.export("runs/first", "models/trained")

Rules kept here: a run has a process of its own (child.py), so it may be started in a notebook, in a running event loop
and in any thread, and its memory is free again when it ends. Leaving the `with` block stops it, and so does the end of
this program: nothing is lost, and `resume` continues the run. An error in the run is raised here, as one exception.
"""

import contextlib
import logging
import os
import queue
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec
from msgspec import Struct

from polyrl.config import build
from polyrl.config.dump import inline
from polyrl.config.recipe import Recipe
from polyrl.config.recipe_files import load_recipe, load_tree
from polyrl.errors import ConfigError, RunFailed, UserError
from polyrl.run import child
from polyrl.telemetry.metrics import FILE_NAME, read_steps

log = logging.getLogger("polyrl.run")

_STOP_TIMEOUT_S = 120.0
"""Stopping waits for a checkpoint that is being copied, but not for the step in progress."""
_OUTPUT_LINES = 200
_LAST_WORDS_S = 5.0
"""The time to read the last output of a process that has ended."""

Overrides = Mapping[str, Any]
"""Values by dotted key: {"train.steps": 40, "fleet.workers": 2}."""


class TrainedStep(Struct, frozen=True):
    """A step that was trained."""

    number: int
    metrics: dict[str, float | int | str | None]
    """The step's line of metrics.jsonl; docs/reference/metrics.md."""

    @property
    def reward(self) -> float | None:
        """The mean reward of the step's samples; None if the step had no samples."""
        mean = self.metrics.get("reward/mean")
        return float(mean) if isinstance(mean, int | float) else None

    @property
    def seconds(self) -> float:
        total = self.metrics.get("time/step_total")
        return float(total) if isinstance(total, int | float) else 0.0


class Exported(Struct, frozen=True):
    """The result of `export`."""

    folder: Path
    checkpoint: Path
    """The checkpoint that the weights come from."""
    dtype: str


def load(recipe: "str | os.PathLike[str] | Mapping[str, Any] | Recipe", overrides: Overrides | None = None) -> Recipe:
    """Return a recipe: one that ships, by its name; a TOML file, by its path; a tree of its sections; another recipe.

    Raises ConfigError, one line with the dotted key, for a mistake in it.
    """
    given = _as_overrides(overrides)
    if isinstance(recipe, Recipe):
        return load_tree(msgspec.to_builtins(recipe), given)
    if isinstance(recipe, Mapping):
        return load_tree(dict(recipe), given)
    return load_recipe(os.fspath(recipe), given)


def start(
    recipe: "str | os.PathLike[str] | Mapping[str, Any] | Recipe",
    overrides: Overrides | None = None,
    *,
    run_dir: "str | os.PathLike[str] | None" = None,
) -> "TrainingRun":
    """Start a run, and return when its first round is requested. `run_dir` is a new directory; None: runs/NAME.

    Raises UserError, one line, for a recipe that cannot run here.
    """
    loaded = load(recipe, overrides)
    place = loaded.run_dir if run_dir is None else os.fspath(run_dir)
    return TrainingRun(child.RunRequested(run_dir=place, recipe=msgspec.to_builtins(loaded)))


def resume(run_dir: "str | os.PathLike[str]", overrides: Overrides | None = None) -> "TrainingRun":
    """Continue a run that was stopped or killed, or that is to have more steps; otherwise like `start`."""
    return TrainingRun(child.RunRequested(run_dir=os.fspath(run_dir), overrides=_as_overrides(overrides)))


def export(
    run_dir: "str | os.PathLike[str]",
    out: "str | os.PathLike[str]",
    *,
    step: int | None = None,
    best: bool = False,
    adapter: bool = False,
) -> "Exported":
    """Write a checkpoint's weights as a new Hugging Face directory.

    The newest checkpoint, or that of `step`, or the `best` one that checkpoint.keep_best has kept. `adapter`: of a run
    with LoRA, its changes alone, as peft has them. Raises UserError.
    """
    from polyrl.engines import registry

    registry.check_libraries()
    from polyrl.run import checkpoints
    from polyrl.trainer import exporting

    if step is not None and best:
        raise UserError("step and best: expected one of them")
    place, target = Path(run_dir), Path(out)
    if target.exists():
        raise UserError(f"{target}: is there already, expected a new directory")
    recipe, _ = checkpoints.read_recipe(place, [])
    folder = exporting.choose(place, checkpoints.best_step(place, recipe) if best else step)
    exporting.export(folder, recipe, target, adapter=adapter)
    return Exported(target, folder, "float32" if adapter else recipe.model.dtype)


class TrainingRun:
    """A run in a process of its own. Made by `start` and `resume`."""

    def __init__(self, request: child.RunRequested) -> None:
        self.run_dir = Path(request.run_dir)
        self._queue: queue.SimpleQueue[TrainedStep | None] = queue.SimpleQueue()
        self._begun: child.RunBegun | None = None
        self._end: child.RunEnded | child.RunStopped | child.RunBroken | None = None
        self._is_up, self._is_over = threading.Event(), threading.Event()
        self._is_asked_to_stop = False
        self._output: deque[str] = deque(maxlen=_OUTPUT_LINES)
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(
            [sys.executable, "-m", "polyrl.run.child"],
            stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True,  # Ctrl+C is this program's to hear
        )  # fmt: skip
        listening = threading.Thread(target=self._hear_output, name="output of a run", daemon=True)
        listening.start()
        threading.Thread(target=self._hear, args=(listening,), name="events of a run", daemon=True).start()
        try:
            self._send(request)
            self._is_up.wait()
        except BaseException:
            self._kill()
            raise
        self._raise_failure()

    def __repr__(self) -> str:
        return f"<TrainingRun {self.run_dir}: {self.status}>"

    # What it is

    @property
    def recipe(self) -> Recipe:
        return build(self._what_it_began_with.recipe, Recipe)

    @property
    def url(self) -> str:
        """The address of the run's manager."""
        return self._what_it_began_with.url

    @property
    def join_command(self) -> str:
        """The command that adds a worker from another machine."""
        return self._what_it_began_with.join_command

    @property
    def first_step(self) -> int:
        """The number of the first step that this process trains: 0, unless the run was resumed."""
        return self._what_it_began_with.first_step

    @property
    def status(self) -> str:
        """ "running", "stopped", "done: REASON" or "failed: REASON"."""
        match self._end:
            case None:
                return "running"
            case child.RunEnded(why):
                return f"done: {why}"
            case child.RunStopped():
                return "stopped"
            case child.RunBroken(why):
                return f"failed: {why}"

    @property
    def pid(self) -> int:
        """The process id of the trainer."""
        return self._process.pid

    @property
    def is_running(self) -> bool:
        return not self._is_over.is_set()

    @property
    def output(self) -> Sequence[str]:
        """The last lines that `polyrl train` would have printed. The logger `polyrl.run` gets each line at once."""
        return tuple(self._output)

    def history(self) -> list[TrainedStep]:
        """Return every trained step, including those before the run was resumed."""
        file = self.run_dir / FILE_NAME
        lines = read_steps(file) if file.exists() else []
        return [TrainedStep(int(line["step"] or 0), {k: v for k, v in line.items() if k != "step"}) for line in lines]

    # What can be done with it

    def steps(self) -> Iterator[TrainedStep]:
        """Yield each step when it is trained, until the run ends or is stopped. Raises the error of a failed run.

        Each step is yielded once: a second loop continues after the last step of the first.
        """
        while (step := self._queue.get()) is not None:
            yield step
        self._queue.put(None)
        self._raise_failure()

    def wait(self, timeout_s: float | None = None) -> str:
        """Wait for the run to end, and return its status. Raises the error of a failed run.

        Raises TimeoutError after `timeout_s`; the run goes on.
        """
        if not self._is_over.wait(timeout_s):
            raise TimeoutError(f"{self.run_dir}: the run has not ended within {timeout_s:g} s")
        self._raise_failure()
        return self.status

    def stop(self, timeout_s: float = _STOP_TIMEOUT_S) -> None:
        """Stop the run in good order, and return when all of its processes have ended. `resume` continues it."""
        if self.is_running and not self._is_asked_to_stop:
            self._is_asked_to_stop = True
            self._process.send_signal(signal.SIGTERM)
        try:
            is_over = self._is_over.wait(timeout_s)
        except BaseException:  # a second Ctrl+C does not wait
            self._kill()
            raise
        if not is_over:
            log.warning("%s: the run has not stopped within %.0f s; it is killed", self.run_dir, timeout_s)
            self._kill()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()
        if error is None:
            self._raise_failure()

    @property
    def _what_it_began_with(self) -> child.RunBegun:
        assert self._begun is not None, "a run that does not begin raises when it is made"
        return self._begun

    def _raise_failure(self) -> None:
        match self._end:
            case child.RunBroken(why, "config"):
                raise ConfigError(why)
            case child.RunBroken(why, "user"):
                raise UserError(why)
            case child.RunBroken(why, "bug"):
                last = "\n".join(self._output)
                raise RunFailed(f"{self.run_dir}: the run failed: {why}; it can be resumed. It said last:\n{last}")
            case _:
                return

    def _kill(self) -> None:
        """Kill the trainer. The processes that it started end with it."""
        self._is_asked_to_stop = True
        self._process.kill()
        self._is_over.wait()

    # What it says, in threads of their own

    def _send(self, request: child.RunRequested) -> None:
        """Send a request. The pipe stays open: when it closes, the process knows that this program has ended."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended already, and its events say why
            self._process.stdin.write(msgspec.json.encode(request) + b"\n")
            self._process.stdin.flush()

    def _hear(self, listening: threading.Thread) -> None:
        assert self._process.stdout is not None
        try:
            for line in self._process.stdout:
                self._take(msgspec.json.decode(line, type=child.RunEvent))
            code = self._process.wait()
            listening.join(_LAST_WORDS_S)
            if self._end is None:
                killed = f"its process ended with {signal.Signals(-code).name if code < 0 else f'exit code {code}'}"
                self._end = child.RunStopped() if self._is_asked_to_stop else child.RunBroken(killed, "bug")
        finally:
            self._is_over.set()
            self._is_up.set()
            self._queue.put(None)

    def _take(self, event: child.RunEvent) -> None:
        match event:
            case child.RunBegun():
                self._begun = event
                self._is_up.set()
            case child.StepTold(number, metrics):
                self._queue.put(TrainedStep(number, metrics))
            case _:
                self._end = event

    def _hear_output(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            text = line.decode(errors="replace").rstrip()
            self._output.append(text)
            log.info("%s", text)


def _as_overrides(overrides: Overrides | None) -> list[str]:
    given = {} if overrides is None else overrides
    if not isinstance(given, Mapping):
        raise ConfigError(f'overrides: got {given!r}; expected values by dotted key, such as {{"train.steps": 40}}')
    empty = [key for key, value in given.items() if value is None]
    if empty:
        raise ConfigError(f"{empty[0]}: got None; expected a value, or leave the key out")
    return [f"{key}={inline(value)}" for key, value in given.items()]
