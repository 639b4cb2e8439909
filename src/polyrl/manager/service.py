"""The manager as a process: one port, one owner of the scheduler, a clean start from whatever is in the run directory.

The owner takes everything from the inbox, in turns: questions of HTTP handlers, the clock, and frames of connections
if something is due before them; otherwise it hears a frame where it is read, since turns are costly. Handlers never
touch the executor themselves: `post` hands over what is to be done with it, and `ask` a question, which is answered
when what it led to is in the journal.
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
from polyrl.manager.journal import RunJournal
from polyrl.manager.lobby import Lobby
from polyrl.manager.peers.link import Link
from polyrl.manager.recovery import recover
from polyrl.manager.settings import ManagerSettings
from polyrl.wire.credentials import AccessTokens, ensure_tokens

log = logging.getLogger("polyrl.manager")

_LOCK_FILE = "manager.lock"
_BATCH = 512
"""So much is taken from the inbox before the journal is written and peers are answered."""
_MAX_INBOX = 4096
_STOOD_STILL_S = 0.5
"""A timer that comes later than this means that the whole process stood still: nobody else was late."""
_COMMIT_WITHIN_S = 0.02
"""Tokens alone may wait so long for the journal: others come meanwhile, and nothing depends on them yet."""
_COMMIT_EVERY_S = 0.01
"""Sooner, if everybody has been heard: workers flush together, so there is nobody to wait for, and writing now spares a
wake. But no more often than this, however fast frames come."""
_LONGEST_SLEEP_S = 3600.0
"""Waits are as long as a trainer sets them; a loop's timers are not."""
_GC_THRESHOLDS = (50_000, 20, 100)
"""What lives long here is many and never cyclic: look for garbage more rarely than Python would."""

Answer = TypeVar("Answer")
Action = Callable[[Lobby], object]
Hearer = Callable[[Lobby, Any, Link, bytes], None]
"""What hears a frame of a session that came on a connection: from_workers.said, or from_trainer.said."""
Said = tuple[Hearer, Any, Link, bytes]
"""Such a frame. An action would do, but frames are many, and making it takes longer."""


class Service:
    """Runs an executor: everything that needs an event loop is here."""

    def __init__(self, run_dir: Path, settings: ManagerSettings, *, recovers: bool = True) -> None:
        """`recovers`: the run that is there is read now. Otherwise `recover` does it, beside a port that says so."""
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
        """Of ours: nothing may go on after it."""
        self._failed = asyncio.Event()
        self._room = asyncio.Event()
        self._room.set()
        self._timer: asyncio.TimerHandle | None = None
        self._wakes_at = 0.0
        """When `_timer` comes: uvloop's handles do not all say it."""
        self._commit_timer: asyncio.TimerHandle | None = None
        self._committed_at = 0.0
        self._syncer = ThreadPoolExecutor(1, "journal sync")
        self._syncing: Future[None] | None = None

    def recover(self) -> None:
        """Go on with the run of the directory. It may take a while, in a thread: nobody else touches the executor."""
        self.recovered = recover(self.lobby)

    @property
    def share_read(self) -> float | None:
        """How much of its run has been read; None when all has, and peers are heard."""
        return None if self.recovered else min(1.0, self._journal.num_read / self._num_to_read)

    @property
    def uptime_s(self) -> float:
        return time.monotonic() - self.started_at

    # The inbox

    def post(self, matter: Action | Said) -> None:
        """Have something done by the owner."""
        self._inbox.append(matter)
        if len(self._inbox) > _MAX_INBOX:
            self._room.clear()
        self._turn_soon()

    def _turn_soon(self) -> None:
        if not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._take_turn)

    def count_refusal(self, kind: str) -> None:
        """Now, not in the owner's turn: whoever reads that it was refused finds it counted."""
        self.lobby.refused[kind] += 1

    def hear(self, hearer: Hearer, session: Any, link: Link, raw: bytes) -> bool:
        """Have a frame heard by the owner: now, or after what is due before it, if there is room there."""
        if self._is_due:
            if not self._room.is_set():
                return False
            self.post((hearer, session, link, raw))
        elif self._failure is None:
            try:
                hearer(self.lobby, session, link, raw)
                if self.lobby.is_urgent:
                    self._turn_soon()  # there may be more to read before that, to be told in the same commit
                else:
                    self._commit_in_time()
            except Exception as error:  # noqa: BLE001
                self._fail(error)
        return True

    async def wait_for_room(self) -> None:
        """Readers wait here, so that nobody can fill the inbox."""
        await self._room.wait()

    async def ask(self, question: Callable[[Lobby], Answer]) -> Answer:
        """Have something answered by the owner; the answer comes when what it led to is in the journal."""
        if self._failure is not None:
            raise self._failure
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()

        def act(lobby: Lobby) -> None:
            try:
                answer = question(lobby)
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
        """Begin, and wait for what should never come: raises a failure of ours. Cancel it to end."""
        gc.collect()
        gc.freeze()
        gc.set_threshold(*_GC_THRESHOLDS)
        if self._succeeds(self._commit):
            await self._failed.wait()
        assert self._failure is not None
        raise self._failure

    def _take_turn(self) -> None:
        """The owner's turn: all that has come, or a batch of it. Nobody else touches the executor."""
        self._is_due = False
        if not self._succeeds(self._take_batch):
            return
        if len(self._inbox) <= _MAX_INBOX // 2:
            self._room.set()
        if self._inbox:
            self._turn_soon()

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
        """Now, if there is nobody to wait for; or by the timer."""
        if self._commit_timer is not None and not self.lobby.has_heard_all:
            return  # nearly always
        loop = asyncio.get_running_loop()
        if self.lobby.has_heard_all and loop.time() - self._committed_at >= _COMMIT_EVERY_S:
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
        """`own` raises it, and so does whatever waits for an answer."""
        self._failure = error
        self._failed.set()
        for future, _ in self._answers:
            if not future.done():
                future.set_exception(error)
        self._answers = []

    def _commit(self) -> None:
        """Write, send, answer. Within a turn, or by its timer between two."""
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
                self._syncing.result()  # a disk that fails is a failure of ours: loudly
            self._syncing = self._syncer.submit(self._journal.take_sync())

    def _set_timer(self) -> None:
        """Wake when the scheduler wants it. A timer that comes early, for a wait that was put off, is cheap."""
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
        lobby.need_run().pass_time()
        self._set_timer()

    def close(self) -> None:
        """Write what is left. A sync that is under way is waited for: its files must stay open until it is over."""
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
    """Raises UserError where another manager has the directory; nothing is made in it."""
    if os.path.exists(run_dir / _LOCK_FILE):  # Path.exists raises for a name that is too long
        os.close(_lock(run_dir))


def _lock(run_dir: Path) -> int:
    """Hold the run directory: two managers over one journal would end it."""
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
