"""Rank zero leads: what it is asked to do it has all ranks do.

    leader.begin(step); leader.add(groups); leader.finish()      what the loop calls, as with one rank
    leader.weights(), leader.state()                             whole tensors, one at a time
    leader.stop()                                                the others may go

    follow(ranks, crew)                                          every other rank, until it is told to stop

Rank zero alone has a client, a manager, rewards and files. The others hear one command at a time, as bytes, and do the
same as it does, in the same order: that is what makes their collectives meet.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch
from msgspec import Struct

from polyrl.errors import UserError
from polyrl.trainer import sharding
from polyrl.trainer.batch import Group, TrainSample, Turn
from polyrl.trainer.critic import Critic
from polyrl.trainer.model import Policy
from polyrl.trainer.optimizer import Optimizer
from polyrl.trainer.ranks import Ranks
from polyrl.trainer.step import Added, StepAccumulator, StepStats

Tensor = torch.Tensor


class Crew(NamedTuple):
    """What every rank holds its part of."""

    policy: Policy
    optimizer: Optimizer
    critic: Critic | None
    steps: StepAccumulator

    def state(self) -> dict[str, Tensor]:
        """What a checkpoint holds; of several ranks, this one's part."""
        tensors = {f"policy/{name}": one for name, one in self.optimizer.state_dict().items()}
        if self.critic is not None:
            tensors |= {f"critic/{name}": one for name, one in self.critic.optimizer.state_dict().items()}
        return tensors

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """From a checkpoint, of however many ranks. Raises UserError if it is of another model."""
        self.optimizer.load_state_dict(_of("policy/", state))
        if self.critic is not None:
            self.critic.optimizer.load_state_dict(_of("critic/", state))


def _of(prefix: str, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): one for name, one in state.items() if name.startswith(prefix)}


class Begin(Struct, frozen=True, tag=True):
    step: int


class Add(Struct, frozen=True, tag=True):
    groups: bytes


class Finish(Struct, frozen=True, tag=True):
    pass


class Abort(Struct, frozen=True, tag=True):
    pass


class GatherWeights(Struct, frozen=True, tag=True):
    pass


class GatherState(Struct, frozen=True, tag=True):
    pass


class Stop(Struct, frozen=True, tag=True):
    pass


Command = Begin | Add | Finish | Abort | GatherWeights | GatherState | Stop


class Leader:
    """Keeps the contract of `Steps`; one thread at a time. `lost` is asked when something fails: which rank is gone, in
    a line, or None if that is not why.
    """

    def __init__(self, ranks: Ranks, crew: Crew, lost: Callable[[RuntimeError], str | None]) -> None:
        self._ranks, self._crew, self._lost = ranks, crew, lost

    @property
    def device_type(self) -> str:
        return self._crew.steps.device_type

    def begin(self, step: int) -> None:
        with self._all(Begin(step)):
            self._crew.steps.begin(step)

    def add(self, groups: Sequence[Group]) -> Added:
        with self._all(Add(encode_groups(groups))):
            return self._crew.steps.add(groups)

    def finish(self) -> StepStats:
        with self._all(Finish()):
            return self._crew.steps.finish()

    def abort(self) -> None:
        with self._all(Abort()):
            self._crew.steps.abort()

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """In the precision that they are served in. The engine's own copy takes each as it passes."""
        policy = self._crew.policy
        served: dict[str, Tensor] = {}
        if policy.loaded.model is not policy.model:
            served = dict(policy.loaded.model.named_parameters())
        with self._all(GatherWeights()):
            for name, one in _weights(self._crew):
                if name in served:
                    with torch.no_grad():
                        served[name].copy_(one)
                yield name, one

    def state(self) -> dict[str, Tensor]:
        """In this machine's memory."""
        with self._all(GatherState()):
            return {name: one.cpu() for name, one in sharding.gather(self._crew.state())}

    def stop(self) -> None:
        """Whoever is gone already need not be told."""
        try:
            with self._all(Stop()):
                pass
        except (UserError, RuntimeError):
            pass

    @contextmanager
    def _all(self, command: Command) -> Iterator[None]:
        try:
            self._ranks.broadcast(msgspec.msgpack.encode(command))
            yield
        except RuntimeError as error:
            why = self._lost(error)
            if why is None:
                raise
            raise UserError(why) from error


def follow(ranks: Ranks, crew: Crew) -> None:
    """Do as rank zero does. Raises RuntimeError when it is gone."""
    while True:
        match msgspec.msgpack.decode(ranks.broadcast(), type=Command):
            case Begin(step):
                crew.steps.begin(step)
            case Add(groups):
                crew.steps.add(decode_groups(groups))
            case Finish():
                crew.steps.finish()
            case Abort():
                crew.steps.abort()
            case GatherWeights():
                for _ in _weights(crew):
                    pass
            case GatherState():
                for _ in sharding.gather(crew.state()):
                    pass
            case Stop():
                return


def _weights(crew: Crew) -> Iterator[tuple[str, Tensor]]:
    return sharding.gather(crew.policy.parameters(), crew.policy.dtype)


# Samples as bytes: arrays are their type, three letters of numpy's, and what they hold.

_ARRAY = 1
_KIND_BYTES = 3


def encode_groups(groups: Sequence[Group]) -> bytes:
    return msgspec.msgpack.encode([[tuple(sample) for sample in group] for group in groups], enc_hook=_array_to_bytes)


def decode_groups(data: bytes) -> list[list[TrainSample]]:
    groups = msgspec.msgpack.decode(data, ext_hook=_array_from_bytes)
    return [[_sample(*sample) for sample in group] for group in groups]


def _sample(*fields: Any) -> TrainSample:
    sample = TrainSample(*fields)
    return sample._replace(written_by=tuple(Turn(*one) for one in sample.written_by))


def _array_to_bytes(value: Any) -> msgspec.msgpack.Ext:
    if not isinstance(value, np.ndarray) or value.ndim != 1:
        raise TypeError(f"{type(value).__name__} is not sent to other ranks; expected numbers, text, or flat arrays")
    return msgspec.msgpack.Ext(_ARRAY, value.dtype.str.encode() + value.tobytes())


def _array_from_bytes(_: int, data: memoryview) -> "np.ndarray[Any, Any]":
    return np.frombuffer(bytearray(data[_KIND_BYTES:]), np.dtype(bytes(data[:_KIND_BYTES]).decode()))
