"""A tracker of a person's own: the run never waits for it, and hears what it failed with."""

import threading
from typing import Any

import pytest

from polyrl.telemetry.tracker_thread import MOST_BEHIND, TrackerThread


class Kept:
    where = "a list"

    def __init__(self) -> None:
        self.said: list[Any] = []

    def log(self, step: int, metrics: Any) -> None:
        self.said.append((step, metrics["loss"]))

    def close(self) -> None:
        self.said.append("closed")


def test_all_steps_are_logged_in_order_and_then_it_is_closed():
    kept = Kept()
    tracker = TrackerThread(lambda: kept, "mine:Kept")
    assert (tracker.name, tracker.where) == ("mine:Kept", "a list")
    for step in range(10):
        tracker.log(step, {"loss": 1.0 / (step + 1)})
    tracker.close(10.0)
    assert kept.said == [*((step, 1.0 / (step + 1)) for step in range(10)), "closed"]


def test_a_tracker_that_cannot_begin_raises_its_error_at_once():
    def make() -> Kept:
        raise OSError("no such place")

    with pytest.raises(OSError, match="no such place"):
        TrackerThread(make, "mine:Kept")


def test_an_error_is_raised_at_the_end_at_the_latest_and_later_steps_are_logged():
    tracker = TrackerThread(Kept, "mine:Kept")
    tracker.log(0, {})
    with pytest.raises(KeyError):
        tracker.close(10.0)


def test_steps_that_a_hanging_tracker_has_no_room_for_are_left_out_and_nobody_waits_for_its_end():
    go_on = threading.Event()

    class Hanging(Kept):
        def log(self, step: int, metrics: Any) -> None:
            go_on.wait(60.0)

    tracker = TrackerThread(Hanging, "mine:Hanging")
    with pytest.raises(TimeoutError, match=f"it is {MOST_BEHIND} steps behind, and step 6. is left out"):
        for step in range(MOST_BEHIND + 5):
            tracker.log(step, {})
    with pytest.raises(TimeoutError, match=r"it did not end within 0.1 s, and is left"):
        tracker.close(0.1)
    go_on.set()
