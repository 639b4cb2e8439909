"""Two regions far from a trainer of two machines, in network namespaces; every machine is one of its own.

    10.210.0.1, .2  home 10.210.0.254 ==== 80 ms, so many Mbit/s ==== 10.211.0.254 eu  10.211.0.1, .2, .3
                                      ==== another one like it   ==== 10.212.0.254 us  10.212.0.1, .2, .3

Needs root, `ip` and /dev/net/tun. Everything made here is named after this process and removed at the end.
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.chaos import namespaces

REGIONS = ("eu", "us")
PLACES = ("home", *REGIONS)
NUM_MACHINES = {"home": 2, "eu": 3, "us": 3}
ROUND_TRIP_S = 0.08
_LONG_LINK = Path(__file__).with_name("long_link.py")


def why_not() -> str:
    """Why there can be no such network here; empty when there can."""
    return namespaces.why_not() or ("" if Path("/dev/net/tun").exists() else "there is no /dev/net/tun")


def address(place: str, machine: int) -> str:
    return f"10.{210 + PLACES.index(place)}.0.{machine + 1}"


class World:
    def __init__(self) -> None:
        self._links: list[subprocess.Popen[bytes]] = []

    def _router(self, place: str) -> str:
        return f"polyrl-{place}-{os.getpid()}"

    def _machine(self, place: str, machine: int) -> str:
        return f"polyrl-{place}{machine}-{os.getpid()}"

    def inside(self, place: str, machine: int, *argv: str) -> list[str]:
        return ["ip", "netns", "exec", self._machine(place, machine), *argv]

    def bytes_into(self, region: str) -> int:
        """Bytes that came over the region's long link."""
        path = "/sys/class/net/long-home/statistics/rx_bytes"
        argv = ["ip", "netns", "exec", self._router(region), "cat", path]
        return int(subprocess.run(argv, capture_output=True, timeout=20, check=True).stdout)

    def cut(self, region: str) -> None:
        """Nothing goes in or out of the region any more, and nobody is told."""
        _run("ip", "-n", self._router(region), "link", "set", "long-home", "down")

    def heal(self, region: str) -> None:
        _run("ip", "-n", self._router(region), "link", "set", "long-home", "up")
        _run("ip", "-n", self._router(region), "route", "add", "default", "dev", "long-home")

    def build(self, mbit_s: float) -> None:
        for place in PLACES:
            self._build_place(place)
        home = self._router("home")
        for region in REGIONS:
            router = self._router(region)
            argv = [sys.executable, str(_LONG_LINK), home, router, str(ROUND_TRIP_S / 2), str(mbit_s)]
            link = subprocess.Popen(argv, stdout=subprocess.PIPE)
            self._links.append(link)
            assert link.stdout is not None and link.stdout.readline() == b"ready\n"
            _run("ip", "-n", home, "link", "set", f"long-{region}", "up")
            _run("ip", "-n", home, "route", "add", f"{address(region, -1)}/24", "dev", f"long-{region}")
            self.heal(region)

    def _build_place(self, place: str) -> None:
        router, gateway = self._router(place), address(place, 253)
        _run("ip", "netns", "add", router)
        _run("ip", "-n", router, "link", "set", "lo", "up")
        _run("ip", "-n", router, "link", "add", "switch", "type", "bridge")
        _run("ip", "-n", router, "addr", "add", f"{gateway}/24", "dev", "switch")
        _run("ip", "-n", router, "link", "set", "switch", "up")
        _run("ip", "netns", "exec", router, "sysctl", "-qw", "net.ipv4.ip_forward=1")
        for machine in range(NUM_MACHINES[place]):
            name, port = self._machine(place, machine), f"port{machine}"
            _run("ip", "netns", "add", name)
            _run("ip", "-n", name, "link", "set", "lo", "up")
            _run("ip", "-n", name, "link", "add", "net", "type", "veth", "peer", "name", port, "netns", router)
            _run("ip", "-n", name, "addr", "add", f"{address(place, machine)}/24", "dev", "net")
            _run("ip", "-n", name, "link", "set", "net", "up")
            _run("ip", "-n", router, "link", "set", port, "master", "switch", "up")
            _run("ip", "-n", name, "route", "add", "default", "via", gateway)

    def remove(self) -> None:
        for link in self._links:
            link.kill()
            link.wait(10)
        machines = [self._machine(place, machine) for place in PLACES for machine in range(NUM_MACHINES[place])]
        for name in (*machines, *map(self._router, PLACES)):
            subprocess.run(["ip", "netns", "del", name], capture_output=True, timeout=20, check=False)


def _run(*argv: str) -> None:
    done = subprocess.run(argv, capture_output=True, text=True, timeout=20, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(argv)}: {done.stderr.strip()}")


@contextmanager
def two_regions(mbit_s: float) -> Iterator[World]:
    world = World()
    try:
        world.build(mbit_s)
        yield world
    finally:
        world.remove()
