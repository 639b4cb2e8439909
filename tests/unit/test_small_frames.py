"""How much a worker may say that is no tokens: all that it was asked, and a little more."""

import pytest
from tests.unit.played import Line

from polyrl.ids import Incarnation
from polyrl.manager.peers.sessions import WorkerSession
from polyrl.wire import frames
from polyrl.wire.control import JoinRequest

REPORT = frames.Report(0, 0, 0.0, 0, 0.0)
TURNED = frames.OnDuty("training")


@pytest.fixture
def session() -> WorkerSession:
    made = WorkerSession("key", Incarnation(1), JoinRequest(name="w1", protocol=1, engine="script", slots=1))
    made.connect(Line())
    made.greeted = True
    return made


def num_taken(session: WorkerSession, frame: frames.FromWorker, *, now: float = 1.0, interval_s: float = 1.0) -> int:
    """How many of a flood of them are taken in before one is refused."""
    return next(num for num in range(100_000) if not session.may_say(frame, now, interval_s))


@pytest.mark.parametrize(
    "order, answer",
    [
        (frames.ChangeDuty("training", "a step"), TURNED),
        (frames.PullOrder(1, "", 0), frames.Installed(1)),
        (frames.PullOrder(1, "", 0), frames.InstallFailed(1, "no route")),
    ],
)
def test_answers_to_orders_are_no_flood(session: WorkerSession, order: frames.ToWorker, answer: frames.FromWorker):
    for _ in range(10_000):
        session.say(order)
        session.flush(1.0)
        assert session.may_say(answer, 1.0, 1.0)
    for _ in range(10_000):
        session.say(order)
    session.flush(1.0)
    assert all(session.may_say(answer, 1.0, 1.0) for _ in range(10_000))
    assert num_taken(session, answer) == 600


def test_an_order_that_was_not_sent_is_owed_no_answer(session: WorkerSession):
    session.greeted = False
    session.say(frames.ChangeDuty("training", "a step"))
    session.flush(1.0)
    assert num_taken(session, TURNED) == 600


def test_orders_pay_for_no_other_frame(session: WorkerSession):
    for _ in range(1000):
        session.say(frames.ChangeDuty("training", "a step"))
    session.flush(1.0)
    assert num_taken(session, REPORT) == 600


@pytest.mark.parametrize("interval_s, at_once, a_second", [(10.0, 600, 8), (1.0, 600, 8), (0.05, 12_000, 160)])
def test_a_flood_is_refused_and_time_makes_room(session: WorkerSession, interval_s: float, at_once: int, a_second: int):
    assert num_taken(session, REPORT, interval_s=interval_s) == at_once
    session._num_small -= 1.0  # the one that was refused
    assert num_taken(session, REPORT, now=2.0, interval_s=interval_s) == a_second
