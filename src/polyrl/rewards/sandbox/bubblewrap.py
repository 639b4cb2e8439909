"""From limits and this machine's layout to bubblewrap's command line and the zygote's settings. Pure.

Rules kept here: what is not listed here is not visible inside, and all that is listed is read-only. The home directory,
the current folder, /etc but for three entries, /run, /sys and sockets are not listed. The environment is empty. A
sandbox that root starts runs programs as another user: the kernel does not limit root's processes, and root owns files.
"""

import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import Struct

from polyrl.rewards.sandbox.program import SandboxLimits

HOME = "/tmp"
SHARED_MEMORY = ".shm"
"""The folder of named semaphores and shared memory; on the program's disk, so that its size is limited."""
CODE = "/polyrl"
PACKAGES = "/polyrl/packages"
"""Where pytest is, for the processes of tests alone."""
_INSIDE = "polyrl/rewards/sandbox/inside"
_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
_FILES = ("/etc/ld.so.cache", "/etc/alternatives", "/etc/localtime")
_DEVICES = ("null", "full", "random", "urandom")
"""Without `zero`: mapped and shared, it is memory that no limit counts."""
_PROGRAM_ID, _OUTSIDE_ID = 1000, 65534
"""The program's user inside, and outside if root starts the sandbox: the user `nobody`."""
_NAMESPACES = ("user", "pid", "net", "ipc", "uts")
_START = (
    f"import sys; sys.path.insert(0, {CODE!r}); from {_INSIDE.replace('/', '.')} import zygote; "
    f"sys.path.remove({CODE!r}); zygote.main()"
)


class MachineLayout(Struct, frozen=True, kw_only=True):
    """The facts about this machine that the walls depend on."""

    bwrap: str
    python: str
    """The interpreter, without links and outside of any virtual environment."""
    prefix: str
    """The folder of its standard library."""
    inside: str
    """The folder of the programs that run inside."""
    uid: int
    gid: int
    links: dict[str, str]
    """The system's folders that are links, with their targets."""
    present: tuple[str, ...]
    """The system's folders and files that exist here."""
    packages: tuple[str, ...] = ()
    """The folders and files of pytest; none: it is not installed."""
    folders: tuple[str, ...] = ()
    """Further folders that programs may read, also on Python's path."""

    @property
    def is_root(self) -> bool:
        return self.uid == 0


class Pipes(Struct, frozen=True):
    """Descriptors that bubblewrap inherits."""

    control: int
    info: int
    block: int
    seccomp: int


def look_at_system() -> tuple[dict[str, str], tuple[str, ...]]:
    """Return the links among the system's folders, and those that are there."""
    links = {one: os.readlink(one) for one in _SYSTEM if os.path.islink(one)}
    there = tuple(one for one in (*_SYSTEM, *_FILES) if one not in links and os.path.exists(one))
    return links, there


def command(layout: MachineLayout, pipes: Pipes, settings: dict[str, Any]) -> list[str]:
    """Return the command line that starts a zygote."""
    uid = "0" if layout.is_root else str(_PROGRAM_ID)
    words = [layout.bwrap, *(f"--unshare-{one}" for one in _NAMESPACES), "--unshare-cgroup-try"]
    words += ["--uid", uid, "--gid", uid, "--hostname", "sandbox", "--clearenv"]
    # Symbols that are looked up at the start need not be looked up, and their tables copied, by every program.
    words += ["--setenv", "PYTHONHASHSEED", "0", "--setenv", "LD_BIND_NOW", "1"]
    words += ["--die-with-parent", "--new-session", "--cap-drop", "ALL"]
    for one in ("SYS_ADMIN", *(("SETUID", "SETGID", "KILL") if layout.is_root else ())):
        words += ["--cap-add", f"CAP_{one}"]
    words += ["--info-fd", str(pipes.info), "--userns-block-fd", str(pipes.block), "--seccomp", str(pipes.seccomp)]
    words += mounts(layout)
    words += ["--chdir", "/", "--", layout.python, "-S", "-s", "-P", "-c", _START]
    return [*words, str(pipes.control), json.dumps(settings)]


def mounts(layout: MachineLayout) -> list[str]:
    """Return the options that make the file system. Its root is a small folder in memory, read-only in the end."""
    words = mount_system(layout.links, layout.present)
    own = [(one, one) for one in (layout.prefix, *layout.folders) if not is_inside(one, layout.present)]
    packages = [(one, f"{PACKAGES}/{os.path.basename(one)}") for one in layout.packages]
    for source, target in [*own, (layout.inside, f"{CODE}/{_INSIDE}"), *packages]:
        words += [*parents(target), "--ro-bind", source, target]
    words += mount_devices()
    return [*words, "--proc", "/proc", "--perms", "0755", "--dir", HOME, "--remount-ro", "/"]


def mount_system(links: Mapping[str, str], present: Sequence[str]) -> list[str]:
    """Return the options for the system's folders (`look_at_system`), read-only."""
    words: list[str] = []
    for link, target in links.items():
        words += ["--symlink", target, link]
    for path in present:
        words += [*parents(path), "--ro-bind", path, path]
    return words


def mount_devices() -> list[str]:
    """Return the options for /dev. Shared memory is in a folder of HOME, which is to be made there."""
    words = ["--perms", "0755", "--dir", "/dev"]
    for one in _DEVICES:
        words += ["--dev-bind", f"/dev/{one}", f"/dev/{one}"]
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        words += ["--symlink", f"/proc/self/fd/{number}", f"/dev/{name}"]
    return [*words, "--symlink", "/proc/self/fd", "/dev/fd", "--symlink", f"{HOME}/{SHARED_MEMORY}", "/dev/shm"]


def settings_of(layout: MachineLayout, limits: SandboxLimits, seccomp: bytes) -> dict[str, Any]:
    """Return what a zygote is told at its start; nothing of it is secret."""
    return {
        "is_unsafe": False,
        "home": HOME,
        "uid": _PROGRAM_ID,
        "gid": _PROGRAM_ID,
        "disk_bytes": limits.disk_mb << 20,
        "disk_options": _tmpfs(limits.disk_mb << 20),
        "shared_memory": SHARED_MEMORY,
        "open_files": limits.open_files,
        "processes": limits.processes,
        "own_processes": 0 if layout.is_root else 2,  # bubblewrap and the zygote are of the same user
        "filter": seccomp.hex(),
    }


def _tmpfs(size: int) -> str:
    """Return the options of a disk in memory that belongs to the program; small files are bounded by their number."""
    return f"nr_inodes={max(256, size >> 12)},uid={_PROGRAM_ID},gid={_PROGRAM_ID},mode=0755"


def id_map(own: int, *, is_root: bool) -> str:
    """Return the map of user or group ids of the sandbox's user namespace."""
    return f"0 {own} 1\n{_PROGRAM_ID} {_OUTSIDE_ID} 1\n" if is_root else f"{_PROGRAM_ID} {own} 1\n"


def parents(path: str) -> list[str]:
    """Return the options that make the folders above a mount readable; otherwise only root may read them."""
    parts = path.strip("/").split("/")[:-1]
    words: list[str] = []
    for num in range(1, len(parts) + 1):
        words += ["--perms", "0755", "--dir", "/" + "/".join(parts[:num])]
    return words


def is_inside(path: str, folders: Sequence[str]) -> bool:
    return any(path == one or path.startswith(f"{one}/") for one in folders)
