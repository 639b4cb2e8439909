"""Ranks: processes on one or several nodes that train one model together, each with a shard of it and a part of every
batch.

    ranks = Ranks.join(RankInfo(rank, size))     every process says which rank it is; returns when all are there
    ranks.broadcast(data)                    rank zero's bytes, at every rank
    ranks.exchange(data)                     every rank's bytes, at every rank
    ranks.use("cuda", num_replicas=2)        where the model is to be; one GPU per rank
    ranks.replica                            the ranks that share one copy of the model, as a group of their own
    ranks.add_up(gradients)                  sums over replicas, in place

Ranks are divided into replicas of equal size. The ranks of a replica shard one copy of the model, and make every pass
together; replicas meet only in `add_up` and `exchange`. Commands go from rank zero to the first rank of each other
replica, and its answers come back, on two `RankLine`s, so that each replica can be told something else at another time.

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
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import NamedTuple, Protocol

import psutil
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, Store, TCPStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from polyrl.errors import RankLost, UserError, one_line

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


class Context(NamedTuple):
    """Ranks that train on the same samples, each with a run of their tokens (contexts.py)."""

    rank: int
    size: int
    group: dist.ProcessGroup


class RankGroup:
    """Ranks that exchange bytes. `rank` is this process's place among `members`, which are ranks of all."""

    def __init__(self, members: Sequence[int], rank: int, talk: dist.ProcessGroup) -> None:
        self.rank, self.size = rank, len(members)
        self.device = torch.device("cpu")
        self._first, self._talk = members[0], talk
        self._mesh: DeviceMesh | None = None
        self.context: Context | None = None

    @property
    def mesh(self) -> DeviceMesh:
        """The devices that share one copy of the model, which this rank's is one of."""
        if self._mesh is None:
            raise RuntimeError("the ranks were not told which devices to use")
        return self._mesh

    def broadcast(self, data: bytes = b"") -> bytes:
        """Return the first rank's bytes. The `data` of other ranks is ignored."""
        return _broadcast(data, self._first, self._talk, speaks=self.rank == 0)

    def exchange(self, data: bytes) -> list[bytes]:
        lengths = [torch.empty(1, dtype=torch.int64) for _ in range(self.size)]
        dist.all_gather(lengths, torch.tensor([len(data)]), group=self._talk)
        longest = max(int(one) for one in lengths)
        told = [torch.empty(longest, dtype=torch.uint8) for _ in range(self.size)]
        dist.all_gather(told, _tensor(data.ljust(longest, b"\0")), group=self._talk)
        return [one.numpy().tobytes()[: int(length)] for one, length in zip(told, lengths, strict=True)]


class RankLine:
    """Messages from one rank to another, in order. Each end belongs to one thread."""

    def __init__(self, sender: int, group: dist.ProcessGroup) -> None:
        self._sender, self._group = sender, group

    def send(self, data: bytes) -> None:
        """Send a message. Returns when the other rank has it."""
        _broadcast(data, self._sender, self._group, speaks=True)

    def receive(self) -> bytes:
        """Wait for the next message. Raises RuntimeError when the other rank is gone."""
        return _broadcast(b"", self._sender, self._group, speaks=False)


class RankLines(NamedTuple):
    """The two ways between rank zero and the first rank of another replica."""

    down: RankLine
    """From rank zero."""
    up: RankLine


class NodeHeads:
    """The first rank of each node, as `weights.shares.ServingNodes`."""

    def __init__(self, heads: RankGroup, beside: RankGroup) -> None:
        self._heads, self._beside = heads, beside
        self.number, self.size = heads.rank, heads.size
        self.lost: Callable[[RuntimeError], RankLost | None] = lambda _: None
        """Returns which rank is gone, or None if no rank is."""

    def exchange(self, data: bytes) -> list[bytes]:
        try:
            return self._heads.exchange(data)
        except RuntimeError as error:
            lost = self.lost(error)
            if lost is None:
                raise
            raise lost from error

    def exchange_beside(self, data: bytes) -> list[bytes]:
        return self._beside.exchange(data)


class Ranks(RankGroup):
    """All ranks, and this rank's place among them."""

    def __init__(self, info: RankInfo, talk: dist.ProcessGroup) -> None:
        super().__init__(range(info.size), info.rank, talk)
        self.info = info
        self.num_replicas, self.replica_number = 1, 0
        self.replica: RankGroup = self
        """The ranks that share this rank's copy of the model."""
        self.lines: dict[int, RankLines] = {}
        """By the number of the replica: all of them at rank zero, its own at the first rank of another replica."""
        self.heads: NodeHeads | None = None
        """Where this is the first rank of its node, and there are several nodes."""
        self._across: dist.ProcessGroup | None = None
        """The ranks that hold the same shard, one of each replica."""

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

    def use(self, device: str, num_replicas: int = 1, context_ranks: int = 1) -> None:
        """Choose the device type, cpu or cuda, and divide the ranks. Raises UserError if GPUs are too few."""
        if device == "cuda":
            check_gpus(self.size if self.info.local_size is None else self.info.local_size)
            self.device = torch.device(device, self.rank if self.info.local_rank is None else self.info.local_rank)
            torch.cuda.set_device(self.device)
        per = self.size // num_replicas
        mesh = init_device_mesh(device, (num_replicas, per), mesh_dim_names=("replica", "shard"))
        self._mesh = mesh["shard"]
        if context_ranks > 1:
            of_contexts = init_device_mesh(
                device, (self.size // context_ranks, context_ranks), mesh_dim_names=("work", "context")
            )
            self.context = Context(self.rank % context_ranks, context_ranks, of_contexts.get_group("context"))
        if num_replicas > 1:
            self._across = mesh.get_group("replica")
            self._divide(num_replicas, per)
        if self.info.num_nodes > 1:
            members = self.first_ranks()
            groups = [_new_group(members) for _ in range(2)]
            if self.rank in members:
                heads, beside = (
                    RankGroup(members, members.index(self.rank), one)
                    for one in groups
                    if isinstance(one, dist.ProcessGroup)
                )
                self.heads = NodeHeads(heads, beside)

    def first_ranks(self) -> list[int]:
        """Return the first rank of each node."""
        return list(range(0, self.size, self.size // self.info.num_nodes))

    def _divide(self, num_replicas: int, per: int) -> None:
        """Make the groups. All ranks make all of them, in the same order: torch demands it."""
        self.num_replicas, (self.replica_number, place) = num_replicas, divmod(self.rank, per)
        for number in range(num_replicas):
            members = list(range(number * per, (number + 1) * per))
            talk = _new_group(members)
            if number == self.replica_number:
                assert isinstance(talk, dist.ProcessGroup)
                self.replica = RankGroup(members, place, talk)
                self.replica.device, self.replica._mesh, self.replica.context = self.device, self._mesh, self.context
        for number in range(1, num_replicas):
            first = number * per
            down, up = _new_group([0, first]), _new_group([0, first])
            if self.rank in (0, first):
                assert isinstance(down, dist.ProcessGroup) and isinstance(up, dist.ProcessGroup)
                self.lines[number] = RankLines(RankLine(0, down), RankLine(first, up))

    def add_up(self, tensors: Iterable[torch.Tensor]) -> None:
        """Sum tensors over replicas, in place: each rank with those that hold the same shard. All call it with tensors
        of the same shapes, in the same order."""
        for work in [dist.all_reduce(one, group=self._across, async_op=True) for one in tensors if one.numel()]:
            assert work is not None
            work.wait()

    def break_off(self) -> None:
        """Make ranks that wait for another rank fail; called from another thread. Over gloo they fail by themselves."""
        if self.device.type == "cuda":
            dist.distributed_c10d._abort_process_group()

    def close(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()


def open_store(info: RankInfo, *, timeout_s: float = _MEETING_S) -> Store:
    """Return the place where ranks leave each other addresses. Raises UserError if its port is taken; RuntimeError if
    rank zero's node does not answer in time."""
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
        raise UserError(f"{host}, the first node: cannot be reached from here: {error.strerror}") from error
    for name, addresses in psutil.net_if_addrs().items():
        if any(one.address.partition("%")[0] == ours for one in addresses):
            return name
    raise UserError(f"{host}: no interface of this node has {ours}, the address from which that would be reached")


def check_gpus(num_ranks: int) -> None:
    num = torch.cuda.device_count()
    if num_ranks > num:
        raise UserError(
            f"train.ranks: {num_ranks} ranks and {num} GPUs on this node; expected a GPU for each, or model.device=cpu"
        )


def _new_group(members: list[int]) -> object:
    """Make a group for messages, which may be waited for without limit. A rank outside gets something else."""
    return dist.new_group(members, backend="gloo", timeout=_PATIENCE)


def _broadcast(data: bytes, sender: int, group: dist.ProcessGroup, *, speaks: bool) -> bytes:
    length = torch.tensor([len(data)])
    dist.broadcast(length, sender, group=group)
    told = _tensor(data) if speaks else torch.empty(int(length), dtype=torch.uint8)
    dist.broadcast(told, sender, group=group)
    return data if speaks else told.numpy().tobytes()


def _tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
