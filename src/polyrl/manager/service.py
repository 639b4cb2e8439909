"""The manager as a process: one owner of the lobby and its run, and a clean start from the files of the run directory.

The owner takes everything from the inbox, a batch in each pass: requests of HTTP handlers, the clock, and frames of
connections. A frame before which nothing is due is heard where it is read, since a pass is costly. Handlers never touch
the lobby: `post` hands the owner something to do, and `call` returns the owner's answer when its causes are in the
journal.
"""

import asyncio
import gc
import logging
import os
import socket
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from polyrl import __version__
from polyrl.errors import RequestError, UserError
from polyrl.manager.frames_in import from_hosts, reward_joining
from polyrl.manager.journal import RunJournal
from polyrl.manager.lobby import Lobby
from polyrl.manager.peers.link import Link
from polyrl.manager.recovery import recover
from polyrl.manager.settings import ManagerSettings
from polyrl.wire.credentials import AccessTokens, ensure_tokens

log = logging.getLogger("polyrl.manager")

_LOCK_FILE = "manager.lock"
_BATCH = 512
"""Entries taken from the inbox before the journal is written and peers are answered."""
_MAX_INBOX = 4096
_STOOD_STILL_S = 0.5
"""A timer that comes later than this means that the whole process stood still: no peer was late."""
_COMMIT_WITHIN_S = 0.02
"""Tokens alone may wait this long for the journal: more come meanwhile, and nothing depends on them yet."""
_COMMIT_EVERY_S = 0.01
"""The journal is written sooner when every worker has been heard: workers flush together, so no more is due, and
writing now spares a wake. But no more often than this, however fast frames come."""
_LONGEST_SLEEP_S = 3600.0
"""A trainer may set longer waits than an event loop's timer takes."""
_GC_THRESHOLDS = (50_000, 20, 100)
"""Collect garbage more rarely than Python would: the many objects that live long here are never cyclic."""

Answer = TypeVar("Answer")
Action = Callable[[Lobby], object]
Hearer = Callable[[Lobby, Any, Link, bytes], None]
"""Hears a frame of a session, from one of its connections: from_workers.said, or from_trainer.said."""
Said = tuple[Hearer, Any, Link, bytes]
"""A frame in the inbox. An action would do, but frames are many, and a tuple is made faster than a function."""


class Service:
    """The owner of the lobby. Everything that needs an event loop is here."""

    def __init__(self, run_dir: Path, settings: ManagerSettings, *, recovers: bool = True) -> None:
        """`recovers`: read the run on file now. Otherwise `recover` does, beside a port that says how far it is."""
        self.run_dir = run_dir
        self.settings = settings
        self.started_at = time.monotonic()
        self._lock = _lock(run_dir)
        self.tokens: AccessTokens = ensure_tokens(run_dir)
        self._journal = RunJournal(run_dir, settings.journal)
        about = {"driver": "manager", "polyrl": __version__, "host": socket.gethostname()}
        self.lobby = Lobby(self._journal, settings, about)
        self.lobby.weights_key = self.tokens.weights_key()
        self._num_to_read = self._journal.num_to_read
        self.recovered = ""
        """A line about what was found; empty until it has been read."""
        if recovers or not self._num_to_read:
            self.recover()
        self._inbox: deque[Action | Said] = deque()
        self._answers: list[tuple[asyncio.Future[object], object]] = []
        self._is_due = False
        self._failure: Exception | None = None
        """A bug, or a disk that fails: nothing may go on after it."""
        self._failed = asyncio.Event()
        self._room = asyncio.Event()
        self._room.set()
        self._timer: asyncio.TimerHandle | None = None
        self._wakes_at = 0.0
        """When `_timer` fires: not all of uvloop's handles say it."""
        self._commit_timer: asyncio.TimerHandle | None = None
        self._committed_at = 0.0
        self._syncer = ThreadPoolExecutor(1, "journal sync")
        self._syncing: Future[None] | None = None

    def recover(self) -> None:
        """Go on with the run of the directory. It may take a while, in a thread: no other code touches the lobby."""
        self.recovered = recover(self.lobby)

    @property
    def share_read(self) -> float | None:
        """The share of the run that has been read; None when all of it has, and peers are heard."""
        return None if self.recovered else min(1.0, self._journal.num_read / self._num_to_read)

    @property
    def uptime_s(self) -> float:
        return time.monotonic() - self.started_at

    # The inbox

    def post(self, matter: Action | Said) -> None:
        """Have the owner do something in its next pass."""
        self._inbox.append(matter)
        if len(self._inbox) > _MAX_INBOX:
            self._room.clear()
        self._pass_soon()

    def _pass_soon(self) -> None:
        if not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._pass)

    def count_refusal(self, kind: str) -> None:
        """Count a refusal now, not in a pass of the owner: a peer that reads its refusal finds it counted."""
        self.lobby.refused[kind] += 1

    def hear(self, hearer: Hearer, session: Any, link: Link, raw: bytes) -> bool:
        """Have the owner hear a frame: now, or after what is due before it. Returns False where there is no room."""
        if self._is_due:
            if not self._room.is_set():
                return False
            self.post((hearer, session, link, raw))
        elif self._failure is None:
            try:
                hearer(self.lobby, session, link, raw)
                if self.lobby.is_urgent:
                    self._pass_soon()  # more may be read before that, for the same commit
                else:
                    self._commit_in_time()
            except Exception as error:  # noqa: BLE001
                self._fail(error)
        return True

    async def wait_for_room(self) -> None:
        """Wait for room in the inbox, so that no peer can fill it."""
        await self._room.wait()

    async def call(self, act_on: Callable[[Lobby], Answer]) -> Answer:
        """Have the owner of the lobby call this, and return its result when all that it caused is in the journal."""
        if self._failure is not None:
            raise self._failure
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()

        def act(lobby: Lobby) -> None:
            try:
                answer = act_on(lobby)
            except Exception as error:
                if not future.cancelled():
                    future.set_exception(error)
                if not isinstance(error, RequestError):  # a failure of ours: nothing may go on after it
                    raise
            else:
                self._answers.append((future, answer))  # type: ignore[arg-type]

        self.post(act)
        return await future

    async def own(self) -> None:
        """Begin, and wait for a failure of ours, which it raises. Cancel it to end."""
        gc.collect()
        gc.freeze()
        gc.set_threshold(*_GC_THRESHOLDS)
        if self._succeeds(self._commit):
            await self._failed.wait()
        assert self._failure is not None
        raise self._failure

    def _pass(self) -> None:
        """Make one pass: take in all that has come, or a batch of it. No other code touches the lobby."""
        self._is_due = False
        if not self._succeeds(self._take_batch):
            return
        if len(self._inbox) <= _MAX_INBOX // 2:
            self._room.set()
        if self._inbox:
            self._pass_soon()

    def _take_batch(self) -> None:
        for _ in range(min(_BATCH, len(self._inbox))):
            matter = self._inbox.popleft()
            if isinstance(matter, tuple):
                hearer, session, link, raw = matter
                hearer(self.lobby, session, link, raw)
            else:
                matter(self.lobby)
        if self.lobby.is_urgent or self._answers:
            self._commit()
        else:
            self._commit_in_time()

    def _commit_in_time(self) -> None:
        """Commit now where every worker has been heard; otherwise by the timer."""
        has_heard_all = self.lobby.has_heard_all
        if self._commit_timer is not None and not has_heard_all:
            return  # nearly always
        loop = asyncio.get_running_loop()
        if has_heard_all and loop.time() - self._committed_at >= _COMMIT_EVERY_S:
            self._commit()
        elif self._commit_timer is None:
            self._commit_timer = loop.call_later(_COMMIT_WITHIN_S, self._succeeds, self._commit)

    def _succeeds(self, action: Callable[[], None]) -> bool:
        if self._failure is not None:
            return False
        try:
            action()
        except Exception as error:  # noqa: BLE001
            self._fail(error)
            return False
        return True

    def _fail(self, error: Exception) -> None:
        """Stop everything: `own` raises the failure, and so does every `call`."""
        self._failure = error
        self._failed.set()
        for future, _ in self._answers:
            if not future.done():
                future.set_exception(error)
        self._answers = []

    def _commit(self) -> None:
        """Write, send and answer: within a pass, or by its timer between two."""
        if self._commit_timer is not None:
            self._commit_timer.cancel()
            self._commit_timer = None
        self._committed_at = asyncio.get_running_loop().time()
        self.lobby.commit()
        for future, answer in self._answers:
            if not future.cancelled():
                future.set_result(answer)
        self._answers = []
        self._set_timer()
        if self._journal.sync_due and (self._syncing is None or self._syncing.done()):
            if self._syncing is not None:
                self._syncing.result()  # raises where the disk failed
            self._syncing = self._syncer.submit(self._journal.take_sync())

    def _set_timer(self) -> None:
        """Wake when the scheduler's next deadline comes. A timer that fires early, for a deadline put off, is cheap."""
        run = self.lobby.run
        if run is None or (self._timer is not None and not run.has_told):
            return
        run.has_told = False
        wakeup_in = run.wakeup_in()
        if wakeup_in is None:
            return
        loop = asyncio.get_running_loop()
        at = loop.time() + min(wakeup_in, _LONGEST_SLEEP_S)
        if self._timer is None or at < self._wakes_at:
            if self._timer is not None:
                self._timer.cancel()
            self._timer, self._wakes_at = loop.call_at(at, self._wake_scheduler), at

    def _wake_scheduler(self) -> None:
        self._timer = None
        late_s = asyncio.get_running_loop().time() - self._wakes_at
        if late_s > _STOOD_STILL_S:  # stopped, or starved: what came meanwhile is still in the sockets
            self.post(lambda lobby: lobby.need_run().stood_still(late_s))
        self.post(self._pass_time)

    def _pass_time(self, lobby: Lobby) -> None:
        run = lobby.need_run()
        run.pass_time()
        from_hosts.lose_silent(lobby, run.desk.config.environments.host_timeout_s)
        reward_joining.lose_silent(lobby)
        run.has_told = True
        self._set_timer()

    def close(self) -> None:
        """Write what is left, after a sync that is under way: its files must stay open until it is over."""
        for timer in (self._timer, self._commit_timer):
            if timer is not None:
                timer.cancel()
        self._syncer.shutdown(wait=True)
        try:
            if self._failure is not None or not self.recovered:
                self._journal.abandon()
                return
            if self._syncing is not None:
                self._syncing.result()
            self.lobby.commit()
            self._journal.close()
        finally:
            os.close(self._lock)


def check_that_none_runs(run_dir: Path) -> None:
    """Raise UserError where another manager has the directory. Nothing is created in it."""
    if os.path.exists(run_dir / _LOCK_FILE):  # Path.exists raises for a name that is too long
        os.close(_lock(run_dir))


def _lock(run_dir: Path) -> int:
    """Lock the run directory: two managers would destroy its journal."""
    import fcntl

    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(run_dir / _LOCK_FILE, os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise UserError(f"{run_dir}: a run cannot be kept there: {error.strerror}") from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        raise UserError(f"{run_dir}: another manager runs on this directory") from error
    return descriptor
