"""The trainer beside plain transformers loops, which pad a group's samples to the longest, or have nothing to pad.

The loops have chunked losses and torch's fused AdamW on the model's own weights. Each takes turns with ours on the same
work: `padded` on groups of published lengths, `unpadded` on samples of equal length.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks import parser_of, tell
from polyrl.bench import train
from polyrl.bench.engine import Work, make_model
from polyrl.cli import bench


def main(argv: Sequence[str]) -> int:
    parser = parser_of("train", argv, __doc__)
    bench.add_model_options(parser)
    bench.add_train_options(parser)
    args = parser.parse_args(argv)
    result = measure(bench.train_work(args))
    return tell(result, train.table(result), as_json=args.json)


def measure(work: train.TrainWork) -> dict[str, Any]:
    result = train.measure(work, lambda ours: PlainLoop(ours).step)
    result["goals"]["ratio_to_unpadded"] = 1.25
    return result


class PlainLoop:
    """A model of its own, so that neither side sees what the other switched on."""

    def __init__(self, ours: train.Bench) -> None:
        import torch

        self.device = ours.device
        self.model = make_model(Work(ours.work.arch, ours.work.model, 1, 1, 1), ours.device)
        self.model.set_attn_implementation("sdpa")
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-6, fused=True)

    def step(self, groups: Sequence[Sequence[Any]]) -> None:
        """A micro-batch a group, padded to its longest; then torch's own clipping and AdamW."""
        import torch

        for group in groups:
            longest = max(one.num_tokens for one in group) - 1
            ids = np.zeros((len(group), longest), np.int64)
            mask = np.zeros((len(group), longest), np.int64)
            wanted = np.full((len(group), longest), -1, np.int64)
            for row, one in enumerate(group):
                num = one.num_tokens - 1
                ids[row, :num] = np.concatenate([one.prompt, one.answer])[:num]
                mask[row, :num] = 1
                wanted[row, len(one.prompt) - 1 : num] = one.answer
            its_mask = None if mask.all() else torch.from_numpy(mask).to(self.device)
            self._micro_batch(torch.from_numpy(ids), its_mask, torch.from_numpy(wanted))
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def _micro_batch(self, ids: Any, mask: Any, wanted: Any) -> None:
        from torch.utils.checkpoint import checkpoint

        hidden = self.model.model(input_ids=ids.to(self.device), attention_mask=mask, use_cache=False).last_hidden_state
        targets = wanted.flatten()
        rows = hidden.flatten(0, 1).index_select(0, (targets >= 0).nonzero()[:, 0].to(self.device))
        targets = targets[targets >= 0].to(self.device)
        total: Any = 0.0
        for start in range(0, len(targets), 2048):
            part = slice(start, start + 2048)
            total = total + checkpoint(self._loss, rows[part], targets[part], use_reentrant=False)
        total.backward()

    def _loss(self, rows: Any, targets: Any) -> Any:
        import torch

        logits = torch.nn.functional.linear(rows, self.model.get_output_embeddings().weight).float()
        return torch.nn.functional.cross_entropy(logits, targets, reduction="sum")
