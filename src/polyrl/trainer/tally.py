"""What is told of a step: sums that stay on the device while it trains, and one look at them when it is over.

A loss is a mean of its update, by the update's own denominator, and then a mean over the step's updates. Everything
else is a mean over the step's trained tokens, or a maximum. Ranks add theirs together when the step is over.
"""

from collections.abc import Mapping

import msgspec
import torch

from polyrl.trainer.ranks import ALONE, Peers

Tensor = torch.Tensor


class Tally:
    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._sums: dict[str, Tensor] = {}
        self._peaks: dict[str, Tensor] = {}
        self._open: dict[str, Tensor] = {}
        """Losses since the last update."""
        self._closed: dict[str, Tensor] = {}
        self._num_closed = 0

    def add(self, told: Mapping[str, Tensor]) -> None:
        """Numbers of tokens, whose mean over the step is told."""
        _add(self._sums, told)

    def add_losses(self, told: Mapping[str, Tensor]) -> None:
        """Weighted sums, to be divided when their update is made."""
        _add(self._open, told)

    def peak(self, told: Mapping[str, Tensor]) -> None:
        for name, numbers in told.items():
            most = numbers.detach().max().double()
            self._peaks[name] = torch.maximum(self._peaks[name], most) if name in self._peaks else most

    def close(self, denominator: float) -> None:
        """An update was made of the losses since the last one."""
        _add(self._closed, {name: total / denominator for name, total in self._open.items()})
        self._open = {}
        self._num_closed += 1

    def metrics(self, num_tokens: int, peers: Peers = ALONE) -> dict[str, float]:
        sums = {name: total / max(1, num_tokens) for name, total in self._sums.items()}
        sums |= {name: total / self._num_closed for name, total in self._closed.items()}
        told = self._look(sums), self._look(self._peaks)
        if peers.size == 1:
            return told[0] | told[1]
        means: dict[str, float] = {}
        peaks: dict[str, float] = {}
        for theirs in peers.exchange(msgspec.msgpack.encode(told)):
            its_sums, its_peaks = msgspec.msgpack.decode(theirs, type=tuple[dict[str, float], dict[str, float]])
            for name, number in its_sums.items():
                means[name] = means.get(name, 0.0) + number
            for name, number in its_peaks.items():
                peaks[name] = max(peaks.get(name, number), number)
        return means | peaks

    def _look(self, numbers: Mapping[str, Tensor]) -> dict[str, float]:
        if not numbers:
            return {}
        found = torch.stack([one.to(self._device) for one in numbers.values()]).tolist()
        return dict(zip(numbers, found, strict=True))


def _add(sums: dict[str, Tensor], told: Mapping[str, Tensor]) -> None:
    for name, numbers in told.items():
        total = numbers.detach().sum(dtype=torch.float64)
        sums[name] = sums[name] + total if name in sums else total
