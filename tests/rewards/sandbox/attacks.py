"""Programs that attack the sandbox. Each prints ESCAPED if it got what it wanted, and nothing else that counts."""

import textwrap
from typing import NamedTuple


class Attack(NamedTuple):
    source: str
    outcomes: tuple[str, ...] = ("failed", "crashed")
    """What the verdict may be. `passed` means that the attack succeeded."""
    works_outside: bool = False
    """Whether the attack is harmless enough to be shown to work without the sandbox."""


def attack(source: str, *outcomes: str, works_outside: bool = False) -> Attack:
    return Attack(textwrap.dedent(source), outcomes or ("failed", "crashed"), works_outside)


ENDED = ("failed", "crashed", "timed_out")

RESOURCES = {
    "fork bomb": attack("import os\nwhile True:\n    try: os.fork()\n    except OSError: pass", *ENDED),
    "fork bomb that sleeps": attack(
        "import os, time\nwhile True:\n    try:\n        if os.fork() == 0: time.sleep(60); os._exit(0)\n"
        "    except OSError: time.sleep(60)",
        *ENDED,
    ),
    "threads": attack(
        "import threading, time\nwhile True:\n    threading.Thread(target=time.sleep, args=(60,)).start()", *ENDED
    ),
    "memory bomb": attack("held = []\nwhile True: held.append(bytearray(1 << 24))", *ENDED),
    "memory bomb of many processes": attack(
        """
        import os, time
        for _ in range(20):
            os.fork()
        held = bytearray(1 << 26)
        for at in range(0, len(held), 4096): held[at] = 1
        time.sleep(60)
        """,
        *ENDED,
    ),
    "memory of processes whose first thread has ended": attack(
        """
        import ctypes, os, threading, time
        def fill():
            held = bytearray(1 << 26)
            for at in range(0, len(held), 4096): held[at] = 1
            time.sleep(60)
        for _ in range(20):
            if os.fork() == 0:
                threading.Thread(target=fill).start()
                time.sleep(0.01)
                ctypes.CDLL(None).syscall(60 if os.uname().machine == "x86_64" else 93, 0)
        time.sleep(1)
        print("ESCAPED")
        """,
        *ENDED,
    ),
    "memory of processes with a name that looks like a count": attack(
        """
        import ctypes, os, time
        ctypes.CDLL(None).prctl(15, b"RssAnon: 0", 0, 0, 0)
        for _ in range(3):
            os.fork()
        held = bytearray(1 << 26)
        for at in range(0, len(held), 4096): held[at] = 1
        time.sleep(1)
        print("ESCAPED")
        """,
        *ENDED,
    ),
    "a name that is no count": attack(
        """
        import ctypes, time
        ctypes.CDLL(None).prctl(15, b"RssAnon: x", 0, 0, 0)
        time.sleep(0.2)
        """,
        "failed",
    ),
    "signals and timers of the user": attack(
        """
        import ctypes, resource
        timer, num = ctypes.create_string_buffer(8), 0
        while num < 5000 and ctypes.CDLL(None).timer_create(0, 0, timer) == 0: num += 1
        if num == 5000 or resource.getrlimit(resource.RLIMIT_RTPRIO) != (0, 0): print("ESCAPED")
        """
    ),
    "waiting for a core by its own choice": attack(
        """
        import os
        for choose in (lambda: os.nice(19), lambda: os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0)),
                       lambda: os.sched_setaffinity(0, {min(os.sched_getaffinity(0))}),
                       lambda: os.setpriority(os.PRIO_PROCESS, 0, 19)):
            try: choose(); print("ESCAPED"); break
            except OSError: pass
        """
    ),
    "writing the machine's disk, and waiting for it": attack(
        """
        import ctypes, os
        for call in (lambda: os.fsync(1000), lambda: os.fdatasync(1000), lambda: ctypes.CDLL(None).msync(1, 1, 4)):
            try:
                if call(): raise OSError  # the kernel has looked: there is no such file, and no such memory
            except OSError: print("ESCAPED"); break
        """
    ),
    "watches of the user's files": attack(
        """
        import ctypes
        if ctypes.CDLL(None).inotify_init1(0) >= 0: print("ESCAPED")
        """
    ),
    "memory shared by nobody": attack(
        """
        import mmap
        held, size = [], 1 << 24
        while True:
            held.append(mmap.mmap(-1, size))
            held[-1].write(bytes(size))
        """,
        *ENDED,
    ),
    "outliving others when memory is short": attack(
        """
        import os
        before = open("/proc/self/oom_score_adj").read().strip()
        try:
            os.write(os.open("/proc/self/oom_score_adj", os.O_WRONLY), b"0")
        except OSError:
            pass
        if before != "1000" or open("/proc/self/oom_score_adj").read().strip() != "1000":
            print("ESCAPED")
        """
    ),
    "disk filler": attack(
        """
        import os
        for number in range(10000):
            for folder in ("/tmp", "/dev/shm"):
                with open(f"{folder}/{number}", "wb") as file: file.write(bytes(1 << 20))
        print("ESCAPED")
        """
    ),
    "disk filler with small files": attack(
        "for number in range(2_000_000):\n    open(f'/tmp/{number}', 'w').close()\nprint('ESCAPED')", *ENDED
    ),
    "a file larger than the disk": attack(
        "with open('/tmp/x', 'wb') as file:\n    file.truncate(1 << 40)\nprint('ESCAPED')"
    ),
    "endless output": attack("while True: print('x' * 10_000)", "failed"),
    "endless errors": attack("import sys\nwhile True: print('x' * 10_000, file=sys.stderr)", "failed"),
    "endless loop that ignores signals": attack(
        """
        import signal
        for number in range(1, 65):
            try: signal.signal(number, signal.SIG_IGN)
            except (OSError, ValueError): pass
        while True: pass
        """,
        "timed_out",
    ),
    "endless sleep": attack("import time\ntime.sleep(3600)", "timed_out"),
    "a stopped process": attack(
        "import os, signal, time\nif os.fork() == 0: time.sleep(3600)\nos.kill(0, signal.SIGSTOP)\ntime.sleep(3600)",
        "timed_out",
    ),
    "detached child": attack(
        "import os, time\nif os.fork() == 0:\n    os.setsid()\n    time.sleep(3600)\nos._exit(0)", "failed"
    ),
    "double-forked child that holds standard output": attack(
        """
        import os, time
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                time.sleep(3600)
            os._exit(0)
        os.wait()
        """,
        "failed",
    ),
    "CPU time spread over children": attack(
        """
        import os
        while True:
            pid = os.fork()
            if pid == 0:
                for _ in range(3_000_000): pass
                os._exit(0)
            os.waitpid(pid, 0)
        """,
        "timed_out",
    ),
    "10,000 open files": attack(
        "held = [open('/dev/null') for _ in range(10_000)]\nprint('ESCAPED')", works_outside=False
    ),
    "memory in sockets": attack(
        """
        import os, socket, time
        for _ in range(6):
            os.fork()
        held = []
        try:
            while True:
                pair = socket.socketpair()
                held.append(pair)
                for one in pair:
                    one.setblocking(False)
                    try:
                        while True: one.send(bytes(65536))
                    except BlockingIOError: pass
        except OSError: time.sleep(60)
        """,
        "crashed",
    ),
    "memory in sockets with large buffers": attack(
        """
        import socket
        held, num_bytes = [], 0
        for _ in range(8):
            pair = socket.socketpair()
            held.append(pair)
            for one in pair:
                try: one.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 30)
                except OSError: pass
                one.setblocking(False)
                try:
                    while True: num_bytes += one.send(bytes(65536))
                except BlockingIOError: pass
        if num_bytes > 16 * (1 << 20): print("ESCAPED")
        """
    ),
    "shared memory that is in no page table": attack(
        """
        import mmap, os, time
        held = []
        for _ in range(20):
            held.append(mmap.mmap(-1, 1 << 24))
            held[-1].write(bytes(1 << 24))
            held[-1].madvise(mmap.MADV_DONTNEED)
        time.sleep(0.1)
        print("ESCAPED")
        """,
        *ENDED,
    ),
    "shared memory of a device": attack(
        """
        import mmap, os, time
        zero, held = os.open("/dev/zero", os.O_RDWR), []
        for _ in range(20):
            held.append(mmap.mmap(zero, 1 << 24))
            held[-1].write(bytes(1 << 24))
            held[-1].madvise(mmap.MADV_DONTNEED)
        time.sleep(0.1)
        print("ESCAPED")
        """,
        *ENDED,
    ),
    "CPU time of children that the kernel forgets": attack(
        """
        import os, signal, time
        try: signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        except OSError: pass
        for _ in range(100):
            if os.fork() == 0:
                while time.process_time() < 0.012: pass
                os._exit(0)
            try: os.wait()
            except ChildProcessError: pass
        print("ESCAPED")
        """,
        "timed_out",
    ),
    "CPU time of children that end without a signal": attack(
        """
        import ctypes, os, time
        number, num = 56 if os.uname().machine == "x86_64" else 220, 0
        for _ in range(100):
            pid = ctypes.CDLL(None).syscall(number, 0, 0, 0, 0, 0)
            if pid == 0:
                while time.process_time() < 0.012: pass
                os._exit(0)
            num += pid > 0
            time.sleep(0.001)
        if num == 100: print("ESCAPED")
        """,
        *ENDED,
    ),
    "folders that lie deeply in each other": attack(
        """
        import os
        try:
            for _ in range(100_000): os.mkdir("folder"); os.chdir("folder")
            print("ESCAPED")
        except OSError: pass
        """
    ),
    "a child that nobody waits for": attack(
        """
        import os, signal
        try: signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        except OSError: pass
        while True:
            if os.fork() == 0:
                for _ in range(100_000): pass
                os._exit(0)
        """,
        *ENDED,
    ),
    "core dumps for the host's handler": attack(
        """
        import resource
        if resource.getrlimit(resource.RLIMIT_CORE) != (1, 1): print("ESCAPED")
        try: resource.setrlimit(resource.RLIMIT_CORE, (0, 0)); print("ESCAPED")
        except (OSError, ValueError): pass
        """
    ),
    "raise the limits again": attack(
        """
        import resource
        for name in ("RLIMIT_NOFILE", "RLIMIT_CPU", "RLIMIT_AS", "RLIMIT_NPROC", "RLIMIT_FSIZE"):
            kind = getattr(resource, name)
            soft, hard = resource.getrlimit(kind)
            try:
                resource.setrlimit(kind, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
                print("ESCAPED")
                break
            except (OSError, ValueError): pass
        """
    ),
    "compress a bomb into the reply": attack("import sys\nsys.stdout.write('\\0' * (1 << 28))", *ENDED),
}

LOOKING = {
    "the environment": attack(
        """
        import os
        found = dict(os.environ)
        for pid in os.listdir("/proc"):
            try: found[pid] = open(f"/proc/{pid}/environ").read()
            except OSError: pass
        if "SANDBOX_TEST_SECRET" in str(found): print("ESCAPED")
        """,
        works_outside=False,
    ),
    "a file of the host": attack(
        """
        try: print("ESCAPED" if "secret" in open(SECRET_FILE).read() else "")
        except OSError: pass
        """,
        works_outside=True,
    ),
    "a file of the host through a link": attack(
        """
        import os
        os.symlink(SECRET_FILE, "link")
        for path in ("link", "/proc/self/cwd/link", "/proc/1/root" + SECRET_FILE, "/proc/self/root" + SECRET_FILE):
            try:
                if "secret" in open(path).read(): print("ESCAPED"); break
            except OSError: pass
        """,
        works_outside=True,
    ),
    "system secrets": attack(
        """
        import os
        for path in ("/etc/shadow", "/etc/passwd", "/root/.ssh", "/home", "/run", "/var", "/sys/kernel",
                     "/proc/kallsyms", "/proc/sys/kernel/hostname", "/proc/keys", "/boot", "/etc/hostname", "/work"):
            if os.path.exists(path): print("ESCAPED"); break
        """,
        works_outside=True,
    ),
    "other processes": attack(
        """
        import os
        if len([one for one in os.listdir("/proc") if one.isdigit()]) > 2: print("ESCAPED")
        """,
        works_outside=True,
    ),
    "the process that forked it": attack(
        """
        import os
        if os.getppid() != 0: print("ESCAPED"); raise SystemExit
        for pid in range(2, 5000):
            for name in ("mem", "environ", "maps", "fd/0", "fd/3", "fd/4", "cwd", "root", "exe", "cmdline", "stat"):
                try:
                    with open(f"/proc/{pid}/{name}", "rb") as file: file.read(1); print("ESCAPED"); raise SystemExit
                except OSError: pass
        """
    ),
    "descriptors": attack(
        """
        import os, stat
        for number in range(3, 1024):
            try: os.fstat(number)
            except OSError: continue
            print("ESCAPED"); break
        """
    ),
    "what an earlier program left": attack(
        """
        import os
        left = [os.listdir(one) for one in ("/tmp", "/dev/shm")]
        if [sorted(one) for one in left] != [[".shm", "solution.py"], []]: print("ESCAPED")
        """
    ),
    "earlier programs in memory": attack(
        """
        import re
        needle = re.compile(b"REMEMBER[-]ME")
        for line in open("/proc/self/maps"):
            span, rights = line.split()[:2]
            if "r" not in rights or "vvar" in line or "vsyscall" in line: continue
            low, high = (int(one, 16) for one in span.split("-"))
            try:
                with open("/proc/self/mem", "rb") as file:
                    file.seek(low)
                    if needle.search(file.read(high - low)): print("ESCAPED"); break
            except OSError: pass
        """
    ),
    "the user": attack("import os\nif os.getuid() == 0 or os.geteuid() == 0 or os.getgid() == 0: print('ESCAPED')"),
}

REACHING = {
    "network": attack(
        """
        import socket
        try:
            with socket.create_connection(("127.0.0.1", HOST_PORT), timeout=1): print("ESCAPED")
        except OSError: pass
        """,
        works_outside=True,
    ),
    "a name server": attack(
        "import socket\ntry: socket.getaddrinfo('localhost.example', 80); print('ESCAPED')\nexcept OSError: pass"
    ),
    "other families of sockets": attack(
        """
        import socket
        for family in range(0, 46):
            for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM, socket.SOCK_RAW):
                if family == socket.AF_UNIX: continue
                try: socket.socket(family, kind); print("ESCAPED"); raise SystemExit
                except OSError: pass
        """,
        works_outside=True,
    ),
    "an abstract socket of the host": attack(
        """
        import socket
        try:
            socket.socket(socket.AF_UNIX).connect("\\0" + HOST_SOCKET); print("ESCAPED")
        except OSError: pass
        """,
        works_outside=True,
    ),
    "writing outside": attack(
        """
        import os
        for folder in ("/", "/usr", "/usr/bin", "/etc", "/dev", "/polyrl", "/proc", "/lib", "/root",
                       "/polyrl/polyrl/rewards"):
            try:
                with open(f"{folder}/written", "w") as file: file.write("x")
                print("ESCAPED"); break
            except OSError: pass
        """
    ),
    "changing what is there": attack(
        """
        import os, shutil
        for path in ("/usr/bin/env", "/polyrl/polyrl/rewards/sandbox/inside/zygote.py", os.__file__):
            for change in (os.unlink, lambda one: os.rename(one, "/tmp/x"), lambda one: os.chmod(one, 0o777),
                           lambda one: open(one, "r+")):
                try: change(path); print("ESCAPED"); raise SystemExit
                except OSError: pass
        """
    ),
    "killing the parent": attack(
        """
        import os, signal
        for number in range(1, 65):
            for pid in (os.getppid(), 1, HOST_PID):
                try: os.kill(pid, number)
                except OSError: pass
        """
    ),
    "killing everybody": attack("import os, signal\nos.kill(-1, signal.SIGKILL)\nos.killpg(0, signal.SIGKILL)"),
    "killing a process of the host": attack(
        "import os, signal\ntry: os.kill(HOST_PID, 0); print('ESCAPED')\nexcept OSError: pass", works_outside=True
    ),
    "gaining rights": attack(
        """
        import os
        for change in (lambda: os.setuid(0), lambda: os.setgid(0), lambda: os.setresuid(0, 0, 0),
                       lambda: os.setgroups([0]), lambda: os.chroot("/tmp"), lambda: os.nice(-5),
                       lambda: os.mknod("/tmp/device", 0o60600, os.makedev(8, 0))):
            try: change(); print("ESCAPED"); break
            except OSError: pass
        """
    ),
    "set-user-id programs": attack(
        """
        import os, subprocess
        for path in ("/usr/bin/su", "/bin/su", "/usr/bin/passwd", "/usr/bin/mount"):
            if os.path.exists(path):
                done = subprocess.run([path, "-c", "id -u"], capture_output=True, text=True, stdin=subprocess.DEVNULL)
                if done.stdout.strip() == "0": print("ESCAPED"); break
        """
    ),
}

_CALLS = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
buffer = ctypes.create_string_buffer(4096)
def refused(*args):
    ctypes.set_errno(0)
    result = libc.syscall(*args)
    return result == -1 and ctypes.get_errno() in (1, 38, 97)
"""
X86_CALLS = {
    "ptrace": "101, 0, 0, 0, 0", "process_vm_readv": "310, 1, 0, 0, 0, 0, 0", "kcmp": "312, 1, 2, 0, 0, 0",
    "pidfd_getfd": "438, 0, 0, 0", "mount": "165, b'tmpfs', b'/tmp', b'tmpfs', 0, 0", "umount2": "166, b'/proc', 2",
    "pivot_root": "155, b'/tmp', b'/tmp'", "chroot": "161, b'/tmp'", "unshare user": "272, 0x10000000",
    "unshare mounts": "272, 0x20000", "unshare network": "272, 0x40000000", "setns": "308, 0, 0",
    "clone with a user namespace": "56, 0x10000011, 0, 0, 0, 0",
    "clone with a pid namespace": "56, 0x20000011, 0, 0, 0, 0",
    "clone with a time namespace": "56, 0x91, 0, 0, 0, 0", "clone3": "435, buffer, 88", "bpf": "321, 0, buffer, 128",
    "perf_event_open": "298, buffer, 0, -1, -1, 0", "userfaultfd": "323, 1", "keyctl": "250, 0, -3, 1",
    "add_key": "248, b'user', b'a', b'b', 1, -3", "io_uring_setup": "425, 8, buffer", "memfd_create": "319, b'a', 0",
    "shmget": "29, 0, 4096, 0o1666", "msgget": "68, 0, 0o1666", "mq_open": "240, b'a', 0o102, 0o666, 0",
    "kexec_load": "246, 0, 0, 0, 0", "init_module": "175, buffer, 1, b''", "finit_module": "313, 0, b'', 0",
    "delete_module": "176, b'a', 0", "reboot": "169, 0xfee1dead, 672274793, 0x89abcdef, 0",
    "swapon": "167, b'/tmp/a', 0",
    "open_by_handle_at": "304, -100, buffer, 0", "name_to_handle_at": "303, -100, b'/', buffer, buffer, 0",
    "personality": "135, 0x0040000", "syslog": "103, 3, buffer, 100", "fsopen": "430, b'tmpfs', 0",
    "open_tree": "428, -100, b'/', 1", "seccomp": "317, 1, 0, 0",
    "a call that no list has": "460, 0, 0, 0", "vsock": "41, 40, 1, 0",
    "netlink": "41, 16, 3, 0", "packets": "41, 17, 3, 0", "crypto sockets": "41, 38, 5, 0",
    "quotactl": "179, 0, 0, 0, 0",
    "sethostname": "170, b'a', 1", "settimeofday": "164, buffer, 0", "iopl": "172, 3", "acct": "163, 0",
    "landlock_create_ruleset": "444, 0, 0, 1", "sync": "162", "syncfs": "306, 1",
    "huge pages of the machine": "9, 0, 1 << 21, 3, 0x40022, -1, 0", "a lease": "72, 0, 1024, 0",
    "a watch of a folder": "72, os.open('/usr/bin', 0), 1026, 1", "core scheduling": "157, 62, 0, 0, 0, buffer",
}  # fmt: skip
CALLS = {
    f"system call {name}": attack(f"{_CALLS}\nif not refused({words}): print('ESCAPED')")
    for name, words in X86_CALLS.items()
}
CALLS["32-bit calls"] = attack(
    """
    import ctypes, mmap
    code = bytes.fromhex("b814000000" "cd80" "c3")  # mov eax, 20 (getpid of 32-bit programs); int 0x80; ret
    page = mmap.mmap(-1, 4096, prot=7)
    page.write(code)
    address = ctypes.addressof(ctypes.c_char.from_buffer(page))
    ctypes.CFUNCTYPE(ctypes.c_long)(address)()
    print("ESCAPED")
    """,
    "crashed",
)

FORGING = {
    "printing what looks like our protocol": attack(
        """
        import json, os, struct
        header = json.dumps({"reason": "ended", "status": 0, "cpu_s": 0, "wall_s": 0, "pieces": [7, 0, 0, 0]}).encode()
        frame = struct.pack("<II", len(header) + 7, len(header)) + header + b"ESCAPED"
        for number in range(1, 64):
            try: os.write(number, frame)
            except OSError: pass
        for number in range(1, 64):
            try: os.write(number, b"\\0" * 16 + struct.pack("<i", 0))
            except OSError: pass
        """
    ),
    "closing every descriptor": attack("import os\nos.closerange(0, 4096)"),
    "poking every descriptor": attack(
        """
        import fcntl, os, socket
        for number in range(0, 64):
            for poke in (lambda: os.lseek(number, 0, 0), lambda: os.ftruncate(number, 0), lambda: os.read(number, 0),
                         lambda: fcntl.fcntl(number, fcntl.F_SETFL, os.O_NONBLOCK),
                         lambda: socket.socket(fileno=os.dup(number)).send(b"ESCAPED")):
                try: poke()
                except OSError: pass
        """
    ),
    "a module that shadows ours": attack(
        """
        import os, sys
        for name in ("json", "os", "socket", "polyrl", "struct", "resource", "sitecustomize", "usercustomize"):
            with open(f"/tmp/{name}.py", "w") as file: file.write("print('ESCAPED')\\nraise SystemExit(0)")
        os.makedirs("/tmp/polyrl/rewards", exist_ok=True)
        sys.path.insert(0, "/tmp")
        """
    ),
    "changing the interpreter": attack(
        """
        import builtins, gc, json, os, sys
        builtins.compile = builtins.exec = builtins.open = lambda *args, **kwargs: "ESCAPED"
        os._exit = os.write = os.fork = lambda *args: None
        json.dumps = lambda *args, **kwargs: "ESCAPED"
        frame = sys._getframe()
        while frame is not None:
            frame.f_locals.update(reason="ended", code=0); frame = frame.f_back
        """
    ),
    "exit with success": attack("import os\nos._exit(0)", "failed"),
    "a thread that stays": attack(
        "import threading, time\nthreading.Thread(target=time.sleep, args=(3600,)).start()", "timed_out"
    ),
    "invalid text": attack("import os\nos.write(1, bytes(range(256)) * 100)"),
    "deep recursion": attack("import sys\nsys.setrecursionlimit(10**9)\ndef f(): return f()\nf()", *ENDED),
    "a crash": attack("import ctypes\nctypes.string_at(0)", "crashed"),
}

ATTACKS = RESOURCES | LOOKING | REACHING | CALLS | FORGING
