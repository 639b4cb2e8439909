"""The manager as a process: one port, one owner of the scheduler, a clean start from whatever is in the run directory.

The owner task takes everything from the inbox: frames of connections, questions of HTTP handlers, the clock. Handlers
never touch the executor themselves; `ask` hands a question over and waits until its answer is in the journal.
"""

import asyncio
import gc
import logging
import os
import socket
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from polyrl import __version__
from polyrl.errors import UserError
from polyrl.ids import Incarnation
from polyrl.manager.executor import Executor
from polyrl.manager.journal import RunJournal, RunOpened, SessionOpened
from polyrl.manager.payload import PayloadReader
from polyrl.manager.sessions import TrainerSession, WorkerSession
from polyrl.manager.settings import ManagerSettings
from polyrl.scheduling import events as e
from polyrl.wire.credentials import Tokens, ensure_tokens

log = logging.getLogger("polyrl.manager")

_BATCH = 512
"""So much is taken from the inbox before the journal is written and peers are answered."""
_MAX_INBOX = 4096
_GC_THRESHOLDS = (50_000, 20, 100)
"""What lives long here is many and never cyclic: look for garbage more rarely than Python would."""

Answer = TypeVar("Answer")


class Service:
    """Runs an executor: everything that needs an event loop is here."""

    def __init__(self, run_dir: Path, settings: ManagerSettings) -> None:
        self.run_dir = run_dir
        self.settings = settings
        self.started_at = time.monotonic()
        run_dir.mkdir(parents=True, exist_ok=True)
        self._lock = _lock(run_dir)
        self.tokens: Tokens = ensure_tokens(run_dir)
        self._journal = RunJournal(run_dir, settings.journal)
        about = {"driver": "manager", "polyrl": __version__, "host": socket.gethostname()}
        self.executor = Executor(self._journal, settings, about)
        self.recovered = _recover(self._journal, self.executor)
        self._inbox: deque[Callable[[], object]] = deque()
        self._answers: list[tuple[asyncio.Future[object], object]] = []
        self._wake = asyncio.Event()
        self._room = asyncio.Event()
        self._room.set()
        self._timer: asyncio.TimerHandle | None = None
        self._syncing: asyncio.Task[None] | None = None

    @property
    def uptime_s(self) -> float:
        return time.monotonic() - self.started_at

    # The inbox

    def post(self, action: Callable[[], object]) -> None:
        """Have something done by the owner."""
        self._inbox.append(action)
        if len(self._inbox) > _MAX_INBOX:
            self._room.clear()
        self._wake.set()

    async def wait_for_room(self) -> None:
        """Readers wait here, so that nobody can fill the inbox."""
        await self._room.wait()

    async def ask(self, question: Callable[[Executor], Answer]) -> Answer:
        """Have something answered by the owner; the answer comes when what it led to is in the journal."""
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()

        def act() -> None:
            try:
                answer = question(self.executor)
            except Exception as error:  # noqa: BLE001  the asker gets it, whatever it is
                if not future.cancelled():
                    future.set_exception(error)
            else:
                self._answers.append((future, answer))  # type: ignore[arg-type]

        self.post(act)
        return await future

    async def own(self) -> None:
        """The owner: the only one who touches the executor. Ends when cancelled."""
        gc.collect()
        gc.freeze()
        gc.set_threshold(*_GC_THRESHOLDS)
        self._journal.commit()
        self._set_timer()
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._inbox:
                for _ in range(min(_BATCH, len(self._inbox))):
                    self._inbox.popleft()()
                self.executor.pass_time()
                self._commit()
                await asyncio.sleep(0)

    def _commit(self) -> None:
        self.executor.commit()
        for future, answer in self._answers:
            if not future.cancelled():
                future.set_result(answer)
        self._answers = []
        if len(self._inbox) <= _MAX_INBOX // 2:
            self._room.set()
        self._set_timer()
        if self._journal.sync_due and (self._syncing is None or self._syncing.done()):
            self._syncing = asyncio.create_task(asyncio.to_thread(self._journal.sync))

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        wakeup_in = self.executor.wakeup_in()
        loop = asyncio.get_running_loop()
        self._timer = None if wakeup_in is None else loop.call_later(wakeup_in, self.post, self.executor.pass_time)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._journal.close()
        os.close(self._lock)


def _lock(run_dir: Path) -> int:
    """Hold the run directory: two managers over one journal would end it."""
    import fcntl

    descriptor = os.open(run_dir / "manager.lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        raise UserError(f"{run_dir}: another manager runs on this directory") from error
    return descriptor


def _recover(journal: RunJournal, executor: Executor) -> str:
    """Go on with the run of this directory. Returns a line about it."""
    found = journal.recover()
    if found is None:
        journal.begin()
        return "a new run"
    reader = PayloadReader()
    for item in found.payload:
        match item:
            case bytes():
                reader.tokens(item)
            case SessionOpened():
                _reopen(executor, item)
            case RunOpened():
                executor.trainer = TrainerSession(item.key, has_reward=item.has_reward)
            case _:
                reader.note(item)
    executor.payload = reader.finish(found.scheduler)
    executor.scheduler = found.scheduler
    open_steps = () if found.scheduler is None else tuple(found.scheduler.desk.rounds)
    journal.go_on(open_steps)
    executor.set_clock(found.now + found.away_s)
    if found.scheduler is None:
        return f"going on: {len(executor.workers)} workers, no run was opened"
    fleet = found.scheduler.desk.state.fleet
    gone = [one for one in executor.workers.values() if fleet.find(one.name, one.incarnation) is None]
    for session in gone:
        del executor.workers[session.name]
    for session in executor.workers.values():
        session.heard_at = session.told_at = executor.now()
    executor.tell(e.DriverResumed(found.away_s, executor.restart_grace_s))
    executor.expect_prompts()
    return (
        f"going on after {found.away_s:.1f} s away: {found.num_records} records, {len(executor.workers)} workers, "
        f"{len(found.scheduler.desk.leases)} samples running, {executor.payload.num_bytes // 8} tokens held"
    )


def _reopen(executor: Executor, note: SessionOpened) -> None:
    session = WorkerSession(note.key, Incarnation(note.incarnation), note.facts)
    executor.workers[session.name] = session
    executor.lives[session.name] = session.incarnation
