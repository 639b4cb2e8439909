"""Machines on one switch, as network namespaces: each has a link of its own, with so many bits a second each way.

Needs root, `ip` and `tc` (package iproute2). Everything made here is named after this process and removed at the end.
"""

import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager


def why_not() -> str:
    """Why there can be no such network here; empty when there can."""
    if os.getuid() != 0:
        return "network namespaces need root"
    missing = [name for name in ("ip", "tc") if shutil.which(name) is None]
    return f"there is no `{missing[0]}` (package iproute2)" if missing else ""


class Star:
    """Machine i has the address 10.203.NETWORK.(i + 1) on every network that it is linked to."""

    def __init__(self, num_machines: int, num_networks: int) -> None:
        self._hub = f"polyrl-hub-{os.getpid()}"
        self.machines = [f"polyrl-m{index}-{os.getpid()}" for index in range(num_machines)]
        self._num_networks = num_networks

    def inside(self, machine: int, *argv: str) -> list[str]:
        return ["ip", "netns", "exec", self.machines[machine], *argv]

    def address(self, machine: int, network: int = 0) -> str:
        return f"10.203.{network}.{machine + 1}"

    def received_bytes(self, machine: int, network: int = 0) -> int:
        path = f"/sys/class/net/net{network}/statistics/rx_bytes"
        done = subprocess.run(self.inside(machine, "cat", path), capture_output=True, timeout=20, check=True)
        return int(done.stdout)

    def build(self, mbit_s: int) -> None:
        for name in (self._hub, *self.machines):
            _run("ip", "netns", "add", name)
            _run("ip", "-n", name, "link", "set", "lo", "up")
        for network in range(self._num_networks):
            _run("ip", "-n", self._hub, "link", "add", f"switch{network}", "type", "bridge")
            _run("ip", "-n", self._hub, "link", "set", f"switch{network}", "up")
            for index, machine in enumerate(self.machines):
                self._link(index, machine, network, mbit_s)

    def _link(self, index: int, machine: str, network: int, mbit_s: int) -> None:
        near, far = f"net{network}", f"port{network}-{index}"
        _run("ip", "-n", machine, "link", "add", near, "type", "veth", "peer", "name", far, "netns", self._hub)
        _run("ip", "-n", machine, "addr", "add", f"{self.address(index, network)}/24", "dev", near)
        _run("ip", "-n", machine, "link", "set", near, "up")
        _run("ip", "-n", self._hub, "link", "set", far, "master", f"switch{network}")
        _run("ip", "-n", self._hub, "link", "set", far, "up")
        for namespace, link in ((machine, near), (self._hub, far)):
            rate = ("rate", f"{mbit_s}mbit", "burst", "256kb", "latency", "50ms")
            _run("tc", "-n", namespace, "qdisc", "add", "dev", link, "root", "tbf", *rate)

    def remove(self) -> None:
        for name in (*self.machines, self._hub):
            subprocess.run(["ip", "netns", "del", name], capture_output=True, timeout=20, check=False)


@contextmanager
def star(num_machines: int, mbit_s: int, num_networks: int = 1) -> Iterator[Star]:
    net = Star(num_machines, num_networks)
    before = signal.signal(signal.SIGTERM, _end) if threading.current_thread() is threading.main_thread() else None
    try:
        net.build(mbit_s)
        yield net
    finally:
        net.remove()
        if before is not None:
            signal.signal(signal.SIGTERM, before)


def _end(*_: object) -> None:
    """A bench that is told to end takes its network down first."""
    sys.exit(143)


def _run(*argv: str) -> None:
    done = subprocess.run(argv, capture_output=True, text=True, timeout=20, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(argv)}: {done.stderr.strip()}")
