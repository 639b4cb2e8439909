"""Walls around the processes of reward functions, with `rewards.sandbox`: from folders to bubblewrap's command line.

Rules kept here: a process has no network, a process tree and a /tmp of its own, and the system calls that programs have
(seccomp.py). It sees the files of the system and of Python and the folders of modules, all read-only. The run's
directory, which has its tokens, and the folder `runs` are hidden within these. Its environment is a short list, and
what `rewards.environment` names.
Left out: limits of memory and file sizes, which the process sets itself (process.py), and the number of its processes.
"""

import contextlib
import importlib.machinery
import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from msgspec import Struct

from polyrl.errors import ConfigError, UserError, one_line, plain, shorten
from polyrl.rewards.sandbox import bubblewrap
from polyrl.rewards.sandbox.seccomp import filter_for

KEY = "rewards.sandbox"
_DISK_BYTES = 1 << 30
"""The size of a process's /tmp, which is in memory."""
_ID = "1000"
_NAMESPACES = ("user", "pid", "net", "ipc", "uts")
_KEPT = ("PATH", "LANG", "LANGUAGE", "LC_ALL", "LC_CTYPE", "TZ", "PYTHONPATH", "PYTHONHASHSEED", "OMP_NUM_THREADS")
_TRY_S = 20.0
_TOO_WIDE = ("/", bubblewrap.HOME, "/dev", "/proc")
"""Folders of which a process has its own."""
_START = (
    "import os, resource, sys; resource.setrlimit(resource.RLIMIT_CORE, (1, 1)); os.execv(sys.argv[1], sys.argv[1:])"
)
"""Sets the limit that keeps the machine's core-dump handler from being started: inside, no process may set it."""


class RewardWalls(Struct, frozen=True, kw_only=True):
    """The facts about this machine, and about a recipe's functions, that the walls depend on."""

    bwrap: str
    sets_size: bool
    """Whether this bubblewrap can bound the size of /tmp."""
    links: dict[str, str]
    present: tuple[str, ...]
    readable: tuple[str, ...]
    """Files and folders beside the system's that a process may read, as Python names them: perhaps through links."""
    hidden: tuple[str, ...]
    """Folders that it may not, wherever they are there."""

    @contextlib.contextmanager
    def around(self, words: Sequence[str]) -> Iterator[tuple[list[str], int]]:
        """Yield the command line that runs `words` within the walls, and a descriptor that it has to inherit."""
        seccomp, far = os.pipe()
        try:
            os.write(far, filter_for(is_program=True))
            os.close(far)
            far = -1
            options = [*self._namespaces(), "--seccomp", str(seccomp), *self.mounts()]
            yield [sys.executable, "-I", "-S", "-c", _START, self.bwrap, *options, "--", *words], seccomp
        finally:
            for one in (seccomp, far):
                if one >= 0:
                    os.close(one)

    def environment(self, variables: Mapping[str, str], named: Sequence[str]) -> dict[str, str]:
        """Return the environment of a process; `named` are the variables that the recipe names."""
        kept = {name: variables[name] for name in (*_KEPT, *named) if name in variables}
        return {**kept, "HOME": bubblewrap.HOME, "TMPDIR": bubblewrap.HOME}

    def _namespaces(self) -> list[str]:
        words = [*(f"--unshare-{one}" for one in _NAMESPACES), "--unshare-cgroup-try", "--uid", _ID, "--gid", _ID]
        return [*words, "--hostname", "sandbox", "--die-with-parent", "--new-session", "--cap-drop", "ALL"]

    def mounts(self) -> list[str]:
        """Return the options that make the file system. Folders are mounted where they are, without links."""
        real = _outermost(os.path.realpath(one) for one in self.readable if os.path.exists(one))
        own = [one for one in real if not bubblewrap.is_inside(one, self.present)]
        size = ["--size", str(_DISK_BYTES)] if self.sets_size else []
        words = bubblewrap.mount_system(self.links, self.present)
        words += [*size, "--perms", "1777", "--tmpfs", bubblewrap.HOME]
        for path in own:  # some may be inside of /tmp
            words += [*bubblewrap.parents(path), "--ro-bind", path, path]
        for link, target in self._links(own).items():
            words += [*bubblewrap.parents(link), "--symlink", target, link]
        for path in _outermost(os.path.realpath(one) for one in self.hidden if os.path.isdir(one)):
            if bubblewrap.is_inside(path, own):
                words += ["--tmpfs", path, "--remount-ro", path]
        words += bubblewrap.mount_devices()
        words += ["--proc", "/proc", "--dir", f"{bubblewrap.HOME}/{bubblewrap.SHARED_MEMORY}", "--remount-ro", "/"]
        here = os.getcwd()
        return [*words, "--chdir", here if bubblewrap.is_inside(here, [*own, *self.present]) else "/"]

    def _links(self, mounted: Sequence[str]) -> dict[str, str]:
        """Return the links on the way to what is readable, which are not there by a mount: to where they lead."""
        found: dict[str, str] = {}

        def walk(path: str) -> None:
            at = "/"
            for part in Path(os.path.abspath(path)).parts[1:]:
                at = os.path.join(at, part)
                if not os.path.islink(at):
                    continue
                if bubblewrap.is_inside(at, [*mounted, *self.present]):
                    walk(os.path.join(os.path.dirname(at), os.readlink(at)))
                elif at not in self.links:
                    found[at] = os.path.realpath(at)
                at = os.path.realpath(at)

        for path in self.readable:
            if os.path.exists(path):
                walk(path)
        return found

    def check(self) -> None:
        """Raise ConfigError if no process can be started within these walls."""
        with self.around([sys.executable, "-c", "pass"]) as (words, seccomp):
            try:
                tried = subprocess.run(
                    words, pass_fds=(seccomp,), env=self.environment(os.environ, ()), timeout=_TRY_S, check=False,
                    stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
                )  # fmt: skip
            except (OSError, subprocess.TimeoutExpired) as error:
                raise ConfigError(f"{KEY}: no sandbox can be started: {one_line(error)}") from error
        if tried.returncode:
            said = tried.stderr.decode(errors="replace").strip().splitlines() or [f"exit code {tried.returncode}"]
            raise ConfigError(f"{KEY}: no sandbox can be started: {shorten(plain(said[-1]))}")


def look_for_walls(functions: Iterable[str], run_dir: Path | None = None, bwrap: str | None = None) -> RewardWalls:
    """Return the walls for these functions (`module:name`). Raises ConfigError where bubblewrap is missing."""
    found = shutil.which("bwrap" if bwrap is None else bwrap)
    if found is None:
        raise ConfigError(f"{KEY}: bwrap is missing: apt-get install bubblewrap, or leave {KEY} out")
    try:
        filter_for(is_program=True)
    except UserError as error:
        raise ConfigError(f"{KEY}: {error}") from error
    links, present = bubblewrap.look_at_system()
    places = list(filter(None, (_place_of(name.partition(":")[0]) for name in functions if ":" in name)))
    own = str(Path(__file__).resolve().parents[2])
    here = os.getcwd()
    on_path = [one for one in sys.path if one and os.path.realpath(one) not in (os.path.realpath(here), *_TOO_WIDE)]
    prefixes = (sys.prefix, sys.base_prefix, sys.exec_prefix, sys.executable, os.path.dirname(sys.executable), own)
    hidden = [os.path.join(here, "runs"), *([] if run_dir is None else [os.path.abspath(run_dir)])]
    for folder, file in places:
        if os.path.realpath(folder) in _TOO_WIDE:
            raise ConfigError(f"{KEY}: {file} is in {folder}, expected a folder of its own for the module")
    helped = subprocess.run([found, "--help"], capture_output=True, text=True, timeout=_TRY_S, check=False)
    return RewardWalls(
        bwrap=found,
        sets_size="--size" in helped.stdout,
        links=links,
        present=present,
        readable=tuple(dict.fromkeys((*prefixes, *on_path, *(folder for folder, _ in places)))),
        hidden=tuple(one for one in hidden if not any(bubblewrap.is_inside(file, [one]) for _, file in places)),
    )


def _place_of(module: str) -> tuple[str, str] | None:
    """Return the folder of the module path that has a module, and the module's file; None: there is no such module.

    Nothing is imported: a person's modules run in their own processes alone.
    """
    top = module.partition(".")[0]
    spec = importlib.machinery.PathFinder.find_spec(top, [*sys.path, os.getcwd()])
    if spec is None or spec.origin is None:
        folders = [] if spec is None else list(spec.submodule_search_locations or ())
        return (os.path.dirname(folders[0]), folders[0]) if folders else None
    folder = os.path.dirname(spec.origin)
    return (os.path.dirname(folder) if spec.submodule_search_locations is not None else folder), spec.origin


def _outermost(paths: Iterable[str]) -> list[str]:
    """Return these paths without those that are inside of others."""
    found: list[str] = []
    for one in sorted(set(paths), key=len):
        if not bubblewrap.is_inside(one, found):
            found.append(one)
    return found


def pid_inside(pid: int) -> int | None:
    """Return the pid, outside the walls, of the process that this bubblewrap runs; None if it is gone.

    Bubblewrap's child is process 1 inside; the child of that is the function's process.
    """
    try:
        for _ in range(2):
            pid = int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])
    except (OSError, IndexError, ValueError):
        return None
    return pid
