"""The process that becomes the program: it gives up every right, and then runs what the model wrote.

Rules kept here: the order matters. Limits are set first, then the user and the capabilities go, then the filter of
system calls comes, and only then does a byte of the program run. Nothing but the standard streams and
the channel of a function's value (descriptor 3) is open by then. A step that fails ends the process.
The interpreter's own exit is imitated: threads are waited for, exit functions run, streams are flushed.
"""

import atexit
import contextlib
import gc
import os
import resource
import signal
import socket
import sys
import threading
import traceback
import types
from typing import Any, NoReturn

from polyrl.rewards.sandbox.inside import kernel, testing, values

NOT_STARTED = 125
"""The exit code of a process that could not give its rights up: nothing of the program ran."""
VALUE_FD = 3
_STACK_BYTES = 64 << 20
_SLACK_BYTES = 256 << 20
"""Address space that is never touched: libraries, and reserves of the allocator."""


def run(job: dict[str, Any], pieces: list[bytes], streams: list[int], settings: dict[str, Any]) -> NoReturn:
    try:
        _take_streams(streams)
        if job["mode"] == "tests" and not settings["is_unsafe"]:  # another disk than the program's
            kernel.unshare(kernel.NEW_MOUNTS)
            kernel.mount("tmpfs", settings["home"], kernel.NO_SUID | kernel.NO_DEVICES, settings["disk_options"])
        _enter(settings["home"])
        _limit(job, settings)
        if not settings["is_unsafe"]:
            _give_rights_up(settings, is_tests=job["mode"] == "tests")
            os.mkdir(settings["shared_memory"])
        for name, data in zip(job["files"], pieces[1:], strict=True):
            _write(name, data)
    except BaseException as error:  # noqa: BLE001  whatever it is, the program must not start
        with contextlib.suppress(OSError):
            os.write(2, f"the sandbox could not be closed: {error}\n".encode())
        os._exit(NOT_STARTED)
    if job["mode"] == "exec":
        _become(job["argv"])
    _run_python(job)


def _take_streams(streams: list[int]) -> None:
    """Move the streams to descriptors 0 to 3, and close all others."""
    high = [os.dup2(one, 100 + index, inheritable=True) for index, one in enumerate(streams)]
    for index, one in enumerate(high):
        os.dup2(one, index, inheritable=True)
    os.closerange(len(high), os.sysconf("SC_OPEN_MAX"))


def _enter(home: str) -> None:
    os.setsid()
    os.chdir(home)
    os.environ.clear()
    os.environ.update({"PATH": "/usr/bin:/bin", "HOME": home, "TMPDIR": home, "LANG": "C.UTF-8"})


def _write(name: str, data: bytes) -> None:
    descriptor = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o755)
    with open(descriptor, "wb") as file:
        file.write(data)


def _limit(job: dict[str, Any], settings: dict[str, Any]) -> None:
    memory, cpu_s = job["memory_bytes"], int(job["cpu_s"]) + 2
    address_space = memory + _SLACK_BYTES if job["limits_address_space"] else resource.RLIM_INFINITY
    limits = {
        resource.RLIMIT_CPU: cpu_s,
        resource.RLIMIT_AS: address_space,
        resource.RLIMIT_DATA: memory + _SLACK_BYTES,
        resource.RLIMIT_FSIZE: settings["disk_bytes"],
        resource.RLIMIT_NOFILE: settings["open_files"],
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_MEMLOCK: 0,
        resource.RLIMIT_MSGQUEUE: 0,
        resource.RLIMIT_STACK: _STACK_BYTES,
    }
    if not settings["is_unsafe"]:  # counted over all processes of the user, of which outside there are others
        limits[resource.RLIMIT_NPROC] = settings["processes"] + settings["own_processes"]
    for kind, most in limits.items():
        _, hard = resource.getrlimit(kind)
        if hard != resource.RLIM_INFINITY and (most == resource.RLIM_INFINITY or most > hard):
            most = hard
        resource.setrlimit(kind, (most, most))


def _give_rights_up(settings: dict[str, Any], *, is_tests: bool) -> None:
    if os.getuid() != settings["uid"]:
        os.setgroups([])
        os.setresgid(settings["gid"], settings["gid"], settings["gid"])
        os.setresuid(settings["uid"], settings["uid"], settings["uid"])
    kernel.drop_capabilities()
    kernel.set_dumpable(allowed=not is_tests)
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")  # if the machine runs out of memory, this process is to go first
    kernel.install_filter(bytes.fromhex(settings["filter"]))


def _become(argv: list[str]) -> NoReturn:
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    os.closerange(VALUE_FD, VALUE_FD + 1)
    try:
        os.execv(argv[0], argv)
    except OSError as error:
        os.write(2, f"{argv[0]}: {error}\n".encode())
    os._exit(127)


def _run_python(job: dict[str, Any]) -> NoReturn:
    """Run Python source in this process. The interpreter is warm, and starts none of its modules again."""
    sys.stdin = open(0, encoding="utf-8", errors="surrogateescape", closefd=False)  # noqa: SIM115  until the end
    sys.stdout = open(1, "w", encoding="utf-8", errors="surrogateescape", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", 1, encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115
    sys.__stdin__, sys.__stdout__, sys.__stderr__ = sys.stdin, sys.stdout, sys.stderr
    for name in [one for one in sys.modules if one.partition(".")[0] == "polyrl"]:
        del sys.modules[name]
    sys.path.insert(0, os.getcwd())
    sys.path.extend(job["folders"])
    gc.enable()
    code = 0
    try:
        code = _MODES[job["mode"]](job) or 0
    except SystemExit as error:
        code = _exit_code(error)
    except BaseException:  # noqa: BLE001  as the interpreter does: print it, and exit with 1
        _print_error()
        code = 1
    _leave(code)


def _run_script(job: dict[str, Any]) -> None:
    os.close(VALUE_FD)
    _load("__main__", job["files"][0])


def _run_module(job: dict[str, Any]) -> None:
    """Load the program, and answer the tests. Its descriptor 3 is the line to them."""
    line = socket.socket(fileno=VALUE_FD)
    line.set_inheritable(False)
    testing.run_program(line, lambda: _load(values.PROGRAM, job["files"][0]))


def _run_tests(job: dict[str, Any]) -> int:
    os.set_inheritable(VALUE_FD, False)
    return testing.run_tests(socket.socket(fileno=VALUE_FD + 1), job["files"][0], job["packages"], VALUE_FD)


def _call(job: dict[str, Any]) -> None:
    """Call a function of the program, and write its value to the channel of values."""
    os.set_inheritable(VALUE_FD, False)
    module = _load(values.PROGRAM, job["files"][0])
    try:
        value = _find(module, job["function"])(*values.decode(job["args"]), **values.decode(job["kwargs"]))
        if isinstance(value, types.CoroutineType):
            import asyncio

            value = asyncio.run(value)
        said = {"value": values.encode(value)}
    except Exception as error:
        if not job["may_raise"]:
            raise
        said = {"raised": [one.__name__ for one in type(error).__mro__]}
    data = values.to_bytes(said)
    while data:
        data = data[os.write(VALUE_FD, data) :]


_MODES = {"script": _run_script, "call": _call, "module": _run_module, "tests": _run_tests}


def _load(name: str, file: str) -> types.ModuleType:
    path = os.path.join(os.getcwd(), file)
    with open(path, "rb") as source:
        code = compile(source.read(), path, "exec", dont_inherit=True)
    module = types.ModuleType(name)
    module.__file__ = path
    sys.modules[name] = module
    exec(code, module.__dict__)  # the whole point of the walls around it
    return module


def _find(module: types.ModuleType, dotted: str) -> Any:
    found: Any = module
    for part in dotted.split("."):
        found = getattr(found() if isinstance(found, type) else found, part)
    return found


def _exit_code(error: SystemExit) -> int:
    if error.code is None or isinstance(error.code, int):
        return (error.code or 0) & 0xFF
    print(error.code, file=sys.stderr)
    return 1


def _print_error() -> None:
    """Print the exception without the frames of this file."""
    kind, error, trace = sys.exc_info()
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    with contextlib.suppress(Exception):
        traceback.print_exception(kind, error, trace)


def _leave(code: int) -> NoReturn:
    try:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException:  # noqa: BLE001  a stream may be closed or replaced by anything
        code = code or 120
    os._exit(code)
