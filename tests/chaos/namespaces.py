"""Three network namespaces: a public one with the manager, a home behind NAT with a worker, and the router between.

    public 10.201.0.1 ---- 10.201.0.2 router 10.202.0.1 ---- 10.202.0.2 home
                           masquerades what leaves home; public has no route back

Needs root and nft (package nftables). Everything made here is named after this process and removed at the end.
"""

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

MANAGER_ADDRESS = "10.201.0.1"
HOME_ADDRESS = "10.202.0.2"


class Namespaces(NamedTuple):
    public: str
    router: str
    home: str

    def inside(self, namespace: str, *argv: str) -> list[str]:
        return ["ip", "netns", "exec", namespace, *argv]

    def partition(self) -> None:
        """Nothing gets in or out of home any more."""
        _run(*self.inside(self.router, "ip", "link", "set", "to-home", "down"))

    def heal(self) -> None:
        _run(*self.inside(self.router, "ip", "link", "set", "to-home", "up"))


def why_not() -> str:
    """Why there can be no namespaces here; empty when there can. Installs nft if it may."""
    if os.getuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None:
        return "there is no `ip` (package iproute2)"
    if shutil.which("nft") is None and shutil.which("apt-get") is not None:
        subprocess.run(["apt-get", "install", "-y", "-qq", "nftables"], capture_output=True, timeout=120, check=False)
    return "" if shutil.which("nft") else "there is no `nft` (package nftables)"


def _run(*argv: str) -> None:
    done = subprocess.run(argv, capture_output=True, text=True, timeout=20, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(argv)}: {done.stderr.strip()}")


@contextmanager
def namespaces() -> Iterator[Namespaces]:
    names = Namespaces(*(f"polyrl-{part}-{os.getpid()}" for part in ("public", "router", "home")))
    try:
        for name in names:
            _run("ip", "netns", "add", name)
            _run(*names.inside(name, "ip", "link", "set", "lo", "up"))
        _join(names.public, "to-router", f"{MANAGER_ADDRESS}/24", names.router, "to-public", "10.201.0.2/24")
        _join(names.home, "to-router", f"{HOME_ADDRESS}/24", names.router, "to-home", "10.202.0.1/24")
        _run(*names.inside(names.home, "ip", "route", "add", "default", "via", "10.202.0.1"))
        _run(*names.inside(names.router, "sysctl", "-qw", "net.ipv4.ip_forward=1"))
        _run(*names.inside(names.router, "nft", "add table ip nat"))
        _run(*names.inside(names.router, "nft", "add chain ip nat out { type nat hook postrouting priority 100 ; }"))
        _run(*names.inside(names.router, "nft", 'add rule ip nat out oifname "to-public" masquerade'))
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, timeout=20, check=False)


class Nodes(NamedTuple):
    """Two machines of one trainer: 10.203.0.1 ---- 10.203.0.2."""

    first: str
    second: str

    def inside(self, number: int, *argv: str) -> list[str]:
        return ["ip", "netns", "exec", self[number], *argv]

    def cut(self) -> None:
        """Nothing passes between the nodes any more, and neither is told."""
        _run(*self.inside(1, "ip", "link", "set", "to-first", "down"))

    def heal(self) -> None:
        _run(*self.inside(1, "ip", "link", "set", "to-first", "up"))


FIRST_NODE = "10.203.0.1"


@contextmanager
def two_nodes() -> Iterator[Nodes]:
    nodes = Nodes(*(f"polyrl-node{number}-{os.getpid()}" for number in range(2)))
    try:
        for number, name in enumerate(nodes):
            _run("ip", "netns", "add", name)
            _run(*nodes.inside(number, "ip", "link", "set", "lo", "up"))
        _join(nodes.first, "to-second", f"{FIRST_NODE}/24", nodes.second, "to-first", "10.203.0.2/24")
        yield nodes
    finally:
        for name in nodes:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, timeout=20, check=False)


def _join(here: str, link: str, address: str, there: str, other_link: str, other_address: str) -> None:
    _run("ip", "link", "add", link, "netns", here, "type", "veth", "peer", "name", other_link, "netns", there)
    for name, one, its in ((here, link, address), (there, other_link, other_address)):
        _run("ip", "netns", "exec", name, "ip", "addr", "add", its, "dev", one)
        _run("ip", "netns", "exec", name, "ip", "link", "set", one, "up")
