"""The warm interpreter: it imports what programs often need, and forks a warden for each program.

    bwrap ... python -S -s -P -c "...zygote.main()" FD SETTINGS

The control socket (FD) carries small messages. The host sends the descriptor of a fresh line, then a nonce; the zygote
forks a warden, which is process 1 of a new pid namespace and talks to the host on that line; when the warden and with
it every process of the program is gone, the zygote answers with the nonce.

Rules kept here: the zygote reads no byte that a model wrote, so no program changes what the next one is forked from.
It reads the nonce after the fork, so no program has it in its memory. No child keeps the control socket.
"""

import gc
import json
import os
import signal
import socket
import struct
import sys
from typing import Any

from polyrl.rewards.sandbox.inside import kernel, warden

STATUS = struct.Struct("<i")
"""How the warden ended, as waitpid has it; -1: it could not be started."""
NONCE_BYTES = 16
READY = b"ready"
MESSAGE_BYTES = 64

_OFTEN_USED = "bisect collections functools heapq itertools math operator random re string typing"
"""Modules that many programs import. Each makes every fork a little dearer."""


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
    sys.argv = ["main.py"]
    os.umask(0o022)
    gc.collect()
    gc.freeze()
    gc.disable()  # until a program runs: a collection touches, and so copies, all memory that a fork shares
    own = -1 if settings["is_unsafe"] else os.open("/proc/self/ns/pid", os.O_RDONLY | os.O_CLOEXEC)
    control.send(READY)
    while _serve_one(control, own, settings):
        pass


def _serve_one(control: socket.socket, own: int, settings: dict[str, Any]) -> bool:
    data, lines, _, _ = socket.recv_fds(control, MESSAGE_BYTES, 1)
    if not data or len(lines) != 1:
        return False
    status = -1
    try:
        if own >= 0:
            kernel.unshare(kernel.NEW_PIDS)
        warden_pid = os.fork()
    except OSError:
        warden_pid = -1
    if warden_pid == 0:
        control.close()
        if own >= 0:
            os.close(own)
        warden.run(socket.socket(fileno=lines[0]), settings)
    os.close(lines[0])
    if own >= 0:
        kernel.enter_namespace(own, kernel.NEW_PIDS)
    nonce = control.recv(MESSAGE_BYTES)
    if warden_pid > 0:
        _, status = os.waitpid(warden_pid, 0)
    control.send(nonce + STATUS.pack(status))
    return warden_pid > 0
