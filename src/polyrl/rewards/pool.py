"""A bounded pool of processes that rewards run in, beside generation, each answer with a time limit.

    pool = RewardPool(processes=2, timeout_s=30.0)
    reward = await pool.score("math", given)          # or RewardFailed
    await pool.close()

Async functions run on the caller's event loop; plain ones in processes, which are started when they are first needed.

Rules kept here: a function that hangs is killed with its process, and one that takes its process along hurts its own
answer only: the next one gets a new process. A process is the head of a group, and ends with all that it started. The
clock of an answer starts when its function is called: not while it waits for a process, nor while modules are imported.
An answer that nobody waits for any more is finished all the same: starting a process anew would cost more.

Left out: memory, files, network (a sandbox comes later), and children that leave the group by `setsid`.
"""

import asyncio
import contextlib
import os
import signal
import socket
import sys
from asyncio.subprocess import DEVNULL, Process
from collections import deque

import msgspec

from polyrl.errors import one_line
from polyrl.rewards.process import SIZE, Ask, Began, Failed, Paths, Scored, decode_reply, encode
from polyrl.rewards.reward import (
    RewardFailed,
    RewardFunction,
    RewardInput,
    RewardTimedOut,
    check_value,
    find_reward,
    is_async,
)

START_TIMEOUT_S = 60.0
"""For a process to start and to import a function."""


class RewardPool:
    def __init__(self, processes: int, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._places = asyncio.Semaphore(processes)
        self._idle: deque[_RewardProcess] = deque()
        self._busy: set[_RewardProcess] = set()
        self._asking: set[asyncio.Task[float]] = set()
        self._functions: dict[str, RewardFunction] = {}

    async def score(self, name: str, given: RewardInput) -> float:
        """Raises RewardFailed; ConfigError if there is no such function."""
        function = self._functions.get(name)
        if function is None:
            function = self._functions[name] = find_reward(name)
        if is_async(function):
            return await self._score_here(function, given)
        task = asyncio.create_task(self._score_there(name, given))
        self._asking.add(task)
        task.add_done_callback(self._forget)
        return await asyncio.shield(task)

    @property
    def pids(self) -> list[int]:
        """Of the processes there are now."""
        return [one.pid for one in (*self._idle, *self._busy)]

    async def close(self) -> None:
        """No process is left, nor anything that it started."""
        asking = list(self._asking)
        for task in asking:
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)
        left = [*self._idle, *self._busy]
        self._idle.clear()
        self._busy.clear()
        await asyncio.gather(*(process.end() for process in left))

    async def _score_here(self, function: RewardFunction, given: RewardInput) -> float:
        limit = asyncio.timeout(self._timeout_s)
        try:
            async with limit:
                value = await function(given)  # type: ignore[misc]
        except TimeoutError as error:
            if limit.expired():
                raise RewardTimedOut(f"took longer than {self._timeout_s:g} s") from error
            raise RewardFailed(one_line(error)) from error
        except RewardFailed:
            raise
        except Exception as error:
            raise RewardFailed(one_line(error)) from error
        return check_value(value)

    async def _score_there(self, name: str, given: RewardInput) -> float:
        async with self._places:
            process = await self._take_process()
            is_well = False
            try:
                reply = await process.ask(name, given, self._timeout_s)
                is_well = True
            finally:
                if not is_well:
                    await process.end()
                self._busy.discard(process)
            self._idle.append(process)
        if isinstance(reply, Failed):
            raise RewardFailed(reply.reason)
        return reply.reward

    async def _take_process(self) -> "_RewardProcess":
        """One that is alive: what an earlier answer left behind may have ended it meanwhile."""
        while self._idle:
            process = self._idle.popleft()
            self._busy.add(process)
            if process.is_alive:
                return process
            await process.end()
            self._busy.discard(process)
        process = await _RewardProcess.start()
        self._busy.add(process)
        return process

    def _forget(self, task: asyncio.Task[float]) -> None:
        self._asking.discard(task)
        if not task.cancelled():
            task.exception()  # whoever asked may be gone: then nobody hears of it


class _RewardProcess:
    """One process, and our end of the line to it."""

    def __init__(self, process: Process, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._process, self._reader, self._writer = process, reader, writer

    @classmethod
    async def start(cls) -> "_RewardProcess":
        ours, theirs = socket.socketpair()
        try:
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-P", "-m", "polyrl.rewards.process", str(theirs.fileno()),
                stdin=DEVNULL, stdout=DEVNULL, stderr=DEVNULL, pass_fds=(theirs.fileno(),), start_new_session=True,
            )  # fmt: skip
        except BaseException as error:
            ours.close()
            if isinstance(error, OSError):
                raise RewardFailed(f"no process can be started: {one_line(error)}") from error
            raise
        finally:
            theirs.close()
        ours.setblocking(False)
        try:
            reader, writer = await asyncio.open_connection(sock=ours)
        except BaseException:
            process.kill()
            raise
        writer.write(encode(Paths(list(sys.path))))
        return cls(process, reader, writer)

    @property
    def is_alive(self) -> bool:
        return self._process.returncode is None

    @property
    def pid(self) -> int:
        return self._process.pid

    async def ask(self, name: str, given: RewardInput, timeout_s: float) -> Scored | Failed:
        """Raises RewardFailed if there is no answer; the process is then of no use any more."""
        try:
            question = encode(Ask(name, given))
        except (TypeError, ValueError, OverflowError) as error:
            return Failed(f"the row is no plain data: {one_line(error)}")
        try:
            return await self._converse(question, timeout_s)
        except (ConnectionError, msgspec.DecodeError) as error:
            raise RewardFailed(f"its process spoke nonsense: {one_line(error)}") from error

    async def _converse(self, question: bytes, timeout_s: float) -> Scored | Failed:
        self._writer.write(question)
        reply = await self._reply(START_TIMEOUT_S, "its process was not ready within")
        if isinstance(reply, Began):
            reply = await self._reply(timeout_s, "took longer than")
        if isinstance(reply, Began):
            raise RewardFailed("its process spoke nonsense: it began twice")
        return reply

    async def _reply(self, timeout_s: float, what: str) -> Began | Scored | Failed:
        """What is said next. A process that died says nothing, but what it forked may hold the line open."""
        reading = asyncio.create_task(self._read())
        dying = asyncio.create_task(self._process.wait())
        try:
            await asyncio.wait((reading, dying), timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if reading.done():
                with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
                    return reading.result()
                await asyncio.wait((dying,), timeout=1.0)
            if dying.done():
                raise RewardFailed(f"its process ended: {_how(dying.result())}")
            if reading.done():
                raise RewardFailed("its process hung up")
            raise RewardTimedOut(f"{what} {timeout_s:g} s")
        finally:
            reading.cancel()
            dying.cancel()
            await asyncio.gather(reading, dying, return_exceptions=True)

    async def _read(self) -> Began | Scored | Failed:
        head = await self._reader.readexactly(SIZE.size)
        return decode_reply(await self._reader.readexactly(SIZE.unpack(head)[0]))

    async def end(self) -> None:
        """Now, with everything in its group."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._writer.close()
        await self._process.wait()


def _how(code: int) -> str:
    return f"exit code {code}" if code >= 0 else f"signal {-code}"
