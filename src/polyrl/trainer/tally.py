"""The metrics of a step: sums that stay on the device while it trains, and are read once when it is over.

A loss is divided by the denominator of its update, then averaged over the step's updates. Every other metric is a mean
over the step's trained tokens, or a maximum. Ranks combine their metrics when the step is over.
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
        """The losses since the last update."""
        self._closed: dict[str, Tensor] = {}
        self._num_closed = 0

    def add(self, told: Mapping[str, Tensor]) -> None:
        """Add numbers of tokens. The metric is their mean over the step's trained tokens."""
        _add(self._sums, told)

    def add_losses(self, told: Mapping[str, Tensor]) -> None:
        """Add weighted sums of losses, which are divided when their update is made."""
        _add(self._open, told)

    def peak(self, told: Mapping[str, Tensor]) -> None:
        for name, numbers in told.items():
            most = numbers.detach().max().double()
            self._peaks[name] = torch.maximum(self._peaks[name], most) if name in self._peaks else most

    def close(self, denominator: float) -> None:
        """Note that an update was made from the losses since the last one, with this denominator."""
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
