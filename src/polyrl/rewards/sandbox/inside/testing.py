"""A pytest run: the tests in one process, the program in another, which the tests ask for every use of it.

Rules kept here: no code of the program runs in the tests' process, which alone has the channel of results. The two
have different disks; neither may look into the other. If the program ends or breaks off, the tests fail.
"""

import os
import socket
import sys
from typing import Any, NoReturn

from polyrl.rewards.sandbox.inside import answering, remote, values

_TOLD_BYTES = 500


def run_program(line: socket.socket, load: Any) -> NoReturn:
    """Be the program's process: load the module, say that it is there, and answer."""
    module = load()
    line.sendall(b"1")
    answering.serve(line, module)
    os._exit(0)


def run_tests(line: socket.socket, file: str, packages: str, value_fd: int) -> int:
    """Run the tests, and write how they went to the channel of values. Return pytest's exit code."""
    if line.recv(1) != b"1":
        print("the program could not be loaded", file=sys.stderr)
        return 1
    remote.install(line)
    sys.path[:] = [packages, *(one for one in sys.path if one)]
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    import pytest  # type: ignore[import-not-found]  mounted beside the programs

    book = _Book()
    options = ["-x", "-q", "--noconftest", "-c", "/dev/null", "--rootdir", os.getcwd(), "-p", "no:cacheprovider"]
    code = int(pytest.main([*options, "--tb=line", "--import-mode=importlib", file], plugins=[book]))
    data = values.to_bytes({"passed": book.num_passed, "failed": book.failed, "code": code})
    while data:
        data = data[os.write(value_fd, data) :]
    return 0


class _Book:
    """A plugin that counts."""

    def __init__(self) -> None:
        self.num_passed, self.failed = 0, ""

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when == "call" and report.passed:
            self.num_passed += 1
        if report.failed and not self.failed:
            what = str(report.longreprtext).strip().splitlines()
            self.failed = f"{report.nodeid}: {what[-1] if what else ''}"[:_TOLD_BYTES]
