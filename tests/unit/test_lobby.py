"""Workers that wait for a run: what they may say, what they are told, and what becomes of them when a run opens."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.unit.played import CONFIG, Line, tokens_frame

from polyrl.errors import Refused
from polyrl.ids import HostName
from polyrl.manager import opening
from polyrl.manager.frames_in import from_workers, joining
from polyrl.manager.peers.sessions import WorkerSession
from polyrl.manager.prometheus import metrics
from polyrl.manager.service import Service
from polyrl.manager.settings import JournalSettings, ManagerSettings
from polyrl.manager.status import status
from polyrl.scheduling.core import events as e
from polyrl.wire import frames
from polyrl.wire.control import JoinRequest, RunRequest
from polyrl.wire.frames import PROTOCOL


class Waiting:
    """A worker that has joined a manager without a run."""

    def __init__(self, service: Service) -> None:
        self.lobby = service.lobby
        reply = joining.join(self.lobby, JoinRequest(name="w", protocol=PROTOCOL, engine="none", slots=2, version=0))
        session = joining.find_worker(self.lobby, reply.session)
        assert session is not None
        self.session: WorkerSession = session
        self.line = Line()
        session.connect(self.line)

    def say(self, *said: frames.FromWorker) -> None:
        for frame in said:
            from_workers.said(self.lobby, self.session, self.line, frames.encode(frame))
        self.lobby.commit()

    @property
    def is_here(self) -> bool:
        return self.lobby.workers.get(self.session.name) is self.session

    @property
    def heard(self) -> list[frames.ToWorker]:
        return [frames.decode_to_worker(raw) for raw in self.line.sent]


HELLO = frames.Hello(0, b"")


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[Waiting]:
    service = Service(tmp_path, ManagerSettings(journal=JournalSettings(fsync="never")))
    yield Waiting(service)
    service.close()


def test_a_worker_that_waits_is_welcome_and_may_report_what_its_engine_does(worker: Waiting):
    report = frames.Report(0, 0, 0.25, 0, 0.0, 3, 20, 11)
    worker.say(HELLO, report, frames.Down("out of memory"), frames.Back(0), frames.OnDuty("generating"))
    assert worker.heard == [frames.Welcome(())]
    (seen,) = status(worker.lobby, 1.0).workers
    assert (seen.state, seen.connected, seen.kv_used, seen.version) == ("joined", True, 0.25, -1)
    assert (seen.draft_rounds, seen.tokens_drafted, seen.tokens_accepted) == (3, 20, 11)
    assert worker.lobby.refused == {}
    said = metrics(worker.lobby, 1.0).decode()
    assert "polyrl_tokens_received_total 0.0" in said
    assert re.search(r'polyrl_worker_accepted_tokens{worker="[^"]+"} 11.0', said)


@pytest.mark.parametrize(
    ("frame", "kind"),
    [
        (frames.Installed(0), "version"),
        (tokens_frame(0, 0, [1]), "order"),
        (HELLO, "order"),
        (frames.Hello(0, b"x"), "columns"),
    ],
)
def test_news_of_a_run_that_is_not_open_is_refused(worker: Waiting, frame: frames.FromWorker, kind: str):
    worker.say(HELLO, frame)
    assert not worker.is_here
    assert worker.lobby.refused == {kind: 1}


def test_a_failed_install_that_nobody_asked_for_is_late_news(worker: Waiting):
    worker.say(HELLO, frames.InstallFailed(0, "no disk"))
    assert worker.is_here
    assert worker.lobby.refused == {"late_news": 1}


@pytest.mark.parametrize("last", [frames.Leaving("its machine goes"), frames.Goodbye("its machine goes")])
def test_a_worker_that_goes_before_a_run_is_open_is_forgotten(worker: Waiting, last: frames.FromWorker):
    worker.say(HELLO, last)
    assert not worker.is_here
    assert worker.heard[-1] == frames.Release("its machine goes")


def test_a_worker_that_waited_has_a_seat_when_the_run_opens(worker: Waiting):
    worker.say(HELLO)
    with pytest.raises(Refused, match="no run is open"):
        worker.lobby.need_run()
    worker.lobby.tell(e.PlacingPaused())  # nobody hears it
    opening.open_run(worker.lobby, RunRequest(protocol=PROTOCOL, config=CONFIG))
    seat = worker.lobby.need_run().seat_of(worker.session)
    assert seat is not None
    assert seat.slots == 2


def test_names_of_many_hosts_are_forgotten_and_nothing_else_is(worker: Waiting):
    relay = worker.lobby.reward_relay
    assert [worker.lobby.next_host_life(HostName("again")) for _ in range(3)] == [1, 2, 3]
    for number in range(3000):
        worker.lobby.next_host_life(HostName(f"h{number}"))
    assert len(worker.lobby.host_lives) <= 1002
    assert worker.lobby.reward_relay is relay
