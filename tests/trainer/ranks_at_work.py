"""What two ranks do for test_ranks: `python -m tests.trainer.ranks_at_work FOLDER`.

Every case is a step or two of training on the same samples. Rank zero leaves what came of it in FOLDER.
"""

import json
import sys
import threading
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import torch
from msgspec.structs import replace
from safetensors.torch import save_file
from tests.processes import fork_each
from tests.trainer.episodes import Played, draw_episode, group_of
from tests.trainer.small import CAP, VOCAB, draw_groups, near, save_small

from polyrl.config.recipe import AlgorithmConfig, LoraSection, OptimizerConfig
from polyrl.engines.builtin import models
from polyrl.trainer import lora, sharding
from polyrl.trainer.batch import TrainSample, first_sequences
from polyrl.trainer.contexts import in_contexts
from polyrl.trainer.critic import Critic
from polyrl.trainer.leading import Leader, Learner, RankShards, follow
from polyrl.trainer.meeting import Meeting
from polyrl.trainer.model import Divided, Policy
from polyrl.trainer.optimizer import Optimizer, Update
from polyrl.trainer.ranks import ALONE, RankGroup, RankInfo, Ranks
from polyrl.trainer.state import checkpoint, restoring, sharded
from polyrl.trainer.state.checkpoint import TrainerState
from polyrl.trainer.state.sharded import ShardFile, ShardWriter
from polyrl.trainer.step import StepAccumulator

SIZES = (4, 2, 3)
WITH_CRITIC = AlgorithmConfig(advantage="gae")
LORA = LoraSection(rank=3, alpha=4.5)
CASES: dict[str, dict[str, Any]] = {
    "token-mean": {},
    "seq-mean-token-sum": {"aggregation": "seq-mean-token-sum", "advantage": "rloo"},
    "seq-mean-token-mean": {"aggregation": "seq-mean-token-mean", "kl": "loss", "kl_coef": 0.3},
    "fixed": {"aggregation": "fixed", "fixed_tokens": 20, "kl": "reward", "kl_coef": 0.05, "overlong": "mask"},
    "gspo, entropy": {"loss": "gspo", "aggregation": "seq-mean-token-mean", "entropy_coef": 0.1},
    "cispo, icepop": {"loss": "cispo", "correction": "icepop"},
    "mini-batches, kl": {"mini_batches": 2, "kl": "loss", "kl_coef": 0.3, "correction": "tis-sequence"},
    "reinforce++": {"advantage": "reinforce_plus_plus", "mini_batches": 3},
    "ppo": {"advantage": "gae", "mini_batches": 2, "kl": "reward", "kl_coef": 0.05},
}
SHAPES: dict[str, dict[str, Any]] = {
    "lora": {"lora": LORA},
    "lora, kl": {"lora": LORA, "settings": {"kl": "loss", "kl_coef": 0.3}, "own_reference": True},
    "lora, bfloat16": {"lora": LORA, "dtype": "bfloat16", "gradient_checkpointing": True},
    "lora, adapter": {"lora": replace(LORA, publish="adapter")},
    "lora, offload": {"lora": LORA, "offload": True},
    "small packs": {"max_tokens": 30},
    "one sample": {"groups": 1, "samples": 1},
    "layers again": {"gradient_checkpointing": True},
    "tied": {"family": "gemma"},
    "bfloat16": {"dtype": "bfloat16"},
    "offload, ppo": {"offload": True, "settings": {"advantage": "gae"}, "dtype": "bfloat16"},
    "nothing": {"groups": 0},
    "forged samples": {"forged": (1, 4)},
    "begun again": {"is_begun_again": True},
    "begun again, ppo": {"is_begun_again": True, "settings": {"advantage": "gae", "mini_batches": 2}},
    "episodes": {"episodes": (3, 1, 5), "settings": {"aggregation": "seq-mean-token-mean"}, "max_tokens": 40},
    "episodes, ppo": {
        "episodes": (2, 4, 3),
        "settings": {"advantage": "gae", "mini_batches": 2, "kl": "reward", "kl_coef": 0.05},
    },
}


class Recording(Optimizer):
    """Keeps gradients as they were before the first update: divided, whole, not yet clipped."""

    first: dict[str, torch.Tensor] | None = None

    def update(self, step: int, denominator: float, num_steps: int | None = None, **more: float) -> Update:
        if self.first is None:
            self.first = {name: one / denominator for name, one in sharding.gather(self.gradients().items())}
        return super().update(step, denominator, num_steps, **more)


def make_models(folder: Path) -> None:
    for family in ("qwen3", "gemma"):
        save_small(folder / family, family)
        save_small(folder / f"{family}-reference", family, seed=1)


def load(folder: Path, dtype: str, ranks: RankGroup | None, **more: Any) -> Policy:
    if ranks is None:
        return Policy.load(str(folder), dtype, **more)
    loaded = models.load(str(folder), dtype, "cpu")
    kind = models.DTYPES[dtype]
    divided = Divided(loaded.model, sharding.shard(loaded.model, ranks, kind), kind, ranks.size, ranks.context)
    return Policy(loaded, divided=divided, **more)


def make_crew(
    folder: Path,
    ranks: RankGroup | None,
    config: AlgorithmConfig,
    shape: dict[str, Any],
    meeting: Meeting | None = None,
) -> Learner:
    family, dtype = shape.get("family", "qwen3"), shape.get("dtype", "float32")
    more = {"gradient_checkpointing": shape.get("gradient_checkpointing", False)}
    if "lora" in shape:
        policy = lora.load(str(folder / family), dtype, "cpu", shape["lora"], seed=7, ranks=ranks, serves=True, **more)
    else:
        policy = load(folder / family, dtype, ranks, **more)
    reference = None if config.kl == "none" else load(folder / f"{family}-reference", dtype, ranks)
    if shape.get("own_reference") and isinstance(policy, lora.LoraPolicy):
        reference = policy.reference
    settings = OptimizerConfig(lr=1e-3, grad_clip=0.5, weight_decay=0.1, offload=shape.get("offload", False))
    critic = None
    if config.advantage == "gae":
        critic = Critic(load(folder / family, dtype, ranks), replace(settings, lr=3e-3), 8, ranks)
    optimizer = Recording(policy.parameters(), settings, 8)
    steps = StepAccumulator(
        policy,
        optimizer,
        config,
        max_tokens=shape.get("max_tokens", 100),
        max_new_tokens=CAP,
        reference=reference,
        critic=critic,
        peers=ALONE if ranks is None else in_contexts(ranks),
        meeting=meeting,
    )
    return Learner(policy, optimizer, critic, steps)


def draw_episodes(sizes: tuple[int, ...]) -> list[list[TrainSample]]:
    """Groups of episodes with so many calls."""
    rng = np.random.default_rng(5)
    groups: list[list[TrainSample]] = []
    for number in range(2):
        calls = [draw_episode(rng, VOCAB, [3, 4 + number], size) for size in sizes]
        nums = [sum(len(drawn) for _, drawn in one) for one in calls]
        played = [Played(one, float(rng.normal()), logprobs=[-4.2] * num) for one, num in zip(calls, nums, strict=True)]
        groups.append(group_of(played, number))
    return groups


def samples(folder: Path, shape: dict[str, Any]) -> list[list[TrainSample]]:
    if "episodes" in shape:
        return draw_episodes(shape["episodes"])
    alone = Policy.load(str(folder / shape.get("family", "qwen3")))
    groups = near(alone, draw_groups(0, SIZES))
    number = count()
    forged = shape.get("forged", ())
    return [
        [
            one._replace(logprobs=np.full_like(one.logprobs, -99.0)) if next(number) in forged else one
            for one in group[: shape.get("samples")]
        ]
        for group in groups[: shape.get("groups", len(groups))]
    ]


def begin_in_vain(steps: Any, groups: list[list[TrainSample]], number: int = 0, num_replicas: int = 1) -> None:
    """A step of nothing but forged samples, which no rank trains. This replica gets groups number, number +
    num_replicas, ..."""
    forged = [[one._replace(logprobs=np.full_like(one.logprobs, -99.0)) for one in group] for group in groups]
    steps.begin(0)
    for at in range(number, len(groups), num_replicas):
        steps.add([forged[at]], len(first_sequences(groups[:at])))
    stats = steps.finish(may_be_void=True)
    assert stats.is_void and not stats.metrics


def two_steps(steps: Any, groups: list[list[TrainSample]], first: int = 0) -> dict[str, float]:
    """Streamed in two calls; returns the first step's metrics."""
    told: list[dict[str, float]] = []
    for step in (first, first + 1):
        steps.begin(step)
        steps.add(groups[:1])
        if groups[1:]:
            steps.add(groups[1:])
        told.append(steps.finish().metrics)
    return told[0]


def every_case() -> dict[str, tuple[AlgorithmConfig, dict[str, Any]]]:
    cases = {name: (AlgorithmConfig(**case), {}) for name, case in CASES.items()}
    lone = AlgorithmConfig(
        kl="loss", kl_coef=0.3, entropy_coef=0.1
    )  # its advantage is zero, and it learns all the same
    return cases | {
        name: (lone if "samples" in shape else AlgorithmConfig(**shape.get("settings", {})), shape)
        for name, shape in SHAPES.items()
    }


def main(rank: int, size: int, folder: Path) -> None:
    torch.set_num_threads(1)
    ranks = Ranks.join(RankInfo(rank, size, str(folder / f"meeting-{size}")))
    ranks.use("cpu")
    for name, (config, shape) in every_case().items():
        learner = make_crew(folder, ranks, config, shape)
        if rank != 0:
            follow(ranks, learner)
            continue
        leader = Leader(ranks, learner, lambda error: None)
        if shape.get("is_begun_again"):
            begin_in_vain(leader, samples(folder, shape))
        metrics = two_steps(leader, samples(folder, shape))
        state, served = dict(leader.whole_state()), dict(leader.weights())
        if learner.policy.has_own_engine_copy:
            served |= {f"engine/{key}": one for key, one in learner.policy.loaded.model.named_parameters()}
        leader.stop()
        assert isinstance(learner.optimizer, Recording)
        found = {f"first/{key}": one for key, one in (learner.optimizer.first or {}).items()} | state
        save_file({**found, **{f"served/{key}": one for key, one in served.items()}}, folder / f"{name}.safetensors")
        (folder / f"{name}.json").write_text(json.dumps(metrics))
    go_on(ranks, folder)
    ranks.close()


def go_on(ranks: Ranks, folder: Path) -> None:
    """Leave checkpoints for one rank to go on from, and go on from the one that it left."""
    for given, left in ((None, ("from-two", "from-two-later")), ("from-one", ("from-one-again", "from-one-later"))):
        learner = make_crew(folder, ranks, WITH_CRITIC, {})
        run_dir = folder / f"{left[1]}-in-shards"
        assert sharded.is_shared(run_dir, ranks)
        if given is not None:
            opened = checkpoint.load(checkpoint.found(folder / given)[-1])[1] if ranks.rank == 0 else None
            restoring.restore(learner, ranks, folder / given, is_shared=False, tensors=opened)  # as if only one saw it
        if ranks.rank != 0:
            follow(ranks, learner, ShardWriter(run_dir, ShardFile(ranks.rank, ranks.size)))
            continue
        leader = Leader(ranks, learner, lambda error: None)
        if given is None:
            two_steps(leader, samples(folder, {}))
        save(folder / left[0], dict(leader.whole_state()))
        two_steps(leader, samples(folder, {}), 2)
        save(folder / left[1], dict(leader.whole_state()))
        shards = RankShards(leader, run_dir, ranks.size)
        shards.take(4)
        shards.save(run_dir, TrainerState(next_step=4), threading.Event())
        shards.close()
        leader.stop()
    learner = make_crew(folder, ranks, WITH_CRITIC, {"offload": True})
    in_shards = folder / "from-two-later-in-shards"
    restoring.restore(learner, ranks, checkpoint.found(in_shards)[-1], is_shared=True)
    again = dict(sharding.gather(learner.state().items()))
    if ranks.rank == 0:
        save(folder / "in-shards-again", again)


def save(run_dir: Path, tensors: dict[str, torch.Tensor]) -> None:
    checkpoint.save(run_dir, TrainerState(next_step=2), tensors)


if __name__ == "__main__":
    fork_each(2, lambda rank: main(rank, 2, Path(sys.argv[1])))
