"""A Slurm cluster of several nodes on this machine: munged, slurmctld and a slurmd a node, all on loopback.

Needs root, and the packages slurm-wlm and munge, which are installed if they may be. Everything is in one folder, and
is ended by its process id.
"""

import contextlib
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

_CONFIG = """\
ClusterName=polyrl
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
SwitchType=switch/none
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_res
SelectTypeParameters=CR_CPU
SchedulerParameters=batch_sched_delay=0,sched_interval=1,bf_interval=1
ReturnToService=2
SlurmdTimeout=6
KillWait=10
MinJobAge=10
InactiveLimit=0
JobRequeue=1
SlurmdParameters=config_overrides
{nodes}
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def why_not() -> str:
    """Why there can be no Slurm here; empty when there can. Installs it if it may."""
    if os.getuid() != 0:
        return "a Slurm cluster needs root"
    if shutil.which("slurmctld") is None and shutil.which("apt-get") is not None:
        install = ["apt-get", "install", "-y", "-qq", "--no-install-recommends", "slurm-wlm", "munge"]
        with contextlib.suppress(subprocess.TimeoutExpired):
            subprocess.run(install, capture_output=True, timeout=240, check=False)
    missing = [one for one in ("munged", "slurmctld", "slurmd", "sbatch") if shutil.which(one) is None]
    return f"there is no {missing[0]} (packages slurm-wlm and munge)" if missing else ""


class SlurmCluster:
    def __init__(self, folder: Path, num_nodes: int) -> None:
        self.folder = folder
        self.nodes = [f"n{number}" for number in range(num_nodes)]
        self.environment = {"SLURM_CONF": str(folder / "slurm.conf")}
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}

    def start(self) -> None:
        folder = self.folder
        for name in ("munge", "state"):
            (folder / name).mkdir(parents=True, mode=0o755)
        key = folder / "munge" / "key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)
        self._daemon(
            "munged", "--foreground", "--force", f"--socket={folder}/munge/socket", f"--key-file={key}",
            f"--pid-file={folder}/munge/pid", f"--log-file={folder}/munge/log", f"--seed-file={folder}/munge/seed",
        )  # fmt: skip
        self._wait((folder / "munge" / "socket").exists, "munged")
        lines = [
            f"NodeName={node} NodeHostname=localhost NodeAddr=127.0.0.1 Port={free_port()} CPUs=4 State=UNKNOWN"
            for node in self.nodes
        ]
        config = _CONFIG.format(folder=folder, port=free_port(), nodes="\n".join(lines))
        (folder / "slurm.conf").write_text(config)
        self._daemon("slurmctld", "-D", "-i")
        for node in self.nodes:
            self.start_node(node)
        self._wait(lambda: self._idle_nodes() >= len(self.nodes), "nodes")

    def start_node(self, node: str) -> None:
        self._daemon("slurmd", "-D", "-N", node, called=node)

    def kill_node(self, node: str) -> None:
        """A node loses its power: the daemon and every process that it started."""
        daemon = self._daemons.pop(node)
        jobs = self._jobs_of(node)
        parents = [psutil.Process(pid).parent() for pid in jobs]
        steps = [one.pid for one in parents if one is not None and "slurmstepd" in one.name()]
        daemon.kill()
        daemon.wait(30)
        for pid in (*steps, *jobs):  # whoever could still report how the job ended first
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, 9)

    def busy_node(self) -> str:
        """The node on which a job runs; empty if none does."""
        return self._ask("squeue", "--noheader", "--states", "running", "--format", "%N").strip()

    def release_requeued(self) -> None:
        """Slurm holds a requeued job back for two minutes."""
        told = self._ask("squeue", "--noheader", "--states", "pending", "--format", "%i|%r")
        for job in [line.partition("|")[0] for line in told.splitlines() if line.endswith("BeginTime")]:
            self._ask("scontrol", "update", f"JobId={job}", "StartTime=now")

    def _jobs_of(self, node: str) -> list[int]:
        """The processes of jobs on a node: those whose environment names it, and the step daemons above them."""
        found: list[int] = []
        for folder in Path("/proc").iterdir():
            if folder.name.isdecimal():
                with contextlib.suppress(OSError):
                    environment = (folder / "environ").read_bytes().split(b"\0")
                    if f"SLURMD_NODENAME={node}".encode() in environment:
                        found.append(int(folder.name))
        return found

    def _idle_nodes(self) -> int:
        told = self._ask("sinfo", "--noheader", "--Node", "--format", "%N %T")
        return sum(line.split()[1] == "idle" for line in told.splitlines() if len(line.split()) == 2)

    def _ask(self, *argv: str) -> str:
        environment = {**os.environ, **self.environment}
        done = subprocess.run(argv, capture_output=True, text=True, timeout=20, check=False, env=environment)
        return done.stdout

    def _daemon(self, *argv: str, called: str = "") -> None:
        log = (self.folder / f"{called or argv[0]}.out").open("ab")
        self._daemons[called or argv[0]] = subprocess.Popen(
            argv, stdout=log, stderr=log, env={**os.environ, **self.environment}, start_new_session=True
        )
        log.close()

    def _wait(self, holds: Callable[[], bool], what: str) -> None:
        until = time.monotonic() + 60.0
        while not holds():
            if time.monotonic() > until:
                logs = [file.read_text(errors="replace")[-1500:] for file in sorted(self.folder.glob("*.log"))]
                raise RuntimeError(f"{what} did not come up: {logs}")
            time.sleep(0.2)

    def stop(self) -> None:
        jobs = [pid for node in self.nodes for pid in self._jobs_of(node)]
        for daemon in reversed(self._daemons.values()):
            daemon.terminate()
        for daemon in self._daemons.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                daemon.wait(10)
            daemon.kill()
        for pid in jobs:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, 9)


@contextmanager
def slurm_cluster(folder: Path, num_nodes: int = 2) -> Iterator[SlurmCluster]:
    cluster = SlurmCluster(folder, num_nodes)
    try:
        cluster.start()
        os.environ.update(cluster.environment)
        yield cluster
    finally:
        for name in cluster.environment:
            os.environ.pop(name, None)
        cluster.stop()


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]
