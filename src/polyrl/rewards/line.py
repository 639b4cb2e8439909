"""The trainer's end of one process of the pool: starts it, sends requests, and kills it if it breaks the protocol.

Rules kept here: a reply repeats the nonce of a pending request; anything else, even one surplus byte, ends the process.
The memory that a process can make the trainer hold is bounded. A process leads a process group, and is killed with
everything that it started. Its environment lacks all variables that look like a key or a token, except those that the
recipe names. The time limit of an answer starts when its function is called, not while modules are imported. With
walls (sandbox/walls.py) a process has no network and few files, and no child outlives it.
Left out: which process is asked (pool.py); without walls, children that leave the group.
"""

import asyncio
import contextlib
import os
import re
import secrets
import signal
import socket
import sys
from asyncio.subprocess import DEVNULL, Process
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import BinaryIO, NamedTuple, cast

from polyrl.config.rewards import wall_limit_s
from polyrl.errors import one_line
from polyrl.not_data import NOT_DATA
from polyrl.rewards.facts import RunFacts
from polyrl.rewards.groups import RewardGroup, take_apart
from polyrl.rewards.messages import (
    MAX_REPLY_BYTES,
    NONCE_BYTES,
    Began,
    Failed,
    FunctionRequest,
    GroupScored,
    Reply,
    RewardScored,
    RewardSetup,
    TooLarge,
    decode_reply,
    encode,
    take_messages,
)
from polyrl.rewards.process import STACK_SIGNAL
from polyrl.rewards.reward import RewardFailed, RewardInput
from polyrl.rewards.sandbox.walls import RewardWalls, pid_inside

START_TIMEOUT_S = 60.0
"""The time for a process to start and to import a function, unless the recipe says otherwise."""
_GRACE_S = 2.0
"""An async function ends by itself at its limit, unless something blocks its event loop for this much longer."""
_CLOSE_S = 2.0
"""The time for a process to close its objects before it is killed."""
_SIGNALLED = 128
_STACK_S = 0.1
"""The time for a process to write its stack to the log before it is killed."""
_MAX_LOG_BYTES = 16 << 20
_SECRET = re.compile(
    r"TOKEN(?!IZ)|SECRET|PASSW|_PWD$|CREDENTIAL|API_?KEY|ACCESS_?KEY|PRIVATE_?KEY|AUTH|COOKIE|_KEY$|_PAT$|WEBHOOK"
    r"|CONNECTION_?STRING|_DSN$",
    re.I,
)
_PASSWORD_IN_ADDRESS = re.compile(r"://[^/@\s]*:[^/@\s]+@")


class Surroundings(NamedTuple):
    """The settings that all processes of a pool share."""

    log: Path | None = None
    """The file for the processes' output; None: it is discarded."""
    memory_bytes: int = 0
    """The most memory of each process; 0: no limit."""
    environment: tuple[str, ...] = ()
    """The variables that processes get although they look like secrets."""
    walls: RewardWalls | None = None
    """The sandbox of processes; None: they have the trainer's rights to files and network."""
    facts: RunFacts | None = None
    """Facts about the run for rewards of ours."""
    start_s: float = START_TIMEOUT_S
    """The time for a process to start, to import a function and to start its object."""

    def withheld(self, variables: Mapping[str, str]) -> list[str]:
        """Return the variables that look like secrets, by their names, or by an address with a password."""
        looks = [one for one, value in variables.items() if _SECRET.search(one) or _PASSWORD_IN_ADDRESS.search(value)]
        return [one for one in looks if one not in self.environment]

    @contextlib.contextmanager
    def start_words(self, line: int) -> "Iterator[StartWords]":
        """Yield how a process is started whose socket to the trainer has this descriptor."""
        words = [sys.executable, "-P", "-m", "polyrl.rewards.process", str(line)]
        withheld = self.withheld(os.environ)
        kept = {name: value for name, value in os.environ.items() if name not in withheld}
        kept |= RunFacts.variables(self.facts)
        if self.walls is None:
            yield StartWords(words, (line,), kept)
            return
        with self.walls.around(words) as (around, seccomp):
            yield StartWords(around, (line, seccomp), self.walls.environment(kept, self.environment))


class StartWords(NamedTuple):
    command: list[str]
    descriptors: tuple[int, ...]
    """The descriptors that it inherits."""
    environment: dict[str, str]


ScoredReply = RewardScored | GroupScored
"""The rewards of one answer, or of a group."""


class RewardCall(NamedTuple):
    function: str
    arguments: dict[str, object]
    given: RewardInput | RewardGroup
    timeout_s: float

    @property
    def cpu_s(self) -> float:
        """The most CPU time; 0: no limit."""
        return self.given.limit_s if isinstance(self.given, RewardInput) else 0.0

    @property
    def num_answers(self) -> int:
        return len(self.given.answers) if isinstance(self.given, RewardGroup) else 1

    def is_answered_by(self, reply: "ScoredReply | Failed") -> bool:
        """Return whether a reply has as many rewards as there are answers."""
        if isinstance(reply, GroupScored):
            return isinstance(self.given, RewardGroup) and len(reply.rewards) == self.num_answers
        return isinstance(reply, Failed) or isinstance(self.given, RewardInput)

    def wall_s(self, *, is_async: bool) -> float:
        """Return the limit of wall time. For a plain function with a limit of CPU time it is only a backstop."""
        if is_async or not self.cpu_s:
            return self.timeout_s
        return min(self.timeout_s, wall_limit_s(self.cpu_s))


class ProcessBroke(Exception):
    """The process ended before it answered. `is_own`: no other answer can have caused it. `timed_out`: a function took
    too long; a process that was not ready in time does not count."""

    def __init__(self, reason: str, *, is_own: bool, timed_out: bool = False, cpu_s: float = 0.0) -> None:
        super().__init__(reason)
        self.reason, self.is_own, self.timed_out, self.cpu_s = reason, is_own, timed_out, cpu_s


class _Waiting:
    """A request without a reply yet."""

    def __init__(self, call: RewardCall, answer: "asyncio.Future[ScoredReply | Failed]") -> None:
        self.call, self.answer = call, answer
        self.began_at: float | None = None
        self.timer: asyncio.TimerHandle | None = None


class RewardProcess(asyncio.Protocol):
    """One process. `tell` is called for each function that begins, with whether it is async."""

    def __init__(self, surroundings: Surroundings, tell: Callable[[str, bool], None]) -> None:
        self._surroundings, self._tell = surroundings, tell
        self._loop = asyncio.get_running_loop()
        self._process: Process | None = None
        self._transport: asyncio.WriteTransport | None = None
        self._watching: asyncio.Task[None] | None = None
        self._buffer = bytearray()
        self._waiting: dict[bytes, _Waiting] = {}
        self._num_answered = 0
        self._closes = self._is_leaving = False
        self._broken = ""
        """Why the process cannot be asked any more; empty while it can."""
        self.num_assigned = 0
        """The number of answers that the pool has assigned to it."""
        self.num_since_free = 0
        """The number of answers that it was assigned since it last had none."""
        self.is_alone = False
        """Whether it has one answer, and may get no other beside it."""
        self.is_shared = False
        """Whether it runs async functions, several at a time."""
        self.runs_own = False
        """Whether the function that it was given last is a person's own."""
        self._started = self._loop.create_task(self._start())

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    @property
    def is_usable(self) -> bool:
        return not self._broken

    def running(self) -> Iterator[tuple[float, RewardCall]]:
        """Yield the functions that are running, each with its start time."""
        return ((one.began_at, one.call) for one in self._waiting.values() if one.began_at is not None)

    async def score(self, call: RewardCall) -> ScoredReply | Failed:
        """Score one answer, or one group.

        Raises ProcessBroke; RewardFailed if the process cannot start or the row is not plain data.
        """
        await asyncio.shield(self._started)
        if self._broken:
            raise ProcessBroke(self._broken, is_own=False)
        self._trim_log()
        nonce = secrets.token_bytes(NONCE_BYTES)
        given, answers = take_apart(call.given)
        try:
            request = encode(
                FunctionRequest(
                    nonce, "reward", call.function, call.arguments, given, call.timeout_s, call.cpu_s, answers
                )
            )
        except (TypeError, ValueError, OverflowError) as error:
            raise RewardFailed(f"the row is no plain data: {one_line(error)}") from error
        waiting = self._waiting[nonce] = _Waiting(call, self._loop.create_future())
        waiting.timer = self._loop.call_later(self._surroundings.start_s, self._not_begun, nonce)
        assert self._transport is not None
        self._transport.write(request)
        return await waiting.answer

    async def end(self) -> None:
        """Kill the process and everything in its group; objects that can be closed are closed before."""
        await self._let_close()
        self._break("it was ended", is_over=True)
        await asyncio.gather(self._started, return_exceptions=True)
        self._kill()
        if self._watching is not None:
            await self._watching

    async def _let_close(self) -> None:
        process, transport = self._process, self._transport
        if not self._closes or self._broken or self._waiting or process is None or transport is None:
            return
        self._is_leaving = True
        transport.close()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), _CLOSE_S)

    # Starting

    async def _start(self) -> None:
        ours, theirs = socket.socketpair()
        try:
            with self._open_log() as log, self._surroundings.start_words(theirs.fileno()) as words:
                self._process = await asyncio.create_subprocess_exec(
                    *words.command, stdin=DEVNULL, stdout=log, stderr=log, pass_fds=words.descriptors,
                    start_new_session=True, env=words.environment,
                )  # fmt: skip
        except OSError as error:
            ours.close()
            self._broken = "it could not be started"
            raise RewardFailed(f"no process can be started: {one_line(error)}") from error
        finally:
            theirs.close()
        self._watching = self._loop.create_task(self._watch(self._process))
        ours.setblocking(False)
        await self._loop.create_connection(lambda: self, sock=ours)
        if self._broken:
            self._kill()
            return
        assert self._transport is not None
        self._transport.write(encode(RewardSetup(list(sys.path), self._surroundings.memory_bytes)))

    @contextlib.contextmanager
    def _open_log(self) -> "Iterator[BinaryIO | int]":
        path = self._surroundings.log
        if path is None:
            yield DEVNULL
            return
        with path.open("ab") as file:
            yield file

    def _trim_log(self) -> None:
        """Empty a log that is too large. Processes append to it, so it may be truncated at any time."""
        path = self._surroundings.log
        with contextlib.suppress(OSError):
            if path is not None and path.stat().st_size > _MAX_LOG_BYTES:
                os.truncate(path, 0)

    async def _watch(self, process: Process) -> None:
        """Wait for the process itself: its forked children may keep the connection open after it ends."""
        code = await process.wait()
        if self._surroundings.walls is not None and code > _SIGNALLED:  # as bubblewrap says it
            code = _SIGNALLED - code
        begun = [one.call for one in self._waiting.values() if one.began_at is not None]
        if code == -signal.SIGPROF and len(begun) == 1 and begun[0].cpu_s:
            limit_s = begun[0].cpu_s
            self._break(f"took longer than {limit_s:g} s of CPU time", timed_out=True, cpu_s=limit_s)
            return
        self._break(f"its process ended: {'exit code' if code >= 0 else 'signal'} {abs(code)}")

    # Receiving

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.WriteTransport", transport)

    def data_received(self, data: bytes) -> None:
        if self._broken:
            return
        self._buffer += data
        try:
            for body in take_messages(self._buffer, MAX_REPLY_BYTES * self._most_answers()):
                self._hear(decode_reply(body))
                if self._broken:
                    return
        except (TooLarge, *NOT_DATA) as error:
            self._break(f"its process said what is no reply: {one_line(error)}")
            return
        if self._buffer and not self._waiting:
            self._break("its process said more than was asked for")

    def _most_answers(self) -> int:
        return max((one.call.num_answers for one in self._waiting.values()), default=1)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self._is_leaving:
            self._loop.call_later(1.0, self._break, "its process hung up")  # the exit code is known in a moment

    def _hear(self, reply: Reply) -> None:
        waiting = self._waiting.get(reply.nonce)
        if waiting is None:
            self._break("its process sent an answer without a request")
            return
        if isinstance(reply, Began):
            if waiting.began_at is not None:
                self._break("its process began twice")
                return
            self._begin(reply, waiting)
            return
        if not waiting.call.is_answered_by(reply):
            self._break("its process answered for other answers than were asked")
            return
        del self._waiting[reply.nonce]
        self._num_answered += 1
        self._stop_timer(waiting)
        if not waiting.answer.done():
            waiting.answer.set_result(reply)

    def _begin(self, reply: Began, waiting: _Waiting) -> None:
        waiting.began_at = self._loop.time()
        self._stop_timer(waiting)
        self._closes = self._closes or reply.closes
        allowed_s = waiting.call.wall_s(is_async=reply.is_async) + (_GRACE_S if reply.is_async else 0.0)
        waiting.timer = self._loop.call_later(allowed_s, self._overdue, reply.nonce)
        self.is_shared = reply.is_async and not self.is_alone
        self._tell(waiting.call.function, reply.is_async)

    # Ending

    def _not_begun(self, nonce: bytes) -> None:
        waiting = self._waiting[nonce]
        if any(one.began_at is not None for one in self._waiting.values()):  # another function runs first
            waiting.timer = self._loop.call_later(self._surroundings.start_s, self._not_begun, nonce)
            return
        self._break(f"its process was not ready within {self._surroundings.start_s:g} s", is_late=True)

    def _overdue(self, nonce: bytes) -> None:
        pid = self.pid if self._surroundings.walls is None or self.pid is None else pid_inside(self.pid)
        if pid is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, STACK_SIGNAL)
        self._loop.call_later(_STACK_S, self._give_up, nonce)

    def _give_up(self, nonce: bytes) -> None:
        waiting = self._waiting.get(nonce)
        if waiting is not None:  # no reply came meanwhile
            self._break(f"took longer than {waiting.call.wall_s(is_async=self.is_shared):g} s", timed_out=True)

    def _break(
        self, reason: str, *, timed_out: bool = False, is_late: bool = False, is_over: bool = False, cpu_s: float = 0.0
    ) -> None:
        """End the process, and fail all pending requests. `is_late`: it was not ready in time.

        If several functions were running, it is unknown which of them broke it; `is_own` is set only if there was one.
        """
        if self._broken:
            return
        self._broken = reason
        self._kill()
        begun = [one for one in self._waiting.values() if one.began_at is not None]
        alone = len(begun) <= 1 if timed_out or is_late else len(self._waiting) == 1 and not self._num_answered
        for waiting in self._waiting.values():
            self._stop_timer(waiting)
            is_own = alone and (waiting.began_at is not None or not begun)
            if not waiting.answer.done():
                broke = ProcessBroke(reason, is_own=is_own or is_over, timed_out=timed_out, cpu_s=cpu_s)
                waiting.answer.set_exception(broke)
        self._waiting.clear()
        if self._transport is not None:
            self._transport.close()

    def _kill(self) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def _stop_timer(self, waiting: _Waiting) -> None:
        if waiting.timer is not None:
            waiting.timer.cancel()
            waiting.timer = None
