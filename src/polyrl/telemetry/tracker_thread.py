"""A tracker of a person's own, in a thread of its own: the run never waits for what it does.

    the trainer's loop --log--> a queue of bounded length --> the thread: makes the tracker, logs, closes it

Rules kept here: nothing of a person's runs on the trainer's event loop, so Ctrl+C works while a tracker hangs. A
failure is raised at the next call, and a step for which the queue has no room is left out; both are warned of by
trackers.py. The thread ends with the process.
"""

import queue
import threading
from collections.abc import Callable
from typing import Any

from polyrl.telemetry.metrics import Metrics

MOST_BEHIND = 64
"""Steps that a slow tracker may be behind."""
_BEGIN_S = 1.0
"""How long the run waits for a tracker to begin: what it is called, and that it failed, is told at the start then."""


class TrackerThread:
    def __init__(self, make: Callable[[], Any], name: str) -> None:
        """Make the tracker. Raises whatever it fails with, if that takes no longer than a moment."""
        self.name = self.where = name
        self._steps: queue.Queue[tuple[int, Metrics] | None] = queue.Queue(MOST_BEHIND)
        self._error: Exception | None = None
        self._has_begun = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(make,), name=f"tracker {name}", daemon=True)
        self._thread.start()
        self._has_begun.wait(_BEGIN_S)
        self._raise_error()

    def _run(self, make: Callable[[], Any]) -> None:
        try:
            tracker = make()
            self.name, self.where = getattr(tracker, "name", self.name), getattr(tracker, "where", self.where)
        except Exception as error:  # noqa: BLE001  a person's own code: it may fail with anything
            self._error = error
            return
        finally:
            self._has_begun.set()
        while (said := self._steps.get()) is not None:
            try:
                tracker.log(*said)
            except Exception as error:  # noqa: BLE001  as above
                self._error = error
        try:
            tracker.close()
        except Exception as error:  # noqa: BLE001  as above
            self._error = error

    def _raise_error(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            raise error

    def log(self, step: int, metrics: Metrics) -> None:
        self._raise_error()
        try:
            self._steps.put_nowait((step, dict(metrics)))
        except queue.Full:
            raise TimeoutError(f"it is {MOST_BEHIND} steps behind, and step {step} is left out") from None

    def close(self, patience_s: float) -> None:
        """Have what waits logged and the tracker closed, and wait for it so long."""
        try:
            self._steps.put(None, timeout=patience_s)
            self._thread.join(patience_s)
        except queue.Full:
            pass
        if self._thread.is_alive():
            raise TimeoutError(f"it did not end within {patience_s:g} s, and is left")
        self._raise_error()
