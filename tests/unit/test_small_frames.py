"""How much a worker may say that is no tokens: all that it was asked, and a little more."""

import pytest
from tests.unit.played import Line

from polyrl.ids import Incarnation
from polyrl.manager.peers.sessions import HostSession, WorkerSession
from polyrl.wire import frames
from polyrl.wire.control import HostJoinRequest, JoinRequest

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
    assert num_taken(session, answer) == 1200


def test_an_order_that_was_not_sent_is_owed_no_answer(session: WorkerSession):
    session.greeted = False
    session.say(frames.ChangeDuty("training", "a step"))
    session.flush(1.0)
    assert num_taken(session, TURNED) == 1200


def test_orders_pay_for_no_other_frame(session: WorkerSession):
    for _ in range(1000):
        session.say(frames.ChangeDuty("training", "a step"))
    session.flush(1.0)
    assert num_taken(session, REPORT) == 1200


@pytest.mark.parametrize("interval_s, at_once, a_second", [(10.0, 1200, 8), (1.0, 1200, 8), (0.05, 24_000, 160)])
def test_a_flood_is_refused_and_time_makes_room(session: WorkerSession, interval_s: float, at_once: int, a_second: int):
    assert num_taken(session, REPORT, interval_s=interval_s) == at_once
    session._num_small -= 1.0  # the one that was refused
    assert num_taken(session, REPORT, now=2.0, interval_s=interval_s) == a_second


def test_news_for_the_journal_counts_as_many_frames(session: WorkerSession):
    assert next(num for num in range(100) if not session.may_tell(1.0, 1.0)) == 20
    assert not session.may_say(REPORT, 1.0, 1.0)


def test_a_worker_that_has_just_joined_may_say_less_at_once_and_as_much_later(session: WorkerSession):
    session.begin(1.0, 1.0)
    assert num_taken(session, REPORT) == 300
    session.begin(1.0, 1.0)
    assert num_taken(session, REPORT, now=200.0) == 1200


def test_a_host_that_connects_again_and_again_with_long_lists_is_refused_soon():
    facts = HostJoinRequest(name="h1", protocol=1, environment="echo", slots=65_536)
    assert [HostSession("key", Incarnation(1), facts).may_say(1.0, 0, 65_536) for _ in range(9)] == [True] * 9
    session = HostSession("key", Incarnation(1), facts)
    assert next(num for num in range(100) if not session.may_say(1.0, 0, 65_536)) == 2
    assert session.may_say(2.0, 0, 0)
