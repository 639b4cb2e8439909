"""Keeps a server alive: starts it, waits for it, notices its end, starts it again.

    starting --> up --> down: why --> starting ...       given up: a server that dies again and again before it writes
                  |                                       a token, and one that is not ours to start

When a stream fails, ask `is_alive`: a server of several processes may answer for a while after its engine died.
"""

import asyncio
import logging
import os
import secrets
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from polyrl.engines.engine import EngineError
from polyrl.engines.served import process as processes
from polyrl.engines.served.between import KEY_VARIABLE
from polyrl.engines.served.http import Http
from polyrl.engines.served.process import ServerProcess
from polyrl.engines.served.server import Facts, ServedConfig, Server, ServerLoad
from polyrl.errors import one_line

log = logging.getLogger("polyrl.engines.served")

_LOOK_S = 0.25
_PROGRESS_S = 10.0
_LOAD_EVERY_S = 1.0
"""As often as a worker reports them: the servers work 5 to 15 ms for one answer."""
_LOOKS = 3
"""Samples that wait in this many looks in a row are held back; in fewer, they have just come."""
_SILENCE_S = 60.0
"""A server whose metrics cannot be read for so long is taken to hang."""
_LONGEST_PAUSE_S = 30.0
_MAX_DEATHS = 5
"""In a row, without a token in between."""
_MAX_PORTS = 3
_TAKEN = "ddress already in use"
NOTHING = ServerLoad(0, 0, 0.0, 0)


class Keeper:
    """Keep a server alive. `on_down` is called when a server ended, before the next one can be used.

    `quiet_s` returns for how long a server with something to write has written nothing: the process that answers may
    be another than the one that hangs.
    """

    def __init__(
        self,
        name: str,
        make: Callable[[Http], Server],
        config: ServedConfig,
        on_down: Callable[[], None],
        quiet_s: Callable[[], float],
        pause_s: float,
    ) -> None:
        self._name, self._make, self._config, self._on_down = name, make, config, on_down
        self._quiet_s = quiet_s
        self._pause_s = pause_s
        self.server: Server | None = None
        """The one that is up."""
        self.down = ""
        """Why there is none for now."""
        self.trouble: str | None = None
        """Why there will be none any more."""
        self.load = NOTHING
        self.log_file: Path | None = None
        self.num_outages = 0
        self.wrote = False
        """Set once a token of this server has arrived."""
        self._process: ServerProcess | None = None
        self._broken: asyncio.Future[str] | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def is_ours(self) -> bool:
        return not self._config.url

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    async def start(self) -> Facts:
        """Start the first server. Raises EngineError when it does not come up: nothing is tried twice, but a port."""
        if self.is_ours:
            self.log_file = processes.make_log(self._name.lower(), self._config.log)
        server, facts = await self._begin()
        self._come_up(server)
        self._task = asyncio.create_task(self._keep(server), name=f"keeper of {self._name}")
        return facts

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        server, self.server = self.server, None
        if server is not None:
            await server.http.close()
        await self._end_process(gently=True)

    def give_up(self, server: Server, why: str) -> None:
        """End the life of this server, which must not be used any more; the next one may follow."""
        if self.server is server and self._broken is not None and not self._broken.done():
            self._broken.set_result(why)

    async def given_up(self) -> None:
        """Wait until a server that is not ours, and is no longer used, has been resumed."""
        if self._task is not None:
            await asyncio.wait([self._task])

    async def is_alive(self, server: Server) -> bool:
        """Return whether the server still lives after a stream has failed. If it does not, it is down already."""
        for _ in range(3):
            if self.server is not server:
                return False
            if (self._process is not None and self._process.has_ended) or not await server.is_ready():
                self.give_up(server, "does not answer any more")
                break
            await asyncio.sleep(_LOOK_S)
        while self.server is server and self._broken is not None and self._broken.done():
            await asyncio.sleep(0.01)
        return self.server is server

    # One life after the other

    async def _keep(self, server: Server) -> None:
        """Keep the server alive, and report any error: if the keeper ended unseen, samples would never end."""
        try:
            await self._keep_alive(server)
        except Exception as error:
            log.exception("the %s server is not kept any more", self._name)
            self.trouble = f"the {self._name} server is not kept any more: {one_line(error)}"
            if self.server is not None:
                server = self.server
                self._go_down(self.trouble)
                await server.http.close()

    async def _keep_alive(self, server: Server) -> None:
        num_deaths, pause_s = 0, self._pause_s
        while True:
            why = await self._until_over(server)
            self._go_down(why)
            if not self.is_ours:
                self.trouble = self.down
                with suppress(EngineError):
                    await server.loading.resume()  # it goes on without us
                await server.http.close()
                return
            await server.http.close()
            await self._end_process(gently=False)
            num_deaths = 1 if self.wrote else num_deaths + 1
            pause_s = self._pause_s if self.wrote else min(_LONGEST_PAUSE_S, 2.0 * pause_s)
            again = await self._again(num_deaths, pause_s)
            if again is None:
                return
            server, num_deaths = again
            self._come_up(server)

    async def _again(self, num_deaths: int, pause_s: float) -> tuple[Server, int] | None:
        """Return the next server that comes up; None when it is no use."""
        while num_deaths < _MAX_DEATHS:
            log.warning("%s is down: %s; it is started again in %.1f s", self._name, self.down, pause_s)
            await asyncio.sleep(pause_s)
            try:
                server, _ = await self._begin()
                return server, num_deaths
            except EngineError as error:
                self.down = str(error)
                num_deaths, pause_s = num_deaths + 1, min(_LONGEST_PAUSE_S, 2.0 * pause_s)
        self.trouble = f"the {self._name} server died {num_deaths} times in a row: {self.down}"
        return None

    def _come_up(self, server: Server) -> None:
        self._broken = asyncio.get_running_loop().create_future()
        self.server, self.down, self.load, self.wrote = server, "", NOTHING, False

    def _go_down(self, why: str) -> None:
        error = "" if self._process is None else self._process.first_error()
        self.server, self.down, self.load = None, f"{why}: {error}" if error else why, NOTHING
        self.num_outages += 1
        self._on_down()

    async def _until_over(self, server: Server) -> str:
        assert self._broken is not None
        waits = [asyncio.ensure_future(self._broken), asyncio.create_task(self._watch(server))]
        if self._process is not None:
            waits.append(asyncio.create_task(self._process.ended()))
        try:
            done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            if waits[2:]:  # how it ended says more than that it does not answer
                await asyncio.wait(waits[2:], timeout=_LOOK_S)
        finally:
            for one in waits[1:]:
                one.cancel()
        ended = [one for one in waits[2:] if one.done()]
        return (ended or list(done))[0].result()

    async def _watch(self, server: Server) -> str:
        """Asks for its figures; returns when it has told none for too long, or written nothing."""
        heard_at = time.monotonic()
        waiting = deque([0], maxlen=_LOOKS)
        while time.monotonic() - heard_at < _SILENCE_S:
            if self._quiet_s() > self._config.stall_s:
                return f"has samples, and has written nothing for {self._config.stall_s:g} s"
            try:
                load = await server.load()
                heard_at = time.monotonic()
                waiting.append(load.num_waiting)
                self.load = load._replace(num_waiting=min(waiting))
            except EngineError:
                if not self.is_ours and not await server.is_ready():
                    return f"at {self._config.url} is gone"
            await asyncio.sleep(_LOAD_EVERY_S)
        return f"has told no figures for {_SILENCE_S:.0f} s"

    # One life

    async def _begin(self) -> tuple[Server, Facts]:
        for attempt in range(_MAX_PORTS):
            try:
                return await self._begin_once()
            except OSError as error:  # no room, no descriptors, no processes: later there may be
                raise EngineError(f"the {self._name} server cannot be started: {error}") from error
            except EngineError as error:
                if not self.is_ours or _TAKEN not in str(error) or attempt == _MAX_PORTS - 1:
                    raise
        raise AssertionError

    async def _begin_once(self) -> tuple[Server, Facts]:
        port = processes.free_port()
        key = secrets.token_urlsafe(32) if self.is_ours else os.environ.get(KEY_VARIABLE, "")
        server = self._make(Http(self._config.url or f"http://127.0.0.1:{port}", key))
        try:
            if self.is_ours:
                assert self.log_file is not None
                self._process = await ServerProcess.start(server.command(port), self.log_file)
                log.info("the %s server starts, process %d; its log: %s", self._name, self.pid, self.log_file)
            await self._until_ready(server)
            return server, await server.facts()
        except BaseException:
            await server.http.close()
            await self._end_process(gently=False)
            raise

    async def _until_ready(self, server: Server) -> None:
        began = time.monotonic()
        told = began if self.is_ours else began - _PROGRESS_S  # ours needs its time; another should be there
        process, name = self._process, self._name
        while not await server.is_ready():
            now = time.monotonic()
            if process is not None and process.has_ended:
                how, line = await process.ended(), process.first_error() or self._last_said(server)
                hint = "; name the environment that it is in with --engine-python" if "No module named" in line else ""
                raise EngineError(f"the {name} server {how}: {line}{hint} (its log: {self.log_file})")
            if server.http.is_refused:
                raise EngineError(f"{self._where} wants another key; {KEY_VARIABLE} is where it belongs")
            if now - began > self._config.start_timeout_s:
                raise EngineError(f"{self._where} is not ready after {now - began:.0f} s: {self._last_said(server)}")
            if now - told > _PROGRESS_S:
                told = now
                log.info("waiting for %s for %.0f s: %s", self._where, now - began, self._last_said(server))
            await asyncio.sleep(_LOOK_S)
        log.info("%s is ready after %.1f s", self._where, time.monotonic() - began)

    @property
    def _where(self) -> str:
        if not self.is_ours:
            return f"the {self._name} server at {self._config.url}"
        return f"the {self._name} server (its log: {self.log_file})"

    def _last_said(self, server: Server) -> str:
        if self._process is None:
            return server.http.trouble or "it is not ready yet"
        lines = self._process.last_lines(1)
        return lines[0][:160] if lines else "it says nothing"

    async def _end_process(self, *, gently: bool) -> None:
        process, self._process = self._process, None
        if process is not None:
            await (process.stop() if gently else process.kill())
