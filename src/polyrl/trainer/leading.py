"""The first rank of a replica leads: each call on it is carried out by all ranks that share its copy of the model.

    leader.begin(step); leader.add(groups); leader.finish()      what the loop calls, as with one rank
    leader.weights(), leader.whole_state()                       whole tensors, one at a time
    leader.stop()                                                the other ranks may exit

    follow(ranks, learner)                                          every other rank, until it is told to stop

The other ranks receive one command at a time, as bytes, and carry out the same work in the same order. That is what
makes their collectives match. How several replicas divide a step is in replicas.py.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import msgspec
import torch
from msgspec import Struct

from polyrl.errors import RankLost, UserError
from polyrl.trainer import sharding
from polyrl.trainer.batch import TrainGroup, decode_groups, encode_groups
from polyrl.trainer.critic import Critic
from polyrl.trainer.model import Policy
from polyrl.trainer.optimizer import Optimizer
from polyrl.trainer.publishing import NodeShare, VersionFacts
from polyrl.trainer.ranks import RankGroup
from polyrl.trainer.state import sharded
from polyrl.trainer.state.checkpoint import TrainerState
from polyrl.trainer.state.sharded import ShardFile, ShardWriter
from polyrl.trainer.step import StepAccumulator
from polyrl.trainer.step_stats import Added, StepStats

Tensor = torch.Tensor


class Learner(NamedTuple):
    """The models and optimizers that every rank holds its shards of."""

    policy: Policy
    optimizer: Optimizer
    critic: Critic | None
    steps: StepAccumulator

    def state(self) -> dict[str, Tensor]:
        """Return the tensors of a checkpoint; with several ranks, this rank's shards."""
        tensors = {f"policy/{name}": one for name, one in self.optimizer.state_dict().items()}
        if self.critic is not None:
            tensors |= {f"critic/{name}": one for name, one in self.critic.optimizer.state_dict().items()}
        return tensors

    def whole_state(self) -> Iterable[tuple[str, Tensor]]:
        """Return the tensors of a checkpoint, for a single rank. They are not copies."""
        return self.state().items()

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Load the tensors of a checkpoint of any number of ranks. Raises UserError if it is of another model."""
        self.optimizer.load_state_dict(_of("policy/", state))
        if self.critic is not None:
            self.critic.optimizer.load_state_dict(_of("critic/", state))


def _of(prefix: str, state: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    if isinstance(state, sharding.StoredTensors):
        return state.under(prefix)
    return {name.removeprefix(prefix): one for name, one in state.items() if name.startswith(prefix)}


class Begin(Struct, frozen=True, tag=True):
    step: int
    num_steps: int | None


class Add(Struct, frozen=True, tag=True):
    groups: bytes
    first: int | None = None
    """The number of the first episode within the step, if other replicas get groups too."""


class Finish(Struct, frozen=True, tag=True):
    may_be_void: bool = False


class GatherWeights(Struct, frozen=True, tag=True):
    changes_alone: bool = False
    """Of a model with low-rank changes, gather these, not the weights that engines run."""
    facts: VersionFacts | None = None
    """The version that they are, if each node serves its share of it."""


class GatherState(Struct, frozen=True, tag=True):
    pass


class WriteState(Struct, frozen=True, tag=True):
    next_step: int


class StopRanks(Struct, frozen=True, tag=True):
    pass


RankCommand = Begin | Add | Finish | GatherWeights | GatherState | WriteState | StopRanks


class Leader:
    """Implements `Steps` for the ranks of a replica, for one thread at a time. When something fails, `lost` returns
    which rank is gone, or None if no rank is."""

    def __init__(self, ranks: RankGroup, learner: Learner, lost: Callable[[RuntimeError], RankLost | None]) -> None:
        self._ranks, self._crew, self._lost = ranks, learner, lost

    @property
    def device_type(self) -> str:
        return self._crew.steps.device_type

    def begin(self, step: int, num_steps: int | None = None) -> None:
        with self._all(Begin(step, num_steps)):
            self._crew.steps.begin(step, num_steps)

    def add(self, groups: Sequence[TrainGroup], first: int | None = None) -> Added:
        with self._all(Add(encode_groups(groups), first)):
            return self._crew.steps.add(groups, first)

    def finish(self, *, may_be_void: bool = False) -> StepStats:
        with self._all(Finish(may_be_void)):
            return self._crew.steps.finish(may_be_void=may_be_void)

    def weights(self, facts: VersionFacts | None = None) -> Iterator[tuple[str, Tensor]]:
        """Yield whole weights in the precision that they are served in, and copy each into the engine's own copy. With
        `facts`, the other ranks serve their nodes' shares of them."""
        policy = self._crew.policy
        served = dict(policy.loaded.model.named_parameters()) if policy.has_own_engine_copy else {}
        if policy.adapter is None:
            yield from self._weights_into(served, facts)
            return
        if served:
            for _ in self._weights_into(served):
                pass
        with self._all(GatherWeights(changes_alone=True, facts=facts)):
            yield from sharding.gather(policy.published().items())

    def _weights_into(
        self, served: Mapping[str, Tensor], facts: VersionFacts | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        with self._all(GatherWeights(facts=facts)):
            for name, one in sharding.gather(self._crew.policy.served_parts()):
                if name in served:
                    with torch.no_grad():
                        served[name].copy_(one)
                yield name, one

    def refresh_engine_copy(self) -> None:
        """Copy the weights into the engine's own copy, for a replica that publishes nothing."""
        served = dict(self._crew.policy.loaded.model.named_parameters())
        deque(self._weights_into(served), maxlen=0)

    def whole_state(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors of a checkpoint, whole. Tensors that did not have to be gathered are not copies."""
        with self._all(GatherState()):
            yield from sharding.gather(self._crew.state().items())

    def take_shards(self, next_step: int, writer: ShardWriter) -> None:
        """Have every rank copy its shards to its host, and the others write them: `writer` is our own."""
        with self._all(WriteState(next_step)):
            writer.take(self._crew.state())

    def stop(self) -> None:
        """Tell the other ranks to exit. Ranks that are gone already are not an error."""
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
            lost = self._lost(error)
            if lost is None:
                raise
            raise lost from error


class RankShards:
    """Checkpoints of which every rank writes its part, as `Saver` makes them."""

    def __init__(self, leader: Leader, run_dir: Path, size: int) -> None:
        self._leader, self._size = leader, size
        self._writer = ShardWriter(run_dir, ShardFile(0, size))

    def take(self, next_step: int) -> None:
        self._leader.take_shards(next_step, self._writer)

    def save(self, run_dir: Path, state: TrainerState, stop: threading.Event) -> None:
        sharded.save(run_dir, state, self._writer, self._size, stop)

    def close(self) -> None:
        self._writer.close()


def follow(
    ranks: RankGroup, learner: Learner, writer: ShardWriter | None = None, share: NodeShare | None = None
) -> None:
    """Carry out the first rank's commands until it says stop. Raises RuntimeError when that rank is gone. `share` is
    given at the first rank of a node."""
    while True:
        match msgspec.msgpack.decode(ranks.broadcast(), type=RankCommand):
            case Begin(step, num_steps):
                learner.steps.begin(step, num_steps)
            case Add(groups, first):
                learner.steps.add(decode_groups(groups), first)
            case Finish(may_be_void):
                learner.steps.finish(may_be_void=may_be_void)
            case GatherWeights(changes_alone, facts):
                policy = learner.policy
                its = policy.published().items() if changes_alone else policy.served_parts()
                if facts is None or share is None:
                    deque(sharding.gather(its), maxlen=0)
                else:
                    share.offer(facts, sharding.gather(its))
            case GatherState():
                deque(sharding.gather(learner.state().items()), maxlen=0)
            case WriteState(next_step):
                assert writer is not None, "rank zero found the run's directory to be shared"
                writer.take(learner.state())
                writer.write_beside(next_step)
            case StopRanks():
                if writer is not None:
                    writer.close()
                return
