"""One training step, streamed: add up gradients as groups arrive; then divide once, clip, and update the weights.

    steps.begin(step)
    steps.add(groups)           whenever groups are complete
    stats = steps.finish()      or steps.abort(): as if nothing had been added

Gradients are of *sums* of weighted token losses, in float32; the denominator (tokens or samples) is known only with the
last group. So the gradient is that of one large batch, to rounding, for any order of arrival and any packing.

`add` runs forward and backward passes. With several updates (`mini_batches`, `epochs`), or an advantage that compares
all samples of a step, it scores the groups and holds them back, and `finish` trains. The weights must not move before
the last group is there. A group's mini-batch depends on the step and the group's id alone.

Old log-probabilities are those of the step's starting weights: free with one update, scored by `add` with several.
Calls block: use a thread. The ranks of a replica make the same calls with the same groups, and each trains its share of
the packs. Replicas are given different groups, and meet in `finish` (meeting.py); groups that were held back they train
together.

Left out: which groups there are (filters run earlier), rewards and advantages (ready.py).
"""

import logging
import math
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from polyrl.config.recipe import AlgorithmConfig
from polyrl.errors import UserError
from polyrl.scheduling.rules.order import mix64
from polyrl.trainer import mismatch
from polyrl.trainer.batch import TrainGroup, check_samples, first_sequences, without
from polyrl.trainer.critic import Critic, explained_variance, value_losses
from polyrl.trainer.guard import MismatchGuard
from polyrl.trainer.meeting import Meeting, StepCounts
from polyrl.trainer.model import Policy, Scorer, Scores, is_about_memory
from polyrl.trainer.objectives import aggregation, kl
from polyrl.trainer.objectives.registry import BY_CRITIC, TokenBatch
from polyrl.trainer.objectives.sample_size import SampleSize
from polyrl.trainer.optimizer import Optimizer, Update
from polyrl.trainer.pack_loss import PackLoss, weighed
from polyrl.trainer.packing import Pack, RankWork, make_parts, num_rows, plan_passes
from polyrl.trainer.pulls import Pulls
from polyrl.trainer.ranks import ALONE, Peers
from polyrl.trainer.ready import Preparation, Ready
from polyrl.trainer.step_stats import Added, StepStats
from polyrl.trainer.tally import Tally

log = logging.getLogger("polyrl.trainer")

Tensor = torch.Tensor


class StepAccumulator:
    """Trains one step at a time; `max_tokens` go through the model at once (train.micro_batch_tokens). `reference` is
    for the KL penalty only. `critic` is for the advantage `gae` only, and is trained along with the policy."""

    def __init__(
        self,
        policy: Policy,
        optimizer: Optimizer,
        config: AlgorithmConfig,
        *,
        max_tokens: int,
        max_new_tokens: int,
        temperature: float = 1.0,
        reference: Scorer | None = None,
        critic: Critic | None = None,
        peers: Peers = ALONE,
        meeting: Meeting | None = None,
    ) -> None:
        """`peers` are the ranks of this replica; `meeting` is with the other replicas, if there are any."""
        if (config.advantage == BY_CRITIC) != (critic is not None):
            raise ValueError(f'a critic is for advantage = "{BY_CRITIC}", which needs one; got "{config.advantage}"')
        if config.kl != "none" and reference is None:
            raise ValueError(f'kl = "{config.kl}" needs a reference model')
        self._policy, self._optimizer, self._config = policy, optimizer, config
        self._max_tokens, self._max_new_tokens = max_tokens, max_new_tokens
        self._temperature, self._reference, self._critic = temperature, reference, critic
        self._peers, self._meeting = peers, meeting
        self._everyone: Peers = peers if meeting is None else meeting.everyone
        self._of_pack = PackLoss(config, policy.device)
        self._pulls: Pulls | None = None
        if config.baseline == "optimal":
            self._pulls = Pulls(policy, self._of_pack, max_tokens=max_tokens, temperature=temperature)
        self._preparation = Preparation(
            policy,
            config,
            max_tokens=max_tokens,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            reference=None if config.kl == "none" else reference,
            critic=critic,
            beforehand=config.has_several_updates,
            peers=peers,
        )
        self._holds_back = config.has_several_updates or self._preparation.needs_step
        self._step: int | None = None
        self._num_steps: int | None = None
        self._forget()

    @property
    def device_type(self) -> str:
        return self._policy.device.type

    def begin(self, step: int, num_steps: int | None = None) -> None:
        """Begin a step. A repeated step gets the `num_steps` that the run had when it was first trained."""
        if self._step is not None:
            raise RuntimeError(f"step {self._step} is not over")
        self._forget()
        self._step, self._num_steps = step, num_steps
        self._guard = MismatchGuard(self._config.max_mismatch, step)

    def add(self, groups: Sequence[TrainGroup], first: int | None = None) -> Added:
        """Take in whole groups. `first` is the number of their first episode, if other replicas get groups too. Raises
        UserError, and aborts the step, when memory runs out."""
        if self._step is None:
            raise RuntimeError("no step was begun")
        groups = [group for group in groups if self._knows(group)]
        check_samples(groups)
        first = self._num_came if first is None else first
        self._num_came = first + len(first_sequences(groups))
        if not self._config.has_several_updates:
            self._came.append((first, groups))
        return self._take_in(groups, first)

    def _take_in(self, groups: Sequence[TrainGroup], first: int) -> Added:
        """Train groups, or hold them back. `first` is the number of their first episode within the step."""
        with self._within_memory(self._of_tokens(self._max_tokens)):
            if self._config.has_several_updates:
                groups = self._preparation.look_at(groups, self._guard, first)
            ready = self._preparation.prepare(groups, first)
            if self._pulls is not None:
                ready = self._pulls.measured(ready)
        masked = [one.is_masked for group in ready for one in group if one.is_first]
        added = Added(len(groups), len(masked), sum(masked))
        if self._holds_back:
            self._held += ready
        else:
            added = added.plus(self._train(self._preparation.with_advantages(ready), self._peers))
        self._added = self._added.plus(added)
        return added

    def _knows(self, group: TrainGroup) -> bool:
        """Return whether all tokens are in the vocabulary. The client rejects others, but a redo log may hold some."""
        vocab = self._policy.loaded.vocab
        for sample in group:
            for tokens in (sample.prompt, sample.answer):
                if len(tokens) and not 0 <= tokens.min() <= tokens.max() < vocab:
                    log.warning(
                        "step %d: group %d is left out: token ids from %d to %d; the model's are 0 to %d",
                        *(self._step, sample.group, tokens.min(), tokens.max(), vocab - 1),
                    )
                    return False
        return True

    def finish(self, *, may_be_void: bool = False) -> StepStats:
        """Divide, clip and update, for each mini-batch. Raises UserError and aborts the step when memory runs out: some
        weights may be updated then.

        `may_be_void`: a step most of whose samples are to be left out is aborted, and its stats say so.
        """
        if self._step is None:
            raise RuntimeError("no step was begun")
        step, has_several = self._step, self._config.has_several_updates
        self._meet()
        if not has_several:
            deque(self._train_held(step), maxlen=0)
        left_out, too_far = self._guard.found(ALONE if has_several and self._meeting is None else self._everyone)
        num_good = self._added.num_samples - self._added.num_masked - (0 if has_several else len(left_out))
        if may_be_void and len(left_out) > num_good:
            self.abort()
            return StepStats(step, Added(), {}, tuple(too_far.items()), is_void=True)
        if left_out and not has_several:
            self._train_without(left_out, step)
        updates = [self._update(step) for _ in self._train_held(step)] if has_several else [self._update(step)]
        self._step, self._came = None, []
        num_told = self._added.num_trained_tokens * self._config.epochs
        metrics = mismatch.of_their_own(self._tally.metrics(num_told, self._everyone))
        metrics |= self._added.metrics()
        metrics["actor/grad_norm"] = sum(one.grad_norm for one in updates) / len(updates)
        metrics["actor/lr"] = updates[-1].lr
        metrics["actor/effective_sample_size"] = sum(self._sample_shares) / len(self._sample_shares)
        metrics["actor/skipped_updates"] = float(sum(not one.applied for one in updates))
        metrics["sample/left_out"] = float(len(left_out))
        metrics |= self._of_critic
        if self._critic_norms:
            metrics["critic/grad_norm"] = sum(self._critic_norms) / len(self._critic_norms)
        return StepStats(step, self._added, metrics, tuple(too_far.items()))

    def abort(self) -> None:
        """Forget all that was added. Does nothing outside a step."""
        self._step = None
        self._discard()

    def _discard(self) -> None:
        self._forget()
        self._optimizer.discard()
        if self._critic is not None:
            self._critic.optimizer.discard()

    def _forget(self) -> None:
        self._came: list[tuple[int, list[TrainGroup]]] = []
        """The groups of a step with one update, as they came, with the number of the first episode of each call. They
        are trained again if some samples have to be left out."""
        self._num_came = 0
        self._added = Added()
        self._held: list[list[Ready]] = []
        self._num_open_tokens = self._num_open_samples = 0
        self._tally = Tally(self._policy.device)
        self._sample_size = SampleSize(self._policy.device)
        self._sample_shares: list[float] = []
        """The effective share of the samples of each update."""
        self._of_critic: dict[str, float] = {}
        self._critic_norms: list[float] = []
        self._has_moved = False
        """Whether an update of this step was applied."""

    # Updates

    def _train_held(self, step: int) -> Iterator[None]:
        """Train what was held back. Yields after each mini-batch."""
        if self._holds_back:
            for epoch, groups in self._mini_batches(step):
                added = self._train(groups, self._everyone)
                self._added = self._added.plus(added._replace(num_trained_tokens=0) if epoch else added)
                yield

    def _train_without(self, left_out: frozenset[int], step: int) -> None:
        """Train the step again without these samples: their effect on the gradients of others cannot be undone."""
        log.warning("step %d is trained once more, without %d samples", step, len(left_out))
        came = self._came
        self._discard()
        self._guard.is_over = True
        for first, groups in came:
            self._take_in(without(groups, left_out, first), first)
        self._meet()
        deque(self._train_held(step), maxlen=0)

    def _meet(self) -> None:
        """Put the counts of all replicas together, and what they have held back."""
        if self._meeting is None:
            return
        counts = self._meeting.counts(StepCounts(self._added, self._num_open_tokens, self._num_open_samples))
        self._added, self._num_open_tokens, self._num_open_samples = counts
        if self._holds_back:
            self._held = self._meeting.held(self._held)

    def _mini_batches(self, step: int) -> Iterator[tuple[int, list[list[Ready]]]]:
        """Yield the epoch and groups of each mini-batch: equal parts, other ones in each epoch. The only one may be
        empty."""
        held = sorted(self._held, key=lambda group: mix64(step, group[0].sample.group) if group else 0)
        groups = self._preparation.with_advantages(held)
        self._held = []
        if self._critic is not None:
            trained = [one for group in groups for one in group if not one.is_masked]
            self._of_critic["critic/explained_variance"] = explained_variance(
                [one.values for one in trained if one.values is not None],
                [one.returns for one in trained if one.returns is not None],
            )
        num = max(1, min(self._config.mini_batches, len(groups)))
        ends = [len(groups) * part // num for part in range(num + 1)]
        for epoch in range(self._config.epochs):
            if epoch:
                groups = sorted(groups, key=lambda one: mix64(step, epoch, one[0].sample.group) if one else 0)
            for first, end in pairwise(ends):
                yield epoch, groups[first:end]

    def _update(self, step: int) -> Update:
        fixed = self._max_new_tokens if self._config.fixed_tokens is None else self._config.fixed_tokens
        denominator = aggregation.denominator(self._num_open_tokens, self._num_open_samples, fixed, self._config)
        with self._within_memory(f"the optimizer updates the weights: {self._optimizer.how_to_take_less()}"):
            if self._meeting is not None:
                self._meeting.gradients(self._optimizer)
            if self._critic is not None:
                self._update_critic(self._critic, step)
            update = self._optimizer.update(
                step, denominator if denominator else 1.0, self._num_steps, lr_factor=self._lr_factor()
            )
        self._num_open_tokens = self._num_open_samples = 0
        self._has_moved = self._has_moved or update.applied
        if denominator and not update.applied:
            log.warning("step %d: the gradient's norm is %s: the weights stay as they are", step, update.grad_norm)
        if denominator:
            self._tally.close(denominator)
        return update

    def _lr_factor(self) -> float:
        """Note the effective share of the update's samples. Return what it makes of the learning rate."""
        share = self._sample_size.share(self._everyone)
        self._sample_shares.append(share)
        self._sample_size = SampleSize(self._policy.device)
        return math.sqrt(share) if self._config.scale_lr_by_sample_size else 1.0

    def _update_critic(self, critic: Critic, step: int) -> None:
        if self._meeting is not None:
            self._meeting.gradients(critic.optimizer)
        update = critic.optimizer.update(step, float(max(1, self._num_open_tokens)), self._num_steps)
        if not update.applied and self._num_open_tokens:
            log.warning("step %d: the critic's gradient has norm %s: it stays as it is", step, update.grad_norm)
        self._of_critic["critic/lr"] = update.lr
        self._critic_norms.append(update.grad_norm)

    # The loss

    def _train(self, groups: Sequence[Sequence[Ready]], peers: Peers) -> Added:
        """Run forward and backward passes, one pack at a time. `peers` have the same groups, and train parts of them;
        a rank that meets no other one in a layer skips spare packs."""
        ready = [one for group in groups for one in group if not one.is_masked]
        samples = [one.sample for one in ready]
        rows = num_rows(samples)
        passes = plan_passes(rows, self._max_tokens, peers.size)
        for part in make_parts(samples, passes, peers.rank):
            if part.is_spare and self._peers.size == 1:
                continue
            with self._within_memory(self._of_tokens(len(part.pack.tokens))):
                self._train_part(part, [ready[number] for number in part.pack.samples])
        num_tokens = sum(one.num_drawn for one in samples)
        self._num_open_tokens += num_tokens
        self._num_open_samples += sum(one.is_first for one in ready)
        num_packs = sum(bool(members) for each in passes for members in each)
        return Added(num_packs=num_packs, num_tokens=sum(rows), num_trained_tokens=num_tokens)

    def _train_part(self, part: RankWork, ready: Sequence[Ready]) -> None:
        config, pack = self._config, part.pack
        tally = Tally(self._policy.device) if part.is_spare else self._tally
        scores = self._policy.score(pack, self._temperature, entropy_grad=config.entropy_coef > 0)
        batch = self._of_pack.batch(pack, ready, scores.logprobs)
        if not part.is_spare and not config.has_several_updates:
            whose, numbers = [one.sample for one in ready], [one.number for one in ready]
            self._guard.look(self._ours(batch), batch.behaviour_logprobs, whose, numbers)
        if not part.is_spare:
            self._sample_size.add(self._ours(batch), batch)
        losses = self._policy_losses(batch, tally)
        weights = self._of_pack.weights(batch, ready)
        if part.is_spare:
            weights = torch.zeros_like(losses)
        told = {"actor/pg_loss": weighed(losses, weights)}
        total = losses
        if config.kl == "loss":
            apart = kl.estimate(batch.logprobs, self._reference_logprobs(pack, ready), config.kl_estimator)
            told["actor/kl_loss"] = weighed(apart, weights)
            total = total + config.kl_coef * apart
        if config.entropy_coef > 0:
            total = total - config.entropy_coef * scores.entropy
        weighed(total, weights).backward()
        tally.add_losses(told)
        self._tell(batch, scores, ready, tally)
        if self._critic is not None:
            self._train_critic(self._critic, part, ready, tally)

    def _train_critic(self, critic: Critic, part: RankWork, ready: Sequence[Ready], tally: Tally) -> None:
        values = critic.values(part.pack)
        old = self._send(np.concatenate([one.values for one in ready if one.values is not None]))
        returns = self._send(np.concatenate([one.returns for one in ready if one.returns is not None]))
        losses, clipped = value_losses(values, old, returns, self._config.critic.value_clip)
        weighed(losses, torch.zeros_like(losses) if part.is_spare else None).backward()
        tally.add(
            {
                "critic/vf_loss": losses,
                "critic/vf_clip_frac": clipped,
                "critic/value_mean": values,
                "critic/return_mean": returns,
            }
        )

    def _policy_losses(self, batch: TokenBatch, tally: Tally) -> Tensor:
        losses, stats, ratio = self._of_pack.losses(batch)
        if ratio is not None:
            tally.peak({"actor/correction_max": ratio})
        tally.add({f"actor/{name}": numbers for name, numbers in stats.items()})
        return losses

    def _reference_logprobs(self, pack: Pack, ready: Sequence[Ready]) -> Tensor:
        known = [one.reference for one in ready if one.reference is not None]
        if len(known) == len(ready):
            return self._send(np.concatenate(known))
        assert self._reference is not None
        return self._reference.score_only(pack, self._temperature).logprobs.to(self._policy.device)

    def _send(self, numbers: "np.ndarray[Any, Any]") -> Tensor:
        return torch.from_numpy(numbers).to(self._policy.device, non_blocking=True)

    def _ours(self, batch: TokenBatch) -> Tensor:
        """Return our own log-probabilities: at the step's start where these are known, else by the current weights."""
        return batch.logprobs.detach() if self._config.old_logprobs == "engine" else batch.old_logprobs

    def _tell(self, batch: TokenBatch, scores: Scores, ready: Sequence[Ready], tally: Tally) -> None:
        told = {"actor/entropy": scores.entropy}
        apart = [one.kl for one in ready if one.kl is not None]
        if apart:
            told["actor/reward_kl"] = self._send(np.concatenate(apart))
        tally.add(told | self._mismatch(batch, ready))

    def _mismatch(self, batch: TokenBatch, ready: Sequence[Ready]) -> dict[str, Tensor]:
        """Return how far engines are from the step's starting weights. With `old_logprobs = "engine"` their
        log-probabilities are unknown after an update: then only the first mini-batch is measured."""
        by_engine = self._config.old_logprobs == "engine"
        if by_engine and self._has_moved:
            return {}
        assert self._step is not None
        ours = self._ours(batch)
        samples = [one.sample for one in ready]
        is_part = by_engine and self._config.has_several_updates
        return mismatch.of_tokens(ours, batch.behaviour_logprobs, samples, self._step, is_part=is_part)

    @contextmanager
    def _within_memory(self, what: str) -> Iterator[None]:
        """Turn running out of memory into a UserError. `what` names the work, and the setting that would shrink it."""
        try:
            yield
        except RuntimeError as error:
            if not is_about_memory(error):
                raise
            self.abort()
            raise UserError(f"out of memory on {self._policy.device} while {what}") from error

    def _of_tokens(self, num_tokens: int) -> str:
        advice = f"lower train.micro_batch_tokens (now {self._max_tokens})"
        if not self._policy.gradient_checkpointing:
            advice += ", or set model.gradient_checkpointing=true"
        return f"training on {num_tokens} tokens at once: {advice}"
