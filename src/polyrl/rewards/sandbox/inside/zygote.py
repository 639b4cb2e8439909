"""The warm interpreter: it imports what programs often need, forks a process for each program, and watches it.

    bwrap ... python -S -s -P -c "...zygote.main()" FD SETTINGS

The control socket (FD) carries small messages. For a run the host sends its bounds with four descriptors (a line with
the job, and the program's output, errors and value), and then a nonce. The zygote forks a child, which is process 1 of
a new pid namespace and reads the job. When that child and with it every process of the program is gone, the zygote
answers with the nonce and how it ended.

Rules kept here: the zygote reads no byte that a model wrote, so no program changes what the next one is forked from.
It reads the nonce after the fork, so no program has it in its memory. No child keeps the control socket, and none can
see the zygote: it is outside of their pid namespace.
"""

import gc
import json
import os
import signal
import socket
import struct
import sys
from typing import Any

from polyrl.rewards.sandbox.inside import child, kernel
from polyrl.rewards.sandbox.inside.watching import Bounds, Watched, watch

NONCE_BYTES = 16
READY, END_IT = b"ready", b"end it"
MESSAGE_BYTES = 128
BOUNDS = struct.Struct("<dddd")
ENDED = struct.Struct("<16siddd")
"""Why the run is over, the status as waitpid has it, CPU seconds, seconds, and those without a core."""
NUM_DESCRIPTORS = 4

_OFTEN_USED = "bisect collections functools heapq itertools math operator random re string typing"
"""Modules that many programs import. Each makes every fork a little dearer."""
_HIDDEN: list[Any] = []


def main() -> None:
    control = socket.socket(fileno=int(sys.argv[1]))
    settings: dict[str, Any] = json.loads(sys.argv[2])
    control.set_inheritable(False)
    if not settings["is_unsafe"]:
        kernel.set_dumpable(allowed=False)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    for name in _OFTEN_USED.split():
        __import__(name)
    compile("", "main.py", "exec")  # the first call makes a hundred types, which took a third of a program's CPU time
    settings["filter"] = bytes.fromhex(settings.get("filter", ""))
    _hide_own_modules()
    sys.argv = ["main.py"]
    os.umask(0o022)
    child.open_streams()
    child.set_environment(settings["home"])
    gc.collect()
    gc.freeze()
    gc.disable()  # until a program runs: a collection touches, and so copies, all memory that a fork shares
    own = -1 if settings["is_unsafe"] else os.open("/proc/self/ns/pid", os.O_RDONLY | os.O_CLOEXEC)
    control.send(READY)
    while _serve_one(control, own, settings):
        pass


def _hide_own_modules() -> None:
    """Take our modules out of those that a program finds. Done here once: freeing them in each child copies memory."""
    for name in [one for one in sys.modules if one.partition(".")[0] == "polyrl"]:
        _HIDDEN.append(sys.modules.pop(name))


def _serve_one(control: socket.socket, own: int, settings: dict[str, Any]) -> bool:
    """Run one program. False: the host is gone, or nothing can be forked any more."""
    data, given, _, _ = socket.recv_fds(control, MESSAGE_BYTES, NUM_DESCRIPTORS)
    if data == END_IT:  # the program had already ended
        return True
    if len(data) != BOUNDS.size or len(given) != NUM_DESCRIPTORS:
        return False
    if own >= 0:
        kernel.unshare(kernel.NEW_PIDS)
    pid = os.fork()
    if pid == 0:
        control.close()
        child.run(given, settings)
    for one in given:
        os.close(one)
    if own >= 0:
        kernel.enter_namespace(own, kernel.NEW_PIDS)
    nonce = control.recv(MESSAGE_BYTES)
    ended: Watched = watch(pid, control, Bounds(*BOUNDS.unpack(data)), settings)
    if ended.reason == "host" and control.recv(MESSAGE_BYTES) != END_IT:
        return False
    control.send(nonce + ENDED.pack(ended.reason.encode(), *ended[1:]))
    return True
