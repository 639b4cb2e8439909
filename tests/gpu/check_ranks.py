"""Ranks on GPUs: the gradients of a shared model against those of a whole one. Run by hand; CI has no GPU.

python tests/gpu/check_ranks.py                                     one rank: FSDP2 with NCCL, on one GPU
torchrun --nproc-per-node N tests/gpu/check_ranks.py                N of them
python tests/gpu/check_ranks.py --small                             on the device that is here
"""

import os
import sys
import tempfile
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[2] / "src"), str(Path(__file__).parents[2])]  # it is run as a file

import torch  # noqa: E402
from tests.gpu.setting import DEVICE, need_a_gpu_or_small  # noqa: E402
from tests.trainer.small import CAP, draw_groups, save_small  # noqa: E402

from polyrl.config.recipe import AlgorithmConfig, OptimizerConfig  # noqa: E402
from polyrl.engines.builtin import models  # noqa: E402
from polyrl.trainer import sharding  # noqa: E402
from polyrl.trainer.model import Divided, Policy  # noqa: E402
from polyrl.trainer.optimizer import Optimizer  # noqa: E402
from polyrl.trainer.ranks import ALONE, Peers, RankInfo, Ranks  # noqa: E402
from polyrl.trainer.step import StepAccumulator  # noqa: E402


def gradients(policy: Policy, peers: Peers) -> dict[str, torch.Tensor]:
    optimizer = Optimizer(policy.parameters(), OptimizerConfig(lr=1e-4), 4)
    config = AlgorithmConfig(entropy_coef=0.1)
    steps = StepAccumulator(policy, optimizer, config, max_tokens=100, max_new_tokens=CAP, peers=peers)
    steps.begin(0)
    steps.add(draw_groups(0, (4, 2, 3)))
    found = {name: one.float().cpu().clone() for name, one in sharding.gather(optimizer.gradients().items())}
    steps.finish()
    return found


def main(device: str) -> None:
    size = int(os.environ.get("WORLD_SIZE", "1"))
    folder = Path(tempfile.mkdtemp())
    save_small(folder / "model")  # the same at every rank: it is drawn from a seed
    meeting_point = "" if size > 1 else str(folder / "meeting-point")
    ranks = Ranks.join(RankInfo(int(os.environ.get("RANK", "0")), size, meeting_point))
    ranks.use(device)
    for dtype, most in (("float32", 1e-4), ("bfloat16", 3e-2)):
        for again in (False, True):
            settings = {"gradient_checkpointing": again, "compile_layers": device == "cuda"}
            expected = gradients(Policy.load(str(folder / "model"), dtype, str(ranks.device), **settings), ALONE)
            loaded, kind = models.load(str(folder / "model"), dtype, "cpu"), models.DTYPES[dtype]
            divided = Divided(loaded.model, sharding.shard(loaded.model, ranks, kind), kind, size)
            found = gradients(Policy(loaded, divided=divided, **settings), ranks)
            assert found.keys() == expected.keys()
            whole = torch.cat([one.flatten() for one in expected.values()])
            apart = float((torch.cat([found[name].flatten() for name in expected]) - whole).norm() / whole.norm())
            if ranks.rank == 0:
                print(f"{size} ranks, {ranks.device}, {dtype}, layers again {again}: {apart:.2g} apart")
            assert apart < most
    ranks.close()


if __name__ == "__main__":
    need_a_gpu_or_small()
    main(DEVICE)
