"""The terminal display of a training run: the manager's status and the trainer's progress in one view.

    display = Display("arithmetic", num_steps=40, dialer=Dialer(url, admin_token))
    async with display:                       # asks the manager twice a second; does nothing without a terminal
        display.step_begins(3); display.groups_trained(2); display.step_ended(3, metrics)

Rules kept here: a manager that does not answer is shown as a line of the display, and does not end the run. The lines
of steps and all other output go through `say`, so that they stay above the display.
"""

import asyncio
import contextlib
import time
from types import TracebackType
from typing import Self

from msgspec import Struct
from rich.text import Text

from polyrl.errors import UserError
from polyrl.ids import Seconds
from polyrl.run.waits import is_news
from polyrl.telemetry.metrics import Metrics
from polyrl.telemetry.progress import Progress, RunView, WorkerView
from polyrl.wire.control import Status, WaitStatus, WorkerStatus
from polyrl.wire.dial import Dialer, Unreachable

_REFRESH_EVERY_S = 0.5
_STEP_TIMES_KEPT = 10
_DOES = {"waits": "waits for groups", "trains": "trains", "validates": "validates"}


class Told(Struct):
    """The progress that the training loop reports, beside the manager's status."""

    name: str
    num_steps: int
    step: int = 0
    step_began_at: Seconds = 0.0
    step_times_s: list[float] = []
    rewards: list[float] = []
    num_trained: int = 0
    phase: str = ""
    usd: float = 0.0


class Display:
    def __init__(
        self,
        name: str,
        num_steps: int,
        dialer: Dialer,
        progress: Progress | None = None,
        *,
        follows: bool = False,
    ) -> None:
        """`follows`: it is the manager that tells of the trainer, which is another process."""
        self.progress = Progress() if progress is None else progress
        self._told = Told(name, num_steps)
        self._dialer = dialer
        self._follows = follows
        self._status: Status | None = None
        self._refreshing: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self.progress.__enter__()
        if self.progress.is_live:
            self._refreshing = asyncio.create_task(self._refresh_again_and_again())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._refreshing is not None:
            self._refreshing.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._refreshing
        self.progress.__exit__(kind, error, traceback)

    # What the loop says

    def step_begins(self, step: int) -> None:
        self._told.step, self._told.step_began_at = step, time.monotonic()
        self._told.num_trained, self._told.phase = 0, "waits for groups"
        self._show()

    def groups_trained(self, num: int) -> None:
        self._told.num_trained += num
        self._show()

    def doing(self, phase: str) -> None:
        """Show the trainer's present activity, in a word or two."""
        self._told.phase = phase
        self._show()

    def step_ended(self, step: int, metrics: Metrics) -> None:
        """Print the step's line, and keep its reward, its time and its price."""
        told = self._told
        took_s, reward, usd = (metrics.get(name) for name in ("time/step_total", "reward/mean", "cost/usd_total"))
        if isinstance(took_s, int | float):
            told.step_times_s = [*told.step_times_s, took_s][-_STEP_TIMES_KEPT:]
        if isinstance(reward, float):
            told.rewards.append(reward)
        told.usd = usd if isinstance(usd, float) else told.usd
        self.progress.step_done(step, metrics)

    def say(self, text: str | Text) -> None:
        self.progress.say(text)

    # What the manager says

    async def _refresh_again_and_again(self) -> None:
        async with self._dialer as dialer:
            while True:
                try:
                    self._status = await dialer.get("/v1/status", Status)
                    if self._follows:
                        self._follow(self._status)
                    self._show()
                except (Unreachable, UserError) as error:
                    self.progress.note(f"the manager does not answer: {error}")
                await asyncio.sleep(_REFRESH_EVERY_S)

    def _follow(self, status: Status) -> None:
        """Take in what the loop would say."""
        self._told.phase = _DOES.get(status.trainer_does, "")
        if status.rounds:
            first = status.rounds[0]
            self._told.step, self._told.step_began_at = first.step, time.monotonic() - first.age_s

    def _show(self) -> None:
        if self.progress.is_live:
            self.progress.show(view_of(self._status, self._told))


def view_of(status: Status | None, told: Told) -> RunView:
    """Combine the manager's status and the loop's progress into the view that the display draws."""
    rounds = [] if status is None else [one for one in status.rounds if one.step == told.step]
    round_ = rounds[0] if rounds else None
    workers = () if status is None else tuple(map(_worker, status.workers))
    waits = [] if status is None else [_wait(one) for one in status.waits if is_news(one)]
    return RunView(
        name=told.name,
        step=told.step,
        num_steps=told.num_steps,
        kind="short" if round_ is None else round_.kind,
        phase=told.phase,
        step_began_at=told.step_began_at,
        step_times_s=tuple(told.step_times_s),
        rewards=tuple(told.rewards),
        num_groups=0 if round_ is None else round_.groups,
        num_generated=0 if round_ is None else max(round_.groups_generated, told.num_trained),
        num_scored=0 if round_ is None else max(round_.groups_delivered, told.num_trained),
        num_trained=told.num_trained,
        workers=workers,
        waits=waits,
        usd=told.usd,
    )


def _worker(worker: WorkerStatus) -> WorkerView:
    return WorkerView(
        name=worker.name,
        state=_activity(worker),
        num_samples=worker.running,
        tok_s=worker.tokens_per_s if worker.running else 0.0,
        version=None if worker.version < 0 else worker.version,
        spot=worker.spot,
        local=worker.local,
    )


def _activity(worker: WorkerStatus) -> str:
    if not worker.connected:
        return f"silent {worker.last_heard_s:.0f} s"
    match worker.state:
        case "active" if worker.running:
            return "generating"
        case "active":
            return "training" if worker.local else "idle"
        case "waiting" | "pulling":
            return "pulling"
        case "joined":
            return "starting"
        case other:
            return other


def _wait(wait: WaitStatus) -> str:
    age = "" if wait.age_s is None else f", {wait.age_s:.1f} s so far"
    until = "" if wait.given_up_in_s is None else f", {max(0.0, wait.given_up_in_s):.0f} s more"
    return f"for {wait.what.replace('_', ' ')}: {wait.of}{age}{until}"
