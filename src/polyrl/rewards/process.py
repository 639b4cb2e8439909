"""A process of the pool: it reads which function to call on which input, calls it, and sends the result, repeatedly.

    python -P -m polyrl.rewards.process FD          FD: a socket to the trainer

Plain functions are called one at a time, without an event loop. Async functions run concurrently on an event loop, for
as long as any of them is under way: a person's own on one, ours on another.

Rules kept here: nothing heavy is imported, except by a function itself. The socket to the trainer has an unpredictable
descriptor, and is closed in everything that a function forks or starts; printed output goes to the log that the pool
opened as standard output. The process ends with the trainer, however that ends. A function that raises leaves its
traceback in that log, and the last line of the user's own code in the reply.
Left out: ending functions that exceed their time and do not yield. The pool kills them, with everything they started.
"""

import faulthandler
import fcntl
import inspect
import os
import random
import resource
import signal
import socket
import sys
import traceback
from collections import deque
from collections.abc import Callable, Coroutine
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any

from polyrl.config.plugins import is_own
from polyrl.errors import ConfigError, one_line, plain, shorten
from polyrl.parent import end_with_parent
from polyrl.rewards.groups import check_annotation, check_values, make_group
from polyrl.rewards.messages import (
    Began,
    Failed,
    FunctionRequest,
    GroupScored,
    Reply,
    RewardScored,
    RewardSetup,
    decode_request,
    encode,
    take_messages,
)
from polyrl.rewards.objects import RewardObjects, places_of
from polyrl.rewards.reward import (
    Reward,
    RewardFailed,
    RewardFunction,
    RewardStops,
    RewardTimedOut,
    RewardUnavailable,
    check_reward,
    check_value,
    find_reward,
    is_async,
)

if TYPE_CHECKING:
    import asyncio

STACK_SIGNAL = signal.SIGUSR1
"""The signal at which the process writes its stack to its log."""
_READ_BYTES = 1 << 18
_MAX_FILE_BYTES = 4 << 30
_FIRST_HIDDEN, _LAST_HIDDEN = 200, 900
"""The range of the socket's descriptor: high enough that no program uses it by accident."""


class _Side:
    """The event loop and the objects of a person's own functions, or those of ours.

    The loop is kept, since functions may keep objects that belong to it. Tasks that a function left in it go on only
    while a function of the same side runs.
    """

    def __init__(self) -> None:
        self.objects = RewardObjects()
        self._loop: asyncio.AbstractEventLoop | None = None

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        if self._loop is None:
            import asyncio

            self._loop = asyncio.new_event_loop()
        return self._loop.run_until_complete(work)


class RewardServer:
    """Answers requests until the other side is gone."""

    def __init__(self, line: socket.socket) -> None:
        self._line = line
        self._buffer = bytearray()
        self._pid = os.getpid()
        self._functions: dict[str, RewardFunction] = {}
        self._sides = {True: _Side(), False: _Side()}
        """The owner of the functions: the user, or PolyRL."""
        self._next: deque[FunctionRequest] = deque()

    def serve(self) -> None:
        while True:
            data = self._line.recv(_READ_BYTES)
            if not data:
                break
            self._buffer += data
            for body in take_messages(self._buffer):
                request = decode_request(body)
                if isinstance(request, RewardSetup):
                    _set_up(request)
                else:
                    self._answer(request)
        for side in self._sides.values():
            if side.objects.closes:
                side.run(side.objects.close())

    def _answer(self, request: FunctionRequest) -> None:
        function = self._find(request)
        if function is None:
            return
        if request.given is None:
            self._say(_checked(request, function))
        elif is_async(function):
            self._side(request).run(self._answer_together(request, function))
            while self._next:
                self._answer(self._next.popleft())
        else:
            self._say(self._call(request, function))

    def _call(self, request: FunctionRequest, function: RewardFunction) -> Reply:
        try:
            if inspect.isclass(function):
                side = self._side(request)
                called = side.run(side.objects.ready(request.function, function, request.arguments))
            else:
                called = partial(function, **request.arguments)
            self._say(Began(request.nonce, False, self._closes))
            return _timed(request, called)
        except BaseException as error:  # noqa: BLE001  a function may raise anything, SystemExit too
            return _failure(request, error)

    def _side(self, request: FunctionRequest) -> _Side:
        return self._sides[is_own(request.function)]

    @property
    def _closes(self) -> bool:
        return any(side.objects.closes for side in self._sides.values())

    def _find(self, request: FunctionRequest) -> RewardFunction | None:
        function = self._functions.get(request.function)
        if function is not None:
            return function
        try:
            function = self._functions[request.function] = find_reward(request.function, request.key)
        except ConfigError as error:
            traceback.print_exc()
            self._say(Failed(request.nonce, str(error), "unknown"))
        except BaseException as error:  # noqa: BLE001  a module may raise anything, SystemExit too
            traceback.print_exc()
            self._say(Failed(request.nonce, f"{request.key}: {request.function}: {one_line(error)}", "unknown"))
        return function

    async def _answer_together(self, request: FunctionRequest, function: RewardFunction) -> None:
        """Run this async function, and others that are requested before the last one has ended.

        The pool mixes in neither plain functions nor the other side's.
        """
        import asyncio

        loop = asyncio.get_running_loop()
        running = {loop.create_task(self._wait_for(request, function))}

        def begin(other: FunctionRequest) -> None:
            its = self._find(other)
            if its is not None and is_async(its) and self._side(other) is self._side(request):
                running.add(loop.create_task(self._wait_for(other, its)))
            elif its is not None:  # asked after the last reply was sent: it runs when this loop has ended
                self._next.append(other)

        def begin_all() -> None:
            for body in take_messages(self._buffer):
                other = decode_request(body)
                assert isinstance(other, FunctionRequest), "the other message is said once, first"
                begin(other)

        def hear() -> None:
            data = self._line.recv(_READ_BYTES)
            if not data and not all(one.done() for one in running):
                os._exit(0)  # there is nobody left to answer
            if not data:  # all is answered: `serve` finds the same end, and closes what is open
                loop.remove_reader(self._line)
                return
            self._buffer += data
            begin_all()

        for other in [self._next.popleft() for _ in range(len(self._next))]:
            begin(other)
        begin_all()  # requests that came together with the first one: no further message may arrive before it ends
        loop.add_reader(self._line, hear)
        while running:
            done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            running -= done
        loop.remove_reader(self._line)

    async def _wait_for(self, request: FunctionRequest, function: RewardFunction) -> None:
        import asyncio

        limit = asyncio.timeout(None)
        reply: Reply
        try:
            called = await self._side(request).objects.ready(request.function, function, request.arguments)
            async with places_of(called):
                self._say(Began(request.nonce, True, self._closes))
                async with limit:
                    limit.reschedule(asyncio.get_running_loop().time() + request.timeout_s)
                    value: Any = await called(_given(request))
            reply = _reply(request, value)
        except TimeoutError as error:
            reply = _timed_out(request) if limit.expired() else _failure(request, error)
        except BaseException as error:  # noqa: BLE001  as for a plain function
            reply = _failure(request, error)
        self._say(reply)

    def _say(self, reply: Reply) -> None:
        if os.getpid() != self._pid:  # a child that the function forked, and that returned
            os._exit(0)
        self._line.sendall(encode(reply))


def _checked(request: FunctionRequest, function: RewardFunction) -> Reply:
    try:
        check_reward(function, request.arguments, request.key)
        check_annotation(function, request.key, whole_group=request.answers is not None)
    except ConfigError as error:
        return Failed(request.nonce, str(error), "unknown")
    return RewardScored(request.nonce, 0.0, {})


def _timed(request: FunctionRequest, function: Callable[[Any], Any]) -> Reply:
    """Call a plain function. At its limit of CPU time a signal ends the process: no code of the function's runs on."""
    before_s = _cpu_s()
    if request.cpu_s:
        signal.setitimer(signal.ITIMER_PROF, request.cpu_s)
    try:
        value = function(_given(request))
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0.0)
    return _reply(request, value, _cpu_s() - before_s)


def _cpu_s() -> float:
    """Return the CPU time of this process, and of children that it has waited for."""
    used = [resource.getrusage(one) for one in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def _given(request: FunctionRequest) -> Any:
    """Return what the function is called with: an answer, or a group of them."""
    assert request.given is not None, "the request is no look-up"
    return request.given if request.answers is None else make_group(request.given, request.answers)


def _reply(request: FunctionRequest, value: Any, cpu_s: float | None = None) -> Reply:
    """Make the reply of what a function returned. `cpu_s`: the measured CPU time, used where the function says none."""
    if request.answers is not None:
        found = check_values(value, len(request.answers))
        return GroupScored(request.nonce, [None if one is None else _scored(b"", one) for one in found])
    reward = check_value(value)
    return _scored(request.nonce, reward._replace(cpu_s=cpu_s) if reward.cpu_s is None else reward)


def _scored(nonce: bytes, reward: Reward) -> RewardScored:
    assert reward.outcome != "infrastructure_failed", "check_value raises for it"
    return RewardScored(nonce, reward.score, dict(reward.parts), reward.outcome, reward.cpu_s, reward.correct)


def _timed_out(request: FunctionRequest) -> Failed:
    return Failed(request.nonce, f"took longer than {request.timeout_s:g} s", "timed_out")


def _failure(request: FunctionRequest, error: BaseException) -> Failed:
    try:
        return _described(request, error)
    except BaseException:  # noqa: BLE001  an exception's own text may raise as well
        return Failed(request.nonce, type(error).__name__)


def _described(request: FunctionRequest, error: BaseException) -> Failed:
    if isinstance(error, RewardUnavailable | RewardStops):
        kind = "stops" if isinstance(error, RewardStops) else "unavailable"
        return Failed(request.nonce, shorten(plain(str(error))), kind)
    if isinstance(error, RewardFailed):
        return Failed(
            request.nonce, shorten(plain(str(error))), "timed_out" if isinstance(error, RewardTimedOut) else "failed"
        )
    traceback.print_exception(error)
    return Failed(request.nonce, one_line(error) + _where(error.__traceback__))


def _where(trace: TracebackType | None) -> str:
    """Return the innermost place outside of libraries, which the user can fix."""
    places = [one for one in traceback.extract_tb(trace) if one.filename != __file__]
    own = [one for one in places if not any(f"{os.sep}{part}" in one.filename for part in _LIBRARIES)]
    if not places:
        return ""
    place = (own or places)[-1]
    inside = os.path.relpath(place.filename)
    return f" ({place.filename if inside.startswith('..') else inside}:{place.lineno}, in {place.name})"


_LIBRARIES = (f"lib{os.sep}python", "site-packages", "dist-packages")


def _set_up(setup: RewardSetup) -> None:
    sys.path.extend(one for one in setup.folders if one not in sys.path)
    if setup.memory_bytes:
        _limit(resource.RLIMIT_DATA, setup.memory_bytes)


def _limit(what: int, most: int) -> None:
    _, hard = resource.getrlimit(what)
    most = most if hard == resource.RLIM_INFINITY else min(most, hard)
    resource.setrlimit(what, (most, most))


def _hide(number: int) -> socket.socket:
    """Move the socket to another descriptor, which neither children nor programs that they start inherit."""
    hidden = fcntl.fcntl(number, fcntl.F_DUPFD_CLOEXEC, random.SystemRandom().randint(_FIRST_HIDDEN, _LAST_HIDDEN))
    os.close(number)
    line = socket.socket(fileno=hidden)
    os.register_at_fork(after_in_child=line.close)
    return line


def main(arguments: list[str]) -> None:
    end_with_parent()
    if resource.getrlimit(resource.RLIMIT_CORE) != (1, 1):  # a sandbox has set it, and nobody inside may
        _limit(resource.RLIMIT_CORE, 0)
    _limit(resource.RLIMIT_FSIZE, _MAX_FILE_BYTES)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True, errors="backslashreplace")  # type: ignore[union-attr]
    faulthandler.register(STACK_SIGNAL, all_threads=False)
    line = _hide(int(arguments[0]))
    line.setblocking(True)
    with line:
        RewardServer(line).serve()


if __name__ == "__main__":
    main(sys.argv[1:])
