"""The walls as values: what is mounted, which calls are refused, and how results are compared. Nothing runs here."""

import math
import struct
import time
from typing import Any

import msgspec
import pytest

from polyrl.errors import UserError
from polyrl.rewards.sandbox import bubblewrap
from polyrl.rewards.sandbox.comparing import read_value, same_output, same_value
from polyrl.rewards.sandbox.inside import frames, values
from polyrl.rewards.sandbox.languages import check_installed, find_language
from polyrl.rewards.sandbox.program import SandboxLimits
from polyrl.rewards.sandbox.seccomp import filter_for

LAYOUT = bubblewrap.MachineLayout(
    bwrap="/usr/bin/bwrap",
    python="/home/me/python/bin/python3",
    prefix="/home/me/python",
    inside="/home/me/code/inside",
    uid=500,
    gid=500,
    links={"/bin": "usr/bin"},
    present=("/usr", "/etc/ld.so.cache"),
)
KILL, ALLOW, EPERM = 0x80000000, 0x7FFF0000, 0x00050001


def run_filter(program: bytes, number: int, *args: int, architecture: int = 0xC000003E) -> int:
    """Interpret a filter as the kernel does."""
    data = struct.pack("<iI6Q", number, architecture, 0, *args, *[0] * (5 - len(args)))
    held, at = 0, 0
    while True:
        code, if_true, if_false, value = struct.unpack_from("<HBBI", program, at * 8)
        at += 1
        match code:
            case 0x20:
                (held,) = struct.unpack_from("<I", data, value)
            case 0x06:
                return value
            case _:
                passed = {0x15: held == value, 0x25: held > value, 0x35: held >= value, 0x45: bool(held & value)}[code]
                at += if_true if passed else if_false


@pytest.mark.parametrize(
    ("machine", "architecture", "mount", "write"), [("x86_64", 0xC000003E, 165, 1), ("aarch64", 0xC00000B7, 40, 64)]
)
def test_the_filter_refuses_by_name_and_whatever_it_does_not_know(
    machine: str, architecture: int, mount: int, write: int
):
    program, zygote = (filter_for(is_program=one, machine=machine) for one in (True, False))
    assert run_filter(program, write, architecture=architecture) == ALLOW
    assert run_filter(program, mount, architecture=architecture) == EPERM
    assert run_filter(zygote, mount, architecture=architecture) == ALLOW
    assert run_filter(program, 460, architecture=architecture) == 0x00050026
    assert run_filter(program, write, architecture=0x40000003) == KILL
    assert len(program) // 8 < 4096


def test_the_filter_looks_at_arguments():
    program = filter_for(is_program=True, machine="x86_64")
    assert run_filter(program, 56, 0x11) == ALLOW
    for flag in (0x80, 0x20000, 0x02000000, 0x04000000, 0x08000000, 0x10000000, 0x20000000, 0x40000000):
        assert run_filter(program, 56, 0x11 | flag) == EPERM
    assert run_filter(program, 41, 1) == ALLOW
    assert [run_filter(program, 41, family) for family in (2, 10, 16, 17, 38, 40)] == [0x00050061] * 6
    assert run_filter(program, 302, 0, 4, 0x7F0000000000, 0) == EPERM
    assert run_filter(program, 302, 0, 4, 0x1000, 0) == EPERM
    assert run_filter(program, 302, 0, 4, 0, 0x1000) == ALLOW
    assert run_filter(program, 302, 0, 7, 0x1000, 0) == ALLOW
    assert run_filter(program, 160, 4, 0x1000) == EPERM
    assert run_filter(program, 16, 0, 0x5412) == EPERM
    assert run_filter(program, 16, 0, 0x5401) == ALLOW
    assert run_filter(program, 0x40000000 | 1) == KILL
    assert run_filter(program, 13, 17, 0x7F0000000000) == run_filter(program, 13, 17, 0x1000) == EPERM  # SIGCHLD
    assert run_filter(program, 13, 17, 0, 0x1000) == run_filter(program, 13, 15, 0x1000) == ALLOW
    assert run_filter(program, 9, 0, 4096, 3, 0x21) == EPERM  # shared, without a file
    assert [run_filter(program, 9, 0, 4096, 3, flags) for flags in (0x22, 0x01, 0x02, 0x4022)] == [ALLOW] * 4
    assert [run_filter(program, 54, 3, 1, name) for name in (7, 8, 32, 33)] == [EPERM] * 4
    assert run_filter(program, 54, 3, 1, 2) == ALLOW


def test_a_machine_without_a_table_is_refused():
    with pytest.raises(UserError, match="riscv64"):
        filter_for(is_program=True, machine="riscv64")


def test_nothing_is_mounted_writable_and_the_root_is_closed_last():
    words = bubblewrap.mounts(LAYOUT)
    assert "--bind" not in words and "--tmpfs" not in words and words[-2:] == ["--remount-ro", "/"]
    sources = [words[at + 1] for at, word in enumerate(words) if word == "--ro-bind"]
    assert sources == ["/usr", "/etc/ld.so.cache", "/home/me/python", "/home/me/code/inside"]
    devices = [words[at + 1] for at, word in enumerate(words) if word == "--dev-bind"]
    assert devices == [f"/dev/{one}" for one in ("null", "full", "random", "urandom")]


@pytest.mark.parametrize("uid", [0, 500])
def test_a_program_is_nobody_and_only_the_zygote_has_a_capability(uid: int):
    layout = msgspec.structs.replace(LAYOUT, uid=uid)
    settings = bubblewrap.settings_of(layout, SandboxLimits(), b"")
    words = bubblewrap.command(layout, bubblewrap.Pipes(3, 4, 5, 6), settings)
    added = [words[at + 1] for at, word in enumerate(words) if word == "--cap-add"]
    assert words[words.index("--cap-drop") + 1] == "ALL"
    assert added == ["CAP_SYS_ADMIN", *([] if uid else ["CAP_SETUID", "CAP_SETGID", "CAP_KILL"])]
    assert {f"--unshare-{one}" for one in ("user", "pid", "net", "ipc", "uts")} <= set(words)
    assert "--clearenv" in words and "--die-with-parent" in words and "--new-session" in words
    assert settings["uid"] == 1000
    assert bubblewrap.id_map(uid, is_root=uid == 0) == ("0 0 1\n1000 65534 1\n" if uid == 0 else "1000 500 1\n")


@pytest.mark.parametrize(
    ("expected", "found", "how", "same"),
    [
        ("5\n", b"5", "lines", True),
        ("a\nb", b"a  \nb\n\n", "lines", True),
        ("a b", b"a  b", "lines", False),
        ("a b", b"a\n b", "words", True),
        ("0.3333333", b"0.33333334", "words", True),
        ("1", b"1.0", "words", False),
        ("5", b"5\n", "exact", False),
        ("5", b"\xff", "lines", False),
        ("", b"", "lines", True),
    ],
)
def test_outputs_are_compared_as_the_case_says(expected: str, found: bytes, how: Any, same: bool):
    assert same_output(found, expected, how) is same


@pytest.mark.parametrize(
    ("expected", "found", "same"),
    [
        (1, True, True),
        (0.3, 0.1 + 0.2, True),
        (math.nan, math.nan, True),
        (math.inf, -math.inf, False),
        (10**400, 1.0, False),
        ("1", 1, False),
        ([1, [2]], (1, (2,)), True),
        ([1, 2], {2, 1}, True),
        ([1, 3], {2, 1}, False),
        ([[1, 2]], {(1, 2)}, True),
        ({"1": 2}, {1: 2}, True),
        ({"a": [1]}, {"a": (1.0000000001,)}, True),
        ({"a": 1}, {"a": 1, "b": 2}, False),
        ({"a": 1}, {"b": 1}, False),
        (None, 0, False),
        ({}, object(), False),
        ("x", b"x", False),
    ],
)
def test_values_are_compared_by_content(expected: Any, found: Any, same: bool):
    assert same_value(expected, read_value(values.encode(found))) is same


def test_no_value_takes_long_to_compare():
    same_hash = [number * (2**61 - 1) for number in range(40_000)]
    began = time.process_time()
    for said in ({"set": same_hash}, {"dict": [[one, 1] for one in same_hash]}):
        assert not same_value([1], read_value(said))
    assert not same_output(b"1" * 1_000_000, "1.5", "words")
    assert time.process_time() - began < 2.0


@pytest.mark.parametrize("value", [None, 1, 2.5, "x", [1, (2, {3})], {"a": {(1, 2): b"x"}}, {(1, "a")}])
def test_plain_values_survive_the_way_out(value: Any):
    assert values.decode(values.from_bytes(values.to_bytes(values.encode(value)))) == value


@pytest.mark.parametrize(
    "said",
    [b"", b"{", b"[" * 200_000, b'{"set": 3}', b'{"dict": [[1]]}', b'{"a": 1, "b": 2}', b'{"set": [{"dict": []}]}'],
)
def test_what_describes_no_value_is_an_error_of_one_kind(said: bytes):
    with pytest.raises(values.NotPlain):
        values.decode(values.from_bytes(said))


@pytest.mark.parametrize(
    "body", [b"", b"null", b'{"pieces": 3}', b'{"pieces": [-1]}', b'{"pieces": [5]}', b"[" * 60_000]
)
def test_a_frame_whose_pieces_do_not_fit_is_refused(body: bytes):
    with pytest.raises(frames.BadFrame):
        frames.unpack(body, len(body))


@pytest.mark.parametrize(("total", "header"), [(1 << 31, 10), (100, 200), (1000, 1 << 17)])
def test_a_frame_that_announces_too_much_is_refused_before_it_is_read(total: int, header: int):
    with pytest.raises(frames.BadFrame):
        frames.check_sizes(frames.SIZES.pack(total, header), 1 << 20)


def test_a_missing_compiler_is_one_line():
    language = find_language("cpp")
    assert language is not None and language is find_language("C++")
    with pytest.raises(UserError, match="apt-get install g\\+\\+"):
        check_installed(language, lambda name: None)
