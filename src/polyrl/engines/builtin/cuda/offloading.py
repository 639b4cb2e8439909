"""A model's weights in the host's memory, while its device is another's.

Parameters, and views of one matrix among them (merging.py), stay the tensors they are: only the memory behind them goes
and comes, and need not come to the same place. A CUDA graph, which holds addresses, is stale afterwards.
"""

from typing import Any

import torch


class Offloading:
    """The host's memory stays with it: what is pinned once is pinned for all sleeps."""

    def __init__(self, model: Any) -> None:
        storages = [one.untyped_storage() for one in (*model.parameters(), *model.buffers())]
        self._storages = list({one.data_ptr(): one for one in storages if one.nbytes()}.values())
        self._sizes = [one.nbytes() for one in self._storages]
        self._hosts: list[torch.Tensor] = []
        self.is_away = False

    @torch.no_grad()
    def take_away(self) -> None:
        if self.is_away:
            return
        if not self._hosts:
            pinned = self._storages[0].device.type == "cuda"
            self._hosts = [torch.empty(size, dtype=torch.uint8, pin_memory=pinned) for size in self._sizes]
        for host, storage in zip(self._hosts, self._storages, strict=True):
            host.copy_(_bytes_of(storage))
            storage.resize_(0)
        self.is_away = True

    @torch.no_grad()
    def bring_back(self) -> None:
        if not self.is_away:
            return
        for host, storage, size in zip(self._hosts, self._storages, self._sizes, strict=True):
            storage.resize_(size)
            _bytes_of(storage).copy_(host, non_blocking=True)
        if self._storages[0].device.type == "cuda":
            torch.cuda.synchronize()
        self.is_away = False


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
