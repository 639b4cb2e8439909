"""One step of training, as its groups arrive: add them up, then divide once, clip, and move the weights.

    steps.begin(step)
    steps.add(groups)           as often as groups are complete; each call runs forward and backward
    stats = steps.finish()      or steps.abort(): as if nothing had been added

Gradients of *sums* of weighted token losses are added up in float32; what they are divided by (tokens or samples) is
known only when the last group is in. So the gradient is that of one big batch, to rounding, whatever the order of
arrival and however samples were packed.

Old log-probabilities are those of the step's starting weights. While a step has one update, these are the present
weights, and the forward pass that trains has them for nothing. A later mini-batch of the same step must bring them
along (`with_old_logprobs` before the first update). Blocking; whoever owns the event loop calls it from a thread.

Left out: which groups (filters decide before), advantages that need the whole batch, a critic.
"""

import logging
import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from polyrl.config.recipe import AlgorithmConfig
from polyrl.errors import UserError
from polyrl.trainer import aggregation, kl
from polyrl.trainer.batch import Group, Logprobs, TrainSample, is_masked, shaped_reward
from polyrl.trainer.model import Policy, Scores
from polyrl.trainer.optimizer import Optimizer
from polyrl.trainer.packing import Pack, make_packs
from polyrl.trainer.registry import TokenBatch, find_advantage, find_loss

log = logging.getLogger("polyrl.trainer")

Tensor = torch.Tensor
Rewards = np.ndarray[Any, np.dtype[np.float64]]
Gains = np.ndarray[Any, np.dtype[np.float32]]
"""Advantages."""


class Added(NamedTuple):
    """What one call of `add` trained."""

    num_groups: int
    num_samples: int
    num_masked: int
    """Of them, left out of the loss."""
    num_packs: int
    num_tokens: int
    """Through the model, prompts included."""
    num_trained_tokens: int
    """Of answers, in the loss."""


class StepStats(NamedTuple):
    step: int
    added: Added
    """In all."""
    updated: bool
    """False: nothing was trained, or the gradient was not finite. The weights are as they were."""
    metrics: dict[str, float]


class StepAccumulator:
    """`max_tokens` go through the model at once (train.micro_batch_tokens). `reference` is for KL alone."""

    def __init__(
        self,
        policy: Policy,
        optimizer: Optimizer,
        config: AlgorithmConfig,
        *,
        max_tokens: int,
        max_new_tokens: int,
        temperature: float = 1.0,
        reference: Policy | None = None,
    ) -> None:
        if config.kl != "none" and reference is None:
            raise ValueError(f'kl = "{config.kl}" needs a reference model')
        self._policy, self._optimizer, self._config = policy, optimizer, config
        self._max_tokens, self._max_new_tokens = max_tokens, max_new_tokens
        self._temperature, self._reference = temperature, reference
        self._advantage = find_advantage(config.advantage)
        self._loss = find_loss(config.loss)
        self._step: int | None = None
        self._moved_in: int | None = None
        """The last step with an update."""
        self._added = Added(0, 0, 0, 0, 0, 0)
        self._sums: dict[str, Tensor] = {}
        """Of weighted losses, and of numbers whose mean over tokens is told."""

    def begin(self, step: int) -> None:
        if self._step is not None:
            raise RuntimeError(f"step {self._step} is not over")
        self._step, self._added, self._sums = step, Added(0, 0, 0, 0, 0, 0), {}

    def add(self, groups: Sequence[Group]) -> Added:
        """Forward and backward over whole groups. Raises UserError, and aborts, when memory does not suffice."""
        if self._step is None:
            raise RuntimeError("no step was begun")
        samples = [sample for group in groups for sample in group]
        _check(samples)
        rewards = self._rewards(samples)
        gains = self._advantages(groups, rewards)
        trained = [number for number, one in enumerate(samples) if not is_masked(one, self._config)]
        packs = make_packs([samples[number] for number in trained], self._max_tokens)
        for pack in packs:
            members = [trained[number] for number in pack.samples]
            try:
                self._train(pack, [samples[one] for one in members], gains[members])
            except RuntimeError as error:
                if not _is_about_memory(error):
                    raise
                self.abort()
                raise UserError(self._advise(pack)) from error
        added = Added(
            num_groups=len(groups),
            num_samples=len(samples),
            num_masked=len(samples) - len(trained),
            num_packs=len(packs),
            num_tokens=sum(len(one.tokens) for one in packs),
            num_trained_tokens=sum(len(one.targets) for one in packs),
        )
        self._added = Added(*(a + b for a, b in zip(self._added, added, strict=True)))
        return added

    def finish(self) -> StepStats:
        """Divide by what is known now, clip, update."""
        if self._step is None:
            raise RuntimeError("no step was begun")
        step, added = self._step, self._added
        self._step = None
        fixed = self._max_new_tokens if self._config.fixed_tokens is None else self._config.fixed_tokens
        num_trained = added.num_samples - added.num_masked
        denominator = aggregation.denominator(added.num_trained_tokens, num_trained, fixed, self._config)
        update = self._optimizer.update(step, denominator if denominator else 1.0)
        if update.applied:
            self._moved_in = step
        elif denominator:
            log.warning("step %d: the gradient's norm is %s: the weights stay as they are", step, update.grad_norm)
        metrics = self._metrics(denominator)
        metrics["actor/grad_norm"] = update.grad_norm
        metrics["actor/lr"] = update.lr
        metrics["actor/skipped_updates"] = 0.0 if update.applied else 1.0
        return StepStats(step, added, update.applied, metrics)

    def abort(self) -> None:
        """Forget what was added. Does nothing outside a step."""
        self._step, self._sums = None, {}
        self._optimizer.discard()

    def with_old_logprobs(self, groups: Sequence[Group]) -> list[list[TrainSample]]:
        """The same samples with log-probabilities of the present weights, for use after these have moved."""
        samples = [sample for group in groups for sample in group]
        known = iter(self._score_all(self._policy, samples))
        return [[sample._replace(old_logprobs=next(known)) for sample in group] for group in groups]

    # Before the loss

    def _rewards(self, samples: Sequence[TrainSample]) -> Rewards:
        rewards = np.array([shaped_reward(one, self._config, self._max_new_tokens) for one in samples])
        if self._config.kl != "reward":
            return rewards
        assert self._reference is not None
        olds = [one.logprobs for one in samples]
        if self._config.old_logprobs == "recompute":
            olds = [one.old_logprobs for one in samples if one.old_logprobs is not None]
            if len(olds) < len(samples):
                olds = self._score_all(self._policy, samples)
        for number, (old, ref) in enumerate(zip(olds, self._score_all(self._reference, samples), strict=True)):
            apart = kl.estimate(torch.from_numpy(old), torch.from_numpy(ref), self._config.kl_estimator)
            total = float(apart.sum(dtype=torch.float64))
            rewards[number] -= self._config.kl_coef * total
            if not is_masked(samples[number], self._config):
                self._tell({"reward_kl": torch.tensor(total, dtype=torch.float64)})
        return rewards

    def _advantages(self, groups: Sequence[Group], rewards: Rewards) -> Gains:
        parts: list[Gains] = []
        first = 0
        for group in groups:
            its = torch.from_numpy(rewards[first : first + len(group)])
            gains = self._advantage(its, self._config)
            if gains.shape != its.shape:
                raise UserError(
                    f"algorithm.advantage: {self._config.advantage} gave shape {list(gains.shape)} for a group of "
                    f"{len(group)}; expected [{len(group)}]"
                )
            parts.append(gains.detach().numpy().astype(np.float32))
            first += len(group)
        return np.concatenate(parts) if parts else np.zeros(0, np.float32)

    def _score_all(self, policy: Policy, samples: Sequence[TrainSample]) -> list[Logprobs]:
        """Log-probabilities of every sample's answer, without gradients."""
        found: list[Logprobs] = [np.zeros(0, np.float32)] * len(samples)
        for pack in make_packs(samples, self._max_tokens):
            logprobs = policy.score_only(pack, self._temperature).logprobs.cpu().numpy()
            ends = np.cumsum(pack.num_answer_tokens)[:-1]
            for number, part in zip(pack.samples, np.split(logprobs, ends), strict=True):
                found[number] = part
        return found

    # The loss

    def _train(self, pack: Pack, samples: Sequence[TrainSample], gains: Gains) -> None:
        config = self._config
        scores = self._policy.score(pack, self._temperature, entropy_grad=config.entropy_coef > 0)
        batch = self._batch(pack, samples, gains, scores)
        losses, stats = self._loss(batch, config)
        if losses.shape != batch.logprobs.shape:
            raise UserError(
                f"algorithm.loss: {config.loss} gave shape {list(losses.shape)}; expected one number for each of "
                f"{len(batch.logprobs)} tokens"
            )
        weights = aggregation.token_weights(batch.sample, batch.num_tokens, config)
        told = {"pg_loss": _weighed(losses, weights)}
        total = losses
        if config.kl == "loss":
            assert self._reference is not None
            reference = self._reference.score_only(pack, self._temperature).logprobs.to(self._policy.device)
            apart = kl.estimate(batch.logprobs, reference, config.kl_estimator)
            told["kl_loss"] = _weighed(apart, weights)
            total = total + config.kl_coef * apart
        if config.entropy_coef > 0:
            total = total - config.entropy_coef * scores.entropy
        _weighed(total, weights).backward()
        mismatch = batch.logprobs.detach() - batch.behaviour_logprobs
        told |= {
            "entropy": scores.entropy,
            "mismatch_kl": kl.estimate(batch.behaviour_logprobs, batch.logprobs.detach(), "k3"),
            "mismatch_abs": mismatch.abs(),
            **stats,
        }
        self._tell(told)

    def _batch(
        self,
        pack: Pack,
        samples: Sequence[TrainSample],
        gains: Gains,
        scores: Scores,
    ) -> TokenBatch:
        behaviour = self._send(np.concatenate([one.logprobs for one in samples]))
        sample = self._send(pack.sample)
        return TokenBatch(
            logprobs=scores.logprobs,
            old_logprobs=self._old(samples, behaviour, scores.logprobs),
            behaviour_logprobs=behaviour,
            advantages=self._send(gains).index_select(0, sample),
            sample=sample,
            num_tokens=self._send(pack.num_answer_tokens),
        )

    def _old(self, samples: Sequence[TrainSample], behaviour: Tensor, present: Tensor) -> Tensor:
        if self._config.old_logprobs == "engine":
            return behaviour
        given = [one.old_logprobs for one in samples if one.old_logprobs is not None]
        if len(given) == len(samples):
            return self._send(np.concatenate(given))
        if self._moved_in == self._step:
            raise RuntimeError(
                "the weights have moved within this step, and samples came without old log-probabilities"
            )
        return present.detach()

    def _send(self, numbers: "np.ndarray[Any, Any]") -> Tensor:
        return torch.from_numpy(numbers).to(self._policy.device, non_blocking=True)

    # What is told

    def _tell(self, told: dict[str, Tensor]) -> None:
        for name, numbers in told.items():
            total = numbers.detach().sum(dtype=torch.float64)
            self._sums[name] = total if name not in self._sums else self._sums[name] + total

    def _metrics(self, denominator: float) -> dict[str, float]:
        """One look at the device for all of them."""
        names = list(self._sums)
        sums = torch.stack([self._sums[one].to(self._policy.device) for one in names]).tolist() if names else []
        metrics: dict[str, float] = {}
        for name, total in zip(names, sums, strict=True):
            over = denominator if name in ("pg_loss", "kl_loss") else self._added.num_trained_tokens
            metrics[f"actor/{name}"] = total / over if over else 0.0
        added = self._added
        metrics["token/trained"] = float(added.num_trained_tokens)
        metrics["token/through_model"] = float(added.num_tokens)
        metrics["sample/trained"] = float(added.num_samples - added.num_masked)
        metrics["sample/masked"] = float(added.num_masked)
        metrics["group/trained"] = float(added.num_groups)
        metrics["perf/micro_batches"] = float(added.num_packs)
        return metrics

    def _advise(self, pack: Pack) -> str:
        advice = f"lower train.micro_batch_tokens (now {self._max_tokens})"
        if not self._policy.gradient_checkpointing:
            advice += ", or set model.gradient_checkpointing=true"
        return f"out of memory on {self._policy.device} while training on {len(pack.tokens)} tokens at once: {advice}"


def _is_about_memory(error: RuntimeError) -> bool:
    return isinstance(error, torch.OutOfMemoryError) or "allocate memory" in str(error)


def _weighed(numbers: Tensor, weights: Tensor | None) -> Tensor:
    return (numbers if weights is None else numbers * weights).sum()


def _check(samples: Iterable[TrainSample]) -> None:
    for one in samples:
        if len(one.prompt) == 0 or len(one.answer) == 0 or len(one.logprobs) != len(one.answer):
            raise ValueError(
                f"a sample of group {one.group} has {len(one.prompt)} prompt tokens, {len(one.answer)} answer tokens "
                f"and {len(one.logprobs)} log-probabilities"
            )
        if not math.isfinite(one.reward):
            raise ValueError(f"a sample of group {one.group} has reward {one.reward}")
