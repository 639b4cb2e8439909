"""Ranks: processes on one host that train one model together, each with a part of it and a part of every batch.

    ranks = Ranks.join(RankInfo(rank, size))     every process says which one it is; returns when all are there
    ranks.broadcast(data)                    rank zero's bytes, at every rank
    ranks.exchange(data)                     everybody's bytes, at every rank
    ranks.use("cuda")                        where the model is to be; a GPU for each

Rules kept here: what ranks say to each other are bytes in tensors, which nobody unpickles. It goes over gloo on the CPU
and waits for as long as it takes: between two steps the others wait for rank zero, which waits for answers. A rank that
is gone closes its connections, and whoever waits for it is told at once. Tensors of the model travel by gloo between
CPUs and by NCCL between GPUs, one GPU a rank.

Left out: what is said (leading), how a model is divided (sharding), and who starts the processes.
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
"""For all to be there, and for a pass that all make together."""
_LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}


class RankInfo(NamedTuple):
    rank: int
    size: int
    meeting_point: str = ""
    """A file that all of them can reach; empty: what the environment says, as torchrun leaves it."""


class Peers(Protocol):
    """All that most of the trainer must know of the others."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def exchange(self, data: bytes) -> list[bytes]:
        """What everybody said, in the order of ranks."""
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
        for name, value in _LOOPBACK.items():  # nobody beyond this machine takes part
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
        """cpu or cuda. Raises UserError where there are not as many GPUs."""
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
        """Rank zero's. What others give is not looked at."""
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
        """Have whoever waits for another rank fail, from another thread. Over gloo they fail by themselves."""
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
