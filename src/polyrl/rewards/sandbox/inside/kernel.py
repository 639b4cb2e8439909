"""The system calls that Python has no function for.

Rules kept here: a call that fails raises OSError with its name, so nothing runs with half of its walls. The C library
is loaded at import: after a fork nothing is looked up.
"""

import ctypes
import os
import struct

NEW_PIDS, NEW_MOUNTS = 0x20000000, 0x00020000
READ_ONLY, NO_SUID, NO_DEVICES, NO_EXEC = 1, 2, 4, 8
_SET_DUMPABLE, _SET_SECCOMP, _SET_NO_NEW_PRIVILEGES, _AMBIENT, _CLEAR_ALL = 4, 22, 38, 47, 4
_CAPABILITIES_V3 = 0x20080522
_CAPSET = {"x86_64": 126, "aarch64": 91}
_CAPGET = {"x86_64": 125, "aarch64": 90}
_CAPABILITIES = ctypes.create_string_buffer(struct.pack("<Ii", _CAPABILITIES_V3, 0)), ctypes.create_string_buffer(24)
"""None, of this process."""
_LEFT = ctypes.create_string_buffer(24)
_LIBC = ctypes.CDLL(None, use_errno=True)
_MACHINE = os.uname().machine


class _FilterProgram(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_char_p)]


def unshare(flags: int) -> None:
    _check("unshare", _LIBC.unshare(flags))


def enter_namespace(descriptor: int, kind: int) -> None:
    _check("setns", _LIBC.setns(descriptor, kind))


def mount(kind: str, target: str, flags: int, options: str) -> None:
    name = kind.encode()
    _check(f"mount {target}", _LIBC.mount(name, target.encode(), name, flags, options.encode()))


def set_dumpable(*, allowed: bool) -> None:
    """Say whether processes of the same user may look into this one."""
    _prctl("PR_SET_DUMPABLE", _SET_DUMPABLE, int(allowed))


def drop_capabilities() -> None:
    """Give up every capability, and check that none is left. Raises OSError."""
    _prctl("PR_CAP_AMBIENT", _AMBIENT, _CLEAR_ALL)
    _check("capset", _LIBC.syscall(_CAPSET[_MACHINE], *_CAPABILITIES))
    _check("capget", _LIBC.syscall(_CAPGET[_MACHINE], _CAPABILITIES[0], _LEFT))
    if any(_LEFT.raw):
        raise PermissionError("capabilities are left")


def install_filter(program: bytes) -> None:
    """Install a seccomp filter, which is there until the process and its children end."""
    _prctl("PR_SET_NO_NEW_PRIVS", _SET_NO_NEW_PRIVILEGES, 1)
    held = _FilterProgram(len(program) // 8, program)
    _check("PR_SET_SECCOMP", _LIBC.prctl(_SET_SECCOMP, 2, ctypes.byref(held), 0, 0))


def _prctl(name: str, option: int, value: int) -> None:
    _check(name, _LIBC.prctl(option, ctypes.c_ulong(value), ctypes.c_ulong(0), ctypes.c_ulong(0), ctypes.c_ulong(0)))


def _check(name: str, result: int) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
