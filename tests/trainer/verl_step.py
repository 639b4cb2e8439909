"""A whole step by verl's own functions: from log-probabilities and rewards to the derivative of its loss by each.

The counterpart of `reference_step`, in float64. verl pads a step's answers to one length and masks what is beyond. Its
rejected samples leave the mask, and so the mean's denominator; ours count there with a weight of zero, so that its mask
is taken for weights here.
"""

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from tests.trainer.formulas import Floats
from tests.trainer.reference_step import Known, Slopes
from verl.trainer.ppo import core_algos, rollout_corr_helper  # pyright: ignore[reportMissingImports]
from verl.workers.config import ActorConfig  # pyright: ignore[reportMissingImports]

from polyrl.config.recipe import AlgorithmConfig

LOSSES = {"ppo_clip": "vanilla", "gspo": "gspo", "cispo": "cispo"}
ADVANTAGES = {
    "grpo": "grpo",
    "dr_grpo": "grpo",
    "rloo": "rloo",
    "reinforce_plus_plus": "reinforce_plus_plus",
    "reinforce_plus_plus_baseline": "reinforce_plus_plus_baseline",
    "gae": "gae",
}
AGGREGATIONS = {
    "token-mean": "token-mean",
    "seq-mean-token-sum": "seq-mean-token-sum",
    "seq-mean-token-mean": "seq-mean-token-mean",
    "fixed": "seq-mean-token-sum-norm",
}
CORRECTIONS = ("none", "tis-token", "tis-sequence", "icepop", "sequence-mask")


def slopes(config: AlgorithmConfig, groups: list[list[Known]], cap: int) -> Slopes:
    samples = [one for group in groups for one in group]
    index = np.array([number for number, group in enumerate(groups) for _ in group])
    mask = _padded([np.ones(len(one.now)) for one in samples], cap)
    now, start, engine = (_padded([getattr(one, key) for one in samples], cap) for key in ("now", "start", "engine"))
    old = engine if config.old_logprobs == "engine" else start
    its = _padded([one.reference for one in samples], cap)
    gains, values, returns = _gains(config, samples, index, mask, old, its, cap)
    now.requires_grad_()
    weights = _weights(config, old - engine, mask)
    aggregation = AGGREGATIONS[config.aggregation or ""]
    loss, _ = core_algos.get_policy_loss_fn(LOSSES[config.loss])(
        old, now, gains, mask, aggregation, _actor(config, cap), weights
    )
    total: torch.Tensor = loss
    if config.kl == "loss":
        kl = core_algos.kl_penalty(now, its, config.kl_estimator)
        total = total + config.kl_coef * core_algos.agg_loss(kl, mask, aggregation, **_info(config, cap))
    (by_logprobs,) = torch.autograd.grad(total, now)
    by_values = torch.zeros_like(mask)
    if returns is not None:
        said = values.clone().requires_grad_()
        clip = config.critic.value_clip or 1e9
        (by_values,) = torch.autograd.grad(core_algos.compute_value_loss(said, returns, values, mask, clip)[0], said)
    return Slopes(loss.item(), _cut(by_logprobs, groups), [], _cut(by_values, groups))


def _gains(
    config: AlgorithmConfig,
    samples: list[Known],
    index: Any,
    mask: torch.Tensor,
    old: torch.Tensor,
    its: torch.Tensor,
    cap: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Advantages of every token; what the critic said; what it learns, where there is one."""
    rewards = torch.zeros_like(mask)
    for row, one in zip(rewards, samples, strict=True):
        row[len(one.now) - 1] = one.reward
    if config.kl == "reward":  # as in verl's ray_trainer.apply_kl_penalty
        rewards = rewards - config.kl_coef * core_algos.kl_penalty(old, its, config.kl_estimator) * mask
    values = _padded([one.values for one in samples], cap)
    estimate = core_algos.get_adv_estimator_fn(ADVANTAGES[config.advantage])
    if config.advantage == "gae":
        gamma, lam = config.critic.gamma, config.critic.gae_lambda
        gains, returns = estimate(rewards, values, mask, gamma, lam)
        return gains, values, returns
    more: dict[str, Any] = {"norm_adv_by_std_in_grpo": config.advantage == "grpo"}
    if ADVANTAGES[config.advantage] != "grpo":
        more = {"config": SimpleNamespace(gamma=1.0)}
    return estimate(rewards, mask, index=index, **more)[0], values, None


def _weights(config: AlgorithmConfig, log_ratio: torch.Tensor, mask: torch.Tensor) -> torch.Tensor | None:
    low, high = config.correction_range
    by_verl = rollout_corr_helper.compute_rollout_correction_weights
    match config.correction:
        case "tis-token":
            return by_verl(log_ratio, mask, "token", high)[0]
        case "tis-sequence":
            return by_verl(log_ratio, mask, "sequence", high)[0]
        case "icepop":
            return by_verl(log_ratio, mask, "token", f"{low}_{high}")[0]
        case "sequence-mask":
            reject = rollout_corr_helper.compute_rollout_rejection_mask
            return reject(log_ratio, mask, "seq_mean_k1", f"{low}_{high}")[0]
        case _:
            return None


def _actor(config: AlgorithmConfig, cap: int) -> ActorConfig:
    low, high = config.clip_range
    made = ActorConfig(
        strategy="fsdp",
        ppo_micro_batch_size_per_gpu=1,
        rollout_n=1,
        clip_ratio_low=low,
        clip_ratio_high=high,
        clip_ratio_c=config.dual_clip or 1e9,
    )
    made.global_batch_info.update(_info(config, cap))
    return made


def _info(config: AlgorithmConfig, cap: int) -> dict[str, Any]:
    return {"loss_scale_factor": config.fixed_tokens or cap}


def _padded(rows: list[Floats | None], cap: int) -> torch.Tensor:
    out = torch.zeros(len(rows), cap, dtype=torch.float64)
    for number, one in enumerate(rows):
        assert one is not None
        out[number, : len(one)] = torch.from_numpy(one)
    return out


def _cut(padded: torch.Tensor, groups: list[list[Known]]) -> list[list[Floats]]:
    rows = iter(padded.numpy())
    return [[next(rows)[: len(one.now)] for one in group] for group in groups]
