"""What several replicas do for test_replicas: `python -m tests.trainer.replicas_at_work FOLDER SETTING...`.

Every case is two steps of training. Each replica is given other groups than the others, in any number of calls, and
all meet at the end of the step. Rank zero leaves what came of it in FOLDER.
"""

import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tests.processes import fork_each
from tests.trainer.ranks_at_work import Recording, begin_in_vain, every_case, make_crew, samples

from polyrl.config.recipe import AlgorithmConfig
from polyrl.trainer import sharding
from polyrl.trainer.batch import TrainSample, first_sequences
from polyrl.trainer.meeting import Meeting
from polyrl.trainer.ranks import RankInfo, Ranks
from polyrl.trainer.step import StepAccumulator

OPTIMAL = "optimal baseline"
"""Ranks that share a model have no gradient of a single sample, and replicas of one rank have."""
CASES = (
    OPTIMAL,
    "token-mean",
    "seq-mean-token-mean",
    "fixed",
    "mini-batches, kl",
    "reinforce++",
    "ppo",
    "one sample",
    "bfloat16",
    "forged samples",
    "begun again",
    "begun again, ppo",
    "episodes, ppo",
    "nothing",
)
FEW = ("token-mean", "ppo", "forged samples", "begun again", "begun again, ppo", "one sample")
OF_TOKENS = (*FEW, "gspo, entropy", "mini-batches, kl", "lora, kl", "tied", "layers again", "episodes, ppo", "bfloat16")
SETTINGS = {
    "2 of 1": (2, 2, 1, CASES),
    "4 of 1": (4, 4, 1, FEW),
    "2 of 2": (4, 2, 1, FEW),
    "a context of 2": (2, 1, 2, OF_TOKENS),
    "2 contexts of 2": (4, 1, 2, ("token-mean", "ppo")),
    "a context of 2 in each of 2": (4, 2, 2, ("forged samples", "one sample")),
}
"""The number of ranks, of replicas and of ranks in a context, and the cases. The first group goes to another replica in
each step."""
OTHERS = ("4 of 1", "2 contexts of 2")
"""Settings that repeat a smaller one with more ranks: for `make test-chaos`."""


def case_of(name: str) -> tuple[AlgorithmConfig, dict[str, Any]]:
    if name == OPTIMAL:
        return AlgorithmConfig(baseline="optimal", correction="tis-sequence"), {}
    return every_case()[name]


def two_steps(
    steps: StepAccumulator, groups: list[list[TrainSample]], number: int, num_replicas: int
) -> dict[str, float]:
    """Train groups number, number + num_replicas, ...; returns the first step's metrics."""
    told: list[dict[str, float]] = []
    firsts = [len(first_sequences(groups[:at])) for at in range(len(groups))]
    for step in (0, 1):
        steps.begin(step)
        for at in range(len(groups)):
            if (at + step) % num_replicas == number:
                steps.add([groups[at]], firsts[at])
        told.append(steps.finish().metrics)
    return told[0]


def main(name: str, folder: Path, rank: int) -> None:
    torch.set_num_threads(1)
    size, num_replicas, context_ranks, cases = SETTINGS[name]
    ranks = Ranks.join(RankInfo(rank, size, str(folder / f"meeting-{name}")))
    ranks.use("cpu", num_replicas, context_ranks)
    place = folder / name
    place.mkdir(exist_ok=True)
    for case in cases:
        config, shape = case_of(case)
        sharing = None if ranks.replica.size == 1 else ranks.replica
        learner = make_crew(folder, sharing, config, shape, Meeting(ranks) if num_replicas > 1 else None)
        if shape.get("is_begun_again"):
            begin_in_vain(learner.steps, samples(folder, shape), ranks.replica_number, num_replicas)
        metrics = two_steps(learner.steps, samples(folder, shape), ranks.replica_number, num_replicas)
        state = dict(sharding.gather(learner.state().items()))
        assert isinstance(learner.optimizer, Recording)
        first = {f"first/{key}": one for key, one in (learner.optimizer.first or {}).items()}
        masters = [one for key, one in sorted(state.items()) if "/master/" in key]
        told = ranks.exchange(b"".join(one.contiguous().view(torch.uint8).numpy().tobytes() for one in masters))
        assert all(one == told[0] for one in told), "all ranks hold the same weights, to the last bit"
        if rank == 0:
            save_file(first | state, place / f"{case}.safetensors")
            (place / f"{case}.json").write_text(json.dumps(metrics))
    ranks.close()


if __name__ == "__main__":
    for one in sys.argv[2:]:
        fork_each(SETTINGS[one][0], partial(main, one, Path(sys.argv[1])))
