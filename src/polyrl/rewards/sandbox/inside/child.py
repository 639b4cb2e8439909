"""The process that becomes the program: process 1 of a new pid namespace, which gives up every right and runs it.

Rules kept here: the order matters. It gets its own mounts and reads the job; then limits are set, the user and the
capabilities go, the filter of system calls comes, and only then does a byte of the program run. Nothing but the
standard streams and the channel of a function's value (descriptor 3) is open by then. A step that fails is told on the
job's line, which no program has, and ends the process.
The interpreter's own exit is imitated: threads are waited for, exit functions run, streams are flushed.
"""

import atexit
import contextlib
import fcntl
import gc
import os
import resource
import signal
import socket
import sys
import traceback
import types
from typing import Any, NoReturn

from polyrl.rewards.sandbox.inside import frames, kernel, testing, values

VALUE_FD = 3
_LINE_FD = 100
"""The job's line, until the program begins. Descriptors above it are free in the zygote."""
_STACK_BYTES = 64 << 20
_SLACK_BYTES = 256 << 20
"""Address space that is never touched: libraries, and reserves of the allocator."""
_SIGNALS = 1024
"""Signals and timers that wait. The kernel counts them for the user, who has other processes outside."""


def run(given: list[int], settings: dict[str, Any]) -> NoReturn:
    """Be the child of the zygote. `given`: the job's line, and where output, errors and the value go."""
    os.dup2(given[0], _LINE_FD, inheritable=False)
    try:
        job, pieces = _read_job()
        if job["mode"] == "call":  # the program's own standard input is empty
            job["called"], pieces[0] = pieces[0], b""
        settings = {**settings, "disk_bytes": settings["disk_bytes"] + len(pieces[0])}
        if settings["is_unsafe"]:
            settings["home"] = f"{settings['home']}/{os.getpid()}"
            os.mkdir(settings["home"])
        else:
            _raise_walls(settings)
        streams = given[1:]
        if job["mode"] == "tests":
            job, pieces, streams = _fork_program(job, pieces, streams, settings)
        _prepare(job, pieces, streams, settings)
    except BaseException as error:  # noqa: BLE001  whatever it is, the program must not start
        with contextlib.suppress(OSError):
            os.write(_LINE_FD, f"{type(error).__name__}: {error}".encode()[:1000])
        os._exit(1)
    _begin(job)


def _read_job() -> tuple[dict[str, Any], list[bytes]]:
    return frames.read(lambda length: os.read(_LINE_FD, length), frames.MAX_JOB_BYTES)


def _raise_walls(settings: dict[str, Any]) -> None:
    """Give the program its own mounts: an empty disk of limited size, and the processes of its own namespace."""
    kernel.unshare(kernel.NEW_MOUNTS)  # the filter refuses all IPC that another namespace would divide
    _mount_disk(settings)
    _go_first()
    flags = kernel.READ_ONLY | kernel.NO_SUID | kernel.NO_DEVICES | kernel.NO_EXEC
    try:
        kernel.mount("proc", "/proc", flags, "subset=pid")
    except OSError:  # before Linux 5.8
        kernel.mount("proc", "/proc", flags, "")


def _go_first() -> None:
    """Have the kernel end this process first if the machine runs out of memory. The program's own /proc is read-only,
    so that it cannot take that back."""
    kernel.set_dumpable(allowed=True)  # otherwise the file is root's
    try:
        file = os.open("/proc/self/oom_score_adj", os.O_WRONLY | os.O_CLOEXEC)
        os.write(file, b"1000")
        os.close(file)
    except OSError:
        pass
    kernel.set_dumpable(allowed=False)


def _mount_disk(settings: dict[str, Any]) -> None:
    options = f"size={settings['disk_bytes']},{settings['disk_options']}"
    kernel.mount("tmpfs", settings["home"], kernel.NO_SUID | kernel.NO_DEVICES, options)


def _fork_program(
    job: dict[str, Any], pieces: list[bytes], streams: list[int], settings: dict[str, Any]
) -> tuple[dict[str, Any], list[bytes], list[int]]:
    """Start the program of a pytest run in a process of its own, and return the tests' job.

    The tests are read after the fork: the program has never had them in its memory.
    """
    ours, theirs = socket.socketpair()
    if os.fork() == 0:
        program = {**job, "mode": "module"}
        _prepare(program, pieces, [*streams[:2], theirs.fileno()], settings)
        _begin(program)
    header, tests = _read_job()
    if not settings["is_unsafe"]:  # another disk than the program's
        kernel.unshare(kernel.NEW_MOUNTS)
        _mount_disk(settings)
    return {**job, **header}, [b"", *tests], [*streams, ours.detach()]


def _prepare(job: dict[str, Any], pieces: list[bytes], streams: list[int], settings: dict[str, Any]) -> None:
    """Give up everything that the program may not have, and write its files. Raises if anything is left."""
    _take_streams(streams)
    _enter(settings)
    _limit(job, settings)
    if not settings["is_unsafe"]:
        _give_rights_up(settings, is_tests=job["mode"] == "tests")
        os.mkdir(settings["shared_memory"])
    _take_input(pieces[0])
    for name, data in zip(job["files"], pieces[1:], strict=True):
        _write(name, data)
    os.close(_LINE_FD)


def _take_streams(streams: list[int]) -> None:
    """Move the streams to descriptor 1 and on, and close all others but the line."""
    high = [os.dup2(one, _LINE_FD + 1 + index) for index, one in enumerate(streams)]
    for index, one in enumerate(high, 1):
        os.dup2(one, index, inheritable=True)
    os.closerange(len(high) + 1, _LINE_FD)
    os.closerange(_LINE_FD + 1, os.sysconf("SC_OPEN_MAX"))


def open_streams() -> None:
    """Make Python's streams of descriptors 0 to 2, whatever these will be in a child. Done once, by the zygote."""
    kept = [os.dup(number) for number in range(3)]
    ends = os.pipe()  # what a stream believes of its descriptor, such as that it cannot be rewound
    for number, end in enumerate((ends[0], ends[1], ends[1])):
        os.dup2(end, number)
    sys.stdin = open(0, encoding="utf-8", errors="surrogateescape", closefd=False)  # noqa: SIM115  until the end
    sys.stdout = open(1, "w", encoding="utf-8", errors="surrogateescape", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", 1, encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115
    sys.__stdin__, sys.__stdout__, sys.__stderr__ = sys.stdin, sys.stdout, sys.stderr
    for number, one in enumerate(kept):
        os.dup2(one, number)
    for one in (*kept, *ends):
        os.close(one)


def _take_input(data: bytes) -> None:
    """Make this the standard input: in a pipe if that holds it all, otherwise in a file without a name."""
    near, far = os.pipe()
    if len(data) <= fcntl.fcntl(far, fcntl.F_GETPIPE_SZ):  # less where processes of the same user hold many pipes
        os.write(far, data)
    else:
        os.close(near)
        os.close(far)
        far = os.open(".input", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        near = os.open(".input", os.O_RDONLY)
        os.unlink(".input")
        while data:
            data = data[os.write(far, data) :]
    os.close(far)
    os.dup2(near, 0, inheritable=True)
    os.close(near)


def _begin(job: dict[str, Any]) -> NoReturn:
    match job["mode"]:
        case "exec":
            _become(job["argv"])
        case "compile":
            _compile(job)
        case _:
            _run_python(job)


def _enter(settings: dict[str, Any]) -> None:
    """Leave the zygote's process group, so that a signal to the program's own does not reach it."""
    if settings["is_unsafe"]:
        os.setsid()  # there, a session is what limits are counted over
    else:
        os.setpgid(0, 0)  # a new session would take longer: the kernel makes a group of the scheduler for each
    home = settings["home"]
    os.chdir(home)
    if settings["is_unsafe"]:
        set_environment(home)


def set_environment(home: str) -> None:
    """Have the environment of programs; in a sandbox the zygote has it already."""
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
        resource.RLIMIT_CORE: 1,  # 0 would still start a handler that the machine pipes core dumps to
        resource.RLIMIT_MEMLOCK: 0,
        resource.RLIMIT_MSGQUEUE: 0,
        resource.RLIMIT_SIGPENDING: _SIGNALS,
        resource.RLIMIT_RTPRIO: 0,
        resource.RLIMIT_NICE: 0,
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
    kernel.install_filter(settings["filter"])


def _become(argv: list[str]) -> NoReturn:
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    os.closerange(VALUE_FD, VALUE_FD + 1)
    try:
        os.execv(argv[0], argv)
    except OSError as error:
        os.write(2, f"{argv[0]}: {error}\n".encode())
    os._exit(127)


def _compile(job: dict[str, Any]) -> NoReturn:
    """Run the compiler, and write the file that it made to the channel of values."""
    os.set_inheritable(VALUE_FD, False)
    pid = os.fork()
    if pid == 0:
        _become(job["argv"])
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if code == 0:
        with open(job["collect"], "rb") as file:
            _write_value(file.read())
    os._exit(code if code >= 0 else 1)


def _write_value(data: bytes) -> None:
    while data:
        data = data[os.write(VALUE_FD, data) :]


def _run_python(job: dict[str, Any]) -> NoReturn:
    """Run Python source in this process. The interpreter is warm, and starts none of its modules again."""
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
    called = values.from_bytes(job["called"])
    try:
        value = _find(module, job["function"])(*values.decode(called["args"]), **values.decode(called["kwargs"]))
        if isinstance(value, types.CoroutineType):
            import asyncio

            value = asyncio.run(value)
    except Exception as error:  # the job, which the program can find, does not say whether a test expects this
        _write_value(values.to_bytes({"raised": [one.__name__ for one in type(error).__mro__]}))
        raise
    _write_value(values.to_bytes({"value": values.encode(value)}))


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
        if "threading" in sys.modules:
            sys.modules["threading"]._shutdown()
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException:  # noqa: BLE001  a stream may be closed or replaced by anything
        code = code or 120
    os._exit(code)
