"""The places of reward workers, as the trainer's pool sees them: which workers are there, their jobs, and lost jobs.

    dispatcher --hear_fleet, hear--> RemotePlaces --take--> RemotePlace.score --> a reward, or WorkerLost
               <-------send---------

Rules kept here: the trainer alone owns a job. A job goes again, under its number, to a worker that has connected again,
which scores it once; and comes back to the pool, as WorkerLost, when its worker is gone. A result counts if it comes
from the worker that has the job; every other one is late, or a lie. A worker that says what cannot be true, or keeps a
job for too long, is accused and not heard any more. Claims of many places are believed as far as results bear them out.
A job whose worker was lost may be the cause: it is *suspect*, and no worker has two suspect jobs at once.
After a connection of our own broke, workers that are missing may still dial in: their jobs are waited for a while.
"""

import asyncio
import logging
import secrets
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterator

from msgspec.structs import replace

from polyrl.errors import plain, shorten
from polyrl.rewards.line import START_TIMEOUT_S, RewardCall, ScoredReply
from polyrl.rewards.remote.travel import BadResult, pack_call, read_result
from polyrl.rewards.reward import RewardStops
from polyrl.wire.reward_frames import (
    ERA_BITS,
    MAX_JOB_BYTES,
    MAX_PLACES,
    Accuse,
    FromDispatcher,
    JobDone,
    JobsReturned,
    RewardSeat,
    SendJob,
)

log = logging.getLogger("polyrl.rewards")

REJOIN_S = 15.0
"""How long workers that are missing after a break of ours may take to dial in."""
_FIRST_PLACES = 4
_PLACES_A_RESULT = 4
"""How many places of a worker are used at first, and how many more for every result."""
_GRACE_S = 30.0
_PAST_KEPT = 1024
_LIVES_KEPT = 1024

Send = Callable[[FromDispatcher], None]
SeatKey = tuple[str, str]
"""Name and life."""


class WorkerLost(Exception):
    """A job comes back without a result. `is_suspect`: its worker was lost over it, so the job may be the cause."""

    def __init__(self, why: str, *, is_suspect: bool) -> None:
        super().__init__(why)
        self.is_suspect = is_suspect


class JobTooLarge(Exception):
    """The answer and its row are more than a job may have."""


class _Job:
    def __init__(self, number: int, call: RewardCall, body: bytes, *, is_suspect: bool) -> None:
        self.number, self.call, self.body, self.is_suspect = number, call, body, is_suspect
        self.sent_at = 0.0
        self.result: asyncio.Future[ScoredReply] = asyncio.get_running_loop().create_future()

    def patience_s(self, start_s: float) -> float:
        """Return how long a worker may keep it: it may have to score it a second time, in a process of its own."""
        return 2.0 * (start_s + self.call.timeout_s) + _GRACE_S


class _RemoteWorker:
    def __init__(self, seat: RewardSeat) -> None:
        self.seat = seat
        self.jobs: dict[int, _Job] = {}
        self._past: OrderedDict[int, None] = OrderedDict()
        """The numbers of jobs that it had: their results may come twice."""
        self.num_reserved = 0
        self.num_results = 0
        self.has_suspect = False
        self.is_missing = False
        """Whether the manager has stopped listing it."""
        self.is_excused = False
        """Whether it went missing after a break of ours, which may be the reason."""

    @property
    def key(self) -> SeatKey:
        return self.seat.worker, self.seat.life

    def forget(self, number: int) -> None:
        """Remember a job that is no longer this worker's."""
        self._past[number] = None
        if len(self._past) > _PAST_KEPT:
            self._past.popitem(last=False)

    @property
    def past(self) -> Collection[int]:
        return self._past.keys()

    @property
    def num_usable(self) -> int:
        return min(self.seat.places, MAX_PLACES, _FIRST_PLACES + _PLACES_A_RESULT * self.num_results)

    @property
    def num_free(self) -> int:
        seat = self.seat
        return self.num_usable - len(self.jobs) - self.num_reserved if seat.connection and not seat.draining else 0


class RemotePlace:
    """A place at a reward worker, for one answer."""

    def __init__(self, places: "RemotePlaces", worker: _RemoteWorker, *, is_suspect: bool) -> None:
        self._places, self._worker, self._is_suspect = places, worker, is_suspect
        self._job: _Job | None = None
        worker.num_reserved += 1
        worker.has_suspect = worker.has_suspect or is_suspect

    async def score(self, call: RewardCall) -> ScoredReply:
        """Score one answer. Raises WorkerLost, JobTooLarge, RewardFailed and RewardUnavailable."""
        body = pack_call(call)
        if len(body) > MAX_JOB_BYTES:
            raise JobTooLarge(f"{len(body):,} bytes; expected at most {MAX_JOB_BYTES:,} for a reward worker")
        if not self._places.has(self._worker):
            raise WorkerLost("it left", is_suspect=False)
        self._job = self._places.begin(self._worker, call, body, is_suspect=self._is_suspect)
        self._worker.num_reserved -= 1
        return await self._job.result

    def give_back(self) -> None:
        worker, job = self._worker, self._job
        worker.has_suspect = worker.has_suspect and not self._is_suspect
        if job is None:
            worker.num_reserved -= 1
        elif worker.jobs.pop(job.number, None) is not None:
            worker.forget(job.number)


class RemotePlaces:
    """`changed` is called when a place may have become free; `start_s` is the time for a process to start."""

    def __init__(self, changed: Callable[[], None], start_s: float = START_TIMEOUT_S) -> None:
        self._changed, self._start_s = changed, start_s
        self._workers: dict[SeatKey, _RemoteWorker] = {}
        self._accused: deque[SeatKey] = deque(maxlen=_LIVES_KEPT)
        self._lost: OrderedDict[SeatKey, Collection[int]] = OrderedDict()
        """The jobs that workers had when they were given up: those that come back may still have scored them."""
        self._send: Send | None = None
        self._settled_at = 0.0
        self._num_jobs = 0
        self.era = secrets.randbits(ERA_BITS)
        """The beginning of every job's number: those of a trainer before this one are not ours."""
        self._has_seen_any = False
        self._num_scored = self._num_lost = 0

    # For the pool

    def take(self, *, is_suspect: bool = False) -> RemotePlace | None:
        """Return a place at the worker that has most of them free; None if there is none."""
        if self._send is None:
            return None
        able = [one for one in self._workers.values() if one.num_free > 0 and not (is_suspect and one.has_suspect)]
        return RemotePlace(self, max(able, key=lambda one: one.num_free), is_suspect=is_suspect) if able else None

    def running(self) -> Iterator[tuple[float, RewardCall]]:
        """Yield the answers that reward workers have, each with the time when it was sent."""
        return ((job.sent_at, job.call) for one in self._workers.values() for job in one.jobs.values())

    @property
    def num_workers(self) -> int:
        """Workers that are connected, and stay."""
        return sum(bool(one.seat.connection) and not one.seat.draining for one in self._workers.values())

    @property
    def num_places(self) -> int:
        """Places of the workers that are connected."""
        return sum(min(one.seat.places, MAX_PLACES) for one in self._workers.values() if one.seat.connection)

    def take_metrics(self) -> dict[str, float]:
        """Return the metrics since the last call; nothing as long as no reward worker has joined."""
        scored, lost = self._num_scored, self._num_lost
        self._num_scored = self._num_lost = 0
        if not self._has_seen_any:
            return {}
        return {
            "reward/remote_workers": self.num_workers,
            "reward/remote_places": self.num_places,
            "reward/remote_scored": scored,
            "reward/remote_lost": lost,
        }

    # For a place

    def has(self, worker: _RemoteWorker) -> bool:
        return self._workers.get(worker.key) is worker

    def begin(self, worker: _RemoteWorker, call: RewardCall, body: bytes, *, is_suspect: bool) -> _Job:
        self._num_jobs += 1
        job = _Job((self.era << ERA_BITS) + self._num_jobs, call, body, is_suspect=is_suspect)
        worker.jobs[job.number] = job
        self._give(worker, job)
        return job

    def _give(self, worker: _RemoteWorker, job: _Job) -> None:
        job.sent_at = asyncio.get_running_loop().time()
        if self._send is not None and worker.seat.connection:
            self._send(SendJob(*worker.key, job.number, job.body))

    # For the dispatcher

    def connected(self, send: Send) -> None:
        """Use this connection to the manager. Workers that it lists are sent their jobs again."""
        self._send = send
        self._settled_at = asyncio.get_running_loop().time() + (REJOIN_S if self._workers else 0.0)
        self._set_away()

    def disconnected(self) -> None:
        self._send = None
        self._set_away()

    def _set_away(self) -> None:
        for one in self._workers.values():
            one.seat = replace(one.seat, connection=0)

    def hear_fleet(self, seats: tuple[RewardSeat, ...]) -> None:
        """Take in the present list of reward workers."""
        listed = {(one.worker, one.life): one for one in seats}
        now = asyncio.get_running_loop().time()
        is_settled = now >= self._settled_at
        for worker in [one for key, one in self._workers.items() if key not in listed and not one.is_missing]:
            worker.seat = replace(worker.seat, connection=0)
            worker.is_missing, worker.is_excused = True, not is_settled
        for key, seat in listed.items():
            if key not in self._accused:
                self._sit(key, seat)
        self._give_up_missing(now)
        self._changed()

    def _sit(self, key: SeatKey, seat: RewardSeat) -> None:
        worker = self._workers.get(key)
        if worker is None:
            worker = self._workers[key] = _RemoteWorker(seat)
            for number in self._lost.pop(key, ()):
                worker.forget(number)
            self._has_seen_any = True
        before, worker.seat, worker.is_missing = worker.seat.connection, seat, False
        if seat.connection and seat.connection != before:
            for job in list(worker.jobs.values()):
                self._give(worker, job)

    def hear(self, name: str, life: str, said: JobDone | JobsReturned) -> None:
        """Take in what a worker said. Late news of one that is gone is a dictionary miss."""
        worker = self._workers.get((name, life))
        if worker is None:
            return
        numbers = (said.job,) if isinstance(said, JobDone) else said.jobs
        if len(set(numbers)) < len(numbers) or len(numbers) > len(worker.jobs) + _PAST_KEPT:
            self._accuse(worker, "it handed back more jobs than it was given", is_suspect=False)
            return
        for number in numbers:
            job = worker.jobs.get(number)
            if job is not None and isinstance(said, JobDone):
                self._end(worker, job, said.result)
            elif job is not None:
                self._take_back(worker, job, WorkerLost("it was handed back", is_suspect=False))
            elif number >> ERA_BITS == self.era and number not in worker.past:
                self._accuse(worker, "it answered a job that it was not given", is_suspect=False)
                return
        self._changed()

    def look(self, now: float) -> None:
        """Look, now and then, for workers that did not come back, and for jobs that take too long."""
        if self._send is None:
            return
        self._give_up_missing(now)
        for worker in list(self._workers.values()):
            late = [job for job in worker.jobs.values() if now - job.sent_at > job.patience_s(self._start_s)]
            if late and worker.seat.connection:
                patience_s = late[0].patience_s(self._start_s)
                self._accuse(worker, f"no result of {late[0].call.function} in {patience_s:g} s")

    def _give_up_missing(self, now: float) -> None:
        for worker in [one for one in self._workers.values() if one.is_missing]:
            if now >= self._settled_at or not worker.jobs:
                is_suspect = not worker.is_excused and not worker.seat.draining
                self._lose(worker, "it left" if worker.seat.draining else "it was lost", is_suspect=is_suspect)

    # A job's end

    def _end(self, worker: _RemoteWorker, job: _Job, body: bytes) -> None:
        try:
            found = read_result(job.call, body)
        except BadResult as error:
            self._accuse(worker, f"it sent {error}", is_suspect=False)
            return
        if isinstance(found, RewardStops):  # another machine may be able to
            self._accuse(worker, f"it cannot score: {found}", is_suspect=False)
            return
        self._close(worker, job)
        worker.num_results += 1
        self._num_scored += 1
        if job.result.done():
            return
        if isinstance(found, Exception):
            job.result.set_exception(found)
        else:
            job.result.set_result(found)

    def _take_back(self, worker: _RemoteWorker, job: _Job, lost: WorkerLost) -> None:
        self._close(worker, job)
        if not job.result.done():
            job.result.set_exception(lost)

    def _close(self, worker: _RemoteWorker, job: _Job) -> None:
        del worker.jobs[job.number]
        worker.forget(job.number)

    def _accuse(self, worker: _RemoteWorker, why: str, *, is_suspect: bool = True) -> None:
        why = shorten(plain(why))
        log.warning("reward worker %s is sent away: %s", worker.seat.worker, why)
        self._accused.append(worker.key)
        if self._send is not None:
            self._send(Accuse(*worker.key, why))
        self._lose(worker, why, is_suspect=is_suspect)
        self._changed()

    def _lose(self, worker: _RemoteWorker, why: str, *, is_suspect: bool) -> None:
        del self._workers[worker.key]
        self._num_lost += len(worker.jobs)
        if worker.jobs:
            log.info("reward worker %s: %s; %d answers are scored elsewhere", worker.seat.worker, why, len(worker.jobs))
        for job in list(worker.jobs.values()):
            self._take_back(worker, job, WorkerLost(f"{worker.seat.worker}: {why}", is_suspect=is_suspect))
        self._lost[worker.key] = worker.past
        if len(self._lost) > _LIVES_KEPT:
            self._lost.popitem(last=False)
