"""Relays that others wrote, all installed, started and stopped alike: nginx, sglang-router, vllm-router; and none.

Rules: loopback only; ports that are free; settings as the peer's own documents recommend for streams, the same round
robin over the workers, keep-alive on both sides, no access log. A peer is ready when it says that it has all workers.
Nothing is installed outside `cache`: routers by pip into virtual environments, nginx unpacked from its Debian package
if there is none on the path.
"""

import json
import shutil
import time
import urllib.error
import urllib.request
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.environments import CannotMeasure, environment, run
from benchmarks.processes import Program, relay_cpus
from benchmarks.relay.load import Load, Peer, Programs, Reading, measure_sse
from polyrl.engines.served.process import free_port

READY_S = 30.0

NGINX = """\
worker_processes 1;
pid {folder}/nginx.pid;
events {{ worker_connections 10000; }}
http {{
    access_log off;
    client_body_temp_path {folder}/body;
    proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi;
    scgi_temp_path {folder}/scgi;
    upstream workers {{ {servers} keepalive 4096; }}
    server {{
        listen 127.0.0.1:{port} backlog=4096;
        location / {{
            proxy_pass http://workers;
            proxy_http_version 1.1;
            proxy_set_header Connection "";
            proxy_buffering off;
            proxy_read_timeout 1h;
        }}
    }}
}}
"""


class Direct:
    """No relay: the reader goes to the workers."""

    name = "direct"
    version = ""

    def start(self, worker_urls: Sequence[str]) -> tuple[str, ...]:
        return tuple(worker_urls)

    def cpu_s(self) -> float:
        return 0.0

    def rss_bytes(self) -> int:
        return 0

    def stop(self) -> None:
        pass


class Relay(ABC):
    """A program between reader and workers. Each has its own command line and its own way to say that it is ready."""

    name = ""
    version = ""

    def __init__(self, cache: Path) -> None:
        """Install it. Raises CannotMeasure."""
        self.cache = cache
        self._program: Program | None = None

    @abstractmethod
    def command(self, port: int, worker_urls: Sequence[str]) -> list[str | Path]: ...

    @abstractmethod
    def is_ready(self, url: str, num_workers: int) -> bool: ...

    def start(self, worker_urls: Sequence[str]) -> tuple[str, ...]:
        port = free_port()
        url = f"http://127.0.0.1:{port}"
        log = self.cache / "logs" / f"{self.name}.log"
        program = self._program = Program(self.command(port, worker_urls), cpus=relay_cpus(), log=log)
        deadline = time.monotonic() + READY_S
        while not self.is_ready(url, len(worker_urls)):
            if program.has_ended or time.monotonic() > deadline:
                raise CannotMeasure(f"{self.name} did not come up ({READY_S:g} s at most): {program.last_words()}")
            time.sleep(0.2)
        return (url,)

    def cpu_s(self) -> float:
        return self._program.cpu_s() if self._program else 0.0

    def rss_bytes(self) -> int:
        return self._program.rss_bytes() if self._program else 0

    def stop(self) -> None:
        if self._program:
            self._program.stop()
        self._program = None


class Nginx(Relay):
    name = "nginx"

    def __init__(self, cache: Path) -> None:
        super().__init__(cache)
        self.binary = shutil.which("nginx") or shutil.which("/usr/sbin/nginx") or _unpack_nginx(cache / "nginx")
        self.version = run([self.binary, "-v"]).rpartition("/")[2]

    def command(self, port: int, worker_urls: Sequence[str]) -> list[str | Path]:
        folder = self.cache / "nginx"
        folder.mkdir(parents=True, exist_ok=True)
        servers = " ".join(f"server {url.removeprefix('http://')};" for url in worker_urls)
        config = folder / "nginx.conf"
        config.write_text(NGINX.format(folder=folder, servers=servers, port=port), encoding="utf-8")
        return [self.binary, "-p", folder, "-c", config, "-e", "stderr", "-g", "daemon off;"]

    def is_ready(self, url: str, num_workers: int) -> bool:
        return _get(f"{url}/health") is not None


class Router(Relay):
    """sglang-router and vllm-router have one ancestor: the same flags, the same word for ready."""

    flags: tuple[str, ...] = ()
    """`launch` where it has commands; and the quietest usual log, since a line a request is no relaying."""

    def __init__(self, cache: Path) -> None:
        super().__init__(cache)
        self.programs, self.version = environment(cache / self.name, self.name)

    def command(self, port: int, worker_urls: Sequence[str]) -> list[str | Path]:
        metrics = ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(free_port())]
        where = ["--host", "127.0.0.1", "--port", str(port), *metrics]
        return [
            self.programs / self.name,
            *self.flags,
            *where,
            "--policy",
            "round_robin",
            "--worker-urls",
            *worker_urls,
        ]

    def is_ready(self, url: str, num_workers: int) -> bool:
        said = _get(f"{url}/readiness")
        return said is not None and json.loads(said).get("healthy_workers") == num_workers


class SglangRouter(Router):
    name = "sglang-router"
    flags = ("launch", "--log-level", "warn")


class VllmRouter(Router):
    name = "vllm-router"
    flags = ("--log-level", "warning")


PEERS: dict[str, Callable[[Path], Peer]] = {
    "nginx": Nginx,
    "sglang-router": SglangRouter,
    "vllm-router": VllmRouter,
}


def take_turn(
    peers: Sequence[Peer], load: Load, programs: Programs, missing: dict[str, str], *, cache: Path
) -> list[Reading]:
    """A reading of the direct connection, and of each peer."""
    readings: list[Reading] = []
    for peer in (Direct(), *peers):
        try:
            readings.append(measure_sse(peer, load, programs, cache=cache, direct=readings[0] if readings else None))
        except CannotMeasure as error:
            missing[f"{peer.name}, {load.name}, {load.num_samples} samples"] = str(error)
    return readings


def install_peers(cache: Path, missing: dict[str, str]) -> list[Peer]:
    found: list[Peer] = []
    for name, install in PEERS.items():
        try:
            found.append(install(cache))
        except CannotMeasure as error:
            missing[name] = str(error)
    return found


def _unpack_nginx(folder: Path) -> str:
    """From the Debian package, without installing it: no root, no service that starts by itself."""
    binary = folder / "root" / "usr" / "sbin" / "nginx"
    if binary.exists():
        return str(binary)
    folder.mkdir(parents=True, exist_ok=True)
    if not shutil.which("apt-get"):
        raise CannotMeasure("nginx is not there, nor apt-get to fetch it; install the package nginx")
    run(["apt-get", "download", "-qq", "nginx"], cwd=folder)
    for package in folder.glob("nginx_*.deb"):
        run(["dpkg-deb", "-x", package, folder / "root"])
    return str(binary)


def _get(url: str) -> bytes | None:
    try:
        with urllib.request.urlopen(url, timeout=2) as answer:
            return answer.read()
    except (urllib.error.URLError, OSError):
        return None
