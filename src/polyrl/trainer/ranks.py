"""Ranks: processes on one host that train one model together, each with a shard of it and a part of every batch.

    ranks = Ranks.join(RankInfo(rank, size))     every process says which rank it is; returns when all are there
    ranks.broadcast(data)                    rank zero's bytes, at every rank
    ranks.exchange(data)                     every rank's bytes, at every rank
    ranks.use("cuda")                        where the model is to be; one GPU per rank

Rules kept here: ranks exchange bytes in tensors, which are never unpickled. These go over gloo on the CPU, practically
without a timeout: between two steps the other ranks wait for rank zero, which waits for answers. A rank that is gone
closes its connections, and a rank waiting for it fails at once. Tensors of the model travel by gloo between CPUs and by
NCCL between GPUs, with one GPU per rank.

Left out: the commands (leading.py), sharding a model (sharding.py), and starting the processes.
"""

import os
from datetime import timedelta
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from polyrl.errors import UserError

_PATIENCE = timedelta(days=365)
_MEETING_S = 600.0
"""The timeout for all ranks to join, and for a pass that all ranks run together."""
_LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}


class RankInfo(NamedTuple):
    rank: int
    size: int
    meeting_point: str = ""
    """A file that all ranks can reach. Empty: take the environment variables that torchrun sets."""


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
        self.rank, self.size = info.rank, info.size
        self.device = torch.device("cpu")
        self._talk = talk
        self._mesh: DeviceMesh | None = None

    @classmethod
    def join(cls, info: RankInfo) -> "Ranks":
        for name, value in _LOOPBACK.items():  # all ranks are on this machine
            os.environ.setdefault(name, value)
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() and dist.is_nccl_available() else "gloo"
        patience = timedelta(seconds=_MEETING_S)
        if info.meeting_point:
            store = FileStore(info.meeting_point, info.size)
            dist.init_process_group(backend, store=store, rank=info.rank, world_size=info.size, timeout=patience)
        else:
            dist.init_process_group(backend, timeout=patience)
        talk = dist.new_group(backend="gloo", timeout=_PATIENCE)
        assert isinstance(talk, dist.ProcessGroup)
        return cls(info, talk)

    def use(self, device: str) -> None:
        """Choose the device type, cpu or cuda. Raises UserError if there are fewer GPUs than ranks."""
        if device == "cuda":
            check_gpus(self.size)
            self.device = torch.device(device, self.rank)
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


def check_gpus(num_ranks: int) -> None:
    num = torch.cuda.device_count()
    if num_ranks > num:
        raise UserError(
            f"train.ranks: {num_ranks} ranks and {num} GPUs; expected a GPU for each rank, or model.device=cpu"
        )


def _tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
