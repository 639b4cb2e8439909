"""Ranks: processes on one or several nodes that train one model together, each with a shard of it and a part of every
batch.

    ranks = Ranks.join(RankInfo(rank, size))     every process says which rank it is; returns when all are there
    ranks.broadcast(data)                    rank zero's bytes, at every rank
    ranks.exchange(data)                     every rank's bytes, at every rank
    ranks.use("cuda")                        where the model is to be; one GPU per rank

Rules kept here: ranks exchange bytes in tensors, which are never unpickled. These go over gloo on the CPU, practically
without a timeout: between two steps the other ranks wait for rank zero, which waits for answers. A rank that is gone
closes its connections, and a rank waiting for it fails at once; a node that is gone closes none (run/rank_watch.py).
Tensors of the model travel by gloo between CPUs and by NCCL between GPUs, with one GPU per rank. On one node nothing
leaves it; between nodes all goes over the interface that leads to rank zero's node, unless the environment names
another.

Left out: the commands (leading.py), sharding a model (sharding.py), and starting the processes.
"""

import os
import socket
from datetime import timedelta
from typing import NamedTuple, Protocol

import psutil
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, Store, TCPStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from polyrl.errors import UserError, one_line

_PATIENCE = timedelta(days=365)
_MEETING_S = 600.0
"""The timeout for all ranks to join, and for a pass that all ranks run together."""
_INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
_MEETING_POINT = "tcp://"


class RankInfo(NamedTuple):
    rank: int
    size: int
    meeting_point: str = ""
    """A file that all ranks can reach, or tcp://HOST:PORT of rank zero's node. Empty: take the environment variables
    that torchrun sets."""
    local_rank: int | None = None
    """The number of its GPU on its node; none: all ranks are on one node."""
    local_size: int | None = None
    """The number of ranks on its node."""
    node: int = 0
    num_nodes: int = 1

    @property
    def host(self) -> str:
        """The address of rank zero's node; empty if all ranks are on one node."""
        if self.num_nodes == 1:
            return ""
        if self.meeting_point:
            return self.meeting_point.removeprefix(_MEETING_POINT).rpartition(":")[0].strip("[]")
        return os.environ["MASTER_ADDR"]


class Peers(Protocol):
    """The view of the other ranks that most of the trainer needs."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def exchange(self, data: bytes) -> list[bytes]:
        """Return every rank's bytes, in the order of ranks."""
        ...


class Alone:
    rank, size = 0, 1

    def exchange(self, data: bytes) -> list[bytes]:
        return [data]


ALONE = Alone()


class Ranks:
    def __init__(self, info: RankInfo, talk: dist.ProcessGroup) -> None:
        self.rank, self.size, self.info = info.rank, info.size, info
        self.device = torch.device("cpu")
        self._talk = talk
        self._mesh: DeviceMesh | None = None

    @classmethod
    def join(cls, info: RankInfo) -> "Ranks":
        for name in _INTERFACES:
            os.environ.setdefault(name, interface_to(info.host) if info.host else "lo")
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() and dist.is_nccl_available() else "gloo"
        patience = timedelta(seconds=_MEETING_S)
        if info.meeting_point:
            store = open_store(info)
            dist.init_process_group(backend, store=store, rank=info.rank, world_size=info.size, timeout=patience)
        else:
            dist.init_process_group(backend, timeout=patience)
        talk = dist.new_group(backend="gloo", timeout=_PATIENCE)
        assert isinstance(talk, dist.ProcessGroup)
        return cls(info, talk)

    def use(self, device: str) -> None:
        """Choose the device type, cpu or cuda. Raises UserError if there are fewer GPUs than ranks."""
        if device == "cuda":
            check_gpus(self.size if self.info.local_size is None else self.info.local_size)
            self.device = torch.device(device, self.rank if self.info.local_rank is None else self.info.local_rank)
            torch.cuda.set_device(self.device)
        self._mesh = init_device_mesh(device, (self.size,))

    @property
    def mesh(self) -> DeviceMesh:
        if self._mesh is None:
            raise RuntimeError("the ranks were not told which devices to use")
        return self._mesh

    def broadcast(self, data: bytes = b"") -> bytes:
        """Return rank zero's bytes. The `data` of other ranks is ignored."""
        length = torch.tensor([len(data)])
        dist.broadcast(length, 0, group=self._talk)
        told = _tensor(data) if self.rank == 0 else torch.empty(int(length), dtype=torch.uint8)
        dist.broadcast(told, 0, group=self._talk)
        return data if self.rank == 0 else told.numpy().tobytes()

    def exchange(self, data: bytes) -> list[bytes]:
        lengths = [torch.empty(1, dtype=torch.int64) for _ in range(self.size)]
        dist.all_gather(lengths, torch.tensor([len(data)]), group=self._talk)
        longest = max(int(one) for one in lengths)
        told = [torch.empty(longest, dtype=torch.uint8) for _ in range(self.size)]
        dist.all_gather(told, _tensor(data.ljust(longest, b"\0")), group=self._talk)
        return [one.numpy().tobytes()[: int(length)] for one, length in zip(told, lengths, strict=True)]

    def break_off(self) -> None:
        """Make ranks that wait for another rank fail; called from another thread. Over gloo they fail by themselves."""
        if self.device.type == "cuda":
            dist.distributed_c10d._abort_process_group()

    def close(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()


def open_store(info: RankInfo, *, timeout_s: float = _MEETING_S) -> Store:
    """Return the place where ranks leave each other their addresses. Raises UserError if its port is taken; RuntimeError
    if rank zero's node does not answer in time."""
    if not info.meeting_point.startswith(_MEETING_POINT):
        return FileStore(info.meeting_point, info.size)
    host, _, port = info.meeting_point.removeprefix(_MEETING_POINT).rpartition(":")
    patience, is_first = timedelta(seconds=timeout_s), info.rank == 0
    try:
        return TCPStore(host.strip("[]"), int(port), None, is_first, patience, False, multi_tenant=True)
    except RuntimeError as error:
        if is_first:
            raise UserError(f"--meet {host}:{port}: this node cannot listen there: {one_line(error)}") from error
        raise


def interface_to(host: str) -> str:
    """Return the name of the interface by which this node reaches another one, or has that address itself. Raises
    UserError."""
    try:
        family, _, _, _, place = socket.getaddrinfo(host, 1, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(place)  # sends nothing: only the way there is looked up
            ours = probe.getsockname()[0]
    except OSError as error:
        raise UserError(f"{host}, the address of the first node: cannot be reached from here: {error.strerror}") from error
    for name, addresses in psutil.net_if_addrs().items():
        if any(one.address.partition("%")[0] == ours for one in addresses):
            return name
    raise UserError(f"{host}: no interface of this node has {ours}, the address from which that would be reached")


def check_gpus(num_ranks: int) -> None:
    num = torch.cuda.device_count()
    if num_ranks > num:
        raise UserError(
            f"train.ranks: {num_ranks} ranks on this node and {num} GPUs; expected a GPU for each rank, or model.device=cpu"
        )


def _tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
