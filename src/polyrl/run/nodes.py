"""Ranks on several nodes without torchrun: the same command on each, with the node's number.

    polyrl train recipe.toml --ranks 8 --nodes 2 --meet 10.0.0.1:29500               on 10.0.0.1: runs the run
    polyrl train --nodes 2 --node 1 --meet 10.0.0.1:29500                            on the other: lends its devices

Node zero has the recipe, the manager and the run's directory. Another node asks it how many ranks there are, starts its
own, and starts them again when the run has lost a rank and goes on. It ends when the run is over.
"""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from typing import NamedTuple

import msgspec

from polyrl.errors import UserError, one_line
from polyrl.run import processes
from polyrl.trainer.ranks import RankInfo, open_store

RANK_INFO = "POLYRL_RANK"
"""The facts that a started rank is told of itself, as JSON."""
_NODES = "POLYRL_NODES"
_NUM_RANKS = "polyrl/ranks"
_WAIT_S = 600.0
"""How long a node waits for node zero to begin, or to go on."""
_LOOK_EVERY_S = 0.2
_LOOK_AGAIN_S = 0.5
_PROBE_S = 5.0
_MOST_RANKS = 1 << 16
_SLURM_NODE = "SLURM_NODEID"
TORCHRUN = "TORCHELASTIC_RUN_ID"


class Nodes(NamedTuple):
    num: int
    meet: str
    """HOST:PORT of node zero."""
    number: int = 0

    def info(self, rank: int, size: int) -> RankInfo:
        """Return what a rank has to know of itself. Raises UserError if nodes would have different numbers of ranks."""
        if size % self.num:
            raise UserError(
                f"train.ranks: {size} ranks on {self.num} nodes; expected a multiple of {self.num} (--nodes)"
            )
        node, local = divmod(rank, size // self.num)
        return RankInfo(rank, size, f"tcp://{self.meet}", local, size // self.num, node, self.num)

    def ranks_here(self, size: int) -> range:
        return range(self.number * size // self.num, (self.number + 1) * size // self.num)


def of_options(num: int | None, number: int | None, meet: str | None, environment: Mapping[str, str]) -> Nodes | None:
    """Return the nodes that the command line names; None without --nodes. Raises UserError."""
    if num is None:
        if number is not None or meet is not None:
            raise UserError("--node and --meet: are for several nodes; expected --nodes as well")
        return None
    if TORCHRUN in environment:
        raise UserError("--nodes: torchrun has started the ranks, and knows the machines; leave it out")
    host, _, port = (meet or "").rpartition(":")
    if meet is None or not host or not port.isascii() or not port.isdecimal() or not 0 < int(port[:6]) < 1 << 16:
        raise UserError(f"--meet: {meet or 'is missing'}; expected HOST:PORT of node zero, which all nodes can reach")
    if number is None:
        given = environment.get(_SLURM_NODE, "0")
        number = int(given) if given.isascii() and given.isdecimal() else 0
    if not 1 <= num <= _MOST_RANKS or not 0 <= number < num:
        raise UserError(f"--nodes {num} --node {number}: expected a node from 0 to the number of nodes less one")
    return None if num == 1 else Nodes(num, meet, number)


def remember(nodes: Nodes | None) -> None:
    """Keep this in the environment, also for the process that goes on when a rank was lost."""
    if nodes is not None:
        os.environ[_NODES] = msgspec.json.encode(nodes).decode()


def remembered(environment: Mapping[str, str]) -> Nodes | None:
    return msgspec.json.decode(environment[_NODES], type=Nodes) if _NODES in environment else None


def check_ranks(environment: Mapping[str, str], size: int) -> None:
    """Raise UserError if a run of so many ranks cannot be divided between the nodes that were named."""
    wanted = remembered(environment)
    if wanted is not None:
        wanted.info(0, size)


def announce(info: RankInfo) -> object:
    """Tell the other nodes how many ranks there are, for as long as the result is kept. Raises UserError."""
    if why := _why_unknown(info.host):
        raise UserError(f"--meet {info.host}: is not known here: {why}; expected this machine, as the others know it")
    store = open_store(info)
    meet = info.meeting_point.rpartition("/")[2]
    others = info.num_nodes - 1
    print(
        f"node 0: waits at {meet} for {others} other{'s' if others > 1 else ''}; there: "
        f"polyrl train --nodes {info.num_nodes} --node K --meet {meet}",
        flush=True,
    )
    store.set(_NUM_RANKS, str(info.size))
    return store


def start_rank(info: RankInfo, output: "int | None") -> "subprocess.Popen[bytes]":
    """Start a rank other than zero on this node. `output` is a file's descriptor; None: this process's own output."""
    return subprocess.Popen(
        [sys.executable, "-m", "polyrl", "train"],
        stdin=subprocess.DEVNULL, stdout=output, stderr=output,
        env={**os.environ, RANK_INFO: msgspec.json.encode(info).decode()},
        start_new_session=True, preexec_fn=processes.terminate_with_parent,  # noqa: PLW1509  it takes no lock
    )  # fmt: skip


def lend(nodes: Nodes) -> int:
    """Run the ranks of a node other than zero until the run is over. Raises UserError if node zero does not come."""
    while True:
        print(f"node {nodes.number}: waits for node 0 at {nodes.meet}", flush=True)
        size = _world_size(nodes)
        infos = [nodes.info(rank, size) for rank in nodes.ranks_here(size)]
        print(f"node {nodes.number}: has ranks {infos[0].rank} to {infos[-1].rank} of {size}", flush=True)
        started = [start_rank(info, None) for info in infos]
        try:
            code = _until_one_fails(started)
        finally:
            for one in started:
                one.kill()
                one.wait()
        if code == 0:
            print(f"node {nodes.number}: the run is over", flush=True)
            return 0
        print(f"node {nodes.number}: a rank has ended ({processes.show_code(code)})", flush=True)


def _until_one_fails(started: "list[subprocess.Popen[bytes]]") -> int:
    while True:
        codes = [one.poll() for one in started]
        if failed := [code for code in codes if code]:
            return failed[0]
        if all(code == 0 for code in codes):
            return 0
        time.sleep(_LOOK_EVERY_S)


def _why_unknown(host: str) -> str:
    """Return why a host has no address; empty if it has one."""
    try:
        socket.getaddrinfo(host.strip("[]"), None)
    except (OSError, UnicodeError) as error:
        return one_line(error)
    return ""


def _is_listening(meet: str) -> bool:
    """Return whether a process listens there. torch would fill the terminal with traces of its own until one does."""
    host, _, port = meet.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), _PROBE_S).close()
    except OSError:
        return False
    return True


def _world_size(nodes: Nodes) -> int:
    """Return the number of all ranks, as soon as node zero says so."""
    until, told = time.monotonic() + _WAIT_S, ""
    while time.monotonic() < until:
        why = _why_unknown(nodes.meet.rpartition(":")[0])
        if why and why != told:
            print(f"node {nodes.number}: {nodes.meet} is not known here yet: {why}", flush=True)
        told = why
        if why or not _is_listening(nodes.meet):
            time.sleep(_LOOK_AGAIN_S)
            continue
        try:
            store = open_store(RankInfo(1, 2, f"tcp://{nodes.meet}", num_nodes=nodes.num), timeout_s=_LOOK_EVERY_S * 25)
            size = int(store.get(_NUM_RANKS))
            if not 0 < size <= _MOST_RANKS:
                raise UserError(f"--meet {nodes.meet}: speaks of {size} ranks; expected node zero of a run there")
            return size
        except (RuntimeError, ValueError):
            time.sleep(_LOOK_EVERY_S)
    raise UserError(f"--meet {nodes.meet}: node zero has not begun there within {_WAIT_S:.0f} s")
