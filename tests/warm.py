"""`polyrl` processes that are forks of one that has imported torch and the run: each costs three CPU seconds less.

They are processes as any other, with a session, a working directory, an environment and descriptors of their own; what
they start is started as ever. Their parent is a fork that waits for them, and tells the test their end over a pipe.
Left out: what a process does until its modules are imported; tests of that start Python itself.

`python -m tests.warm DESCRIPTOR` is the process that forks, one for each process of pytest. It ends with its socket.
"""

import atexit
import contextlib
import functools
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src"
WARM = (
    "polyrl.__main__",
    "polyrl.cli.train",
    "polyrl.run.training",
    "polyrl.engines.builtin.decoder",
    "polyrl.engines.builtin.installing",
    "polyrl.engines.builtin.runners",
    "polyrl.weights.adapters",
    "transformers.models.qwen3.modeling_qwen3",
)
_LARGEST = 1 << 18


@functools.cache
def _forks() -> socket.socket:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for one in (ours, theirs):
        one.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _LARGEST)
    with theirs:
        forks = subprocess.Popen(
            [sys.executable, "-m", "tests.warm", str(theirs.fileno())],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, pass_fds=[theirs.fileno()], cwd=ROOT,
            start_new_session=True,
        )  # fmt: skip

    def end() -> None:
        ours.close()
        forks.wait(10)

    atexit.register(end)
    return ours


class WarmProcess(subprocess.Popen[str]):
    """`polyrl` with these arguments: a Popen whose child is forked instead of executed, in a session of its own.

    `together`: what it says of errors is in its output.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        *,
        together: bool = False,
        folder: Path | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._told = -1
        self._lock = threading.Lock()
        errors = subprocess.STDOUT if together else subprocess.PIPE
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(SOURCE), **(environment or {})}
        super().__init__(arguments, stdout=subprocess.PIPE, stderr=errors, text=True, cwd=folder, env=environment)

    def _execute_child(self, args: Sequence[str], *rest: Any) -> None:
        folder, environment, descriptors = rest[4], rest[5], rest[9:15]
        *_, output, _, errors = descriptors
        self._told, tells = os.pipe()
        wanted = json.dumps([args, os.path.abspath(folder or "."), environment]).encode()
        socket.send_fds(_forks(), [wanted], [output, errors, tells])
        os.close(tells)
        self._close_pipe_fds(*descriptors)  # type: ignore[attr-defined]
        told = os.read(self._told, 4)
        assert told, "the process that forks has ended"
        self.pid = int.from_bytes(told, "little")

    def _try_wait(self, flags: int) -> tuple[int, int]:
        if flags & os.WNOHANG and not select.select([self._told], [], [], 0)[0]:
            return 0, 0
        status = os.read(self._told, 4)
        os.close(self._told)
        return self.pid, int.from_bytes(status, "little") if status else signal.SIGKILL

    def _internal_poll(self, *_: Any, **__: Any) -> int | None:
        with self._lock:
            if self.returncode is None and self._told >= 0:
                pid, status = self._try_wait(os.WNOHANG)
                if pid:
                    self._handle_exitstatus(status)  # type: ignore[attr-defined]
        return self.returncode


def run_warm(
    *arguments: str, timeout_s: float, folder: Path | None = None, environment: Mapping[str, str] | None = None
) -> "subprocess.CompletedProcess[str]":
    """Run `polyrl` to its end."""
    with WarmProcess(arguments, folder=folder, environment=environment) as process:
        try:
            said, errors = process.communicate(timeout=timeout_s)
        except BaseException:
            process.kill()
            raise
    return subprocess.CompletedProcess(arguments, process.returncode, said, errors)


def main(descriptor: int) -> None:
    for name in WARM:
        importlib.import_module(name)
    with socket.socket(fileno=descriptor) as tests:
        while True:
            wanted, descriptors, _, _ = socket.recv_fds(tests, _LARGEST, 3)
            _reap()
            if not wanted:
                return
            if os.fork() == 0:
                tests.close()
                _parent(wanted, *descriptors)
            for one in descriptors:
                os.close(one)


def _reap() -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _parent(wanted: bytes, output: int, errors: int, tells: int) -> NoReturn:
    if (pid := os.fork()) == 0:
        os.close(tells)
        arguments, folder, environment = json.loads(wanted)
        _child(arguments, folder, environment, output, errors)
    os.close(output)
    os.close(errors)
    os.write(tells, pid.to_bytes(4, "little"))
    os.write(tells, os.waitpid(pid, 0)[1].to_bytes(4, "little"))
    os._exit(0)


def _child(arguments: list[str], folder: str, environment: dict[str, str], output: int, errors: int) -> NoReturn:
    os.setsid()
    os.chdir(folder)
    os.dup2(output, 1)
    os.dup2(errors, 2)
    os.closerange(3, max(output, errors, 64) + 1)
    os.environ.clear()
    os.environ.update(environment)
    sys.stdout = open(1, "w", buffering=1, encoding="utf-8", closefd=False)  # noqa: SIM115  until the process ends
    sys.stderr = open(2, "w", buffering=1, encoding="utf-8", closefd=False)  # noqa: SIM115
    import polyrl.__main__ as command

    sys.path[:1] = [folder, *environment["PYTHONPATH"].split(os.pathsep)]
    sys.argv[:] = [str(command.__file__), *arguments]
    command.run()


if __name__ == "__main__":
    main(int(sys.argv[1]))
