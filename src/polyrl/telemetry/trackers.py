"""Where metrics go beside the terminal: `metrics.jsonl` always; TensorBoard, W&B and trackers of `[track]` if asked.

    trackers = open_trackers(run_dir, first_step=0, tensorboard=True, wandb="offline", project="polyrl")
    trackers.log(step, metrics)
    trackers.close()

Rules kept here: names go out unchanged. A tracker that fails, in whatever way, is warned of once and never stops the
run; the next step tries it again. A library that is asked for and not installed is the person's mistake, and is said
before the run begins. Nothing waits for a network without a limit.

TensorBoard's files are written here and now, not by a library's thread: a queue whose writer has died fills up, and
then stops the run.
"""

import importlib.util
import logging
import math
import os
import shlex
import socket
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

from polyrl.errors import UserError, one_line
from polyrl.telemetry.metrics import FILE_NAME, Metrics, MetricsFile
from polyrl.telemetry.sample_tables import COLUMNS, SampleRow, as_markdown
from polyrl.telemetry.tracker_thread import TrackerThread

log = logging.getLogger("polyrl.track")

WandbMode = Literal["off", "offline", "online"]
Own = tuple[str, Callable[[], Any]]
"""A tracker of a person's own: its name, and what makes it."""

_LOGIN_TIMEOUT_S = 30.0
_INIT_TIMEOUT_S = 30.0
_FINISH_TIMEOUT_S = 60.0
_HASTE_S = 0.5
_WANDB_ID_FILE = "wandb-run-id"
_TENSORBOARD_FOLDER = "tensorboard"
_SESSION_START = 1
_DT_STRING, _RGBA = 7, 4
"""Numbers of TensorBoard's formats."""


class Tracker(Protocol):
    """A place for metrics. It may raise whatever it likes."""

    @property
    def name(self) -> str: ...

    @property
    def where(self) -> str:
        """Where a person finds them."""
        ...

    def log(self, step: int, metrics: Metrics) -> None: ...

    def close(self) -> None: ...


@runtime_checkable
class SampleTracker(Tracker, Protocol):
    """A place that shows answers and pictures too."""

    def log_samples(self, step: int, rows: Sequence[SampleRow]) -> None: ...

    def log_pictures(self, step: int, pictures: Sequence[Path]) -> None: ...


class Trackers:
    """All of them as one. Keeps the contract of a tracker, and never raises for a place that fails."""

    name = "trackers"

    def __init__(self, trackers: Sequence[Tracker | TrackerThread]) -> None:
        self._trackers = list(trackers)
        self._failed: set[str] = set()

    @property
    def where(self) -> str:
        return "; ".join(one.where for one in self._trackers)

    def log(self, step: int, metrics: Metrics) -> None:
        for tracker in self._trackers:
            try:
                tracker.log(step, metrics)
            except Exception as error:  # noqa: BLE001  libraries of others, networks and disks: none may end a run
                self._warn(tracker, "log", error)

    @property
    def shows_samples(self) -> bool:
        return any(isinstance(one, SampleTracker) for one in self._trackers)

    def log_samples(self, step: int, rows: Sequence[SampleRow]) -> None:
        """Show answers of a step, before its metrics are logged."""
        for tracker in self._trackers:
            if isinstance(tracker, SampleTracker):
                try:
                    tracker.log_samples(step, rows)
                except Exception as error:  # noqa: BLE001  as above
                    self._warn(tracker, "log samples", error)

    def log_pictures(self, step: int, pictures: Sequence[Path]) -> None:
        """Show the run's pictures (PNG)."""
        for tracker in self._trackers:
            if isinstance(tracker, SampleTracker):
                try:
                    tracker.log_pictures(step, pictures)
                except Exception as error:  # noqa: BLE001  as above
                    self._warn(tracker, "log pictures", error)

    def close(self, *, in_haste: bool = False) -> None:
        """Close all of them; `in_haste`: a person waits for the run to stop."""
        for tracker in self._trackers:
            try:
                if isinstance(tracker, TrackerThread):
                    tracker.close(_HASTE_S if in_haste else _FINISH_TIMEOUT_S)
                else:
                    tracker.close()
            except Exception as error:  # noqa: BLE001  as above
                self._warn(tracker, "close", error)

    def _warn(self, tracker: Tracker | TrackerThread, what: str, error: Exception) -> None:
        if tracker.name not in self._failed:
            self._failed.add(tracker.name)
            log.warning("%s failed to %s, the run goes on: %s", tracker.name, what, one_line(error))


def check_libraries(*, tensorboard: bool, wandb: WandbMode) -> None:
    """Raise UserError for one that is asked for and not installed. Imports nothing."""
    for option, library, wanted in (("tensorboard", "tensorboardX", tensorboard), ("wandb", "wandb", wandb != "off")):
        if wanted and importlib.util.find_spec(library) is None:
            raise UserError(f"track.{option}: needs {library}: pip install 'polyrl[track]'")


def open_trackers(
    run_dir: Path,
    *,
    first_step: int = 0,
    tensorboard: bool = False,
    wandb: WandbMode = "off",
    project: str = "polyrl",
    recipe: Mapping[str, Any] | None = None,
    own: Sequence[Own] = (),
) -> Trackers:
    """Open the places that a run's metrics go to. `first_step` is where it goes on, `recipe` what W&B shows as its
    config.

    Raises UserError if the run's directory cannot be written to, or a library is missing.
    """
    check_libraries(tensorboard=tensorboard, wandb=wandb)
    trackers: list[Tracker | TrackerThread] = [MetricsFile(run_dir / FILE_NAME, first_step=first_step)]
    try:
        if tensorboard:
            trackers.append(TensorBoardTracker(run_dir / _TENSORBOARD_FOLDER, first_step=first_step))
        if wandb != "off":
            trackers.append(WandbTracker(run_dir, wandb, project, recipe))
        trackers += [TrackerThread(make, name) for name, make in own]
    except UserError:
        Trackers(trackers).close()
        raise
    except Exception as error:  # noqa: BLE001  whatever a library fails with when it begins, the file is there
        log.warning("a tracker failed to begin, the run goes on without it: %s", one_line(error))
    return Trackers(trackers)


class TensorBoardTracker:
    """An event file: `tensorboard --logdir RUN_DIR`. Words and missing numbers are left out of it."""

    name = "tensorboard"

    def __init__(self, folder: Path, *, first_step: int = 0) -> None:
        from tensorboardX import RecordWriter
        from tensorboardX.proto import event_pb2

        self.where = f"TensorBoard: {shlex.join(['tensorboard', '--logdir', str(folder)])}"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            # Files are read in the order of their names; two of one second, by one process, would be one file.
            path = folder / f"events.out.tfevents.{time.time_ns() // 1000}.{socket.gethostname()}.{os.getpid()}"
            self._writer = RecordWriter(str(path))
        except OSError as error:
            raise UserError(f"{folder}: cannot be written: {error.strerror}") from error
        self._event: Any = event_pb2.Event  # pyright: ignore[reportAttributeAccessIssue]  made on import
        self._write(file_version="brain.Event:2")
        if first_step:  # what earlier files say of these steps no longer holds
            self._write(step=first_step, session_log={"status": _SESSION_START})

    def log(self, step: int, metrics: Metrics) -> None:
        values = [
            {"tag": name, "simple_value": float(value)}
            for name, value in metrics.items()
            if isinstance(value, int | float) and name != "step"
        ]
        self._write(step=step, summary={"value": values})

    def log_samples(self, step: int, rows: Sequence[SampleRow]) -> None:
        text = {"dtype": _DT_STRING, "string_val": [as_markdown(rows).encode()]}
        about = {"plugin_data": {"plugin_name": "text"}}
        self._write(step=step, summary={"value": [{"tag": "samples", "metadata": about, "tensor": text}]})

    def log_pictures(self, step: int, pictures: Sequence[Path]) -> None:
        values = []
        for picture in pictures:
            data = picture.read_bytes()
            width, height = struct.unpack(">II", data[16:24])  # of a PNG's first chunk
            image = {"width": width, "height": height, "colorspace": _RGBA, "encoded_image_string": data}
            values.append({"tag": f"pictures/{picture.stem}", "image": image})
        self._write(step=step, summary={"value": values})

    def _write(self, **fields: Any) -> None:
        self._writer.write(self._event(wall_time=time.time(), **fields).SerializeToString())
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WandbTracker:
    """A run of Weights & Biases. Offline, it is under RUN_DIR/wandb, and `wandb sync` uploads it.

    A run that goes on keeps its id. Online and not to be reached, it begins offline: nothing is lost.
    """

    name = "wandb"

    def __init__(
        self, run_dir: Path, mode: Literal["offline", "online"], project: str, recipe: Mapping[str, Any] | None = None
    ) -> None:
        import wandb

        self._last_step = -1
        settings = wandb.Settings(
            console="off",
            silent=True,
            login_timeout=_LOGIN_TIMEOUT_S,
            init_timeout=_INIT_TIMEOUT_S,
            finish_timeout=_FINISH_TIMEOUT_S,
        )
        about: dict[str, Any] = {
            "dir": str(run_dir),
            "project": project,
            "name": run_dir.resolve().name,
            "config": None if recipe is None else dict(recipe),
            "settings": settings,
        }
        self.where = f"W&B: offline in {run_dir / 'wandb'}, `wandb sync` uploads it"
        if mode == "offline":
            self._run = wandb.init(mode="offline", id=_run_id(run_dir), **about)
            return
        try:
            self._run = wandb.init(mode="online", id=_run_id(run_dir), resume="allow", **about)
            self.where = f"W&B: {self._run.url}"
        except (wandb.Error, TimeoutError) as error:
            reason = str(error).partition("\n")[0]
            log.warning("wandb cannot be reached, the run is kept offline: %s", reason)
            # Its helper process still holds the id of the run that could not begin.
            self._run = wandb.init(mode="offline", id=_new_run_id(run_dir), **about)

    def log(self, step: int, metrics: Metrics) -> None:
        if step <= self._last_step:  # it would take them for the step before
            raise ValueError(f"step {step} comes after step {self._last_step}")
        self._last_step = step
        values = {name: math.nan if value is None else value for name, value in metrics.items()}
        self._run.log(values, step=step, commit=True)

    def log_samples(self, step: int, rows: Sequence[SampleRow]) -> None:
        import wandb

        if step <= self._last_step:
            raise ValueError(f"samples of step {step} come after step {self._last_step}")
        table = wandb.Table(columns=[*COLUMNS], data=[list(row) for row in rows])
        self._run.log({"samples": table}, step=step, commit=False)

    def log_pictures(self, step: int, pictures: Sequence[Path]) -> None:
        import wandb

        images = {f"pictures/{one.stem}": wandb.Image(str(one)) for one in pictures}
        self._run.log(images, step=max(step, self._last_step + 1), commit=True)

    def close(self) -> None:
        self._run.finish()


def _run_id(run_dir: Path) -> str:
    """Made once a run, and kept beside it."""
    path = run_dir / _WANDB_ID_FILE
    return path.read_text(encoding="utf-8").strip() if path.exists() else _new_run_id(run_dir)


def _new_run_id(run_dir: Path) -> str:
    new = os.urandom(4).hex()
    (run_dir / _WANDB_ID_FILE).write_text(new + "\n", encoding="utf-8")
    return new
