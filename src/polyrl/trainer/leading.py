"""Rank zero leads: what it is asked to do it has all ranks do.

    leader.begin(step); leader.add(groups); leader.finish()      what the loop calls, as with one rank
    leader.weights(), leader.whole_state()                       whole tensors, one at a time
    leader.stop()                                                the others may go

    follow(ranks, learner)                                          every other rank, until it is told to stop

Rank zero alone has a client, a manager, rewards and files. The others hear one command at a time, as bytes, and do the
same as it does, in the same order: that is what makes their collectives meet.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import msgspec
import torch
from msgspec import Struct

from polyrl.errors import UserError
from polyrl.trainer import sharding
from polyrl.trainer.batch import TrainGroup, decode_groups, encode_groups
from polyrl.trainer.critic import Critic
from polyrl.trainer.model import Policy
from polyrl.trainer.optimizer import Optimizer
from polyrl.trainer.ranks import Ranks
from polyrl.trainer.step import Added, StepAccumulator, StepStats

Tensor = torch.Tensor


class Learner(NamedTuple):
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

    def whole_state(self) -> Iterable[tuple[str, Tensor]]:
        """What a checkpoint holds, of the only rank. Not copies."""
        return self.state().items()

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """From a checkpoint, of however many ranks. Raises UserError if it is of another model."""
        self.optimizer.load_state_dict(_of("policy/", state))
        if self.critic is not None:
            self.critic.optimizer.load_state_dict(_of("critic/", state))


def _of(prefix: str, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): one for name, one in state.items() if name.startswith(prefix)}


class Begin(Struct, frozen=True, tag=True):
    step: int
    num_steps: int | None


class Add(Struct, frozen=True, tag=True):
    groups: bytes


class Finish(Struct, frozen=True, tag=True):
    pass


class GatherWeights(Struct, frozen=True, tag=True):
    pass


class GatherState(Struct, frozen=True, tag=True):
    pass


class StopRanks(Struct, frozen=True, tag=True):
    pass


RankCommand = Begin | Add | Finish | GatherWeights | GatherState | StopRanks


class Leader:
    """Keeps the contract of `Steps`; one thread at a time. `lost` is asked when something fails: which rank is gone, in
    a line, or None if that is not why.
    """

    def __init__(self, ranks: Ranks, learner: Learner, lost: Callable[[RuntimeError], str | None]) -> None:
        self._ranks, self._crew, self._lost = ranks, learner, lost

    @property
    def device_type(self) -> str:
        return self._crew.steps.device_type

    def begin(self, step: int, num_steps: int | None = None) -> None:
        with self._all(Begin(step, num_steps)):
            self._crew.steps.begin(step, num_steps)

    def add(self, groups: Sequence[TrainGroup]) -> Added:
        with self._all(Add(encode_groups(groups))):
            return self._crew.steps.add(groups)

    def finish(self) -> StepStats:
        with self._all(Finish()):
            return self._crew.steps.finish()

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

    def whole_state(self) -> Iterator[tuple[str, Tensor]]:
        """What a checkpoint holds. Not copies, where nothing had to be gathered."""
        with self._all(GatherState()):
            yield from sharding.gather(self._crew.state())

    def stop(self) -> None:
        """Whoever is gone already need not be told."""
        try:
            with self._all(StopRanks()):
                pass
        except (UserError, RuntimeError):
            pass

    @contextmanager
    def _all(self, command: RankCommand) -> Iterator[None]:
        try:
            self._ranks.broadcast(msgspec.msgpack.encode(command))
            yield
        except RuntimeError as error:
            why = self._lost(error)
            if why is None:
                raise
            raise UserError(why) from error


def follow(ranks: Ranks, learner: Learner) -> None:
    """Do as rank zero does. Raises RuntimeError when it is gone."""
    while True:
        match msgspec.msgpack.decode(ranks.broadcast(), type=RankCommand):
            case Begin(step, num_steps):
                learner.steps.begin(step, num_steps)
            case Add(groups):
                learner.steps.add(decode_groups(groups))
            case Finish():
                learner.steps.finish()
            case GatherWeights():
                for _ in _weights(learner):
                    pass
            case GatherState():
                for _ in sharding.gather(learner.state()):
                    pass
            case StopRanks():
                return


def _weights(learner: Learner) -> Iterator[tuple[str, Tensor]]:
    return sharding.gather(learner.policy.parameters(), learner.policy.dtype)
