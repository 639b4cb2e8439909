"""The system calls that a program may not make, as a seccomp filter: instructions of classic BPF, written by hand.

Rules kept here: the filter names what is refused, and refuses every call that is newer than the list. A refused call
returns EPERM; an unknown one returns ENOSYS, so that libraries fall back to older calls. Calls of another architecture
(32-bit calls on a 64-bit machine) kill the process, because their numbers mean something else. Sockets are of the Unix
family alone: an empty network namespace has no interfaces, but vsock, netlink and others do not belong to one.
"""

import platform
import struct
from collections.abc import Mapping

from polyrl.errors import UserError

_REFUSED: dict[str, tuple[int | None, int | None]] = {
    # other processes' memory and descriptors
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "kcmp": (312, 272),
    "process_madvise": (440, 440), "pidfd_getfd": (438, 438),
    # files that no mount leads to, and accounting
    "name_to_handle_at": (303, 264), "open_by_handle_at": (304, 265), "fanotify_init": (300, 262),
    "fanotify_mark": (301, 263), "lookup_dcookie": (212, 18), "quotactl": (179, 60), "quotactl_fd": (443, 443),
    "acct": (163, 89), "nfsservctl": (180, 42), "inotify_init": (253, None), "inotify_init1": (294, 26),
    # memory that no limit of ours counts
    "memfd_create": (319, 279), "memfd_secret": (447, 447), "shmget": (29, 194), "shmat": (30, 196),
    "shmdt": (67, 197), "shmctl": (31, 195), "msgget": (68, 186), "msgsnd": (69, 189), "msgrcv": (70, 188),
    "msgctl": (71, 187), "semget": (64, 190), "semop": (65, 193), "semctl": (66, 191), "semtimedop": (220, 192),
    "mq_open": (240, 180), "mq_unlink": (241, 181), "mq_timedsend": (242, 182), "mq_timedreceive": (243, 183),
    "mq_notify": (244, 184), "mq_getsetattr": (245, 185),
    # parts of the kernel that have had many holes, and that no answer needs
    "bpf": (321, 280), "perf_event_open": (298, 241), "userfaultfd": (323, 282), "keyctl": (250, 219),
    "add_key": (248, 217), "request_key": (249, 218), "io_uring_setup": (425, 425), "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427), "io_setup": (206, 0), "io_destroy": (207, 1), "io_submit": (209, 2),
    "io_cancel": (210, 3), "io_getevents": (208, 4), "vmsplice": (278, 75), "remap_file_pages": (216, 234),
    "seccomp": (317, 277), "modify_ldt": (154, None), "uselib": (134, None),
    "landlock_create_ruleset": (444, 444), "landlock_add_rule": (445, 445), "landlock_restrict_self": (446, 446),
    # ways to have no core, for which a program gets more time
    "setpriority": (141, 140), "sched_setparam": (142, 118), "sched_setscheduler": (144, 119),
    "sched_setaffinity": (203, 122), "sched_setattr": (314, 274), "ioprio_set": (251, 30),
    # the machine itself, and waiting for its disks, which no kill interrupts
    "sync": (162, 81), "syncfs": (306, 267),
    "kexec_load": (246, 104), "kexec_file_load": (320, 294), "init_module": (175, 105), "finit_module": (313, 273),
    "delete_module": (176, 106), "create_module": (174, None), "get_kernel_syms": (177, None),
    "query_module": (178, None), "reboot": (169, 142), "swapon": (167, 224), "swapoff": (168, 225),
    "settimeofday": (164, 170), "clock_settime": (227, 112), "clock_adjtime": (305, 266), "adjtimex": (159, 171),
    "iopl": (172, None), "ioperm": (173, None), "syslog": (103, 116), "vhangup": (153, 58), "_sysctl": (156, None),
    "sysfs": (139, None), "ustat": (136, None), "personality": (135, 92), "mbind": (237, 235),
    "set_mempolicy": (238, 237), "get_mempolicy": (239, 236), "migrate_pages": (256, 238), "move_pages": (279, 239),
    "set_mempolicy_home_node": (450, 450),
}  # fmt: skip
_NAMESPACES: dict[str, tuple[int | None, int | None]] = {
    "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41), "chroot": (161, 51), "open_tree": (428, 428),
    "move_mount": (429, 429), "fsopen": (430, 430), "fsconfig": (431, 431), "fsmount": (432, 432),
    "fspick": (433, 433), "mount_setattr": (442, 442), "unshare": (272, 97), "setns": (308, 268),
    "sethostname": (170, 161), "setdomainname": (171, 162),
}  # fmt: skip
"""The calls that the zygote needs to set a program's namespaces up, and that the program is refused."""
_NOTHING_TO_DO: dict[str, tuple[int, int]] = {
    "fsync": (74, 82), "fdatasync": (75, 83), "sync_file_range": (277, 84), "msync": (26, 227),
}  # fmt: skip
"""Calls that return 0 and do nothing. A program's own files lie in memory; for the system's, which it can only read,
they would have the machine write its disk, and wait for it where no kill interrupts."""
_MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
_CLONE, _CLONE3, _SOCKET, _SOCKETPAIR, _IOCTL = (56, 220), (435, 435), (41, 198), (53, 199), (16, 29)
_PRLIMIT, _SETRLIMIT, _SIGACTION, _FCNTL, _PRCTL = (302, 261), (160, 164), (13, 134), (72, 25), (157, 167)
_MMAP, _SETSOCKOPT = (9, 222), (54, 208)
_LAST_KNOWN = 456
_X32_BIT = 0x40000000
_NEW_NAMESPACES = 0x7E020080
"""All CLONE_NEW* flags of clone(2)."""
_RLIMIT_CORE = 4
_AF_UNIX = 1
_SIGCHLD, _MAP_SHARED, _MAP_ANONYMOUS, _MAP_HUGETLB = 17, 0x01, 0x20, 0x40000
_PR_SCHED_CORE = 62
"""Keeps others off the same core's second thread, which then idles: a way to slow them down, and to have no core."""
_TYPING = {"TIOCSTI": 0x5412, "TIOCLINUX": 0x541C}
_WATCHES = {"F_SETLEASE": 1024, "F_NOTIFY": 1026}
"""Of the machine's files: a lease holds up whoever opens a file to write."""
_BUFFER_SIZES = {"SO_SNDBUF": 7, "SO_RCVBUF": 8, "SO_SNDBUFFORCE": 32, "SO_RCVBUFFORCE": 33}

_EPERM, _ENOSYS, _EAFNOSUPPORT = 1, 38, 97
_KILL, _ERRNO, _ALLOW = 0x80000000, 0x00050000, 0x7FFF0000
_LOAD, _RETURN, _EQUAL, _ABOVE, _AT_LEAST, _ANY_BIT = 0x20, 0x06, 0x15, 0x25, 0x35, 0x45
_NUMBER, _ARCHITECTURE, _FIRST, _SECOND, _THIRD, _FOURTH = 0, 4, 16, 24, 32, 40
"""Offsets in the kernel's seccomp_data. Arguments have 64 bits; the lower half comes first on both machines."""

_Instruction = tuple[int, int, int, int]


def filter_for(*, is_program: bool, machine: str | None = None) -> bytes:
    """Return the filter of programs, or that of the zygote, which may make namespaces. Raises UserError."""
    name = platform.machine() if machine is None else machine
    if name not in _MACHINES:
        raise UserError(f"the sandbox knows no system calls of {name}; expected one of {', '.join(_MACHINES)}")
    index, architecture = _MACHINES[name]
    refused = _REFUSED | (_NAMESPACES if is_program else {})
    program: list[_Instruction] = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        *_unless(_EQUAL, architecture, _KILL),
        (_LOAD, 0, 0, _NUMBER),
        *_when(_AT_LEAST, _X32_BIT, _KILL),
        *_when(_ABOVE, _LAST_KNOWN, _ERRNO | _ENOSYS),
    ]
    for numbers in refused.values():
        number = numbers[index]
        if number is not None:
            program += _when(_EQUAL, number, _ERRNO | _EPERM)
    program += _of_programs(index) if is_program else []
    for family in (_SOCKET, _SOCKETPAIR):
        program += _argument(family[index], _FIRST, _unless(_EQUAL, _AF_UNIX, _ERRNO | _EAFNOSUPPORT))
    program += _argument(_IOCTL[index], _SECOND, _one_of(_TYPING, _ERRNO | _EPERM))
    program.append((_RETURN, 0, 0, _ALLOW))
    return b"".join(struct.pack("<HBBI", *one) for one in program)


def _of_programs(index: int) -> list[_Instruction]:
    """Return what programs are refused beyond the zygote, by the arguments of calls."""
    refused = _ERRNO | _EPERM
    program = _when(_EQUAL, _CLONE3[index], _ERRNO | _ENOSYS)  # its flags lie in memory, which no filter sees
    for numbers in _NOTHING_TO_DO.values():
        program += _when(_EQUAL, numbers[index], _ERRNO)
    program += _argument(_CLONE[index], _FIRST, _when(_ANY_BIT, _NEW_NAMESPACES, refused))
    program += _argument(_SETRLIMIT[index], _FIRST, _when(_EQUAL, _RLIMIT_CORE, refused))
    program += _argument(_PRLIMIT[index], _SECOND, _sets(_RLIMIT_CORE, _THIRD))
    program += _argument(_SIGACTION[index], _FIRST, _sets(_SIGCHLD, _SECOND))
    program += _argument(_MMAP[index], _FOURTH, [*_when(_ANY_BIT, _MAP_HUGETLB, refused), *_SHARED_BY_NOBODY])
    program += _argument(_SETSOCKOPT[index], _THIRD, _one_of(_BUFFER_SIZES, refused))
    program += _argument(_FCNTL[index], _SECOND, _one_of(_WATCHES, refused))
    return program + _argument(_PRCTL[index], _FIRST, _when(_EQUAL, _PR_SCHED_CORE, refused))


_SHARED_BY_NOBODY: list[_Instruction] = [
    (_ANY_BIT, 0, 2, _MAP_ANONYMOUS),
    (_ANY_BIT, 0, 1, _MAP_SHARED),
    (_RETURN, 0, 0, _ERRNO | _EPERM),
]
"""Shared memory without a file: /proc does not say how much there is once it is out of a page table."""


def _sets(which: int, new: int) -> list[_Instruction]:
    """Refuse to set one limit, or what is done with one signal. `new` is the argument with the address of the new one,
    in two halves; it is null for a mere query.

    A limit of core dumps of 1 keeps the machine's handler, which runs as root outside, from being started; 0 does not.
    The kernel adds the CPU time of a child whose parent ignores SIGCHLD to no other process.
    """
    return [
        (_EQUAL, 0, 5, which),
        (_LOAD, 0, 0, new),
        (_EQUAL, 0, 2, 0),
        (_LOAD, 0, 0, new + 4),
        (_EQUAL, 1, 0, 0),
        (_RETURN, 0, 0, _ERRNO | _EPERM),
    ]


def _when(test: int, value: int, verdict: int) -> list[_Instruction]:
    return [(test, 0, 1, value), (_RETURN, 0, 0, verdict)]


def _one_of(values: Mapping[str, int], verdict: int) -> list[_Instruction]:
    return [one for value in values.values() for one in _when(_EQUAL, value, verdict)]


def _unless(test: int, value: int, verdict: int) -> list[_Instruction]:
    return [(test, 1, 0, value), (_RETURN, 0, 0, verdict)]


def _argument(number: int, offset: int, checks: list[_Instruction]) -> list[_Instruction]:
    """Check an argument of one call; what passes is allowed."""
    body = [(_LOAD, 0, 0, offset), *checks, (_RETURN, 0, 0, _ALLOW)]
    return [(_EQUAL, 0, len(body), number), *body]
