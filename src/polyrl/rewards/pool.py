"""A bounded pool of processes in which rewards run, beside generation, each answer with a time limit.

    pool = RewardPool(processes=2, timeout_s=30.0)
    reward = await pool.score("math", given)          # or RewardFailed
    await pool.close()

No user function runs in the trainer. A plain function has a process to itself; async functions share a process, up to a
limit, a person's own with each other and ours with ours: one that blocks holds up no judge. Processes are started on
demand. Built-in functions that cannot take long run in the trainer. Beside the processes, or instead of them, there are
places at reward workers (remote/places.py): an answer goes to a process if one is free, otherwise to a reward worker,
and waits as long as there is neither.

Rules kept here: until the first call of a function has begun, no second process is started for it: only then is it
known whether its calls share one. A function that hangs is killed with its process. A function that crashes its process
harms only its own answer: the other answers in that process are scored again, each alone in a new process. So is an
answer whose process broke after it had scored others, since their leftovers may be the cause. An answer that itself
took too long is not tried again. A cancelled answer is still finished: restarting a process would
cost more. An answer that a reward worker was lost over goes to another one; after some losses it has no reward for now.
"""

import asyncio
import os
from collections import deque
from collections.abc import Mapping
from itertools import chain, islice
from typing import NamedTuple

from polyrl.config.plugins import is_own
from polyrl.config.rewards import STAYS
from polyrl.errors import ConfigError, plain
from polyrl.rewards import arithmetic
from polyrl.rewards.facts import RunFacts
from polyrl.rewards.groups import RewardGroup
from polyrl.rewards.line import ProcessBroke, RewardCall, RewardProcess, ScoredReply, Surroundings
from polyrl.rewards.messages import Failed, GroupScored, RewardScored
from polyrl.rewards.remote.places import JobTooLarge, RemotePlace, RemotePlaces, WorkerLost
from polyrl.rewards.reward import (
    Reward,
    RewardFailed,
    RewardFunction,
    RewardInput,
    RewardStops,
    RewardTimedOut,
    RewardUnavailable,
    check_value,
)

QUICK: dict[str, RewardFunction] = {"arithmetic": arithmetic.score}
"""Functions of ours that only compare two texts, and run in the trainer."""
MAX_LOSSES = 3
"""An answer over which so many reward workers were lost has no reward for now."""
_MAX_REASON = 2000
_LOOK_AHEAD = 64
"""The number of waiting requests among which those are looked for that may join the ones that run."""


class PoolState(NamedTuple):
    """The pool's current load."""

    running: int
    waiting: int
    longest_s: float
    """For how long the longest-running function has run."""
    longest: str
    """The name of that function."""


class RewardPool:
    """The processes and their queue. At most `together` async functions run in a process at once."""

    def __init__(
        self, processes: int, timeout_s: float, *, together: int = 8, surroundings: Surroundings | None = None
    ) -> None:
        self._max_processes, self._timeout_s, self._together = processes, timeout_s, together
        told = Surroundings() if surroundings is None else surroundings
        self._surroundings = told._replace(facts=told.facts or RunFacts(timeout_s=timeout_s))
        self._processes: list[RewardProcess] = []
        self._queue: deque[_Waiting] = deque()
        self.remote = RemotePlaces(self._fill, self._surroundings.start_s)
        """The places at reward workers; none until a dispatcher connects."""
        self._scoring: set[asyncio.Task[ScoredReply]] = set()
        self._ending: set[asyncio.Task[None]] = set()
        self._is_async: dict[str, bool] = {}
        """Whether each function that was called is async."""
        self._first: dict[str, RewardProcess] = {}
        """The process that makes the first call of a function, until it is known whether the function is async."""

    async def score(self, name: str, given: RewardInput, arguments: Mapping[str, object] | None = None) -> Reward:
        """Score one answer.

        Raises RewardFailed, RewardUnavailable, RewardStops; ConfigError if there is no such function.
        """
        if name in QUICK and not arguments:
            return check_value(QUICK[name](given))
        found = await self.run(RewardCall(name, dict(arguments or {}), given, self._timeout_s))
        assert isinstance(found, RewardScored), "the line checks it"
        return _reward(found)

    async def score_group(
        self, name: str, group: RewardGroup, arguments: Mapping[str, object] | None = None
    ) -> list[Reward | None]:
        """Score all answers of a group at once; None: an answer's infrastructure failed. Raises as `score`."""
        found = await self.run(RewardCall(name, dict(arguments or {}), group, self._timeout_s))
        assert isinstance(found, GroupScored), "the line checks it"
        return [None if one is None else _reward(one) for one in found.rewards]

    async def run(self, call: RewardCall) -> ScoredReply:
        """Score by a call that is made already, as a reward worker has it. Raises as `score`."""
        task = asyncio.create_task(self._score(call))
        self._scoring.add(task)
        task.add_done_callback(self._forget)
        return await asyncio.shield(task)

    def state(self) -> PoolState:
        """Asked every second: a list of 10,000 rewards would have Python look through all objects of the trainer."""
        now = first = asyncio.get_running_loop().time()
        num, name = 0, ""
        for begun_at, call in chain(*(one.running() for one in self._processes), self.remote.running()):
            num += 1
            if not name or begun_at < first:
                first, name = begun_at, call.function
        return PoolState(num, len(self._scoring) - num, now - first, name)

    @property
    def pids(self) -> list[int]:
        """Return the ids of the current processes."""
        return [one.pid for one in self._processes if one.pid is not None]

    async def close(self) -> None:
        """Kill all processes, and everything that they started."""
        scoring = list(self._scoring)
        for task in scoring:
            task.cancel()
        await asyncio.gather(*scoring, return_exceptions=True)
        left, self._processes = self._processes, []
        await asyncio.gather(*self._ending, *(process.end() for process in left))

    @property
    def is_without_places(self) -> bool:
        """Whether there is no process and no reward worker to score anything."""
        return not self._max_processes and not self.remote.num_workers

    async def _score(self, call: RewardCall) -> ScoredReply:
        """Score at the first place that is free; again elsewhere when a reward worker is lost over it."""
        num_losses, may_travel = 0, call.function not in STAYS
        while True:
            try:
                return await self._score_somewhere(call, num_losses, may_travel=may_travel)
            except WorkerLost as lost:
                num_losses += lost.is_suspect
                if num_losses >= MAX_LOSSES:
                    raise RewardUnavailable(
                        f"{num_losses} reward workers were lost over it; the last: {lost}"
                    ) from lost
            except JobTooLarge as error:
                may_travel = False
                if not self._max_processes:
                    raise RewardFailed(f"the answer and its row are {error}; rewards.processes = 0") from error

    async def _score_somewhere(self, call: RewardCall, num_losses: int, *, may_travel: bool) -> ScoredReply:
        try:
            reply = await self._request(call, is_suspect=num_losses > 0, may_travel=may_travel)
        except ProcessBroke as broke:
            if broke.is_own:
                raise self._failure(broke) from broke
            try:
                reply = await self._request(call, alone=True)
            except ProcessBroke as again:
                raise self._failure(again) from again
        if not isinstance(reply, Failed):
            return reply
        reason = plain(reply.reason[:_MAX_REASON])  # code of the function's own may have written it
        match reply.kind:
            case "unknown":
                raise ConfigError(reason)
            case "timed_out":
                raise RewardTimedOut(reason + self._more())
            case "unavailable":
                raise RewardUnavailable(reason)
            case "stops":
                raise RewardStops(reason)
            case "failed":
                raise RewardFailed(reason + self._hint(reason) + self._more())

    def _failure(self, broke: ProcessBroke) -> RewardFailed:
        if broke.timed_out:
            return RewardTimedOut(broke.reason + self._more(), broke.cpu_s)
        return RewardFailed(broke.reason + self._more())

    def _more(self) -> str:
        log = self._surroundings.log
        return "" if log is None else f"; {log} has what it printed"

    def _hint(self, reason: str) -> str:
        """Return an explanation for failures whose cause is a setting, which the error itself does not show."""
        limit = self._surroundings.memory_bytes
        if limit and reason.startswith("MemoryError"):
            return f"; rewards.memory_gb = {limit / (1 << 30):g} is what a process may have"
        named = [one for one in self._surroundings.withheld(os.environ) if one in reason]
        return f"; {named[0]} is withheld from rewards: name it in rewards.environment" if named else ""

    async def _request(
        self, call: RewardCall, *, alone: bool = False, is_suspect: bool = False, may_travel: bool = True
    ) -> ScoredReply | Failed:
        """Send a request to a free process, or to a reward worker.

        `alone`: a process that has answered nothing before, and answers nothing else meanwhile.
        """
        waiting = _Waiting(call.function, asyncio.get_running_loop().create_future(), alone=alone)
        waiting.is_suspect, waiting.may_travel = is_suspect, may_travel and not alone
        self._queue.append(waiting)
        self._fill()
        try:
            place = await waiting.place
        except asyncio.CancelledError:
            if waiting.place.done() and not waiting.place.cancelled():
                self._give_back(waiting.place.result())
            raise
        try:
            return await place.score(call)
        finally:
            if self._first.get(call.function) is place:
                del self._first[call.function]
            self._give_back(place)

    # Assigning processes

    def _fill(self) -> None:
        """Assign free places to waiting requests, first come first served.

        A choosy request that gets none is passed over, for requests that may go to a reward worker; the next free
        process stays its own. Shared processes that have room are filled up behind the first that waits.
        """
        choosy: list[_Waiting] = []
        while self._queue:
            waiting = self._queue[0]
            if not waiting.place.done():
                place = None if choosy else self._process_for(waiting)
                if place is None and waiting.may_travel:
                    place = self.remote.take(is_suspect=waiting.is_suspect)
                if place is None and not waiting.is_choosy:
                    break
                if place is None:
                    choosy.append(waiting)
                else:
                    self._assign(waiting, place)
            self._queue.popleft()
        self._queue.extendleft(reversed(choosy))
        self._fill_shared()

    def _fill_shared(self) -> None:
        """Have async functions join those that run, past a request that waits for the process to be free.

        Without that, functions that may not meet, and come in turn, would run one at a time. As many as may run
        together may begin before the process is left to the others.
        """
        for place in [one for one in self._processes if one.is_usable and one.is_shared and one.num_assigned]:
            room = max(0, self._together - place.num_since_free)
            ahead = islice(self._queue, _LOOK_AHEAD if room else 0)
            mates = [index for index, waiting in enumerate(ahead) if self._may_join(waiting, place)][:room]
            for index in reversed(mates):
                self._assign(self._queue[index], place)
                del self._queue[index]

    def _may_join(self, waiting: "_Waiting", place: RewardProcess) -> bool:
        is_async = self._is_async.get(waiting.name, False)
        can_go = not waiting.alone and not waiting.place.done()
        return is_async and can_go and waiting.is_own == place.runs_own

    def _assign(self, waiting: "_Waiting", place: RewardProcess | RemotePlace) -> None:
        if isinstance(place, RewardProcess):
            place.num_since_free = place.num_since_free + 1 if place.num_assigned else 1
            place.num_assigned += 1
            place.is_alone = waiting.alone
            place.is_shared = self._is_async.get(waiting.name, False) and not waiting.alone
            place.runs_own = waiting.is_own
            if waiting.name not in self._is_async:
                self._first[waiting.name] = place
        waiting.place.set_result(place)

    def _process_for(self, waiting: "_Waiting") -> RewardProcess | None:
        for broken in [one for one in self._processes if not one.is_usable and not one.num_assigned]:
            self._end(broken)
        if waiting.alone:
            idle = [one for one in self._processes if not one.num_assigned]
            if len(self._processes) >= self._max_processes and idle:
                self._end(idle[0])
            return self._start_one()
        if waiting.name not in self._is_async and waiting.name in self._first:
            return None  # async functions share a process, and each further one would load a reward model again
        usable = [one for one in self._processes if one.is_usable]
        alike = [one for one in usable if one.runs_own == waiting.is_own]
        if self._is_async.get(waiting.name, False):
            shared = [one for one in alike if one.is_shared and 0 < one.num_assigned < self._together]
            if shared:
                return min(shared, key=lambda one: one.num_assigned)
        idle = [one for one in usable if not one.num_assigned]
        return next((one for one in idle if one in alike), None) or self._start_one() or next(iter(idle), None)

    def _start_one(self) -> RewardProcess | None:
        if len(self._processes) >= self._max_processes:
            return None
        process = RewardProcess(self._surroundings, self._learn)
        self._processes.append(process)
        return process

    def _learn(self, name: str, is_async: bool) -> None:
        is_new = self._is_async.get(name) is not is_async
        self._is_async[name] = is_async
        if is_new or is_async:  # another process may have begun its first async function, and has room from now on
            self._fill()

    def _give_back(self, place: RewardProcess | RemotePlace) -> None:
        if isinstance(place, RemotePlace):
            place.give_back()
            self._fill()
            return
        place.num_assigned -= 1
        if place in self._processes:
            if not place.is_usable and not place.num_assigned:
                self._end(place)
            self._fill()

    def _end(self, process: RewardProcess) -> None:
        self._processes.remove(process)
        task = asyncio.create_task(process.end())
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)

    def _forget(self, task: asyncio.Task[ScoredReply]) -> None:
        self._scoring.discard(task)
        if not task.cancelled():
            task.exception()  # mark the exception as retrieved: the caller may be gone


def _reward(told: RewardScored) -> Reward:
    return check_value(Reward(told.score, told.parts, told.outcome, told.cpu_s, told.correct))


class _Waiting:
    """A request that waits for a place: a process, or a place at a reward worker."""

    def __init__(self, name: str, place: "asyncio.Future[RewardProcess | RemotePlace]", *, alone: bool) -> None:
        self.name, self.place, self.alone = name, place, alone
        self.is_own = is_own(name)
        self.is_suspect, self.may_travel = False, True

    @property
    def is_choosy(self) -> bool:
        """Whether the request after it may take a place that it may not."""
        return self.is_suspect or not self.may_travel
