"""Every advantage, loss and correction on a GPU: are both gradients those of the CPU? Run by hand; CI has no GPU.

python tests/gpu/check_algorithms.py [cuda|cpu]

One JSON line each, with the relative distance of the whole gradient from the CPU's in float32: about 1e-6 in float32.
In bfloat16 these wild little models are 0.02 to 0.1 away in any case; it is there to see that it runs.
"""

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path[:0] = [  # it is run as a file
    str(Path(__file__).parents[2] / "src"),
    str(Path(__file__).parents[2]),
]

import torch  # noqa: E402
from tests.builtin.tiny_models import save_tiny  # noqa: E402
from tests.trainer.small import Recording, draw_groups, near  # noqa: E402

from polyrl.config.recipe import AlgorithmConfig, OptimizerConfig  # noqa: E402
from polyrl.trainer.batch import TrainSample  # noqa: E402
from polyrl.trainer.critic import Critic  # noqa: E402
from polyrl.trainer.model import Policy  # noqa: E402
from polyrl.trainer.step import StepAccumulator  # noqa: E402

CASES: tuple[dict[str, Any], ...] = (
    {},
    {"loss": "gspo", "old_logprobs": "engine"},
    {"loss": "cispo", "old_logprobs": "engine", "aggregation": "seq-mean-token-mean"},
    {"correction": "tis-token", "advantage": "rloo"},
    {"correction": "tis-sequence"},
    {"correction": "icepop", "kl": "loss", "kl_coef": 0.1},
    {"correction": "sequence-mask", "kl": "reward", "kl_coef": 0.1},
    {"advantage": "reinforce_plus_plus"},
    {"advantage": "reinforce_plus_plus_baseline", "mini_batches": 2, "kl": "loss"},
    {"advantage": "gae"},
    {"advantage": "gae", "mini_batches": 2, "kl": "reward"},
)


def main(device: str) -> None:
    folder = str(save_tiny("qwen3", Path(tempfile.mkdtemp()), head_dim=64))
    groups = near(Policy.load(folder), draw_groups(0))
    for case in CASES:
        config = AlgorithmConfig(**case)
        expected = gradients(folder, config, groups, "float32", "cpu")
        for dtype in ("float32", "bfloat16"):
            found = gradients(folder, config, groups, dtype, device)
            apart = [round(distance(*pair), 7) for pair in zip(found, expected, strict=True)]
            print(json.dumps(case | {"dtype": dtype, "device": device, "gradient_distances": apart}), flush=True)


def gradients(
    folder: str, config: AlgorithmConfig, groups: list[list[TrainSample]], dtype: str, device: str
) -> list[dict[str, torch.Tensor]]:
    """Of the policy's updates, then of the critic's."""
    compiled = device == "cuda" and dtype == "bfloat16"
    policy, reference, trunk = (Policy.load(folder, dtype, device, compile_layers=compiled) for _ in range(3))
    optimizer = Recording(policy.parameters(), OptimizerConfig(lr=1e-30), 1)
    critic = None
    if config.advantage == "gae":
        critic = Critic(trunk, OptimizerConfig(lr=1e-30), 1)
        critic.parameters()["value_head.weight"].data.fill_(0.1)
        critic.optimizer.__class__ = Recording  # a second optimizer would take a bfloat16 model's gradients twice
    steps = StepAccumulator(
        policy,
        optimizer,
        config,
        max_tokens=512,
        max_new_tokens=16,
        reference=reference.freeze() if config.kl != "none" else None,
        critic=critic,
    )
    steps.begin(0)
    for group in groups:
        steps.add([group])
    steps.finish()
    found = list(optimizer.each)
    if critic is not None and isinstance(critic.optimizer, Recording):
        found += critic.optimizer.each
    return [{name: one.float().cpu() for name, one in part.items()} for part in found]


def distance(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    whole = torch.cat([one.double().flatten() for one in theirs.values()])
    return float((torch.cat([ours[name].double().flatten() for name in theirs]) - whole).norm() / whole.norm())


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "cuda")
