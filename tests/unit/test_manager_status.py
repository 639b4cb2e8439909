"""What a status says of running samples: the sums of what the payload has, from one look at each of them."""

from collections import Counter

from tests.unit.played import Manager

from polyrl.ids import SampleId, WorkerName
from polyrl.manager.payload import Payload, SampleTokens
from polyrl.manager.status import status


class WatchedPayload(Payload):
    def __init__(self, other: Payload) -> None:
        super().__init__()
        self.tokens = other.tokens
        self.looks: Counter[SampleId] = Counter()

    def tokens_of(self, sample: SampleId) -> SampleTokens:
        self.looks[sample] += 1
        return super().tokens_of(sample)


def test_tokens_of_running_samples_are_counted_once_and_told_by_worker_and_by_round(tmp_path):
    manager = Manager(tmp_path, 5)
    lobby = manager.lobby
    num_running = 0
    for _ in range(150):
        manager.play()
        desk, ours = lobby.need_run().desk, lobby.need_run().payload
        lobby.need_run().payload = watched = WatchedPayload(ours)
        said = status(lobby, 0.0)
        lobby.need_run().payload = ours
        assert watched.looks == Counter(one.id for one in desk.leases.values())
        for worker in said.workers:
            seat = lobby.need_run().seat_of(lobby.workers[WorkerName(worker.name)])
            held = () if seat is None else seat.leases.values()
            assert worker.tokens_running == sum(ours.tokens_of(one).num_tokens for one in held)
        for round_, told in zip(desk.rounds.values(), said.rounds, strict=True):
            its = [one for one in desk.leases.values() if one.group in round_.groups]
            longest, seat = max(((ours.tokens_of(one.id).num_tokens, one.worker) for one in its), default=(0, -1))
            assert (told.longest_tokens, told.longest_on) == (longest, "" if seat < 0 else desk.seats[seat].name)
        num_running += len(desk.leases)
    assert num_running
    manager.service.close()
